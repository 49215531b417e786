"""A server inside another program, on the loopback interface with a key of its own: for command lines, notebooks and scripts without a server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import uvicorn
import uvloop
from agent_sandbox_core.errors import SandboxError

from .app import create_app
from .backends.choose import build_backend, choose_backend
from .backends.folder import DataFolder, FolderError
from .serve import StartError
from .settings import PREFIX, Settings, SettingsError, load_settings

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 30.0
FOLDER_SECONDS: Final = 15.0
"""How long to wait for another short-lived server on the same data folder."""


@contextlib.contextmanager
def serving(backend: str) -> Iterator[tuple[str, str]]:
    """Address and key of a server over `backend` that ends with the block. Settings as for `sandboxctl serve`, but for keys and address. Raises StartError.

    Docker's sandboxes and snapshots outlive it, in the engine and in AGENT_SANDBOX_DATA_DIR (here by default a folder of the user); those of `memory` do not.
    """
    key = secrets.token_urlsafe(24)
    with contextlib.ExitStack() as stack:
        try:
            # A cluster keeps everything itself and memory nothing: many may work side by side.
            path = _data_path() if backend == "docker" else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agent-sandbox-")))
            settings = load_settings(backend=backend, api_keys=[key], data_dir=path)
            choose_backend(settings)
            folder = stack.enter_context(contextlib.closing(_open(path)))
        except SettingsError as error:
            raise StartError(str(error)) from error
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server = _Server(settings, folder, backend, listener)
        stack.callback(server.stop)
        server.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", key


def _data_path() -> Path:
    given = os.environ.get(f"{PREFIX}DATA_DIR")
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(given) if given else Path(base) / "agent-sandbox"


def _open(path: Path) -> DataFolder:
    deadline = time.monotonic() + FOLDER_SECONDS
    while True:
        try:
            return DataFolder.open(path)
        except FolderError as error:
            if time.monotonic() > deadline or "already in use" not in str(error):
                raise StartError(f"{PREFIX}DATA_DIR: {error}, or use the server that runs there (--url)") from error
            time.sleep(0.05)


class _Server:
    """The server's thread."""

    def __init__(self, settings: Settings, folder: DataFolder, backend: str, listener: socket.socket) -> None:
        self._settings = settings
        self._folder = folder
        self._backend = backend
        self._listener = listener
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._uvicorn: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._run, name="agent-sandbox server", daemon=True)

    def start(self) -> None:
        """Returns when it answers. Raises StartError."""
        self._thread.start()
        if not self._ready.wait(START_SECONDS):
            raise StartError(f"the {self._backend} backend was not ready within {START_SECONDS:.0f} s: look at its engine")
        if self._error is not None:
            message = self._error.message if isinstance(self._error, SandboxError) else str(self._error)
            raise StartError(" ".join(message.split())) from self._error

    def stop(self) -> None:
        """Ends it; what still runs in it gets the time that a stopping server gives."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except Exception as error:  # noqa: BLE001 - told by start(), in the thread of the caller
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        app = create_app(self._settings, build_backend(self._settings, self._folder, self._backend))
        config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=1)
        async with app.router.lifespan_context(app):
            self._uvicorn = _Quiet(config, self._ready)
            await self._uvicorn.serve(sockets=[self._listener])


class _Quiet(uvicorn.Server):
    """Leaves signals to the program it is in, and says when it listens."""

    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self._ready_event = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready_event.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
