"""The snapshot store of Docker mode: flat, one installation's own, a snapshot under its id. Objects and their commit: see blobs.py."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from agent_sandbox_core.errors import Conflict, SandboxError, SnapshotNotFound

from .blobs import PART_SUFFIX, BlobStore, OpenSnapshot
from .faults import DamagedRecord, ObjectMissing
from .manifest import Manifest, Record
from .names import BLOB, INSTANCE, RECORD, check_id, id_of

logger = logging.getLogger(__name__)

READERS: Final = 16
"""Records read at a time for a list."""
STRAY_SECONDS: Final = 3600.0
"""A blob without a record, or a spooled file, is a stray when it is older; a younger one may be another process's work."""

Archive = Callable[[bytes], AsyncIterator[bytes]]
"""Gives the tar of a workspace for a manifest: `Guest.archive`."""


class SnapshotStore:
    """All snapshots of one installation."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._records: dict[str, Record] = {}
        self._active: set[str] = set()

    @classmethod
    def open(cls, address: str, *, spool: Path) -> SnapshotStore:
        """See BlobStore.open."""
        return cls(BlobStore.open(address, spool=spool))

    async def claim(self, instance: str) -> None:
        """Makes the store this installation's. Conflict when it is another's: the two would sweep each other's snapshots."""
        if await self._blobs.put_small(INSTANCE, instance.encode(), create=True):
            return
        owner = (await self._blobs.get_small(INSTANCE)).decode(errors="replace").strip()
        if owner != instance:
            message = f"the snapshot store {self._blobs.address} belongs to installation {owner[:64]}, this one is {instance}"
            raise Conflict(f"{message}: give each a store of its own")

    async def save(self, manifest: Manifest, archive: Archive, *, max_bytes: int) -> Record:
        """Takes a snapshot: on disk, checked and compressed; then, with the sandbox going on already, in the store. All or nothing."""
        snapshot_id = check_id(manifest.id)
        body = manifest.to_bytes()
        if snapshot_id in self._active or await self._exists(snapshot_id):
            raise Conflict(f"snapshot {snapshot_id} exists already")
        self._active.add(snapshot_id)
        committed = False
        try:
            async with self._blobs.spool.received(archive(body), body, max_bytes) as spooled:
                record = spooled.record(manifest)
                await self._blobs.commit(snapshot_id, record, spooled)
                committed = True
        except asyncio.CancelledError:
            if committed:
                # Nobody will be told of it, so it must not be there. What cannot be taken back is a snapshot too many, not one too few.
                with contextlib.suppress(SandboxError):
                    await self.delete(snapshot_id)
            raise
        finally:
            self._active.discard(snapshot_id)
        self._records[snapshot_id] = record
        return record

    async def get(self, snapshot_id: str) -> Record:
        """The record, as the store has it now."""
        try:
            record = await self._blobs.record(check_id(snapshot_id))
        except ObjectMissing:
            self._records.pop(snapshot_id, None)
            raise SnapshotNotFound(snapshot_id) from None
        if record.id != snapshot_id:
            raise DamagedRecord(f"the record of snapshot {snapshot_id} in the store is that of {record.id}")
        self._records[snapshot_id] = record
        return record

    async def list_records(self) -> list[Record]:
        """All records, oldest first. One that cannot be read is logged and left out: it must not hide the others."""
        found = {snapshot_id for name, _ in await self._blobs.list_top() if (snapshot_id := id_of(name, RECORD))}
        for gone in self._records.keys() - found:
            del self._records[gone]
        readers = asyncio.Semaphore(READERS)

        async def read(snapshot_id: str) -> None:
            async with readers:
                try:
                    await self.get(snapshot_id)
                except SnapshotNotFound:
                    return  # deleted meanwhile
                except DamagedRecord as error:
                    logger.error("a snapshot is left out of the list: %s", error.message)  # noqa: TRY400 - the message is all there is

        async with _unwrapped(), asyncio.TaskGroup() as group:
            for snapshot_id in found - self._records.keys():
                group.create_task(read(snapshot_id))
        return sorted(self._records.values(), key=lambda record: (record.manifest.created_at, record.id))

    async def delete(self, snapshot_id: str) -> None:
        """Removes a snapshot, the record first: what is left after a crash is a stray blob."""
        name = check_id(snapshot_id)
        with contextlib.suppress(DamagedRecord):
            await self.get(name)
        self._records.pop(name, None)
        try:
            await self._blobs.delete(name)
        except ObjectMissing:
            raise SnapshotNotFound(snapshot_id) from None

    @contextlib.asynccontextmanager
    async def read(self, snapshot_id: str) -> AsyncIterator[OpenSnapshot]:
        """Opens a snapshot for a restore or a fork. It can be read to its end even when it is deleted meanwhile."""
        record = await self.get(snapshot_id)
        async with self._blobs.read(snapshot_id, record) as opened:
            yield opened

    async def sweep(self, *, older_than: float = STRAY_SECONDS) -> list[str]:
        """Removes blobs without a record and spooled files of crashed processes that are older than so many seconds; returns their names."""
        names = await self._blobs.list_top()
        kept = {snapshot_id for name, _ in names if (snapshot_id := id_of(name, RECORD))} | self._active
        limit = datetime.now(UTC) - timedelta(seconds=older_than)
        removed = []
        for name, modified in names:
            stray = id_of(name, BLOB)
            if (stray and stray not in kept and modified <= limit) or (name.endswith(PART_SUFFIX) and modified <= limit):
                try:
                    await self._blobs.delete_object(name)
                except ObjectMissing:
                    continue
                removed.append(name)
        return removed + await self._blobs.sweep_spool(limit.timestamp())

    async def aclose(self) -> None:
        """Ends the threads."""
        await self._blobs.aclose()

    async def _exists(self, snapshot_id: str) -> bool:
        try:
            await self.get(snapshot_id)
        except SnapshotNotFound:
            return False
        return True


@contextlib.asynccontextmanager
async def _unwrapped() -> AsyncIterator[None]:
    """The first of the errors of a task group in place of the group."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
