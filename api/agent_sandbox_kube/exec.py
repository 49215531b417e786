"""A channel: the stream of one `pods/exec`, over a WebSocket with v5.channel.k8s.io. Facts: kubernetes/remotecommand, and KEP-4006.

Each message is a channel byte and data: 0 stdin, 1 stdout, 2 stderr, 3 a v1.Status at the end. Whatever ends without that status was cut: an error, never
an end. The socket is read by whoever reads the stream and by no task in between, which saves a quarter of a round trip's CPU; so aiohttp's own bounds
are the back-pressure. aiohttp's heartbeat is not used: a server whose process does not read answers no ping, and the exec is healthy all the same.

uvloop throws away what it holds of a TLS connection when the other side closes while reading is paused (MagicStack/uvloop#661). So with unread output in
bulk the end of a command can be lost there, status included: it then counts as cut. A channel ends by our closing, so that costs it nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any, Final

import aiohttp
import httpcore
from agent_sandbox_core.errors import ChannelError
from agent_sandbox_core.hardening import GUEST_CONNECT
from agent_sandbox_core.stream import PieceStream
from agent_sandbox_core.v1alpha1 import CONTAINER

from .client import Kube
from .config import ConfigError
from .resources import PODS

PROTOCOL: Final = "v5.channel.k8s.io"
OLD_PROTOCOL: Final = "v4.channel.k8s.io"
"""Without half-close. Offered all the same, so that a server which knows no other says so."""
STDIN, STDOUT, STDERR, STATUS, CLOSE = 0, 1, 2, 3, 255
TO_STDIN: Final = bytes([STDIN])
END_OF_STDIN: Final = bytes([CLOSE, STDIN])
WRITE_BYTES: Final = 64 << 10
SMALL_BYTES: Final = 4096
"""Up to this size a message is one of a conversation, of which each microsecond counts, and not of a transfer."""
COMPLAINT_BYTES: Final = 4096
KEEP_SECONDS: Final = 25.0
"""Load balancers cut what is idle for minutes."""
OPEN_SECONDS: Final = 10.0
CLOSE_SECONDS: Final = 2.0

UNAUTHORIZED, FORBIDDEN, NOT_FOUND = 401, 403, 404
NEVER_STARTED: Final = ("error dialing backend", "unable to upgrade connection", "failed to start exec")
"""How the API server, the kubelet and the runtime say that the command has not begun."""


class ExecStream(PieceStream):
    """stdin and stdout of one exec as a stream of bytes. One reader and one writer at a time."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, what: str) -> None:
        super().__init__()
        self._socket = socket
        self._what = what
        self._complaint = bytearray()
        self._status: dict[str, Any] | None = None
        self._ended = False
        self._receiving = False
        self._keeping: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(KEEP_SECONDS, self._keep)

    @property
    def complaint(self) -> str:
        """What the command wrote to stderr, and why it ended when that was no success."""
        told = bytes(self._complaint).decode(errors="replace")
        if self._status is not None and not self._succeeded:
            told += " " + str(self._status.get("message", "")).replace("Internal error occurred: ", "")
        return " ".join(told.split())

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - httpcore's signature
        """See httpcore. Empty only at a clean end: the command ended with success."""
        if not self._ready:
            if timeout is None:
                await self._receive()
            else:
                try:
                    async with asyncio.timeout(timeout):
                        await self._receive()
                except TimeoutError as error:
                    raise httpcore.ReadTimeout(f"nothing came over the channel to {self._what} in time") from error
        if len(self._ready) == 1 and len(self._ready[0]) <= min(max_bytes, SMALL_BYTES):
            return self._ready.pop()
        return self._gather(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - httpcore's signature
        """See httpcore."""
        if self._ended:
            raise self._fault(httpcore.WriteError)
        try:
            if timeout is None:
                await self._send(buffer)
            else:
                async with asyncio.timeout(timeout):
                    await self._send(buffer)
        except TimeoutError as error:
            raise httpcore.WriteTimeout(f"the channel to {self._what} took nothing in time") from error
        except (aiohttp.ClientError, OSError) as error:
            while self._poll():
                pass
            raise self._fault(httpcore.WriteError) from error

    async def end_input(self) -> None:
        """Closes the command's stdin and nothing else. Quiet when the command has ended already: reading tells that."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await self._socket.send_bytes(END_OF_STDIN)

    async def aclose(self) -> None:
        """Closes the connection, which ends the bridge's input and so the bridge. Returns when nothing of it is left here; bounded."""
        self._ended = True
        self._timer.cancel()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._socket.close()

    def get_extra_info(self, info: str) -> Any:
        """`is_readable`: something came, or the end did, while nobody asked: the connection is then given up."""
        if info != "is_readable":
            return None
        while not self._ready and self._poll():
            pass
        return bool(self._ready) or self._ended

    async def _send(self, buffer: bytes) -> None:
        if len(buffer) <= SMALL_BYTES:
            if buffer:
                await self._socket.send_bytes(TO_STDIN + buffer)
            return
        view = memoryview(buffer)
        for at in range(0, len(view), WRITE_BYTES):
            await self._socket.send_bytes(b"".join((TO_STDIN, view[at : at + WRITE_BYTES])))
            # aiohttp waits only while the transport is full, and one that is just closing never is: it takes everything and drops it. Without
            # this the loop would never come to tell that the connection is gone.
            await asyncio.sleep(0)

    async def _receive(self) -> None:
        """Waits for output of the command, or raises what its end means."""
        while not self._ready and not self._ended:
            self._receiving = True
            try:
                message = await self._socket.receive()
            finally:
                self._receiving = False
            self._take(message)
        if not self._ready and not self._succeeded:
            raise self._fault(httpcore.ReadError)

    def _poll(self) -> bool:
        """Takes one message that is here already; False when there is none."""
        if self._ended or self._receiving:
            return False
        # aiohttp has no way to ask. So its coroutine takes one step: either it returns a message, or it would wait and is taken back like a
        # cancelled reader, which loses nothing.
        receiving = self._socket.receive()
        try:
            receiving.send(None)
        except StopIteration as found:
            self._take(found.value)
            return True
        with contextlib.suppress(asyncio.CancelledError):
            receiving.throw(asyncio.CancelledError())
        return False

    def _take(self, message: aiohttp.WSMessage) -> None:
        if message.type is not aiohttp.WSMsgType.BINARY:
            self._ended = True
            self._timer.cancel()
            return
        data: bytes = message.data
        if len(data) < 2:
            return  # the server begins with empty ones
        channel = data[0]
        if channel == STDOUT:
            self._ready.append(data[1:])
        elif channel == STDERR:
            self._complaint = (self._complaint + data[1:])[-COMPLAINT_BYTES:]
        elif channel == STATUS:
            # The end comes by itself: streams run side by side in the server, so output may still follow.
            with contextlib.suppress(ValueError):
                told = json.loads(data[1:])
                self._status = told if isinstance(told, dict) else None

    @property
    def _succeeded(self) -> bool:
        return self._status is not None and self._status.get("status") == "Success"

    def _fault(self, kind: type[Exception]) -> Exception:
        if self._status is not None and not self._ready and any(sign in str(self._status.get("message")) for sign in NEVER_STARTED):
            return ChannelError(f"{self._what} could not be entered: {self.complaint}; look whether its container runs")
        if self.complaint:
            return kind(f"the bridge into {self._what} ended: {self.complaint}")
        return kind(f"the bridge into {self._what} has ended" if self._succeeded else f"the channel to {self._what} was cut")

    def _keep(self) -> None:
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.get_running_loop().create_task(self._ping())
        self._timer = asyncio.get_running_loop().call_later(KEEP_SECONDS, self._keep)

    async def _ping(self) -> None:
        # Nobody waits for the answer. While stdin is full this waits in line with it.
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await self._socket.ping()


async def open_channel(kube: Kube, namespace: str, pod: str, container: str, command: Sequence[str]) -> ExecStream:
    """Starts `command` in a running container and gives its stdin and stdout. ChannelError, with the next step, when that fails.

    That the container does not run is told only after this, by ChannelError of the first read or write.
    """
    what = f"pod {namespace}/{pod}"
    query = [("container", container), ("stdin", "true"), ("stdout", "true"), ("stderr", "true"), *(("command", word) for word in command)]
    try:
        async with asyncio.timeout(OPEN_SECONDS):
            socket = await kube.open_websocket(PODS.path(namespace, pod, "exec"), query, (PROTOCOL, OLD_PROTOCOL))
    except aiohttp.WSServerHandshakeError as error:
        raise ChannelError(_refused(what, namespace, container, error.status)) from error
    except TimeoutError as error:
        raise ChannelError(f"{what} let nobody in within {OPEN_SECONDS:.0f} s: look whether its node is well") from error
    except ConfigError as error:
        raise ChannelError(f"{what} cannot be entered: {error}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ChannelError(f"{what} cannot be reached through the API server ({error or type(error).__name__}): try again") from error
    if socket.protocol != PROTOCOL:
        await socket.close()
        raise ChannelError(f"the API server does not speak {PROTOCOL}: Kubernetes 1.30 or newer is needed")
    return ExecStream(socket, what)


async def open_guest(kube: Kube, namespace: str, pod: str) -> ExecStream:
    """A channel to sandbox-init in a sandbox's pod. See open_channel."""
    return await open_channel(kube, namespace, pod, CONTAINER, GUEST_CONNECT)


def _refused(what: str, namespace: str, container: str, status: int) -> str:
    if status == UNAUTHORIZED:
        return f"the API server does not accept our credentials for an exec in {what}: check the kubeconfig's user, or the pod's service account"
    if status == FORBIDDEN:
        return f"no right to exec in {what}: the account needs the verbs get and create on pods/exec in namespace {namespace}"
    if status == NOT_FOUND:
        return f"{what} is not there"
    return f"{what} let nobody in (HTTP {status}): it is not on a node yet, or has no container {container}"
