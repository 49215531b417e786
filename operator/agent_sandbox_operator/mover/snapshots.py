"""Reconciles Snapshots: takes them, imports them, finds again what is in the store. Each step can be repeated, and be cut anywhere.

Order: claim, copy of the env values, archive into the spool (the sandbox is stopped for that long), blob, record (the commit), status.
A Snapshot whose record is in the store is Ready, whoever wrote it: it is never taken again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from agent_sandbox_core.errors import SandboxError
from agent_sandbox_core.snapshots import Manifest, ObjectMissing, Record
from agent_sandbox_core.snapshots.importing import imported
from agent_sandbox_core.snapshots.spool import Spooled
from agent_sandbox_core.v1alpha1 import SandboxObject, SnapshotObject, SnapshotPhase, SnapshotReason
from agent_sandbox_core.v1alpha1.snapshot import ArchiveSource, SourceSpec

from .claims import ClaimLost, Withdrawn
from .cluster import Changed, Vanished
from .context import Context, Key, patiently
from .decide import Fail, Go, Wait, decide_take
from .facts import build_manifest, recall_source, source_spec
from .status import claim_fields, reason_of, snapshot_ready, snapshot_state
from .vault import Place, check_location, place_of

logger = logging.getLogger(__name__)

SOON: Final = 0.05
LATER: Final = 1.0
DONE: Final = frozenset({"Ready", "Failed"})
RESTORED_BY_VELERO: Final = "velero.io/restore-name"
"""A label on objects that came out of a backup: these got a new uid and lost their status, so their archive is looked for by name."""


class Snapshots:
    """One reconcile a Snapshot at a time. `find_sandbox` gives the newest version that the watch told of."""

    def __init__(self, context: Context, find_sandbox: Callable[[Key], SandboxObject | None]) -> None:
        self._context = context
        self._cluster = context.cluster
        self._vault = context.vault
        self._find_sandbox = find_sandbox
        self.taking: set[Place] = set()
        """Places that may have a blob before their record."""
        self.policy_edited: set[str] = set()
        """uids of Snapshots whose deletionPolicy has changed since their archive was marked."""

    async def reconcile(self, snapshot: SnapshotObject) -> float | None:
        """One look; after how many seconds the next one is due, None when an event will tell."""
        status, place = snapshot.status, place_of(snapshot)
        if snapshot.metadata.deletion_timestamp is not None or status.phase in DONE:
            await self._mark_policy(snapshot)
            return None
        held = self._context.claims.wait_for(place, status.claimed_by, status.claimed_at)
        if held:
            return held
        self.taking.add(place)
        try:
            return await self._advance(snapshot, place)
        except Changed:
            return SOON
        except ClaimLost:
            return LATER
        except (Vanished, Withdrawn):
            await self._drop(snapshot, place)
        except SandboxError as error:
            await self._fail(snapshot, reason_of(error), error.message)
        finally:
            self.taking.discard(place)
        return None

    async def _advance(self, snapshot: SnapshotObject, place: Place) -> float | None:
        record = await patiently(lambda: self._vault.record(place), self._context.limits.patience_seconds, self._teller(snapshot))
        if record is not None:
            await self._finish(snapshot, record, place, recall_source(record.manifest, await self._cluster.env_secret(snapshot)))
            return None
        if RESTORED_BY_VELERO in snapshot.metadata.labels and snapshot.spec.source.archive is None:
            await self._adopt_by_name(snapshot)
            return None
        if snapshot.spec.source.archive is not None:
            await self._import(snapshot, place, snapshot.spec.source.archive)
            return None
        return await self._take(snapshot, place)

    async def _mark_policy(self, snapshot: SnapshotObject) -> None:
        if snapshot.metadata.uid in self.policy_edited and snapshot.status.phase == "Ready":
            await self._vault.set_keep(self._vault.place_of(snapshot), keep=snapshot.spec.deletion_policy == "Retain")
            self.policy_edited.discard(snapshot.metadata.uid)

    async def _drop(self, snapshot: SnapshotObject, place: Place) -> None:
        """The Snapshot went while it was worked on."""
        if snapshot.spec.deletion_policy == "Delete":
            await self._vault.delete(place)
        else:
            await self._vault.delete_uncommitted(place)

    # Taking

    async def _take(self, snapshot: SnapshotObject, place: Place) -> float | None:
        sandbox_key = (place.namespace, snapshot.spec.source.sandbox_name or "")
        # What the watch does not show may only be late: asked for before it is taken for missing.
        sandbox = self._find_sandbox(sandbox_key) or await self._cluster.sandbox(*sandbox_key)
        decision = decide_take(snapshot, sandbox, self._context.now())
        if isinstance(decision, Go):
            async with self._context.slots.transfer(sandbox_key):
                # What was true before the wait for a turn need not be true after it: a rollback may have come in between.
                sandbox = self._find_sandbox(sandbox_key) or sandbox
                decision = decide_take(snapshot, sandbox, self._context.now())
                if isinstance(decision, Go) and sandbox is not None:
                    message = f"the files of Sandbox {sandbox.metadata.name} are being read"
                    claimed = await self._claim(snapshot, "Taking", message, sandbox.metadata.uid)
                    await self._work(claimed, place, lambda: self._archive(claimed, sandbox, place))
                    return None
        if isinstance(decision, Wait):
            await self._say(snapshot, "Pending", decision.reason, decision.message)
            return max(0.1, (decision.until - self._context.now()).total_seconds())
        if isinstance(decision, Fail):
            await self._fail(snapshot, decision.reason, decision.message)
        return None

    async def _archive(self, snapshot: SnapshotObject, sandbox: SandboxObject, place: Place) -> None:
        marks, env = await asyncio.gather(self._cluster.marks(sandbox), self._cluster.env(sandbox))
        secret = await self._cluster.keep_env(snapshot, env) if env else None
        source = source_spec(sandbox, env, secret)
        origin = marks.origin if marks is not None else None
        manifest = build_manifest(
            snapshot,
            sandbox,
            source,
            parent_id=origin.api_id if origin else None,
            installation=self._vault.installation,
            now=self._context.now(),
        )
        body = manifest.to_bytes()
        spool, limits = self._vault.blobs.spool, self._context.limits

        async def attempt() -> Spooled:
            async with self._cluster.guest(sandbox) as guest:
                return await spool.receive(guest.archive(body), body, limits.max_snapshot_bytes)

        began = time.perf_counter()
        spooled = await patiently(attempt, limits.patience_seconds)
        read = time.perf_counter()
        try:
            await self._store(snapshot, place, manifest, spooled)
        finally:
            await spool.discard(spooled)
        record = spooled.record(manifest)
        stored = time.perf_counter()
        logger.info("Snapshot %s/%s: read in %.0f ms, stored in %.0f ms", place.namespace, place.name, (read - began) * 1000, (stored - read) * 1000)
        await self._finish(snapshot, record, place, source, parent=origin.name if origin else None)

    async def _store(self, snapshot: SnapshotObject, place: Place, manifest: Manifest, spooled: Spooled) -> None:
        """Blob, then record. The spooled file waits for a store that does not answer; the sandbox does not."""
        record = spooled.record(manifest)
        if snapshot.spec.deletion_policy == "Retain":
            await patiently(lambda: self._vault.set_keep(place, keep=True), self._context.limits.patience_seconds, self._teller(snapshot))

        async def attempt() -> None:
            await self._vault.blobs.commit(self._vault.key(place), record, spooled)

        await patiently(attempt, self._context.limits.patience_seconds, self._teller(snapshot))

    # Importing and finding again

    async def _import(self, snapshot: SnapshotObject, place: Place, archive: ArchiveSource) -> None:
        location = check_location(archive.location, place.namespace, self._vault.installation)
        claimed = await self._claim(snapshot, "Importing", f"{location} is being checked", None)

        async def bring() -> None:
            blobs, limits = self._vault.blobs, self._context.limits
            try:
                file = await patiently(lambda: blobs.open_blob(location), limits.patience_seconds, self._teller(claimed))
            except ObjectMissing:
                raise ObjectMissing(f"there is no file {location} in the store: put it there, then make a new Snapshot") from None
            try:
                async with imported(blobs.spool, file, archive.digest, limits.max_snapshot_bytes) as found:
                    await self._store(claimed, place, found.manifest, found.spooled)
            finally:
                await blobs.spool.run(file.close)
            await self._finish(claimed, found.spooled.record(found.manifest), place, recall_source(found.manifest))

        await self._work(claimed, place, bring)

    async def _adopt_by_name(self, snapshot: SnapshotObject) -> None:
        meta = snapshot.metadata
        found = await self._vault.find_by_name(meta.namespace, meta.name)
        record = await self._vault.record(found) if found is not None else None
        if found is None or record is None:
            message = "it came out of a backup and the store has no archive of it: it is not taken anew from today's files; make a new Snapshot"
            await self._fail(snapshot, "BlobMissing", message)
            return
        await self._finish(snapshot, record, found, recall_source(record.manifest, await self._cluster.env_secret(snapshot)))

    # Status

    async def _claim(self, snapshot: SnapshotObject, reason: SnapshotReason, message: str, sandbox_uid: str | None) -> SnapshotObject:
        now = self._context.now()
        fields = {
            **snapshot_state(snapshot, "Running", reason, message, now),
            **claim_fields(self._context.claims.identity, now),
            "sandboxUid": sandbox_uid,
        }
        return await self._cluster.write_snapshot(snapshot, fields)

    async def _work(self, claimed: SnapshotObject, place: Place, work: Callable[[], Awaitable[None]]) -> None:
        async def renew() -> None:
            fresh = await self._fresh(claimed)
            await self._cluster.write_snapshot(fresh, claim_fields(self._context.claims.identity, self._context.now()))

        async def run() -> None:
            await work()

        await self._context.work.run(("Snapshot", place.namespace, place.name), place.uid, run(), renew)

    async def _fresh(self, claimed: SnapshotObject) -> SnapshotObject:
        """Its newest version, while it is still ours."""
        found = await self._cluster.snapshot(claimed.metadata.namespace, claimed.metadata.name)
        if found is None or found.metadata.uid != claimed.metadata.uid:
            raise Vanished
        if found.status.claimed_by != self._context.claims.identity or found.status.phase in DONE:
            raise ClaimLost
        return found

    async def _finish(self, snapshot: SnapshotObject, record: Record, place: Place, source: SourceSpec, parent: str | None = None) -> None:
        def fields(seen: SnapshotObject) -> dict[str, object]:
            return snapshot_ready(
                seen,
                record,
                location=self._vault.location(place),
                source=source,
                sandbox_uid=seen.status.sandbox_uid,
                parent=parent or seen.status.parent,
                now=self._context.now(),
            )

        await self._write(snapshot, fields)
        logger.info("Snapshot %s/%s is stored: %d files, %d bytes", place.namespace, place.name, record.file_count, record.size_bytes)
        await self._cluster.tell(snapshot, "SnapshotReady", f"{record.file_count} files, {record.size_bytes} bytes stored")

    async def _fail(self, snapshot: SnapshotObject, reason: SnapshotReason, message: str) -> None:
        def fields(seen: SnapshotObject) -> dict[str, object]:
            now = self._context.now()
            return {**snapshot_state(seen, "Failed", reason, message, now), **claim_fields(None, now)}

        with contextlib.suppress(Vanished, ClaimLost):
            await self._write(snapshot, fields)
            logger.warning("Snapshot %s/%s failed (%s): %s", snapshot.metadata.namespace, snapshot.metadata.name, reason, message)
            await self._cluster.tell(snapshot, f"Snapshot{reason}", message, warning=True)

    async def _say(self, snapshot: SnapshotObject, phase: SnapshotPhase, reason: SnapshotReason, message: str) -> None:
        """How it stands, unless that is told already."""
        status = snapshot.status
        if (status.phase, status.reason, status.message) != (phase, reason, message):
            await self._write(snapshot, lambda seen: snapshot_state(seen, phase, reason, message, self._context.now()))

    def _teller(self, snapshot: SnapshotObject) -> Callable[[SandboxError], Awaitable[None]]:
        """Says in the status what is being tried again."""
        phase: SnapshotPhase = "Running" if snapshot.status.claimed_by == self._context.claims.identity else "Pending"

        async def tell(error: SandboxError) -> None:
            await self._say(snapshot, phase, reason_of(error), f"{error.message} (tried again for {self._context.limits.patience_seconds:.0f} s)")

        return tell

    async def _write(self, snapshot: SnapshotObject, fields: Callable[[SnapshotObject], dict[str, object]]) -> None:
        """A last word; written again over what others changed meanwhile, unless it is not ours any more."""
        while True:
            try:
                await self._cluster.write_snapshot(snapshot, fields(snapshot))
            except Changed:
                snapshot = await self._fresh_or_unclaimed(snapshot)
            else:
                return

    async def _fresh_or_unclaimed(self, snapshot: SnapshotObject) -> SnapshotObject:
        if snapshot.status.claimed_by == self._context.claims.identity:
            return await self._fresh(snapshot)
        found = await self._cluster.snapshot(snapshot.metadata.namespace, snapshot.metadata.name)
        if found is None or found.metadata.uid != snapshot.metadata.uid:
            raise Vanished
        if found.status.phase in DONE or found.status.claimed_by not in {None, self._context.claims.identity}:
            raise ClaimLost
        return found
