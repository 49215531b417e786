"""What these tests live in: a clock that is moved by hand, a LocalBackend over a memory engine, an app over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import httpx
import uvicorn
from agent_sandbox_api.app import create_app
from agent_sandbox_api.backends.engine import Engine
from agent_sandbox_api.backends.folder import DataFolder
from agent_sandbox_api.backends.local import LocalBackend, LocalLimits
from agent_sandbox_api.backends.memory import MemoryEngine
from agent_sandbox_api.settings import Settings, load_settings
from agent_sandbox_core.interfaces import Backend
from agent_sandbox_core.models import Command, SandboxSpec
from agent_sandbox_core.snapshots import SnapshotStore
from fastapi import FastAPI

T = TypeVar("T")
KEY = "unit-key-0123456789"
HEADERS = {"Authorization": f"Bearer {KEY}"}


async def until(condition: Callable[[], T], *, within: float = 5.0) -> T:
    """Waits until the condition gives something true, and returns that."""
    async with asyncio.timeout(within):
        while not (value := condition()):
            await asyncio.sleep(0.002)
    return value


class HandClock:
    """Time that moves only when it is told to."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._begin = datetime(2030, 1, 1, tzinfo=UTC)
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> datetime:
        return self._begin + timedelta(seconds=self._seconds)

    def monotonic(self) -> float:
        return self._seconds

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._seconds + seconds, future))
        await future

    async def advance(self, seconds: float) -> None:
        """Moves on, waking sleepers in order; what they do runs before it returns, as far as it waits for nothing real."""
        end = self._seconds + seconds
        while True:
            self._sleepers = [(due, future) for due, future in self._sleepers if not future.done()]
            due = min((due for due, _ in self._sleepers), default=end + 1)
            if due > end:
                break
            self._seconds = due
            for when, future in self._sleepers:
                if when <= due and not future.done():
                    future.set_result(None)
            await settle()
        self._seconds = end
        await settle()


async def settle() -> None:
    """Lets everything run that waits for nothing."""
    for _ in range(30):
        await asyncio.sleep(0)


@dataclass
class World:
    """A memory engine, a data folder, and the LocalBackend over them that was opened last."""

    path: Path
    engine: MemoryEngine
    clock: HandClock = field(default_factory=HandClock)
    limits: LocalLimits = field(default_factory=LocalLimits)
    backend: LocalBackend = field(init=False)

    @contextmanager
    def opened(self, engine: Engine | None = None) -> Iterator[LocalBackend]:
        """A backend that somebody else starts and closes: an app's lifespan."""
        folder = DataFolder.open(self.path)
        try:
            store = SnapshotStore.open((self.path / "snapshots").as_uri(), spool=self.path / "spool")
            self.backend = LocalBackend(engine or self.engine, store, folder, self.limits, clock=self.clock)
            yield self.backend
        finally:
            folder.close()

    @asynccontextmanager
    async def running(self, engine: Engine | None = None) -> AsyncIterator[LocalBackend]:
        """A backend from its start to its end."""
        with self.opened(engine) as backend:
            try:
                await backend.start()
                yield backend
            finally:
                await backend.close()

    def later(self, seconds: float = 900) -> datetime:
        return self.clock.now() + timedelta(seconds=seconds)

    async def new(self, seconds: float = 900, **spec: object) -> str:
        """A sandbox's id."""
        return (await self.backend.create(make_spec(**spec), expires_at=self.later(seconds))).id

    async def write(self, sandbox_id: str, name: bytes, content: bytes) -> None:
        async def body() -> AsyncIterator[bytes]:
            yield content

        await (await self.backend.guest(sandbox_id)).write_file(name, body())

    async def read(self, sandbox_id: str, name: bytes) -> bytes:
        async with (await self.backend.guest(sandbox_id)).read_file(name) as body:
            return b"".join([chunk async for chunk in body.chunks])

    async def sh(self, sandbox_id: str, script: str) -> str:
        result = await (await self.backend.guest(sandbox_id)).run(Command(command=script, timeout_seconds=10), max_output_bytes=1_000_000)
        assert result.exit_code == 0, result.stderr
        return result.stdout


def make_spec(**changes: object) -> SandboxSpec:
    return SandboxSpec.model_validate({"image": "python:3.12-slim", "cpus": 1, "memory_mb": 512, "pids_limit": 256} | changes)


def make_settings(**given: object) -> Settings:
    return load_settings(**({"api_keys": KEY} | given))


@asynccontextmanager
async def client_of(app: FastAPI, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client in this process; the app's lifespan is entered."""
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://facade", headers=headers or HEADERS) as client:
            yield client


@asynccontextmanager
async def served(settings: Settings, backend: Backend) -> AsyncIterator[httpx.AsyncClient]:
    """A real server on loopback, in this loop."""
    app = create_app(settings, backend)
    config = uvicorn.Config(app, port=0, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    async with app.router.lifespan_context(app):
        task = asyncio.create_task(server._serve())
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=HEADERS, timeout=20) as client:
                yield client
        finally:
            server.should_exit = True
            await task
