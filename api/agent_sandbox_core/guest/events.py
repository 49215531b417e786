"""The event stream: one channel that carries the frames of all running commands of a guest.

It is opened for the first command that needs it and closed after 60 s without any. The guest sends a heartbeat every 15 s; after 45 s of
silence, or when the channel breaks, it is opened again and every command goes on from the first frame it has not seen. While it cannot be
opened (a full process table takes no new bridge), frames are fetched over the channel that is kept for short calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from agent_sandbox_core.channel import CHANNEL_ERRORS, IDLE_SECONDS, TRANSPORT_ERRORS, Broken, Channel, Lane, Request
from agent_sandbox_core.errors import ChannelError, OutcomeUnknown, SandboxError
from agent_sandbox_core.frames import HEARTBEAT, FrameError, FrameParser
from agent_sandbox_core.names import new_guest_id

from .answers import ERROR_STATUS, raise_error
from .calls import GuestCalls
from .runs import Run

SILENCE_SECONDS = 45.0
POLL_SECONDS = 0.1
POLL_BYTES = 256 << 10
RETRY_SECONDS = 10.0
"""How long a lost connection is sought again before the outcome of its commands is called unknown."""
CONFLICT = 409
NOT_FOUND = 404


class Lost(Protocol):
    """Told about runs that cannot be followed any more."""

    def __call__(self, runs: list[Run], what: str, known: SandboxError | None = None) -> Awaitable[None]:
        """`what` happened to them; `known` is what the backend said about it, asked for when it is None."""


class EventStream:
    """Routes frames to runs."""

    def __init__(self, calls: GuestCalls, lane: Lane, lost: Lost, consumed: Callable[[Run], None]) -> None:
        self._calls = calls
        self._lane = lane
        self._lost = lost
        self._consumed = consumed
        self._runs: dict[bytes, Run] = {}
        self._task: asyncio.Task[None] | None = None
        self._idle_since = 0.0
        self.id = new_guest_id()
        self.open = False
        self.number = 0
        """Of the connection: subscriptions end with theirs."""

    @property
    def runs(self) -> list[Run]:
        """All runs that have not been left."""
        return list(self._runs.values())

    def route(self, run: Run) -> None:
        """Frames of this process go to `run` from now on."""
        self._runs[run.raw_id] = run
        self._lane.busy = True

    def leave(self, run: Run) -> None:
        """Frames of this process are dropped from now on."""
        self._runs.pop(run.raw_id, None)
        if not self._runs:
            self._lane.busy = False
            self._lane.last_used = self._idle_since = asyncio.get_running_loop().time()

    async def follow(self, run: Run, *, subscribed: int | None) -> None:
        """Sees to it that the frames of a running process come, over this and every later connection.

        `subscribed`: the number of the connection on which the guest said it subscribed it.
        """
        run.following = True
        if self._task is None:
            self._task = self._calls.tasks.spawn(self._work())
        elif self.open and subscribed != self.number:
            await self._subscribe(run)

    async def _work(self) -> None:
        try:
            while (channel := await self._connect()) is not None:
                self.open = True
                self.number += 1
                parser = FrameParser()
                resubscribe = self._calls.tasks.spawn(self._subscribe_all())
                try:
                    while await self._read(channel, parser):
                        pass
                finally:
                    self.open = False
                    resubscribe.cancel()
                    self._lane.drop()
        finally:
            self._task = None

    async def _connect(self) -> Channel | None:
        """The stream's channel; None when nobody waits for frames, or when it cannot be had (the runs have been told then)."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + RETRY_SECONDS, 0.1
        while following := [run for run in self._runs.values() if run.following and not run.done]:
            known: SandboxError | None = None
            try:
                return await self._open()
            except CHANNEL_ERRORS as error:
                failure: Exception = error
                known = await self._calls.explain()
            except SandboxError as error:
                failure = error
            self._lane.drop()
            if known is None and await self._fetch(following, for_seconds=pause):
                deadline = loop.time() + RETRY_SECONDS
            elif known is not None or loop.time() >= deadline:
                await self._lost(
                    following, f"the connection that carries the command's output broke and could not be opened again ({failure})", known
                )
                continue
            else:
                await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)
        return None

    async def _fetch(self, runs: list[Run], *, for_seconds: float) -> bool:
        """Fetches what the runs wrote for so long, by short calls; False when these do not get through either."""
        deadline = asyncio.get_running_loop().time() + for_seconds
        while asyncio.get_running_loop().time() < deadline:
            for run in runs:
                target = f"/v1/processes/{run.id}/output?from={run.next_seq}&max_bytes={POLL_BYTES}"
                try:
                    answer = await self._calls.exchange(Request("GET", target, idempotent=True, max_answer=2 * POLL_BYTES))
                    if answer.status >= ERROR_STATUS:
                        return False
                    self._take(FrameParser(), answer.body)
                except (Broken, FrameError, SandboxError):
                    return False
            runs = [run for run in runs if not run.done]
            if not runs:
                break
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def _open(self) -> Channel:
        channel = await self._lane.channel()
        answer = await channel.begin(Request("GET", f"/v1/streams/{self.id}"))
        if answer.status >= ERROR_STATUS:
            answer.body = await channel.rest()
            raise_error(answer)
        self._calls.note_boot(answer)
        return channel

    async def _read(self, channel: Channel, parser: FrameParser) -> bool:
        """Takes what comes; False when the connection is over."""
        try:
            data = await channel.read_part(SILENCE_SECONDS)
            if data is None:
                return False
            self._take(parser, data)
        except TRANSPORT_ERRORS:
            return False
        except FrameError:
            return False  # what follows cannot be told apart: a new connection starts at a frame again
        return bool(self._runs) or asyncio.get_running_loop().time() < self._idle_since + IDLE_SECONDS

    def _take(self, parser: FrameParser, data: bytes) -> None:
        for frame in parser.feed(data):
            if frame.type == HEARTBEAT:
                continue
            run = self._runs.get(frame.process)
            if run is not None:
                run.feed(frame)
                self._consumed(run)

    async def _subscribe_all(self) -> None:
        for run in self.runs:
            if run.following and not run.done:
                await self._subscribe(run)

    async def _subscribe(self, run: Run) -> None:
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + RETRY_SECONDS, 0.1
        while self.open and not run.done:
            known: SandboxError | None = None
            target = f"/v1/streams/{self.id}/processes/{run.id}?from={run.next_seq}"
            try:
                answer = await self._calls.exchange(Request("PUT", target, idempotent=True))
                if answer.status == CONFLICT:
                    self._lane.drop()  # the guest does not have the stream: the reader notices and opens it again
                    return
                if answer.status == NOT_FOUND:
                    run.alive = False
                    run.fail(
                        OutcomeUnknown("the sandbox no longer knows the command: it restarted, or the command ended long ago; its outcome is unknown")
                    )
                elif answer.status >= ERROR_STATUS:
                    raise_error(answer)
            except (Broken, ChannelError) as error:
                failure: Exception = error
                known = await self._calls.explain()
            except SandboxError as error:
                failure = error
            else:
                return
            if known is not None or loop.time() >= deadline:
                await self._lost([run], f"the command's output could not be asked for ({failure})", known)
                return
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)
