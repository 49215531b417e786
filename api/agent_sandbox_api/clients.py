"""The client at the other end: a call that runs for it ends when it goes away."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.types import Receive


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


class ClientWatch:
    """Cancels what runs inside the block when the client disconnects, and raises ClientGone then. The request's body must have been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._watcher is not None
        self._watcher.cancel()
        # A cancellation of somebody else's (the server stops) is not ours to swallow.
        if self._gone and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise ClientGone from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()
