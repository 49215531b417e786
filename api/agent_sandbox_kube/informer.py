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
from .errors import Gone, KubeError
from .resources import Resource

logger = logging.getLogger(__name__)

Key = tuple[str, str]
"""Namespace and name."""

RELIST_SECONDS: Final = 600.0
"""A watch can miss what nobody tells it: a full LIST heals that, deletions included."""
PAUSES: Final = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)


class Informer:
    """The objects of one resource in one namespace, or in all. Use as `async with`; it follows until the block ends."""

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
        self._heard = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # What its users ask.

    async def wait_synced(self, seconds: float = 30.0) -> None:
        """Returns when the first LIST is in; TimeoutError after so many seconds."""
        async with asyncio.timeout(seconds):
            await self._synced.wait()

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
        key = _key(found)
        known = self._objects.get(key)
        if known is None or _version(found) > _version(known):
            self._objects[key] = found
            self._tell(key)

    # How it follows.

    async def _follow(self) -> None:
        failures = 0
        while True:
            try:
                version = await self._list()
                failures = 0
                await self._watch(version)
            except Gone:
                continue
            except KubeError as error:
                pause = PAUSES[min(failures, len(PAUSES) - 1)] * random.uniform(0.8, 1.2)  # noqa: S311 - jitter, no secret
                failures += 1
                logger.warning("%s; trying again in %.1f s", error, pause)
                await asyncio.sleep(pause)

    async def _list(self) -> int:
        items, version = await self._kube.list(self._resource, self._namespace, label_selector=self._label_selector)
        self._heard = time.monotonic()
        now = {_key(item): item for item in items}
        before, self._objects = self._objects, now
        self._synced.set()
        for key in before.keys() | now.keys():
            if key not in now or key not in before or _version(now[key]) != _version(before[key]):
                self._tell(key)
        return version

    async def _watch(self, version: int) -> None:
        deadline = time.monotonic() + self._relist_seconds * random.uniform(0.9, 1.1)  # noqa: S311 - jitter, no secret
        current = str(version)
        while time.monotonic() < deadline:
            events = self._kube.watch(self._resource, self._namespace, version=current, label_selector=self._label_selector)
            async with contextlib.aclosing(events):
                async for kind, found in events:
                    self._heard = time.monotonic()
                    current = found["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        self._apply(kind, found)
                    if time.monotonic() >= deadline:
                        return

    def _apply(self, kind: str, found: Object) -> None:
        key = _key(found)
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


def _key(found: Object) -> Key:
    metadata = found["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _version(found: Object) -> int:
    # Comparable as integers: guaranteed from Kubernetes 1.35 on (KEP-5504), and so in every release before.
    return int(found["metadata"]["resourceVersion"])
