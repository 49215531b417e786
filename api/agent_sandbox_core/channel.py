"""A channel: one duplex byte stream to `sandbox-init`, with HTTP/1.1 on it, and the lanes that share the few channels of a sandbox.

The protocol is h11, the parser inside httpcore, on an `httpcore.AsyncNetworkStream`. httpcore's pool is left out on purpose: it costs
1.2 ms of CPU a request where this costs 0.2, loses a slot for ever when a queued request is cancelled, and sends a body whole before it
reads the answer.

A sandbox has three lanes, one channel each: *control* for short calls (they go to their end even when their caller is cancelled, so a
cancelled caller costs no channel), *events* for the one event stream, *bulk* for transfers. So a transfer or a stream never holds up a
short call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import h11
import httpcore

from .errors import ChannelError, SandboxError, Unavailable
from .interfaces import OpenChannel

logger = logging.getLogger(__name__)

READ_BYTES = 256 * 1024
MAX_ANSWER_BYTES = 8 * 1024 * 1024
"""The largest usual one is 1 MiB of output frames."""
OPEN_SECONDS = 10.0
SHORT_SECONDS = 15.0
"""Longest wait for a short answer: the guest itself takes at most 2 s for a kill."""
STALL_SECONDS = 75.0
"""Longest silence inside a transfer: an archive is thawed after 60 s at the latest."""
IDLE_SECONDS = 60.0
TURN_SECONDS = 120.0
ANSWER_POLL_SECONDS = 0.05
"""How often an upload that cannot go on looks for an early answer: a stream can be asked whether it is readable, not waited for."""
NO_CONTENT = 204

TRANSPORT_ERRORS: tuple[type[Exception], ...] = (
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.TimeoutException,
    h11.ProtocolError,
    OSError,  # TimeoutError and ConnectionError too
    EOFError,
)
"""All that a broken channel raises; nothing else is taken for one."""


class Tasks:
    """The background tasks of one guest: none outlives it, none fails unseen."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task that is cancelled with the guest."""
        return self._start(work, self._running)

    def spawn_close(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a task that closes something: bounded by itself, and waited for at the end."""
        self._start(work, self._closing)

    async def aclose(self) -> None:
        """Cancels what runs and waits until all has ended."""
        own = asyncio.current_task()
        while others := [task for task in (*self._running, *self._closing) if task is not own]:
            for task in self._running - {own}:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None], group: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        group.add(task)
        task.add_done_callback(group.discard)
        task.add_done_callback(_log_failure)
        return task


class Broken(Exception):
    """The channel broke. `sent`: the request may have reached the guest."""

    def __init__(self, cause: Exception, *, sent: bool) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__)
        self.sent = sent


CHANNEL_ERRORS: tuple[type[Exception], ...] = (*TRANSPORT_ERRORS, ChannelError)


@dataclass(slots=True)
class Request:
    """A request whose body is in memory. `idempotent`: it may be sent once more when a channel broke under it."""

    method: str
    target: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    idempotent: bool = False
    seconds: float = SHORT_SECONDS
    max_answer: int = MAX_ANSWER_BYTES


@dataclass(slots=True)
class Answer:
    """Status and headers (lower case); `body` is empty for a streamed answer, its bytes come from `Channel.read_part()`."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes = b""

    @property
    def boot_id(self) -> str:
        """The boot id that every answer of a guest carries, empty when it does not."""
        return self.headers.get(b"sandbox-boot-id", b"").decode("latin-1")


class Channel:
    """HTTP/1.1 on one stream, one request after another. Not for concurrent use: lanes see to that."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.CLIENT)
        self.sent_all = True
        """False after an upload that the guest answered before its end."""
        self.proven = False
        """Something was answered on it: a bridge that the engine has started may still die for want of a thread."""

    @property
    def reusable(self) -> bool:
        """Idle and alive: a readable idle stream has ended (or speaks out of turn)."""
        return self._http.our_state is h11.IDLE and self._http.their_state is h11.IDLE and not self._stream.get_extra_info("is_readable")

    async def exchange(self, request: Request) -> Answer:
        """Sends a request and reads its whole answer."""
        async with asyncio.timeout(request.seconds):
            await self._stream.write(self._head(request, str(len(request.body))) + self._tail(request.body))
            answer = await self._answer()
            parts: list[bytes] = []
            size = 0
            while (part := await self._next_data()) is not None:
                parts.append(part)
                size += len(part)
                if size > request.max_answer:
                    raise h11.RemoteProtocolError(f"an answer over {request.max_answer} bytes")
        answer.body = parts[0] if len(parts) == 1 else b"".join(parts)
        self.proven = True
        self._end()
        return answer

    async def begin(self, request: Request, upload: AsyncIterator[bytes] | None = None) -> Answer:
        """Sends a request, with `upload` as its body when given, and reads the head of the answer; the rest comes from `read_part()`.

        A guest that answers before it has the whole body is heard at once and the rest is not sent (the channel is used up then).
        """
        if upload is None:
            await self._write(self._head(request, str(len(request.body))) + self._tail(request.body))
        else:
            await self._write(self._head(request, None))
            await self._send(upload)
        async with asyncio.timeout(STALL_SECONDS):
            return await self._answer()

    async def read_part(self, seconds: float = STALL_SECONDS) -> bytes | None:
        """The next bytes of a streamed answer, None at its end. A transport error when it ends early, or after `seconds` of silence."""
        event = self._http.next_event()
        if event is h11.NEED_DATA:
            async with asyncio.timeout(seconds):
                event = await self._next_event()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        self._end()
        return None

    async def rest(self) -> bytes:
        """The rest of a streamed answer that is short: an error, or a few JSON keys."""
        found = bytearray()
        while (part := await self.read_part()) is not None:
            found += part
            if len(found) > MAX_ANSWER_BYTES:
                raise h11.RemoteProtocolError(f"an answer over {MAX_ANSWER_BYTES} bytes")
        return bytes(found)

    async def aclose(self) -> None:
        """Closes the stream; bounded, and quiet about a stream that is dead already."""
        with contextlib.suppress(*TRANSPORT_ERRORS):
            async with asyncio.timeout(5):
                await self._stream.aclose()

    def _head(self, request: Request, length: str | None) -> bytes:
        framing = ("Transfer-Encoding", "chunked") if length is None else ("Content-Length", length)
        event = h11.Request(method=request.method, target=request.target, headers=[("Host", "sandbox"), framing, *request.headers])
        return self._http.send(event) or b""

    def _tail(self, body: bytes) -> bytes:
        data = self._http.send(h11.Data(data=body)) if body else b""
        return (data or b"") + (self._http.send(h11.EndOfMessage()) or b"")

    async def _send(self, upload: AsyncIterator[bytes]) -> None:
        async for part in upload:
            if part:
                for piece in self._http.send_with_data_passthrough(h11.Data(data=part)) or ():
                    if not await self._write_unless_answered(piece):
                        self.sent_all = False
                        return
        await self._write(self._http.send(h11.EndOfMessage()) or b"")

    async def _write_unless_answered(self, data: bytes) -> bool:
        """Writes, or says False as soon as the guest has answered before it has everything: it takes no more then, and waiting for room would be in vain."""
        if self._stream.get_extra_info("is_readable"):
            return False
        writing = asyncio.ensure_future(self._write(data))
        try:
            while not writing.done():
                await asyncio.wait({writing}, timeout=ANSWER_POLL_SECONDS)
                if not writing.done() and self._stream.get_extra_info("is_readable"):
                    return False
            await writing
        finally:
            writing.cancel()
        return True

    async def _write(self, data: bytes) -> None:
        async with asyncio.timeout(STALL_SECONDS):
            await self._stream.write(data)

    async def _answer(self) -> Answer:
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Response):
                headers = dict(event.headers)
                if event.status_code != NO_CONTENT and not {b"content-length", b"transfer-encoding"} & headers.keys():
                    # Such a body would end with the connection: a cut one would look whole.
                    raise h11.RemoteProtocolError("an answer with neither length nor chunks")
                return Answer(event.status_code, headers)
            if not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("the channel ended before an answer")

    async def _next_data(self) -> bytes | None:
        event = await self._next_event()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        return None

    async def _next_event(self) -> h11.Event | type[h11.PAUSED]:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._stream.read(READ_BYTES))
        return event  # type: ignore[return-value]  # NEED_DATA is the loop's condition

    def _end(self) -> None:
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()


class ChannelBudget:
    """The cap on open channels over all sandboxes of a process, and the figures for its metrics."""

    def __init__(self, limit: int = 512) -> None:
        self.limit = limit
        self.open = 0
        self.opened_total = 0
        self.failed_total = 0
        self.evicted_total = 0
        self._lanes: WeakSet[Lane] = WeakSet()
        self._freed = asyncio.Event()

    def register(self, lane: Lane) -> None:
        """Makes a lane known, so that its channel can be evicted."""
        self._lanes.add(lane)

    async def admit(self) -> None:
        """Takes a place for a channel: evicts the channel that is idle for longest when all are taken, else waits for one up to 10 s."""
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                while self.open >= self.limit:
                    self._freed.clear()
                    idle = min((other for other in self._lanes if other.idle), key=lambda other: other.last_used, default=None)
                    if idle is not None:
                        self.evicted_total += 1
                        idle.drop()
                    await self._freed.wait()
        except TimeoutError as error:
            raise ChannelError(f"all {self.limit} channels of this process are in use: try again, or raise the limit of channels") from error
        self.open += 1

    def release(self) -> None:
        """Gives a place back."""
        self.open -= 1
        self._freed.set()


class Lane:
    """At most one channel, opened when it is needed. Subclasses and users serialise what runs on it."""

    def __init__(self, open_channel: OpenChannel, budget: ChannelBudget, tasks: Tasks) -> None:
        self._open_channel = open_channel
        self._budget = budget
        self._tasks = tasks
        self._channel: Channel | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.busy = False
        self.last_used = 0.0
        budget.register(self)

    @property
    def idle(self) -> bool:
        """Holds a channel that nobody uses."""
        return self._channel is not None and not self.busy

    async def channel(self) -> Channel:
        """The open channel, or a new one. ChannelError when none can be opened."""
        if self._channel is not None:
            if self._channel.reusable:
                return self._channel
            self.drop()
        await self._budget.admit()
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                stream = await self._open_channel()
        except BaseException as error:
            self._budget.release()
            self._budget.failed_total += 1
            if isinstance(error, TimeoutError):
                raise ChannelError(f"no channel to the sandbox could be opened within {OPEN_SECONDS:.0f} s: try again") from error
            if isinstance(error, TRANSPORT_ERRORS):
                raise ChannelError(f"no channel to the sandbox could be opened ({type(error).__name__}: {error}): try again") from error
            raise
        self._budget.opened_total += 1
        self._channel = Channel(stream)
        return self._channel

    def drop(self) -> None:
        """Closes the channel, if there is one, in the background."""
        channel, self._channel = self._channel, None
        if channel is not None:
            self._tasks.spawn_close(self._close(channel))

    def drop_used_up(self) -> None:
        """Closes the channel when it can carry nothing more: its transfer broke off, or was not sent whole."""
        if self._channel is not None and not self._channel.reusable:
            self.drop()

    async def aclose(self) -> None:
        """Closes the channel, if there is one, and waits for that."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await self._close(channel)

    def close_when_idle(self) -> None:
        """Closes the channel once it was idle for 60 s; call it after each use."""
        self.last_used = asyncio.get_running_loop().time()
        if self._timer is None and self._channel is not None:
            self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._check_idle)

    def cancel_timer(self) -> None:
        """Ends what `close_when_idle` began."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_idle(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        rest = self.last_used + IDLE_SECONDS - loop.time()
        if self.idle and rest <= 0:
            self.drop()
        elif self._channel is not None:
            self._timer = loop.call_later(max(rest, 1.0), self._check_idle)

    async def _close(self, channel: Channel) -> None:
        try:
            await channel.aclose()
        finally:
            self._budget.release()


class ControlLane(Lane):
    """Short calls, in order. A worker task carries them out and lives as long as there are any, so a cancelled caller breaks no channel.

    Its channel is kept open while the sandbox is in use: with a full process table no new bridge could be started.
    """

    def __init__(self, open_channel: OpenChannel, budget: ChannelBudget, tasks: Tasks) -> None:
        super().__init__(open_channel, budget, tasks)
        self._queue: deque[tuple[Request, asyncio.Future[Answer]]] = deque()
        self._free = asyncio.Event()

    async def call(self, request: Request) -> Answer:
        """The answer, whatever its status. Raises Broken, or ChannelError when the request was not sent.

        A cancelled call that was not begun is never sent; one that was begun goes on, its answer is dropped.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._queue.append((request, future))
        self._resume()
        return await future

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncIterator[Channel | None]:
        """The open channel for one transfer that cannot have one of its own, None when there is none. Short calls wait meanwhile."""
        async with asyncio.timeout(SHORT_SECONDS):
            while self.busy:
                await self._free.wait()
        if self._channel is None or not self._channel.reusable:
            yield None
            return
        self.busy = True
        try:
            yield self._channel
        finally:
            self.drop_used_up()
            self._rest()
            self._resume()

    def _resume(self) -> None:
        if self._queue and not self.busy:
            self.busy = True
            self._tasks.spawn(self._work())

    def _rest(self) -> None:
        self.busy = False
        self.last_used = asyncio.get_running_loop().time()
        self._free.set()
        self._free.clear()

    async def _work(self) -> None:
        try:
            while self._queue:
                request, future = self._queue.popleft()
                if future.done():
                    continue
                try:
                    answer = await self._carry_out(request)
                except ChannelError as error:
                    # Whoever waits behind it would wait for the same failure again.
                    for waiting in (future, *(queued for _, queued in self._queue)):
                        _fail(waiting, ChannelError(error.message))
                    self._queue.clear()
                except (SandboxError, Broken) as error:
                    _fail(future, error)
                except BaseException:
                    future.cancel()
                    raise
                else:
                    if not future.done():
                        future.set_result(answer)
        finally:
            self._rest()
            while self._queue:  # only when the worker itself was ended
                self._queue.popleft()[1].cancel()

    async def _carry_out(self, request: Request) -> Answer:
        channel = await self.channel()
        try:
            return await self._exchange(channel, request)
        except Broken:
            if not request.idempotent:
                raise
        return await self._exchange(await self.channel(), request)

    async def _exchange(self, channel: Channel, request: Request) -> Answer:
        try:
            return await channel.exchange(request)
        except BaseException as error:
            self.drop()
            if isinstance(error, TRANSPORT_ERRORS):
                raise Broken(error, sent=True) from error
            raise


class BulkLane(Lane):
    """Transfers, one after another, each in its caller's task: cancelling one closes the channel."""

    def __init__(self, open_channel: OpenChannel, budget: ChannelBudget, tasks: Tasks) -> None:
        super().__init__(open_channel, budget, tasks)
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The lane for one transfer, within 120 s. Its channel is kept when the transfer ended cleanly."""
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._lock.acquire()
        except TimeoutError as error:
            raise Unavailable(f"other transfers have kept this sandbox busy for {TURN_SECONDS:.0f} s: try again when they have ended") from error
        self.busy = True
        try:
            yield
        finally:
            self.busy = False
            self.drop_used_up()
            self.close_when_idle()
            self._lock.release()


def _fail(future: asyncio.Future[Answer], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a background task of a guest failed", exc_info=error)
