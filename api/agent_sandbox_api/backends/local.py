"""LocalBackend: the core's Backend on top of one Engine and the snapshot store. Quotas, times to live, snapshots, rollback and locks live here;
coming back after a death is in revival.py.

The engine is the truth about what exists and runs; this process remembers only what it is doing itself. Each sandbox has at most one piece of
work (snapshot or rollback), as a task of the backend's own: a caller that leaves does not leave it half done. Delete cancels it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeVar

from agent_sandbox_core.errors import (
    BackendError,
    Conflict,
    InvalidRequest,
    LimitExceeded,
    SandboxError,
    SandboxNotFound,
    SnapshotNotFound,
    Unavailable,
)
from agent_sandbox_core.interfaces import Guest
from agent_sandbox_core.models import Sandbox, SandboxSpec, Snapshot
from agent_sandbox_core.names import SNAPSHOT_ID, new_sandbox_id, new_snapshot_id
from agent_sandbox_core.snapshots import Manifest, SnapshotSecrets, SnapshotStore, StoredSpec

from .box import Box, Work
from .clock import Clock, SystemClock
from .engine import CountsChannels, Engine, Instance, InstanceRecord
from .folder import SECRETS, DataFolder, Entry, Ledger
from .revival import Revival
from .tasks import TaskOwner

logger = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_SECONDS: Final = 10.0
"""Longest wait for work that was cancelled, and for channels to close."""
SWEEP_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class LocalLimits:
    """What LocalBackend is told by the settings."""

    max_sandboxes: int = 20
    max_snapshot_bytes: int = 1 << 30
    reap_interval_seconds: float = 10.0


class LocalBackend:
    """Sandboxes of one engine, for one process. The data folder's lock keeps a second one away."""

    def __init__(
        self, engine: Engine, store: SnapshotStore, folder: DataFolder, limits: LocalLimits | None = None, *, clock: Clock | None = None
    ) -> None:
        self.name = engine.name
        self._engine = engine
        self._store = store
        self._folder = folder
        self._limits = limits or LocalLimits()
        self._clock = clock or SystemClock()
        self._ledger = Ledger(folder.path)
        self._secrets = SnapshotSecrets(folder.path / SECRETS)
        self._tasks = TaskOwner()
        self._revival = Revival(engine, self._clock, self._tasks)
        self._boxes: dict[str, Box] = {}
        self._keys: dict[str, str] = {}
        self._making: dict[str, asyncio.Task[Sandbox]] = {}
        self._making_keys: dict[str, tuple[str, asyncio.Task[Sandbox]]] = {}
        self._leftovers: set[str] = set()
        """Half-made ones whose removal failed: they hold their place until it succeeds."""
        self._complaint = ""
        self._swept = 0.0

    # Life of the backend

    async def start(self) -> None:
        """Picks up what is there: live sandboxes, dead ones (they come back), expired and half-made ones (they go)."""
        self._ledger.load()
        await self._engine.open()
        await self._store.claim(self._folder.instance_id)
        instances = await self._engine.instances()
        for instance in instances:
            if instance.committed:
                self._adopt(instance)
            else:
                self._leftovers.add(instance.record.sandbox_id)
        await self._ledger.keep_only({instance.record.sandbox_id for instance in instances})
        self._delete_expired()
        # Nobody else uses this folder, so whatever is half done there is from a process that is dead.
        await self._engine.sweep()
        await self._sweep_store(older_than=0)
        await self._secrets.sweep({_secret_name(record.id) for record in await self._store.list_records()})
        self._tasks.spawn(self._reap())
        self._tasks.spawn(self._watch())

    async def close(self) -> None:
        """Stops what this process does; sandboxes live on."""
        await self._tasks.aclose(CLOSE_SECONDS)
        async with bounded(CLOSE_SECONDS):
            await asyncio.gather(*(box.guest.aclose() for box in self._boxes.values() if box.guest is not None), return_exceptions=True)
        await self._engine.close()
        await self._store.aclose()

    async def ready(self) -> None:
        """Raises BackendError when the engine does not answer now."""
        await self._engine.ping()

    def max_cpus(self) -> float | None:
        """CPUs of the engine."""
        return self._engine.max_cpus()

    def open_channels(self) -> int:
        """Channels to sandboxes that are open now."""
        return self._engine.open_channels() if isinstance(self._engine, CountsChannels) else 0

    # Sandboxes

    async def create(
        self,
        spec: SandboxSpec,
        *,
        expires_at: datetime,
        source: str | None = None,
        idempotency_key: str | None = None,
        request_digest: str | None = None,
    ) -> Sandbox:
        """See Backend."""
        key = _sha256(idempotency_key) if idempotency_key is not None else None
        digest = request_digest or _sha256(spec.model_dump_json() + (source or ""))
        if key is not None and (earlier := self._earlier(key, digest)) is not None:
            return await asyncio.shield(earlier) if isinstance(earlier, asyncio.Task) else await self.get(earlier)
        if len(self._boxes.keys() | self._making.keys() | self._leftovers) >= self._limits.max_sandboxes:
            raise LimitExceeded(f"all {self._limits.max_sandboxes} sandboxes that are allowed here exist: delete one, or wait until one expires")
        record = InstanceRecord(
            sandbox_id=new_sandbox_id(),
            spec=spec,
            created_at=self._clock.now(),
            expires_at=expires_at,
            source_snapshot_id=source,
            idempotency_key=key,
            request_digest=digest if key is not None else None,
        )
        task = self._tasks.spawn(self._make(record))
        self._making[record.sandbox_id] = task
        if key is not None:
            self._making_keys[key] = (digest, task)
        task.add_done_callback(lambda _: self._made(record))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if key is None:
                task.cancel()
            raise

    async def list(self) -> Sequence[Sandbox]:
        """Oldest first, as the engine has them now."""
        await self._look()
        boxes = [box for box in self._boxes.values() if box.deleting is None]
        return [box.view() for box in sorted(boxes, key=lambda box: (box.record.created_at, box.id))]

    async def get(self, sandbox_id: str) -> Sandbox:
        """As the engine has it now."""
        box = self._box(sandbox_id)
        version = box.version
        instance = await self._engine.inspect(sandbox_id)
        if box.version == version:
            self._absorb(box, instance)
        return self._box(sandbox_id).view()

    async def spec(self, sandbox_id: str) -> SandboxSpec:
        """The complete spec."""
        return self._box(sandbox_id).record.spec

    async def delete(self, sandbox_id: str) -> None:
        """Ends whatever it is doing and removes it. A second call meanwhile waits for the first."""
        box = self._boxes.get(sandbox_id)
        if box is None:
            raise SandboxNotFound(sandbox_id)
        await asyncio.shield(self._begin_delete(box))

    async def set_expiry(self, sandbox_id: str, expires_at: datetime) -> Sandbox:
        """Changes the time at which it goes; on disk when it returns."""
        box = self._box(sandbox_id)
        await self._ledger.put(sandbox_id, Entry(expires_at, self._ledger.get(sandbox_id).parent))
        box.expires_at = expires_at
        return box.view()

    async def guest(self, sandbox_id: str) -> Guest:
        """The guest, kept while the sandbox runs. Asks no engine: this is the quick path."""
        box = self._box(sandbox_id)
        if box.work is not None and box.work[0] == "rollback":
            raise Conflict(f"sandbox {sandbox_id} is being rolled back: try again when that is done")
        if box.phase != "Running":
            raise InvalidRequest(box.why_stopped())
        return self._guest_of(box)

    # Snapshots

    async def snapshot(self, sandbox_id: str, *, name: str | None) -> Snapshot:
        """See Backend."""
        box = self._box(sandbox_id)
        self._check_free(box)
        await self.guest(sandbox_id)
        return await self._work(box, "snapshot", self._take(box, name))

    async def list_snapshots(self, sandbox_id: str | None = None) -> Sequence[Snapshot]:
        """Oldest first."""
        records = await self._store.list_records()
        return [record.to_snapshot() for record in records if sandbox_id is None or record.manifest.sandbox_id == sandbox_id]

    async def get_snapshot(self, snapshot_id: str) -> Snapshot:
        """Its facts."""
        return (await self._store.get(_checked(snapshot_id))).to_snapshot()

    async def snapshot_spec(self, snapshot_id: str) -> SandboxSpec:
        """The spec of the sandbox it was taken of, env values included."""
        stored = (await self._store.get(_checked(snapshot_id))).manifest.spec
        env = (await self._secrets.load(_secret_name(snapshot_id)) or {}) if stored.env_names else {}
        missing = [name for name in stored.env_names if name not in env]
        if missing:
            raise BackendError(
                f"the values of {', '.join(missing[:10])} in the environment of snapshot {snapshot_id} are not in this server's data folder, "
                "so it cannot be forked: create a sandbox with them and roll it back to the snapshot"
            )
        return stored.complete({name: env[name] for name in stored.env_names})

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Removes it; a restore that reads it goes on."""
        await self._store.delete(_checked(snapshot_id))
        await self._secrets.delete(_secret_name(snapshot_id))

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> Sandbox:
        """See Backend."""
        await self._store.get(_checked(snapshot_id))
        box = self._box(sandbox_id)
        self._check_free(box)
        return await self._work(box, "rollback", self._roll_back(box, snapshot_id))

    # Create

    async def _make(self, record: InstanceRecord) -> Sandbox:
        box = Box(record, record.expires_at, record.source_snapshot_id)
        try:
            await self._engine.create(record)
            if record.source_snapshot_id is not None:
                await self._fill(self._guest_of(box), record.source_snapshot_id)
            await self._engine.commit(record.sandbox_id)
        except BaseException:
            self._leftovers.add(record.sandbox_id)
            self._lose_guest(box)
            await asyncio.shield(self._tasks.spawn(self._clear_leftover(record.sandbox_id)))
            raise
        self._boxes[record.sandbox_id] = box
        if record.idempotency_key is not None:
            self._keys[record.idempotency_key] = record.sandbox_id
        return box.view()

    def _made(self, record: InstanceRecord) -> None:
        del self._making[record.sandbox_id]
        if record.idempotency_key is not None:
            self._making_keys.pop(record.idempotency_key, None)

    def _earlier(self, key: str, digest: str) -> asyncio.Task[Sandbox] | str | None:
        """What an earlier request with this key is making, or the id of what it made."""
        known: str | None
        found: asyncio.Task[Sandbox] | str
        if key in self._making_keys:
            known, found = self._making_keys[key]
        elif key in self._keys and (box := self._boxes[self._keys[key]]).deleting is None:
            known, found = box.record.request_digest, box.id
        else:
            return None
        if known == digest:
            return found
        raise Conflict("this Idempotency-Key was used for another request: use a new key for each request, and the same one only to repeat it")

    async def _clear_leftover(self, sandbox_id: str) -> None:
        try:
            await self._engine.remove(sandbox_id)
        except SandboxError as error:
            logger.warning("the half-made sandbox %s could not be removed, which is tried again: %s", sandbox_id, error.message)
        else:
            self._leftovers.discard(sandbox_id)

    async def _fill(self, guest: Guest, snapshot_id: str) -> None:
        async with self._store.read(snapshot_id) as opened:
            record = opened.record
            await guest.restore(opened.chunks, bytes=record.data_bytes, entries=record.entries, max_bytes=self._limits.max_snapshot_bytes)

    # Work that holds a sandbox

    def _check_free(self, box: Box) -> None:
        if box.work is not None:
            what = "is being rolled back" if box.work[0] == "rollback" else "has a snapshot taken of it"
            raise Conflict(f"sandbox {box.id} {what}: try again when that is done")

    async def _work(self, box: Box, kind: Work, work: Coroutine[Any, Any, T]) -> T:
        task = self._tasks.spawn(work)
        box.work = (kind, task)

        def done(_: asyncio.Task[T]) -> None:
            box.work = None

        task.add_done_callback(done)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # Either the caller was cancelled, or the work was: by a delete, which wins, or by the end of this process.
            if not task.cancelled():
                raise
            if box.deleting is not None:
                raise SandboxNotFound(box.id) from None
            raise Unavailable("the server stopped before it was done: look at the sandbox, then try again") from None

    async def _take(self, box: Box, name: str | None) -> Snapshot:
        spec = box.record.spec
        manifest = Manifest(
            id=new_snapshot_id(),
            sandbox_id=box.id,
            name=name,
            spec=StoredSpec.of(spec),
            created_at=self._clock.now(),
            parent_id=box.parent,
            instance=self._folder.instance_id,
        )
        secret = _secret_name(manifest.id)
        try:
            # The values first: a snapshot that is there can be forked.
            await self._secrets.save(secret, spec.env)
            record = await self._store.save(manifest, self._guest_of(box).archive, max_bytes=self._limits.max_snapshot_bytes)
        except BaseException:
            with contextlib.suppress(OSError):  # the next start removes it
                await self._secrets.delete(secret)
            raise
        return record.to_snapshot()

    async def _roll_back(self, box: Box, snapshot_id: str) -> Sandbox:
        await stop_task(box.reviving)
        before = (box.phase, box.reason, box.message)
        box.set("Restoring")
        try:
            await self._ensure_running(box)
            await self._fill(self._guest_of(box), snapshot_id)
            if not box.record.spec.read_only_rootfs:
                await self._close_guest(box)
                await self._engine.renew(box.id)
        except BaseException as error:
            box.set(*before)
            if not isinstance(error, asyncio.CancelledError):
                # What it is now is for the engine to say, once this work is over.
                self._tasks.spawn(self._observe_soon(box))
            raise
        box.lives.reset()
        instance = await self._engine.inspect(box.id)
        if instance is not None:
            box.run_on(instance)
        box.parent = snapshot_id
        try:
            await self._ledger.put(box.id, Entry(self._ledger.get(box.id).expires_at, snapshot_id))
        except BackendError as error:
            logger.warning("sandbox %s was rolled back; that its next snapshot descends from %s is not kept: %s", box.id, snapshot_id, error.message)
        return box.view()

    async def _ensure_running(self, box: Box) -> None:
        instance = await self._engine.inspect(box.id)
        if instance is not None and instance.state == "running":
            return
        await self._close_guest(box)
        if instance is not None and instance.state == "exited":
            await self._engine.restart(box.id)
        elif box.whole:
            await self._engine.remove(box.id)
            await self._engine.create(box.record)
            await self._engine.commit(box.id)
        else:
            raise InvalidRequest(f"{box.why_stopped()}; nothing of it is left to roll back: fork the snapshot instead")

    # Delete and expiry

    def _begin_delete(self, box: Box) -> asyncio.Task[None]:
        if box.deleting is None:
            box.deleting = self._tasks.spawn(self._delete(box))
        return box.deleting

    async def _delete(self, box: Box) -> None:
        try:
            await stop_task(box.work[1] if box.work else None)
            await stop_task(box.reviving)
            await self._close_guest(box)
            await self._engine.remove(box.id)
        except BaseException:
            box.version += 1
            box.deleting = None
            raise
        del self._boxes[box.id]
        if box.record.idempotency_key is not None:
            self._keys.pop(box.record.idempotency_key, None)
        await self._ledger.forget(box.id)

    def _delete_expired(self) -> None:
        now = self._clock.now()
        for box in self._boxes.values():
            if box.expires_at <= now and box.deleting is None:
                logger.info("sandbox %s has expired", box.id)
                self._begin_delete(box).add_done_callback(_log_failure)

    # What the engine has

    def _box(self, sandbox_id: str) -> Box:
        box = self._boxes.get(sandbox_id)
        if box is None or box.deleting is not None:
            raise SandboxNotFound(sandbox_id)
        return box

    def _guest_of(self, box: Box) -> Guest:
        if box.guest is None:
            box.guest = self._engine.guest(box.id)
        return box.guest

    async def _close_guest(self, box: Box) -> None:
        guest, box.guest = box.guest, None
        if guest is not None:
            async with bounded(CLOSE_SECONDS):
                await guest.aclose()

    def _adopt(self, instance: Instance) -> None:
        record = instance.record
        entry = self._ledger.get(record.sandbox_id)
        box = Box(record, entry.expires_at or record.expires_at, entry.parent or record.source_snapshot_id, whole=instance.state != "lost")
        self._boxes[box.id] = box
        if record.idempotency_key is not None:
            self._keys[record.idempotency_key] = box.id
        box.run_on(instance)
        self._absorb(box, instance)

    async def _look(self) -> None:
        """Compares with the engine, one call whatever the number of sandboxes."""
        versions = {box.id: box.version for box in self._boxes.values()}
        instances = {instance.record.sandbox_id: instance for instance in await self._engine.instances()}
        for sandbox_id, version in versions.items():
            box = self._boxes.get(sandbox_id)
            if box is not None and box.version == version:
                self._absorb(box, instances.get(sandbox_id))
        for sandbox_id in instances.keys() - versions.keys() - self._boxes.keys() - self._making.keys() - self._leftovers:
            # Asked once more: it may have been deleted, or given up, since the list was made.
            instance = await self._engine.inspect(sandbox_id)
            if instance is None or sandbox_id in self._boxes or sandbox_id in self._making:
                continue
            if instance.committed:
                self._adopt(instance)
            else:
                self._leftovers.add(sandbox_id)

    def _absorb(self, box: Box, instance: Instance | None) -> None:
        """Takes in what the engine says about a sandbox, unless this process is changing it."""
        if not box.settled:
            return
        if instance is None or instance.state == "lost":
            if box.phase != "Failed":
                self._lose_guest(box)
                box.set("Failed", "WorkspaceLost", "its container or its workspace was removed outside: delete it, and fork a snapshot of it")
        elif instance.state == "exited":
            if box.phase != "Stopped":
                self._lose_guest(box)
                self._revival.begin(box, instance)
        elif box.phase != "Running" or box.incarnation != instance.incarnation:
            self._lose_guest(box)
            box.run_on(instance)
        elif instance.termination is not None:
            box.termination = instance.termination

    def _lose_guest(self, box: Box) -> None:
        """Its channels lead nowhere any more; the next call gets fresh ones."""
        guest, box.guest = box.guest, None
        if guest is not None:
            self._tasks.spawn(guest.aclose())

    async def _observe(self, box: Box) -> None:
        version = box.version
        instance = await self._engine.inspect(box.id)
        if box.version == version and box.id in self._boxes:
            self._absorb(box, instance)

    async def _observe_soon(self, box: Box) -> None:
        if box.work is not None:
            await asyncio.wait({box.work[1]})
        with contextlib.suppress(SandboxError):  # the reaper looks again
            await self._observe(box)

    async def _watch(self) -> None:
        """Hears of deaths as they happen."""
        async for sandbox_id in self._engine.changes():
            box = self._boxes.get(sandbox_id)
            if box is not None and box.settled:
                with contextlib.suppress(SandboxError):  # the reaper looks again
                    await self._observe(box)

    async def _reap(self) -> None:
        """Removes what has expired and heals what was missed, for ever."""
        while True:
            try:
                self._delete_expired()
                await self._look()
                for sandbox_id in [*self._leftovers]:
                    await self._clear_leftover(sandbox_id)
                await self._engine.sweep()
                if self._clock.monotonic() - self._swept >= SWEEP_SECONDS:
                    await self._sweep_store()
                self._complaint = ""
            except SandboxError as error:
                if error.message != self._complaint:
                    self._complaint = error.message
                    logger.warning("the engine cannot be looked at, which is tried again: %s", error.message)
            await self._clock.sleep(self._limits.reap_interval_seconds)

    async def _sweep_store(self, **age: float) -> None:
        self._swept = self._clock.monotonic()
        if removed := await self._store.sweep(**age):
            logger.info("%d leftovers of unfinished snapshots were removed", len(removed))


@contextlib.asynccontextmanager
async def bounded(seconds: float) -> AsyncIterator[None]:
    """Gives up on the block after so many seconds, quietly: what it closes is lost anyway."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            yield


async def stop_task(task: asyncio.Task[Any] | None) -> None:
    """Cancels a task of ours and waits until it has ended, bounded."""
    if task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CLOSE_SECONDS)


def _checked(snapshot_id: str) -> str:
    if not SNAPSHOT_ID.match(snapshot_id):
        raise SnapshotNotFound(snapshot_id)
    return snapshot_id


def _secret_name(snapshot_id: str) -> str:
    """Files with a snapshot's id in their name are the snapshot, and may be copied elsewhere as such; its env values must not be among them."""
    return snapshot_id.removeprefix("snap_")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        told = error.message if isinstance(error, SandboxError) else type(error).__name__
        logger.warning("an expired sandbox could not be removed, which is tried again: %s", told)
