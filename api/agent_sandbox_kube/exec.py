"""A channel: the stream of one `pods/exec`, over a WebSocket with v5.channel.k8s.io. Facts: kubernetes/remotecommand, and KEP-4006.

Each message is a channel byte and data: 0 stdin, 1 stdout, 2 stderr, 3 a v1.Status at the end. Whatever ends without that status was cut: an error, never
an end. aiohttp's heartbeat is not used: a server whose process does not read answers no ping, and the exec is healthy all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import aiohttp
import httpcore
from agent_sandbox_core.errors import ChannelError

from .client import Kube
from .resources import PODS

PROTOCOL: Final = "v5.channel.k8s.io"
STDIN, STDOUT, STDERR, STATUS = 0, 1, 2, 3
WRITE_BYTES: Final = 64 << 10
HIGH_WATER: Final = 1 << 20
"""Bytes that wait for a reader before the connection is not read any further."""
COMPLAINT_BYTES: Final = 4096
PING_SECONDS: Final = 25.0
"""Load balancers cut what is idle for minutes."""
OPEN_SECONDS: Final = 10.0
CLOSE_SECONDS: Final = 2.0


class ExecStream(httpcore.AsyncNetworkStream):
    """stdin and stdout of one exec as a stream of bytes."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, what: str) -> None:
        self._socket = socket
        self._what = what
        self._ready: deque[bytes] = deque()
        self._held = 0
        self._complaint = bytearray()
        self._status: dict[str, Any] | None = None
        self._ended = False
        self._reader: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._room.set()
        loop = asyncio.get_running_loop()
        self._pump = loop.create_task(self._receive())
        self._pinging: asyncio.Task[None] | None = None
        self._timer = loop.call_later(PING_SECONDS, self._ping)

    @property
    def complaint(self) -> str:
        """What the command wrote to stderr, or why it ended."""
        told = bytes(self._complaint).decode(errors="replace")
        if self._status is not None and self._status.get("status") != "Success":
            told += " " + str(self._status.get("message", ""))
        return " ".join(told.split())

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - httpcore's signature
        """See httpcore. Empty only at a clean end: the command ended with success."""
        while not self._ready:
            if self._ended:
                if self._status is not None and self._status.get("status") == "Success":
                    return b""
                raise httpcore.ReadError(self._why())
            self._reader = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout):
                    await self._reader
            except TimeoutError as error:
                raise httpcore.ReadTimeout(f"nothing came over the channel to {self._what} in time") from error
            finally:
                self._reader = None
        return self._gather(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - httpcore's signature
        """See httpcore."""
        try:
            async with asyncio.timeout(timeout):
                for at in range(0, len(buffer), WRITE_BYTES):
                    if self._ended:
                        raise httpcore.WriteError(self._why())
                    await self._socket.send_bytes(b"\0" + buffer[at : at + WRITE_BYTES])
        except TimeoutError as error:
            raise httpcore.WriteTimeout(f"the channel to {self._what} took nothing in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise httpcore.WriteError(f"the channel to {self._what} broke: {error or type(error).__name__}") from error

    async def aclose(self) -> None:
        """Closes the connection, which ends the bridge's input and so the bridge. Returns when nothing of it is left here; bounded."""
        self._ended = True
        self._timer.cancel()
        self._pump.cancel()
        if self._pinging is not None:
            self._pinging.cancel()
        await asyncio.gather(self._pump, *([self._pinging] if self._pinging is not None else []), return_exceptions=True)
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._socket.close()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
    ) -> httpcore.AsyncNetworkStream:
        """Channels carry plain HTTP inside the API server's own connection."""
        raise httpcore.ConnectError("a channel to a sandbox has no TLS of its own")

    def get_extra_info(self, info: str) -> Any:
        """`is_readable`: something came, or the end did, while nobody asked: the connection is then given up."""
        return bool(self._ready) or self._ended if info == "is_readable" else None

    def _gather(self, most: int) -> bytes:
        """All that is here, up to so many bytes: messages are small, and each read costs its readers the same."""
        size, pieces = 0, []
        while self._ready and size < most:
            piece = self._ready.popleft()
            if size + len(piece) > most:
                self._ready.appendleft(piece[most - size :])
                piece = piece[: most - size]
            pieces.append(piece)
            size += len(piece)
        self._held -= size
        if self._held < HIGH_WATER // 2:
            self._room.set()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _receive(self) -> None:
        try:
            while True:
                message = await self._socket.receive()
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                data: bytes = message.data
                if len(data) > 1:
                    self._take(data[0], data[1:])
                if self._held >= HIGH_WATER:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._ended = True
            self._timer.cancel()
            self._wake()

    def _take(self, channel: int, data: bytes) -> None:
        if channel == STDOUT:
            self._ready.append(data)
            self._held += len(data)
            self._wake()
        elif channel == STDERR:
            self._complaint = (self._complaint + data)[-COMPLAINT_BYTES:]
        elif channel == STATUS:
            with contextlib.suppress(ValueError):
                told = json.loads(data)
                self._status = told if isinstance(told, dict) else None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _ping(self) -> None:
        if self._pinging is None or self._pinging.done():
            self._pinging = asyncio.get_running_loop().create_task(self._send_ping())
        self._timer = asyncio.get_running_loop().call_later(PING_SECONDS, self._ping)

    async def _send_ping(self) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await self._socket.ping()

    def _why(self) -> str:
        if self.complaint:
            return f"the bridge into {self._what} ended: {self.complaint}"
        return f"the channel to {self._what} was cut"


async def open_channel(kube: Kube, namespace: str, pod: str, container: str, command: Sequence[str]) -> ExecStream:
    """Starts `command` in a running container and gives its stdin and stdout. ChannelError, with the next step, when that fails."""
    what = f"pod {namespace}/{pod}"
    query = [("container", container), ("stdin", "true"), ("stdout", "true"), ("stderr", "true"), *(("command", word) for word in command)]
    try:
        async with asyncio.timeout(OPEN_SECONDS):
            socket = await kube.open_websocket(PODS.path(namespace, pod, "exec"), query, PROTOCOL)
    except aiohttp.WSServerHandshakeError as error:
        raise ChannelError(_refused(what, namespace, error.status)) from error
    except TimeoutError as error:
        raise ChannelError(f"{what} let nobody in within {OPEN_SECONDS:.0f} s: look whether its node is well") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ChannelError(f"{what} cannot be reached through the API server ({error or type(error).__name__}): try again") from error
    if socket.protocol != PROTOCOL:
        await socket.close()
        raise ChannelError(f"the API server does not speak {PROTOCOL}: Kubernetes 1.30 or newer is needed")
    return ExecStream(socket, what)


def _refused(what: str, namespace: str, status: int) -> str:
    if status == 403:
        return f"no right to exec in {what}: the account needs the verbs get and create on pods/exec in namespace {namespace}"
    if status == 404:
        return f"{what} is not there, or its container is not"
    return f"{what} let nobody in (HTTP {status}): its container does not run"
