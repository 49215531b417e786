"""Claims: one mover works on one thing. A claim is a name and a time in a status, written with resourceVersion and renewed while the work goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable
from datetime import datetime
from typing import Any, Final, TypeVar

from agent_sandbox_core.errors import SandboxError

from .cluster import Changed, Trouble, Vanished

T = TypeVar("T")

RENEWAL_ERRORS: Final[tuple[type[Exception], ...]] = (Trouble, Changed, SandboxError, TimeoutError)
"""What may be wrong with one renewal: the next one may succeed."""
RENEW_SECONDS: Final = 15.0
LOST_SECONDS: Final = 40.0
"""Without a renewal for so long the work is given up: another mover may take it over after STALE_SECONDS."""
STALE_SECONDS: Final = 60.0


class ClaimLost(Exception):
    """Somebody else works on it, or what it was about is gone."""


class Withdrawn(Exception):
    """The work was cancelled here, since nobody wants it any more."""


def new_identity() -> str:
    """A name for this process that no other had."""
    return f"{socket.gethostname()[:200]}-{os.getpid()}-{secrets.token_hex(4)}"


class Claims:
    """Whose claims count. `exclusive`: this mover is the only one on its store (it holds the lock), so every other claim is of a dead one."""

    def __init__(self, identity: str, *, exclusive: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.identity = identity
        self._exclusive = exclusive
        self._clock = clock
        self._seen: dict[Hashable, tuple[object, float]] = {}

    def wait_for(self, key: Hashable, claimed_by: str | None, claimed_at: datetime | None) -> float:
        """How many seconds to leave it to its holder; 0 when it is free. Clocks of others are not compared: what counts is how long it stood still here."""
        if self._exclusive or claimed_by in {None, self.identity}:
            self._seen.pop(key, None)
            return 0.0
        now, claim = self._clock(), (claimed_by, claimed_at)
        known = self._seen.get(key)
        if known is None or known[0] != claim:
            self._seen[key] = (claim, now)
            return STALE_SECONDS
        return max(0.0, known[1] + STALE_SECONDS - now)

    def forget(self, key: Hashable) -> None:
        """It is of no interest any more."""
        self._seen.pop(key, None)


class Slots:
    """What bounds the transfers: a number of them in all, and one for each sandbox."""

    def __init__(self, transfers: int) -> None:
        self._room = asyncio.Semaphore(transfers)
        self._locks: dict[Hashable, tuple[asyncio.Lock, int]] = {}

    @contextlib.asynccontextmanager
    async def transfer(self, sandbox: Hashable) -> AsyncIterator[None]:
        """Holds one, for that sandbox."""
        lock, users = self._locks.get(sandbox, (asyncio.Lock(), 0))
        self._locks[sandbox] = (lock, users + 1)
        try:
            async with lock, self._room:
                yield
        finally:
            lock, users = self._locks.pop(sandbox)
            if users > 1:
                self._locks[sandbox] = (lock, users - 1)


class Work:
    """Pieces of work that can be withdrawn from outside."""

    def __init__(self) -> None:
        self._running: dict[Hashable, tuple[str, asyncio.Task[Any]]] = {}

    def running(self, key: Hashable) -> str | None:
        """What is being done for a key, None when nothing is."""
        found = self._running.get(key)
        return None if found is None else found[0]

    def withdraw(self, key: Hashable) -> None:
        """Nobody wants it any more."""
        found = self._running.get(key)
        if found is not None:
            found[1].cancel()

    async def run(self, key: Hashable, what: str, work: Coroutine[Any, Any, T], renew: Callable[[], Awaitable[None]]) -> T:
        """Runs `work` to its end, renewing its claim. Withdrawn or ClaimLost when it was stopped for that."""
        working = asyncio.ensure_future(work)
        renewing = asyncio.ensure_future(_renew(renew))
        self._running[key] = (what, working)
        try:
            await asyncio.wait({working, renewing}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                working.cancel()
                await asyncio.wait({working})
                if working.cancelled():
                    raise ClaimLost
            if working.cancelled():
                raise Withdrawn
            return working.result()
        finally:
            del self._running[key]
            for task in (working, renewing):
                task.cancel()
            await asyncio.gather(working, renewing, return_exceptions=True)


async def _renew(renew: Callable[[], Awaitable[None]]) -> None:
    """Returns when the claim is lost, or counts as that since it could not be renewed for long."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(RENEW_SECONDS)
        try:
            async with asyncio.timeout(RENEW_SECONDS):
                await renew()
            last = time.monotonic()
        except (ClaimLost, Vanished):
            return
        except RENEWAL_ERRORS:
            if time.monotonic() - last >= LOST_SECONDS:
                return
