"""The resync: everything is listed from time to time, and looked at again. It finds what a watch has missed, and drops what only the store still has."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from agent_sandbox_kube.errors import KubeError

from .cluster import Cluster
from .metrics import Metrics
from .policies import Policies
from .queue import WorkQueue
from .store import KINDS, Key, Store, owner_key

logger = logging.getLogger(__name__)


class Resync:
    """Lists and compares."""

    def __init__(self, store: Store, cluster: Cluster, queue: WorkQueue[Key], policies: Policies, metrics: Metrics) -> None:
        self._store = store
        self._cluster = cluster
        self._queue = queue
        self._policies = policies
        self._metrics = metrics
        self.last: float | None = None
        """When everything was listed last, in the event loop's time."""

    async def run_once(self) -> None:
        """Lists all kinds, takes in what they hold, and adds every Sandbox to the queue. Raises KubeError."""
        for kind in KINDS:
            async for scope, items, version in self._cluster.list_all(kind):
                owners = {item["metadata"]["name"]: owner_key(item) for item in items} if kind != "sandboxes" else {}
                for key in self._store.replace(kind, items, version, scope):
                    if owner := owners.get(key[1]):
                        self._queue.add(owner)
        self._policies.distrust()
        keys = list(self._store.keys("sandboxes"))
        for key in keys:
            self._queue.add(key)
        for namespace in {key[0] for key in keys}:
            await self._policies.ensure_quietly(namespace)
        self.last = asyncio.get_running_loop().time()
        self._metrics.resyncs.labels("ok").inc()

    async def run(self, seconds: float, chance: Callable[[], float] = random.random) -> None:
        """For ever, with pauses that differ a little. A list that fails is tried again sooner."""
        pause = seconds
        while True:
            await asyncio.sleep(pause * (0.9 + 0.2 * chance()))
            try:
                await self.run_once()
                pause = seconds
            except KubeError as error:
                self._metrics.resyncs.labels("failed").inc()
                pause = min(seconds, 10.0)
                logger.warning("not everything could be listed (%s); it is tried again in %.0f s", error, pause)
