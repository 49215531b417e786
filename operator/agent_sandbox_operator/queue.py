"""The work queue, as client-go has it: keys, not events.

A key that is added while it waits is one piece of work; one that is added while it is worked on is done again after that, never beside it. So a
reconcile always sees at least what the newest event told, and no two work on one object.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

Key = TypeVar("Key")

BASE_SECONDS: Final = 0.2
MAX_SECONDS: Final = 60.0
JITTER: Final = 0.5
"""Up to this part of a backoff is added by chance, so that what failed together does not come again together."""


class Closed(Exception):
    """The queue was closed: no more work."""


@dataclass(order=True, slots=True)
class _Later(Generic[Key]):
    due: float
    order: int
    key: Key = field(compare=False)


class WorkQueue(Generic[Key]):
    """Keys to reconcile, each by one worker at a time. All methods belong to one event loop."""

    def __init__(self, *, base: float = BASE_SECONDS, limit: float = MAX_SECONDS, chance: Callable[[], float] = random.random) -> None:
        self._base = base
        self._limit = limit
        self._chance = chance
        self._ready: deque[Key] = deque()
        self._dirty: dict[Key, float] = {}
        """What has to be done, with the time of its first add; a superset of what is ready."""
        self._processing: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._later: list[_Later[Key]] = []
        self._due: dict[Key, float] = {}
        """The one delayed add of a key that counts: the soonest."""
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._dirty)

    @property
    def depth(self) -> int:
        """Keys that wait for a worker."""
        return len(self._ready)

    @property
    def processing(self) -> int:
        """Keys that are worked on."""
        return len(self._processing)

    @property
    def delayed(self) -> int:
        """Keys that will be added later."""
        return len(self._due)

    def age(self) -> float:
        """How long the key at the head has waited, in seconds; 0 when none waits."""
        if not self._ready:
            return 0.0
        return max(0.0, self._now() - self._dirty[self._ready[0]])

    def add(self, key: Key) -> None:
        """There is something to do about this key."""
        if self._closed or key in self._dirty:
            return
        self._dirty[key] = self._now()
        if key not in self._processing:
            self._offer(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Adds it after a time. Of several such for one key the soonest counts."""
        if self._closed:
            return
        if seconds <= 0:
            self.add(key)
            return
        due = self._now() + seconds
        known = self._due.get(key)
        if known is not None and known <= due:
            return
        self._due[key] = due
        heapq.heappush(self._later, _Later(due, next(self._order), key))
        self._arm()

    def retry(self, key: Key) -> float:
        """Adds it after its backoff, which doubles with every failure in a row; returns the delay in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay: float = min(self._limit, self._base * 2 ** min(failures, 30)) * (1 + JITTER * self._chance())
        self.add_after(key, delay)
        return delay

    def forget(self, key: Key) -> None:
        """It went well: its backoff begins anew at the next failure."""
        self._failures.pop(key, None)

    def failures(self, key: Key) -> int:
        """How often in a row it failed."""
        return self._failures.get(key, 0)

    async def get(self) -> Key:
        """The next key, for one worker. It must be followed by done(). Raises Closed."""
        while not self._ready:
            if self._closed:
                raise Closed
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                self._pass_on(waiter)
                raise
        key = self._ready.popleft()
        del self._dirty[key]
        self._processing.add(key)
        return key

    def done(self, key: Key) -> None:
        """The worker has ended with this key; what was added meanwhile is offered now."""
        self._processing.discard(key)
        if key in self._dirty:
            self._offer(key)

    def close(self) -> None:
        """No more work is given out; whoever waits in get() gets Closed."""
        self._closed = True
        self._ready.clear()
        self._dirty.clear()
        self._later.clear()
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def _offer(self, key: Key) -> None:
        self._ready.append(key)
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _pass_on(self, waiter: asyncio.Future[None]) -> None:
        """A worker that was cancelled just when it was woken gives the call to the next one."""
        if waiter.done() and not waiter.cancelled():
            if self._ready:
                self._wake()
        elif waiter in self._waiting:
            self._waiting.remove(waiter)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._later:
            self._timer = asyncio.get_running_loop().call_at(self._later[0].due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = self._now()
        while self._later and self._later[0].due <= now:
            item = heapq.heappop(self._later)
            if self._due.get(item.key) == item.due:
                del self._due[item.key]
                self.add(item.key)
        self._arm()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
