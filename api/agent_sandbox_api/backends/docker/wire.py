"""A byte connection to the engine on the event loop, the same over unix, tcp, TLS and ssh. No thread waits for any of it.

The reading side is bounded: while nobody takes what came, the transport is paused and the engine feels it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from typing import Final, cast

from .address import Address

HIGH_WATER: Final = 1 << 20
"""Bytes held before reading pauses; it goes on when half of them are taken."""
CONNECT_SECONDS: Final = 20.0
WRITE_CHUNK: Final = 1 << 16
SAID_BYTES: Final = 2048
"""How much of ssh's error output is kept for messages."""


class Wire(asyncio.Protocol):
    """One connection. Reads give what is there; an empty read is the end. Faults are OSError (also TimeoutError)."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self._paused = False
        self._ended = False
        self._fault: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._closed = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._said = b""

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        # No isinstance: uvloop's transports are not asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._chunks.append(bytes(data))
        self._held += len(data)
        if self._held >= HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        """See asyncio.Protocol. The transport closes itself: nothing is sent to a side that has ended."""
        self._ended = True
        self._wake()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._ended = True
        self._fault = self._fault or exc
        self._writable.set()
        self._closed.set()
        self._wake()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._writable.set()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # What the user of the connection calls.

    @property
    def ended(self) -> bool:
        """Whether the other side has closed; what it sent before may still be waiting to be read."""
        return self._ended

    def take(self) -> bytes:
        """What has come and was not taken yet, without waiting."""
        if not self._chunks:
            return b""
        data = self._chunks.popleft()
        self._held -= len(data)
        if self._paused and self._held <= HIGH_WATER // 2 and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()
        return data

    async def read(self, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - httpcore's streams carry a timeout with each call
        """The next bytes; empty at the end. TimeoutError when none came in `timeout` seconds."""
        while True:
            data = self.take()
            if data:
                return data
            if self._ended:
                if self._fault is not None:
                    raise ConnectionError(self.explain(f"the connection broke: {self._fault}"))
                return b""
            self._reader = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout):
                    await self._reader
            finally:
                self._reader = None

    async def write(self, data: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - see read
        """Hands all of `data` to the transport, waiting while that is full; ConnectionError when the connection is gone."""
        async with asyncio.timeout(timeout):
            for position in range(0, len(data), WRITE_CHUNK):
                await self._writable.wait()
                if self._transport is None or self._transport.is_closing() or self._closed.is_set():
                    raise ConnectionResetError(self.explain("the connection is closed"))
                self._transport.write(data[position : position + WRITE_CHUNK])
            await self._writable.wait()

    def explain(self, text: str) -> str:
        """`text`, with what ssh said about it."""
        said = " ".join(self._said.decode(errors="replace").split())
        return f"{text} (ssh says: {said})" if said else text

    def abort(self) -> None:
        """Closes at once and without waiting; safe to call again and from a finally."""
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def aclose(self) -> None:
        """Closes and returns when nothing of it is left: no socket, no ssh process."""
        self.abort()
        if self._transport is not None:
            await self._closed.wait()
        if self._watcher is not None:
            await self._watcher

    def adopt(self, process: asyncio.subprocess.Process) -> None:
        """Ties the life of an ssh process to this connection, and keeps the end of what it says."""
        self._process = process
        self._watcher = asyncio.get_running_loop().create_task(self._watch(process))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while said := await process.stderr.read(1024):
            self._said = (self._said + said)[-SAID_BYTES:]
        await process.wait()


async def connect(address: Address, tls: ssl.SSLContext | None = None) -> Wire:
    """A connection to the engine; OSError when there is none. `tls`: the context of the address's TLS files, made once by the caller."""
    loop = asyncio.get_running_loop()
    if address.kind == "ssh":
        return await connect_ssh(address)
    async with asyncio.timeout(CONNECT_SECONDS):
        if address.kind == "unix":
            _, wire = await loop.create_unix_connection(Wire, address.path)
            return wire
        name = address.host if tls is not None else None
        assert address.port is not None
        transport, wire = await loop.create_connection(Wire, address.host, address.port, ssl=tls, server_hostname=name)
        keep_alive(transport.get_extra_info("socket"))
        return wire


def keep_alive(connection: socket.socket) -> None:
    """Lets the kernel notice within about 75 s that the other machine is gone: a quiet stream would wait for ever."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def connect_ssh(address: Address) -> Wire:
    """A connection over `ssh host docker system dial-stdio`, whose input and output are one socket pair: so it is like any other."""
    ours, theirs = socket.socketpair()
    try:
        ours.setblocking(False)
        process = await asyncio.create_subprocess_exec(
            *address.ssh_command(), stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=asyncio.subprocess.PIPE
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    wire = Wire()
    wire.adopt(process)
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: wire, sock=ours)
    except BaseException:
        ours.close()
        await wire.aclose()
        raise
    return wire
