"""The server inside this process, for clients that name a backend. It is shared by all of them and ends with the last one, or with the process."""

from __future__ import annotations

import importlib
import threading
import weakref
from contextlib import ExitStack
from typing import Final

from .errors import StartFailed

BACKENDS: Final = ("docker", "kubernetes", "memory")


class LocalServer:
    """A running server on the loopback interface, with a key that only this process knows."""

    def __init__(self, backend: str) -> None:
        # By name: the client's layer must not depend on the server's, and a client may be installed without it.
        try:
            inside = importlib.import_module("agent_sandbox_api.inside")
        except ModuleNotFoundError as error:
            raise StartFailed(
                f"backend={backend!r} needs the server, which cannot be loaded ({error})", next_step=f"pip install 'agent-sandbox-operator[{backend}]'"
            ) from error
        stack = ExitStack()
        try:
            self.url, self.key = stack.enter_context(inside.serving(backend))
        except inside.StartError as error:
            raise StartFailed(f"the {backend} backend cannot be used: {error}") from error
        weakref.finalize(self, stack.close)


_running: weakref.WeakValueDictionary[str, LocalServer] = weakref.WeakValueDictionary()
_starting = threading.Lock()


def local_server(backend: str) -> LocalServer:
    """The process's server over `backend`; started when there is none. Whoever holds the result keeps it running. Blocks while it starts."""
    if backend not in BACKENDS:
        raise StartFailed(f"there is no backend {backend!r}", next_step=f"use one of {', '.join(BACKENDS)}, or url= for a server")
    with _starting:
        server = _running.get(backend)
        if server is None:
            server = _running[backend] = LocalServer(backend)
        return server
