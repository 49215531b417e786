"""Commands: started once and never twice, followed to their end, killed when they are left; an outcome that is not known is an error.

A command that ends within 50 ms is one round trip; every other is followed over the event stream. All attached commands of a guest hang
on one lease, which is renewed while there are any: when this process dies, they end within 30 s.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from agent_sandbox_core.channel import Answer, Broken, ChannelBudget, Lane, Request
from agent_sandbox_core.decoding import TextDecoder
from agent_sandbox_core.errors import BackendError, ChannelError, InvalidRequest, OutcomeUnknown, SandboxDied, SandboxError
from agent_sandbox_core.frames import FrameError, FrameParser
from agent_sandbox_core.interfaces import OpenChannel
from agent_sandbox_core.models import Command, ExecResult, ExitEvent, OutputEvent, StreamEvent
from agent_sandbox_core.names import new_guest_id

from .answers import ERROR_STATUS, Exit, GuestProtocolError, ProcessState, parse_json, parse_output, parse_process, raise_error
from .calls import GuestCalls
from .events import NOT_FOUND, RETRY_SECONDS, EventStream
from .runs import ACK_BYTES, Collecting, Queueing, Run

QUICK_MS: Final = 50
LEASE_MS: Final = 30_000
RENEW_SECONDS: Final = 10.0
OVERDUE_SECONDS: Final = 300.0
"""A command is given up when its time-out passed this long ago and it is still not reported; a snapshot stops its clock for up to 60 s."""
ACK_SECONDS: Final = 0.2
FORGET_LATER_SECONDS: Final = 1.0
MAX_FORGOTTEN: Final = 256
KILLED: Final = 137

STILL_RUNS: Final = f"the command may still run; it is killed when the sandbox is reached again, else it ends within {LEASE_MS // 1000} s"


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

ExitReason = Callable[[str, str], None]
"""Told how each command ended: the reason of init/API.md and its message."""


class Processes:
    """The commands of one guest."""

    def __init__(self, calls: GuestCalls, open_channel: OpenChannel, budget: ChannelBudget, on_exit_reason: ExitReason | None) -> None:
        self._calls = calls
        self._on_exit_reason = on_exit_reason
        self._lane = Lane(open_channel, budget, calls.tasks)
        self._events = EventStream(calls, self._lane, self.lost, self._consumed)
        self._lease = new_guest_id()
        self._renewing = False
        self._condemned: list[Run] = []
        self._acks: dict[str, int] = {}
        self._acking = False
        self._ack_timer: asyncio.TimerHandle | None = None
        self._forget: dict[str, int] = {}
        self._forget_timer: asyncio.TimerHandle | None = None

    async def run(self, command: Command, *, max_output_bytes: int) -> ExecResult:
        """Runs a command to its end."""
        sink = Collecting(max_output_bytes)
        run = Run(new_guest_id(), await self._calls.known_boot(), sink)
        try:
            await self._start(run, command, "exit")
            await self._until_done(run, command)
            ended, timed_out = self._ended(run)
        finally:
            self._leave(run)
        out, err = sink.collector.text()
        return ExecResult(
            stdout=out, stderr=err, exit_code=ended, timed_out=timed_out, truncated=sink.collector.truncated, duration_ms=run.duration_ms
        )

    async def stream(self, command: Command, *, on_start: Callable[[], None] | None = None) -> AsyncIterator[StreamEvent]:
        """The events of a command as they come."""
        sink = Queueing()
        run = Run(new_guest_id(), await self._calls.known_boot(), sink)
        decoders = {False: TextDecoder(), True: TextDecoder()}
        try:
            await self._start(run, command, "output")
            if on_start is not None and run.error is None:
                on_start()
            while True:
                while (item := sink.take()) is not None:
                    error, data, next_seq = item
                    if text := decoders[error].decode(data):
                        yield OutputEvent(type="stderr" if error else "stdout", data=text)
                    run.consume(len(data), next_seq)
                    self._consumed(run)
                if sink.lost:
                    raise OutcomeUnknown("part of the command's output was lost, so the stream ends here and the command is killed: run it again")
                if run.done:
                    break
                await self._change(run, command)
            ended, timed_out = self._ended(run)
            for error, decoder in decoders.items():
                if tail := decoder.finish():
                    yield OutputEvent(type="stderr" if error else "stdout", data=tail)
            yield ExitEvent(exit_code=ended, timed_out=timed_out, duration_ms=run.duration_ms)
        finally:
            self._leave(run)

    def boot_changed(self, boot: str) -> None:
        """The guest is another one than before: what ran in the old one is gone."""
        gone = [run for run in self._events.runs if run.following and run.boot != boot]
        if gone:
            what = "the sandbox restarted or was rolled back while the command ran: it no longer runs, and how it ended is unknown"
            for run in gone:
                run.alive = False
            self._calls.tasks.spawn(self.lost(gone, what))

    async def lost(self, runs: list[Run], what: str, known: SandboxError | None = None) -> None:
        """Ends runs that cannot be followed any more with what is known about them."""
        known = known or await self._calls.explain()
        for run in runs:
            if isinstance(known, SandboxDied):
                run.alive = False
                if known.out_of_memory:
                    run.finish(Exit("oom", KILLED, known.message), int((time.monotonic() - run.began) * 1000))
            if isinstance(known, BackendError):
                run.fail(OutcomeUnknown(f"{what}: {known.message}"))
            elif known is not None:
                run.fail(known)
            else:
                run.fail(OutcomeUnknown(f"{what}; {STILL_RUNS}" if run.alive else what))

    def disown(self) -> None:
        """Fails what is still followed, its lease ends it; call it before the tasks are ended."""
        for timer in (self._forget_timer, self._ack_timer):
            if timer is not None:
                timer.cancel()
        for run in self._events.runs:
            run.alive = False
            run.fail(OutcomeUnknown(f"the connection to the sandbox was closed here while the command ran; it ends within {LEASE_MS // 1000} s"))

    async def aclose(self) -> None:
        """Closes the channel of the event stream; call it when the tasks have ended."""
        await self._lane.aclose()

    # Start

    async def _start(self, run: Run, command: Command, wait_for: str) -> None:
        wait_ms = 0 if self._calls.control.busy else QUICK_MS
        target = f"/v1/processes/{run.id}?wait_ms={wait_ms}&wait_for={wait_for}"
        connection = self._events.number
        if self._events.open:
            target += f"&stream={self._events.id}"
        body = self._start_body(command)
        run.alive = True
        self._events.route(run)
        try:
            answer = await self._put(run, Request("PUT", target, body))
        except SandboxError as error:
            run.alive = run.alive and isinstance(error, BackendError)
            raise
        if answer is None:
            return
        data = parse_json(answer.body)
        state = parse_process(data)
        run.boot = answer.boot_id
        run.begin(parse_output(data) if "output" in data else [])
        self._consumed(run)
        if state.exit is None:
            self._keep_lease()
            await self._events.follow(run, subscribed=connection if data.get("subscribed") is True else None)
        elif run.next_seq == state.next_seq - 1:
            run.conclude(state)
        else:
            await self._drain(run, state)

    def _start_body(self, command: Command) -> bytes:
        what: Any = {"command": command.command} if isinstance(command.command, str) else {"argv": command.command}
        what["env"] = command.env
        what["cwd"] = command.workdir
        what["timeout_ms"] = max(1, round(command.timeout_seconds * 1000))
        what["lease"] = self._lease
        what["lease_ttl_ms"] = LEASE_MS
        if self._forget:
            what["forget"] = list(self._forget)
            self._forget.clear()
        try:
            return _encode(what).encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest("command, env or workdir is not valid Unicode (a lone surrogate): send UTF-8") from error

    async def _put(self, run: Run, request: Request) -> Answer | None:
        """Starts the process exactly once, whatever happens to the channel. None: the run has been told how it ended."""
        deadline = time.monotonic() + RETRY_SECONDS
        while True:
            try:
                answer = await self._calls.exchange(request)
            except ChannelError as error:
                if not run.in_doubt:
                    run.alive = False
                    raise await self._calls.explained(error, "the start of a command", idempotent=True) from error
                failure: Exception = error
            except Broken as error:
                run.in_doubt = True
                failure = error
            else:
                if answer.status >= ERROR_STATUS:
                    raise_error(answer)
                return answer
            if time.monotonic() >= deadline:
                raise OutcomeUnknown(f"the channel to the sandbox keeps breaking while the command is started ({failure}); {STILL_RUNS}")
            found = await self._find(run, failure, deadline)
            if found is None or found.status != NOT_FOUND:
                return found

    async def _find(self, run: Run, failure: Exception, deadline: float) -> Answer | None:
        """Asks for a process whose start is in doubt. A 404 of the same boot: it was not started, and may be. None: the run was told."""
        pause = 0.1
        while True:
            try:
                answer = await self._calls.exchange(Request("GET", f"/v1/processes/{run.id}", idempotent=True))
            except (Broken, ChannelError) as error:
                failure = error
            else:
                if answer.boot_id != run.boot:
                    run.alive = False
                    await self.lost([run], "the sandbox restarted while the command was started: it no longer runs, and what it did is unknown")
                    return None
                if answer.status >= ERROR_STATUS and answer.status != NOT_FOUND:
                    raise_error(answer)
                return answer
            known = await self._calls.explain()
            if known is not None or time.monotonic() >= deadline:
                await self.lost([run], f"the channel to the sandbox broke while the command was started ({failure})", known)
                return None
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    async def _drain(self, run: Run, state: ProcessState) -> None:
        """Reads what a process that has ended left in its journal."""
        while not run.done:
            before = run.next_seq
            answer = await self._calls.call(Request("GET", f"/v1/processes/{run.id}/output?from={before}&max_bytes=1048576", idempotent=True))
            try:
                frames = FrameParser().feed(answer.body)
            except FrameError as error:
                raise GuestProtocolError(f"the sandbox sent output that is no frames: {error}") from error
            for frame in frames:
                run.feed(frame)
            if run.next_seq == before:
                run.conclude(state)
            else:
                self._consumed(run)

    # Follow

    async def _until_done(self, run: Run, command: Command) -> None:
        while not run.done:
            await self._change(run, command)

    async def _change(self, run: Run, command: Command) -> None:
        if run.done:
            return
        rest = run.began + command.timeout_seconds + OVERDUE_SECONDS - time.monotonic()
        try:
            async with asyncio.timeout(rest):
                await run.changed()
        except TimeoutError:
            run.fail(OutcomeUnknown(f"the sandbox did not report the end of a command long after its time-out; {STILL_RUNS}"))

    def _ended(self, run: Run) -> tuple[int, bool]:
        """Exit code and whether it timed out; raises when there is no exit that may be told as one."""
        if run.exit is None:
            raise run.error or OutcomeUnknown(f"the sandbox did not report how the command ended; {STILL_RUNS}")
        reason, code = run.exit.reason, run.exit.code
        if self._on_exit_reason is not None:
            self._on_exit_reason(reason, run.exit.message)
        match reason:
            case "exited" | "signaled" | "start_failed":
                return code, False
            case "timed_out":
                return code or KILLED, True
            case "oom":
                return KILLED, False
            case "canceled":
                why = run.exit.message or "its connection was gone for too long"
                raise BackendError(f"the command was ended from outside before it had finished ({why}): run it again")
        raise GuestProtocolError(f"the sandbox reported an exit for a reason that is not in its API: {reason[:100]!r}")

    def _leave(self, run: Run) -> None:
        self._events.leave(run)
        self._acks.pop(run.id, None)
        if run.exit is not None:
            self._forget_soon(run)
        elif run.alive:
            run.fail(OutcomeUnknown("the command was cancelled"))
            self._calls.tasks.spawn(self._kill(run))

    def _forget_soon(self, run: Run) -> None:
        """The next start tells the guest to forget it; when none comes soon, at least its journal is given back."""
        self._forget[run.id] = run.next_seq
        while len(self._forget) > MAX_FORGOTTEN:
            del self._forget[next(iter(self._forget))]
        if self._forget_timer is None:
            self._forget_timer = asyncio.get_running_loop().call_later(FORGET_LATER_SECONDS, self._acknowledge_forgotten)

    def _acknowledge_forgotten(self) -> None:
        self._forget_timer = None
        if self._forget:
            self._acks.update(self._forget)
            self._send_acks_soon()

    def _consumed(self, run: Run) -> None:
        """Acknowledges what was consumed of an attached command: at once when it is much, else soon (its journal may be small)."""
        if run.unacknowledged >= ACK_BYTES:
            self._acknowledge(run)
        elif run.unacknowledged and run.following and self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_SECONDS, self._acknowledge_rest)

    def _acknowledge_rest(self) -> None:
        self._ack_timer = None
        for run in self._events.runs:
            if run.unacknowledged:
                self._acknowledge(run)

    def _acknowledge(self, run: Run) -> None:
        run.unacknowledged = 0
        self._acks[run.id] = run.consumed_seq
        self._send_acks_soon()

    def _send_acks_soon(self) -> None:
        if not self._acking:
            self._acking = True
            self._calls.tasks.spawn(self._send_acks())

    async def _send_acks(self) -> None:
        try:
            while self._acks:
                acks, self._acks = self._acks, {}
                try:
                    await self._calls.call_json("POST", "/v1/acks", acks)
                except SandboxError:
                    # The channel or the sandbox is gone; the runs learn that from the event stream, and ask again from where they are.
                    return
        finally:
            self._acking = False

    # Lease and kill

    def _keep_lease(self) -> None:
        if not self._renewing:
            self._renewing = True
            self._calls.tasks.spawn(self._renew())

    async def _renew(self) -> None:
        try:
            while True:
                await asyncio.sleep(RENEW_SECONDS)
                if not any(run.following and not run.done for run in self._events.runs):
                    break
                condemned, self._condemned = self._condemned, []
                for run in condemned:
                    await self._kill(run)
                try:
                    await self._calls.exchange(Request("POST", f"/v1/leases/{self._lease}?ttl_ms={LEASE_MS}", idempotent=True))
                except (Broken, SandboxError):
                    continue  # the lease outlasts two more attempts; a sandbox that is gone is noticed by the event stream
        finally:
            self._renewing = False
            if self._condemned:
                # Nobody renews for them any more, and a new command must not: they end with the old lease.
                self._condemned.clear()
                self._lease = new_guest_id()

    async def _kill(self, run: Run) -> None:
        """Kills a command's whole tree; what cannot be reached now is tried again while the lease is renewed for others."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RETRY_SECONDS
        request = Request("POST", f"/v1/processes/{run.id}/kill", b'{"reason":"canceled"}', idempotent=True)
        while loop.time() < deadline:
            try:
                answer = await self._calls.exchange(request)
            except (Broken, SandboxError):
                answer = None
            if answer is not None and answer.boot_id != run.boot:
                return
            if answer is not None and answer.status == NOT_FOUND and run.in_doubt:
                run.in_doubt = False  # the broken start may still be on its way: look once more
            elif answer is not None and answer.status < 500:
                self._forget_soon(run)
                return
            await asyncio.sleep(1.0)
        self._condemned.append(run)
        self._keep_lease()
