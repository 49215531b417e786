"""Bounded waits on conditions: the only way a test waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], *, within: float = 10.0, every: float = 0.05, why: str = "") -> T:
    """Calls `condition` until it gives something true, and returns that; fails after `within` seconds with what it saw last."""
    deadline = time.monotonic() + within
    while True:
        failure: AssertionError | None = None
        value: T | None = None
        try:
            value = condition()
            if value:
                return value
        except AssertionError as error:
            failure = error
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {within} s: {why or getattr(condition, '__name__', 'condition')}; last: {failure or value!r}")
        time.sleep(every)


def throughout(condition: Callable[[], object], *, seconds: float, every: float = 0.1, why: str = "") -> None:
    """Holds `condition` true for a whole time span: for what must *not* happen. Fails at once when it does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        assert value, f"did not hold: {why or getattr(condition, '__name__', 'condition')}: {value!r}"
        time.sleep(every)
