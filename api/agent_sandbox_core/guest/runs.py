"""One command as the client follows it: its frames in order, what was lost of them, and how it ended. No I/O here."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

from agent_sandbox_core.decoding import OutputCollector
from agent_sandbox_core.errors import SandboxError
from agent_sandbox_core.frames import EXIT, GAP, STDERR, Frame, gap_end

from .answers import Exit, GuestProtocolError, ProcessState, parse_json, parse_process

ACK_BYTES = 256 * 1024
JOIN_BYTES = 64 * 1024
WINDOW_BYTES = 2 * 1024 * 1024
"""The guest keeps at most 1 MiB that is not acknowledged; one that sends twice that does not keep to its API."""


class Sink(Protocol):
    """Where a command's output goes."""

    def put(self, data: bytes, next_seq: int, *, error: bool) -> int:
        """Takes the output of one frame; `next_seq` follows it. Returns how many bytes are consumed by that."""

    def lose(self) -> None:
        """Output is missing from here on."""


class Collecting:
    """For `run`: everything is consumed at once; up to a limit it is kept."""

    def __init__(self, limit: int) -> None:
        self.collector = OutputCollector(limit)

    def put(self, data: bytes, next_seq: int, *, error: bool) -> int:
        """Keeps what there is room for."""
        self.collector.add(data, error=error)
        return len(data)

    def lose(self) -> None:
        """Keeps nothing more."""
        self.collector.mark_lost()


class Queueing:
    """For `stream`: output waits for its reader. What he has not taken stays in the guest's journal, which is the window."""

    def __init__(self) -> None:
        self.lost = False
        self._items: deque[tuple[bool, bytes, int]] = deque()
        self._size = 0

    def put(self, data: bytes, next_seq: int, *, error: bool) -> int:
        """Keeps it for the reader."""
        if not self.lost:
            self._items.append((error, data, next_seq))
            self._size += len(data)
            if self._size > WINDOW_BYTES:
                raise GuestProtocolError("the sandbox sent more output than it may without an acknowledgement")
        return 0

    def lose(self) -> None:
        """Keeps nothing more."""
        self.lost = True

    def take(self) -> tuple[bool, bytes, int] | None:
        """The next output of one stream (joined up to 64 KiB) and the number that follows it; None when there is none now."""
        if not self._items:
            return None
        error, data, next_seq = self._items.popleft()
        if self._items and self._items[0][0] is error and len(data) < JOIN_BYTES:
            parts, size = [data], len(data)
            while self._items and self._items[0][0] is error and size < JOIN_BYTES:
                _, part, next_seq = self._items.popleft()
                parts.append(part)
                size += len(part)
            data = b"".join(parts)
        self._size -= len(data)
        return error, data, next_seq


class Run:
    """A command that was started, or is being started, by this client."""

    def __init__(self, process: str, boot: str, sink: Sink) -> None:
        self.id = process
        self.raw_id = bytes.fromhex(process)
        self.boot = boot
        self.next_seq = 0
        self.exit: Exit | None = None
        self.duration_ms = 0
        self.error: SandboxError | None = None
        self.in_doubt = False
        """A channel broke under its start, which may still be on its way."""
        self.alive = False
        """It runs in the sandbox, or may: whoever leaves it has to kill it."""
        self.following = False
        """Its frames come over the event stream, now or when that is open."""
        self.began = time.monotonic()
        self.consumed_seq = 0
        self.unacknowledged = 0
        self._sink = sink
        self._early: list[Frame] | None = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        """It ended, or nothing more will be heard of it."""
        return self.exit is not None or self.error is not None

    def feed(self, frame: Frame) -> None:
        """Takes a frame of the event stream. Frames that overtake the answer to the start wait for it."""
        if self._early is not None:
            self._early.append(frame)
            return
        if self.done or frame.seq < self.next_seq:
            return
        try:
            self._take(frame)
        except GuestProtocolError as error:
            self.fail(error)
        self._wake()

    def begin(self, output: list[tuple[int, int, bytes]]) -> None:
        """Takes the output in the answer to the start, then what came before the answer did."""
        early, self._early = self._early or [], None
        for seq, fd, data in output:
            self.feed(Frame(fd, self.raw_id, seq, data))
        for frame in early:
            self.feed(frame)

    def conclude(self, state: ProcessState) -> None:
        """Ends it with the exit of a Process whose frames have all been taken."""
        if not self.done and state.exit is not None:
            if self.next_seq < state.next_seq - 1:
                self._sink.lose()
            self.next_seq = state.next_seq
            self.finish(state.exit, state.duration_ms)

    def finish(self, ended: Exit, duration_ms: int) -> None:
        """It ended."""
        if not self.done:
            self.exit, self.duration_ms = ended, duration_ms
            self._wake()

    def fail(self, error: SandboxError) -> None:
        """Nothing more will be heard of it."""
        if not self.done:
            self.error = error
            self._wake()

    async def changed(self) -> None:
        """Waits until a frame was taken or it is done. One waiter at a time."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def consume(self, size: int, next_seq: int) -> None:
        """`size` more bytes, all before `next_seq`, are out of the way."""
        self.unacknowledged += size
        self.consumed_seq = next_seq

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self, frame: Frame) -> None:
        if frame.type == GAP:
            self._sink.lose()
            self.next_seq = max(self.next_seq, gap_end(frame))
            return
        if frame.seq > self.next_seq:
            self._sink.lose()
        self.next_seq = frame.seq + 1
        if frame.type == EXIT:
            state = parse_process(parse_json(frame.payload))
            if state.exit is None:
                raise GuestProtocolError("the sandbox sent an exit frame without an exit")
            self.exit, self.duration_ms = state.exit, state.duration_ms
        else:
            consumed = self._sink.put(frame.payload, self.next_seq, error=frame.type == STDERR)
            if consumed:
                self.consume(consumed, self.next_seq)
