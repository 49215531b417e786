"""The memory engine: sandboxes that are Python objects. For tests, ours and yours: no Docker, no root, nothing to clean up.

The files are real (a tree with modes, times, links and the archives of every other backend); commands are a small built-in set (programs.py)
and coroutines of yours. It isolates nothing: what you register runs in this process.
"""

from .engine import MemoryEngine
from .programs import Call, Program

__all__ = ["Call", "MemoryEngine", "Program"]
