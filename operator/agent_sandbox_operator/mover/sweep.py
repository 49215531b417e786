"""What becomes of archives whose Snapshot goes or is gone: deleted when its end was seen, else by way of the trash."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from agent_sandbox_core.errors import SandboxError
from agent_sandbox_core.v1alpha1 import SnapshotObject

from .cluster import Trouble
from .context import Context
from .vault import Kept, Place, place_of, plan_sweep

logger = logging.getLogger(__name__)

SETTLE_SECONDS: Final = 1.0
"""Between the end of a Snapshot and that of its archive: when the CRD goes, its objects go first."""
READ_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class SweepTimes:
    """How old strays must be, and how long they stay in the trash."""

    stray: timedelta = timedelta(hours=1)
    trash: timedelta = timedelta(hours=24)


class Sweeper:
    """Removes archives. `reads(namespace, name)` tells whether a restore of that Snapshot is going on, here or in another mover."""

    def __init__(
        self, context: Context, namespaces: Collection[str], times: SweepTimes, *, busy: Callable[[], set[Place]], reads: Callable[[str, str], bool]
    ) -> None:
        self._context = context
        self._namespaces = namespaces
        self._times = times
        self._busy = busy
        self._reads = reads

    async def forget(self, snapshot: SnapshotObject) -> float | None:
        """The Snapshot was seen to go; when to look again, None when its archive is gone or stays."""
        vault, meta = self._context.vault, snapshot.metadata
        if snapshot.spec.deletion_policy == "Retain":
            return None
        there = await self._context.cluster.snapshot(meta.namespace, meta.name)
        if there is not None and there.metadata.uid == meta.uid:
            return None
        if not await self._context.cluster.crd_stands():
            logger.warning("the archive of Snapshot %s/%s stays for now: the CRD of Snapshots is gone or going", meta.namespace, meta.name)
            return None
        places = {place_of(snapshot), vault.place_of(snapshot)}
        if places & self._busy() or any(vault.is_read(place) for place in places) or self._reads(meta.namespace, meta.name):
            return READ_SECONDS
        for place in places:
            await vault.delete(place)
        logger.info("the archive of Snapshot %s/%s is deleted with it", meta.namespace, meta.name)
        return None

    async def run_once(self) -> None:
        """Compares the store with the Snapshots. Raises Trouble or SandboxError, having done nothing, when either could not be listed whole."""
        vault, now = self._context.vault, self._context.now()
        found = await vault.list_all()
        snapshots = await self._context.cluster.snapshots(self._namespaces)
        if not await self._context.cluster.crd_stands():
            return
        owned = {place for snapshot in snapshots for place in (place_of(snapshot), vault.place_of(snapshot))}
        plan = plan_sweep(found, owned, scope=self._namespaces, busy=self._busy(), now=now, stray=self._times.stray)
        for place in plan.untrash:
            await vault.take_from_trash(place)
        for place in plan.trash:
            logger.warning("the archive %s belongs to no Snapshot: it is in the trash, and is deleted in %s", place, self._times.trash)
            await vault.put_in_trash(place, now)
        for place in plan.check:
            since = await vault.trashed_at(place)
            if since is None:
                await vault.put_in_trash(place, now)
            elif now - since >= self._times.trash and not vault.is_read(place) and not self._reads(place.namespace, place.name):
                logger.warning("the archive %s was in the trash since %s: it is deleted", place, since.isoformat())
                await vault.delete(place)
        for place in plan.uncommitted:
            logger.warning("a half written archive is deleted: %s", place)
            await vault.delete_uncommitted(place)
        await self._keep_marks(snapshots, found)

    async def _keep_marks(self, snapshots: Iterable[SnapshotObject], found: Mapping[Place, Kept]) -> None:
        """Makes the mark of each archive say what the deletionPolicy says, whatever was missed."""
        for snapshot in snapshots:
            place = self._context.vault.place_of(snapshot)
            keep = snapshot.spec.deletion_policy == "Retain"
            if place in found and found[place].retained != keep:
                await self._context.vault.set_keep(place, keep=keep)

    async def run(self, seconds: float) -> None:
        """For ever. A sweep that fails is tried again at the next time."""
        while True:
            try:
                await self.run_once()
            except (Trouble, SandboxError) as error:
                logger.warning("the store could not be swept, which is tried again: %s", error)
            await asyncio.sleep(seconds)
