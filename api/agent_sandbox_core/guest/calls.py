"""Calls to one guest over its lanes: boot id, errors, and the truth about a channel that broke."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from agent_sandbox_core.channel import (
    CHANNEL_ERRORS,
    TRANSPORT_ERRORS,
    Answer,
    Broken,
    BulkLane,
    Channel,
    ChannelBudget,
    ControlLane,
    Request,
    Tasks,
)
from agent_sandbox_core.errors import BackendError, ChannelError, OutcomeUnknown, SandboxError, Unavailable
from agent_sandbox_core.interfaces import OpenChannel

from .answers import ERROR_STATUS, GuestProtocolError, parse_json, raise_error

Explain = Callable[[], Awaitable[SandboxError | None]]
"""Asked when a channel to a sandbox broke, did not open, or found another boot: why what we talked to is gone.

SandboxDied when its container ended since (with `out_of_memory` when the engine confirms that), another error when it is stopped or
deleted, None when nothing is known against it. It may look for up to 10 s, since an engine notices a death late."""

EXPLAIN_SECONDS = 12.0
API_VERSION = 1


class GuestCalls:
    """The control and the bulk lane of one guest, and what is known about it."""

    def __init__(self, open_channel: OpenChannel, budget: ChannelBudget, explain: Explain | None, on_boot: Callable[[str], None]) -> None:
        self._closed = False
        self._explain = explain
        self._on_boot = on_boot
        self.boot_id = ""
        self.tasks = Tasks()
        self.control = ControlLane(open_channel, budget, self.tasks)
        self.bulk = BulkLane(open_channel, budget, self.tasks)

    def check_open(self) -> None:
        """Raises Unavailable after close()."""
        if self._closed:
            raise Unavailable("the connection to the sandbox is closed here: the server is shutting down, or the sandbox was replaced; try again")

    async def known_boot(self) -> str:
        """The boot id, asked for once: without it a start could not be told from a start before a restart."""
        if not self.boot_id:
            await self.health()
        return self.boot_id

    async def health(self) -> dict[str, Any]:
        """What the guest says about itself; refuses a guest of another API."""
        found = parse_json((await self.call(Request("GET", "/v1/health", idempotent=True))).body)
        if found.get("api") != API_VERSION:
            raise GuestProtocolError(f"the sandbox speaks guest API {found.get('api')!r}, this server {API_VERSION}: make a new sandbox")
        return found

    async def exchange(self, request: Request) -> Answer:
        """A short call: the answer, whatever its status. Raises Broken or ChannelError."""
        self.check_open()
        answer = await self.control.call(request)
        self.note_boot(answer)
        return answer

    async def call(self, request: Request) -> Answer:
        """A short call: a good answer, or an error of errors.py."""
        try:
            answer = await self.exchange(request)
        except (Broken, ChannelError) as error:
            raise await self.explained(error, request.method, idempotent=request.idempotent) from error
        if answer.status >= ERROR_STATUS:
            raise_error(answer)
        return answer

    async def call_json(self, method: str, target: str, payload: Any) -> Answer:
        """A short idempotent call with a JSON body."""
        return await self.call(Request(method, target, json.dumps(payload).encode(), idempotent=True))

    @contextlib.asynccontextmanager
    async def transfer(self, request: Request, upload: AsyncIterator[bytes] | None = None) -> AsyncIterator[Transfer]:
        """A transfer on the bulk lane; an answer of 400 or more is raised. `upload` is closed at the end when it is a generator."""
        self.check_open()
        try:
            async with self.bulk.turn(), contextlib.AsyncExitStack() as loan:
                yield await self._begin(request, upload, loan)
        finally:
            if isinstance(upload, AsyncGenerator):
                await upload.aclose()

    async def _channel(self, loan: contextlib.AsyncExitStack) -> Channel:
        """The bulk channel; where none can be opened (a full process table starts no bridge) the control channel, for this transfer."""
        try:
            return await self._proven_channel()
        except ChannelError:
            lent = await loan.enter_async_context(self.control.lend())
            if lent is None:
                raise
            return lent

    async def _proven_channel(self) -> Channel:
        """The bulk channel, asked before it carries what could not be repeated."""
        channel = await self.bulk.channel()
        try:
            if not channel.proven:
                await channel.exchange(Request("GET", "/v1/health"))
        except TRANSPORT_ERRORS as error:
            self.bulk.drop()
            raise ChannelError(f"a new channel to the sandbox broke before it was used ({error}): try again") from error
        return channel

    async def _begin(self, request: Request, upload: AsyncIterator[bytes] | None, loan: contextlib.AsyncExitStack) -> Transfer:
        source = None if upload is None else _Upload(upload)
        try:
            channel = await self._channel(loan)
            answer = await channel.begin(request, source)
            if answer.status >= ERROR_STATUS:
                answer.body = await channel.rest()
        except CHANNEL_ERRORS as error:
            if source is not None and source.failure is error:
                raise
            raise await self.explained(error, request.method, idempotent=request.idempotent) from error
        self.note_boot(answer)
        if answer.status >= ERROR_STATUS:
            raise_error(answer)
        if not channel.sent_all:
            raise GuestProtocolError(f"the sandbox answered {answer.status} before it had the whole upload: repeat it")
        return Transfer(self, channel, answer, request)

    async def explained(self, error: Exception, method: str, *, idempotent: bool) -> SandboxError:
        """The truth about a broken channel: what the backend knows, else what can be said from here."""
        known = await self.explain()
        if known is not None:
            return known
        if isinstance(error, ChannelError):
            return error
        if idempotent:
            return BackendError(f"the channel to the sandbox broke ({error}): try again")
        return OutcomeUnknown(f"the channel to the sandbox broke during {method} ({error}): it may have happened or not; look before you repeat it")

    async def explain(self) -> SandboxError | None:
        """What the backend knows about a dead channel."""
        if self._closed:
            return Unavailable("the connection to the sandbox was closed here: the server is shutting down, or the sandbox was replaced; try again")
        if self._explain is None:
            return None
        try:
            async with asyncio.timeout(EXPLAIN_SECONDS):
                return await self._explain()
        except TimeoutError:
            return None
        except SandboxError as error:
            return error

    async def aclose(self) -> None:
        """Ends all tasks and closes all channels."""
        self._closed = True
        await self.tasks.aclose()
        for lane in (self.control, self.bulk):
            lane.cancel_timer()
            await lane.aclose()

    def note_boot(self, answer: Answer) -> None:
        """Compares the boot id of an answer with the one before; a changed one is told to the owner."""
        boot = answer.boot_id
        if boot == self.boot_id:
            return
        if not boot:
            raise GuestProtocolError("the sandbox answered without its boot id: what answers is not sandbox-init")
        self.boot_id = boot
        self._on_boot(boot)


class Transfer:
    """A transfer whose answer has begun."""

    def __init__(self, calls: GuestCalls, channel: Channel, answer: Answer, request: Request) -> None:
        self._calls = calls
        self._channel = channel
        self._request = request
        self.answer = answer

    async def chunks(self) -> AsyncIterator[bytes]:
        """The bytes of the answer; an early end is an error."""
        while (part := await self._next()) is not None:
            yield part

    async def json(self) -> dict[str, Any]:
        """The answer as a JSON object."""
        try:
            return parse_json(await self._channel.rest())
        except TRANSPORT_ERRORS as error:
            raise await self._explained(error) from error

    async def _next(self) -> bytes | None:
        try:
            return await self._channel.read_part()
        except TRANSPORT_ERRORS as error:
            raise await self._explained(error) from error

    async def _explained(self, error: Exception) -> SandboxError:
        return await self._calls.explained(error, self._request.method, idempotent=self._request.idempotent)


class _Upload:
    """The caller's bytes; remembers what reading them raised, so that a failing source is not taken for a broken channel."""

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source = source
        self.failure: BaseException | None = None

    def __aiter__(self) -> _Upload:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._source)
        except BaseException as error:
            self.failure = error
            raise
