"""Answers with an endless or a large body: the event stream of a command, the bytes of a file. Both end early rather than lie."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Final

from agent_sandbox_core.errors import SandboxError
from agent_sandbox_core.interfaces import FileBody, Guest
from agent_sandbox_core.models import Command, ExitEvent, OutputEvent, StreamEvent
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .clients import ClientWatch

START_SECONDS: Final = 10.0
"""How long a stream's headers wait for its command to start, so that one that cannot is an ordinary error."""
HEARTBEAT_SECONDS: Final = 60.0
"""A known client gives up after 300 s without bytes."""
JOIN_CHARACTERS: Final = 64 * 1024
QUEUED_EVENTS: Final = 32


class BodyAborted(Exception):
    """The body cannot be finished truthfully: the connection is closed in the middle of it, which every client notices."""

    def __init__(self, cause: SandboxError | None) -> None:
        super().__init__(cause.message if cause else "the server is stopping")
        self.cause = cause


class EventFeed:
    """The events of one command, read ahead by a task of their own so that small ones can be joined and silence can be noticed."""

    def __init__(self, guest: Guest, command: Command) -> None:
        self._started = asyncio.Event()
        self._events = guest.stream(command, on_start=self._started.set)
        self._queue: asyncio.Queue[StreamEvent | None] = asyncio.Queue(QUEUED_EVENTS)
        self._held: StreamEvent | None = None
        self._began = False
        self._error: Exception | None = None
        self._pump = asyncio.create_task(self._read())

    async def start(self) -> None:
        """Returns when the command has started, or after START_SECONDS; raises what kept it from starting."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                await self._started.wait()
        if self._error is not None and not self._began:
            raise self._error

    async def next(self) -> StreamEvent | None:
        """The next event, small ones of one stream joined. None at the end, which is an end without an exit only if it raises."""
        event = self._held or await self._queue.get()
        self._held = None
        if event is None:
            if self._error is not None:
                raise self._error
            return None
        if isinstance(event, OutputEvent):
            parts, size = [event.data], len(event.data)
            while size < JOIN_CHARACTERS and not self._queue.empty():
                following = self._queue.get_nowait()
                if not isinstance(following, OutputEvent) or following.type != event.type:
                    if following is None:
                        self._queue.put_nowait(None)
                    self._held = following
                    break
                parts.append(following.data)
                size += len(following.data)
            if len(parts) > 1:
                event = OutputEvent(type=event.type, data="".join(parts))
        return event

    async def aclose(self) -> None:
        """Ends the command when it still runs."""
        self._pump.cancel()
        await asyncio.wait({self._pump})

    async def _read(self) -> None:
        try:
            try:
                async for event in self._events:
                    self._began = True
                    await self._queue.put(event)
            finally:
                if isinstance(self._events, AsyncGenerator):
                    await self._events.aclose()
        except Exception as error:  # noqa: BLE001 - raised again in next(), in the request's own task
            self._error = error
        self._started.set()
        await self._queue.put(None)


class EventAnswer(Response):
    """The NDJSON stream of a command. Without its exit line it ends with the connection, never with a proper end."""

    media_type = "application/x-ndjson"

    def __init__(self, feed: EventFeed) -> None:
        super().__init__(None, 200, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            async with ClientWatch(receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_events(send)
        finally:
            await self._feed.aclose()

    async def _send_events(self, send: Send) -> None:
        exited = False
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    event = await self._feed.next()
            except TimeoutError:
                await send({"type": "http.response.body", "body": b"\n", "more_body": True})
                continue
            except SandboxError as error:
                raise BodyAborted(error) from error
            if event is None:
                break
            exited = isinstance(event, ExitEvent)
            await send({"type": "http.response.body", "body": event.model_dump_json().encode() + b"\n", "more_body": True})
        if not exited:
            raise BodyAborted(None)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class FileAnswer(Response):
    """The bytes of an open file; `resources` holds it open and is closed at the end."""

    media_type = "application/octet-stream"

    def __init__(self, body: FileBody, resources: contextlib.AsyncExitStack) -> None:
        super().__init__(None, 200, headers={"Content-Length": str(body.end - body.start), "X-Content-Type-Options": "nosniff"})
        self._body = body
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        async with self._resources, ClientWatch(receive):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            left = self._body.end - self._body.start
            try:
                async for chunk in self._body.chunks:
                    left -= len(chunk)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except SandboxError as error:
                raise BodyAborted(error) from error
            if left:
                raise BodyAborted(None)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
