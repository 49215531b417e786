"""`sandboxctl` and `kubectl sandbox`: the command line. One module a subject; nothing is loaded before its command is called."""

from .app import kubectl_main, main

__all__ = ["kubectl_main", "main"]
