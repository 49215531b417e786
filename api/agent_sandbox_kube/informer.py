"""A cache of one resource, kept by LIST and WATCH. What it holds may lag behind: whoever acts on it makes the API server check (uid, resourceVersion)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import Final, Self

from .client import Kube, Object
from .errors import Gone, KubeError, Unreachable
from .resources import Resource

logger = logging.getLogger(__name__)

Key = tuple[str, str]
"""Namespace and name."""

RELIST_SECONDS: Final = 600.0
"""A watch can miss what nobody tells it: a full LIST heals that, deletions included."""
PAUSES: Final = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)


class Informer:
    """The objects of one resource in one namespace, or in all. Use as `async with`; it follows until the block ends, and survives every fault of the API server."""

    def __init__(
        self, kube: Kube, resource: Resource, namespace: str | None = None, *, label_selector: str = "", relist_seconds: float = RELIST_SECONDS
    ) -> None:
        self._kube = kube
        self._resource = resource
        self._namespace = namespace
        self._label_selector = label_selector
        self._relist_seconds = relist_seconds
        self._objects: dict[Key, Object] = {}
        self._listeners: set[Callable[[Key], None]] = set()
        self._waiters: dict[Key, set[asyncio.Event]] = {}
        self._synced = asyncio.Event()
        self._own: dict[Key, Object] = {}
        """What `put` has brought since the last LIST was asked for."""
        self._seen = 0
        """Everything up to this resourceVersion is in."""
        self._heard = time.monotonic()
        self._failures = 0
        self._failure: KubeError | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._follow())
        self._task.add_done_callback(_log_end)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # What its users ask.

    async def wait_synced(self, seconds: float = 30.0) -> None:
        """Returns when the first LIST is in; after so many seconds the KubeError that is in the way."""
        try:
            async with asyncio.timeout(seconds):
                await self._synced.wait()
        except TimeoutError as error:
            doing = f"listing {self._resource.describe(self._namespace)}"
            raise self._failure or Unreachable(
                doing, 0, "Unreachable", f"no answer within {seconds:.0f} s: look whether the API server is well"
            ) from error

    def get(self, key: Key) -> Object | None:
        """The object as it was last seen."""
        return self._objects.get(key)

    def items(self) -> dict[Key, Object]:
        """All of them; do not change the dict."""
        return self._objects

    def age(self) -> float:
        """Seconds since the API server was last heard of (events, bookmarks and lists): for probes."""
        return time.monotonic() - self._heard

    @contextlib.contextmanager
    def listen(self, listener: Callable[[Key], None]) -> Iterator[None]:
        """Calls `listener` with the key of whatever is added, changed or deleted. It must not block: a work queue's `add` is meant."""
        self._listeners.add(listener)
        try:
            yield
        finally:
            self._listeners.discard(listener)

    async def wait_for(self, key: Key, condition: Callable[[Object | None], bool], seconds: float) -> Object | None:
        """Returns the object as soon as `condition` holds for it (None: it is not there); TimeoutError after so many seconds."""
        changed = asyncio.Event()
        self._waiters.setdefault(key, set()).add(changed)
        try:
            async with asyncio.timeout(seconds):
                while not condition(found := self._objects.get(key)):
                    changed.clear()
                    await changed.wait()
                return found
        finally:
            waiting = self._waiters[key]
            waiting.discard(changed)
            if not waiting:
                del self._waiters[key]

    def put(self, found: Object) -> None:
        """Takes in an object that a call answered with, unless something newer is known: the own change is then seen at once."""
        key, version = _key(found), _version(found)
        known = self._objects.get(key)
        # What the watch has passed by and does not hold any more was deleted.
        if version > (self._seen if known is None else _version(known)):
            self._objects[key] = self._own[key] = found
            self._tell(key)

    # How it follows.

    async def _follow(self) -> None:
        while True:
            try:
                await self._list()
                await self._watch()
            except Gone:
                continue
            except KubeError as error:
                await self._pause(error)

    async def _pause(self, error: KubeError) -> None:
        pause = PAUSES[min(self._failures, len(PAUSES) - 1)] * random.uniform(0.8, 1.2)  # noqa: S311 - jitter, no secret
        self._failures += 1
        self._failure = error
        logger.log(logging.INFO if self._failures == 1 else logging.WARNING, "%s; trying again in %.1f s", error, pause)
        await asyncio.sleep(pause)

    def _hear(self) -> None:
        self._heard = time.monotonic()
        self._failures = 0
        self._failure = None

    async def _list(self) -> None:
        self._own.clear()
        items, version = await self._kube.list(self._resource, self._namespace, label_selector=self._label_selector)
        self._hear()
        now = {_key(item): item for item in items}
        # An own change from after this list was read.
        now |= {key: found for key, found in self._own.items() if _version(found) > version}
        before, self._objects, self._seen = self._objects, now, version
        self._synced.set()
        for key in before.keys() | now.keys():
            if key not in now or key not in before or _version(now[key]) != _version(before[key]):
                self._tell(key)

    async def _watch(self) -> None:
        """Follows until the next LIST is due. A connection that breaks is no reason for one: the watch goes on where it was. Twice without an event in between is."""
        deadline = time.monotonic() + self._relist_seconds * random.uniform(0.9, 1.1)  # noqa: S311 - jitter, no secret
        while time.monotonic() < deadline:
            events = self._kube.watch(self._resource, self._namespace, version=self._seen, label_selector=self._label_selector)
            try:
                async with contextlib.aclosing(events):
                    async for kind, found in events:
                        self._hear()
                        self._apply(kind, found)
                        if time.monotonic() >= deadline:
                            return
                # A server that ends watches at once is not asked without a pause.
                await asyncio.sleep(PAUSES[0])
            except Unreachable as error:
                if self._failures:
                    raise
                await self._pause(error)

    def _apply(self, kind: str, found: Object) -> None:
        self._seen = version = _version(found)
        if kind == "BOOKMARK":
            return
        key = _key(found)
        known = self._objects.get(key)
        if known is not None and _version(known) > version:
            return  # an own change, put in before its event came
        if kind == "DELETED":
            self._objects.pop(key, None)
        else:
            self._objects[key] = found
        self._tell(key)

    def _tell(self, key: Key) -> None:
        for listener in list(self._listeners):
            listener(key)
        for waiter in self._waiters.get(key, ()):
            waiter.set()


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        # A fault of ours, or of a listener. `age` grows from now on, and a probe that looks at it ends the process.
        logger.error("a watch ended by an error of its own", exc_info=error)


def _key(found: Object) -> Key:
    metadata = found["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _version(found: Object) -> int:
    # Comparable as integers: guaranteed from Kubernetes 1.35 on (KEP-5504), and so in every release before.
    return int(found["metadata"]["resourceVersion"])
