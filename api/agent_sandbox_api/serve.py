"""The server's process: settings, data folder, socket, app, signals. Everything that can go wrong at the start is one line on standard error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import uvicorn
import uvloop
from agent_sandbox_core.errors import SandboxError
from agent_sandbox_core.version import __version__

from .app import create_app
from .backends.choose import build_backend, build_local, choose_backend
from .backends.folder import DataFolder, FolderError
from .logs import configure_logging
from .middleware import Lifecycle
from .settings import PREFIX, Settings, SettingsError, load_settings

BACKENDS: Final = ("auto", "docker", "kubernetes", "memory")
KEEP_ALIVE_SECONDS = 75  # longer than clients and proxies keep an idle connection: they close it, so none is closed under a request
BACKLOG: Final = 2048


class StartError(Exception):
    """The server cannot start. The message is one line."""


def serve(backend: str | None = None) -> None:
    """Runs the server until SIGTERM or SIGINT. Raises StartError."""
    if backend is not None and backend not in BACKENDS:
        raise StartError(f"there is no backend {backend!r}: use one of {', '.join(BACKENDS)}")
    try:
        settings = load_settings(**({} if backend is None else {"backend": backend}))
        name = choose_backend(settings)
        configure_logging(settings.log_level, settings.log_format)
        with _listen(settings) as listener, _hold(settings.data_dir) as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, name, folder, listener))
    except SettingsError as error:
        raise StartError(str(error)) from error
    except SandboxError as error:
        raise StartError(" ".join(error.message.split())) from error
    except KeyboardInterrupt:
        raise StartError("interrupted") from None


def print_schema() -> None:
    """The OpenAPI schema on standard output."""
    with tempfile.TemporaryDirectory() as path, _hold(Path(path)) as folder:
        settings = load_settings(insecure_no_auth=True, data_dir=folder.path)

        async def build() -> dict[str, object]:
            return create_app(settings, build_local(settings, folder, "memory")).openapi()

        json.dump(asyncio.run(build()), sys.stdout, indent=2)
        sys.stdout.write("\n")


async def _serve(settings: Settings, name: str, folder: DataFolder, listener: socket.socket) -> None:
    app = create_app(settings, build_backend(settings, folder, name))
    config = uvicorn.Config(
        app,
        lifespan="off",  # entered here, so that a failed start is an exception and no traceback in a log
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_seconds),
    )
    async with app.router.lifespan_context(app):
        keys = "no keys: everybody may use it" if not settings.api_keys else f"{len(settings.api_keys)} key{'s'[: len(settings.api_keys) > 1]}"
        line = f"agent-sandbox {__version__}: {name} backend on {_url(settings)}, documentation at /docs, data in {folder.path}, {keys}"
        await _Server(config, app.state.context.lifecycle, line).serve(sockets=[listener])


class _Server(uvicorn.Server):
    """Says when it is ready, refuses new work while it stops, and ends with 0 after a signal (uvicorn raises it again)."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle, line: str) -> None:
        super().__init__(config)
        self._lifecycle = lifecycle
        self._line = line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        sys.stdout.write(self._line + "\n")
        sys.stdout.flush()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._lifecycle.draining = True
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            # Closing goes on after this; whoever stops the process twice must not cut it short. It is bounded, and Ctrl-C ends it.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, before[signal.SIGINT])


@contextlib.contextmanager
def _hold(path: Path) -> Iterator[DataFolder]:
    try:
        folder = DataFolder.open(path)
    except FolderError as error:
        raise StartError(f"{PREFIX}DATA_DIR: {error}") from error
    try:
        yield folder
    finally:
        folder.close()


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        place = f"{settings.host}:{settings.port}"
        raise StartError(
            f"{PREFIX}HOST, {PREFIX}PORT: cannot listen on {place} ({error.strerror or error}): choose another address or port"
        ) from error


def _url(settings: Settings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}"
