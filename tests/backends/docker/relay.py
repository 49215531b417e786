"""A relay between an engine client and the real engine, over a unix or a TCP socket: the place where connections hang, break or are refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import tempfile
from pathlib import Path
from typing import Literal

ENGINE = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")


class Relay:
    """Passes bytes both ways until told otherwise. `kind`: on which socket it listens."""

    def __init__(self, kind: Literal["unix", "tcp"] = "unix", tls: ssl.SSLContext | None = None, engine: str = ENGINE) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="asb-relay-")
        self._kind = kind
        self._tls = tls
        self._engine = engine
        self._server: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._port = 0
        self.accepted = 0
        self.cut_after: int | None = None
        """Bytes from the engine after which the next connection is cut."""

    @property
    def host(self) -> str:
        """Its address, in the form of DOCKER_HOST."""
        return f"unix://{self._folder.name}/s" if self._kind == "unix" else f"tcp://localhost:{self._port}"

    async def start(self) -> None:
        if self._kind == "unix":
            Path(self._folder.name, "s").unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._accept, f"{self._folder.name}/s")
        else:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port, ssl=self._tls)
            self._port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """The engine is down: nobody listens, and what was open is closed."""
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Breaks everything that is open; new connections are fine."""
        for writer in list(self._writers):
            writer.transport.abort()

    def hang(self) -> None:
        """Nothing passes any more, in neither direction."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    async def stop(self) -> None:
        self.resume()
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._folder.cleanup()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        limit, self.cut_after = self.cut_after, None
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._flowing.wait()
            engine_reader, engine_writer = await asyncio.open_unix_connection(self._engine)
            self._writers.add(engine_writer)
            try:
                up = asyncio.create_task(self._copy(reader, engine_writer, None))
                await self._copy(engine_reader, writer, limit)
                up.cancel()
                await asyncio.gather(up, return_exceptions=True)
            finally:
                self._writers.discard(engine_writer)
                engine_writer.transport.abort()
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, limit: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._flowing.wait()
                if limit is not None:
                    data, limit = data[:limit], limit - len(data)
                target.write(data)
                await target.drain()
                if limit is not None and limit <= 0:
                    return
            if target.can_write_eof():
                target.write_eof()
