"""Reconciles rollbacks and first fills: brings the files of a Snapshot into a running sandbox. Each step can be repeated, and be cut anywhere.

Order: claim (lastRestore Running), the files, the mark on the workspace (the commit), lastRestore Succeeded. The operator keeps the Sandbox
from being Ready until the mark is there, so nobody works in files that a repeated restore would take away.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from agent_sandbox_core.errors import SandboxError
from agent_sandbox_core.v1alpha1 import ENDED_RESTORES, SandboxObject, SnapshotObject, snapshot_api_id
from agent_sandbox_core.v1alpha1.sandbox import LastRestore

from .claims import ClaimLost, Withdrawn
from .cluster import Changed, Vanished
from .context import Context, Key, patiently
from .decide import Outcome, Wanted, decide_restore, needs_look
from .marks import Marks, Origin
from .status import claim_fields, restore_state

logger = logging.getLogger(__name__)

AGAIN: Final = 0.0
SOON: Final = 0.05
LATER: Final = 1.0


class Restores:
    """One reconcile a Sandbox at a time. `await_snapshot(snapshot, sandbox)` asks for another look when that Snapshot changes."""

    def __init__(self, context: Context, await_snapshot: Callable[[Key, Key], None]) -> None:
        self._context = context
        self._cluster = context.cluster
        self._vault = context.vault
        self._await_snapshot = await_snapshot

    async def reconcile(self, seen: SandboxObject) -> float | None:
        """One look; after how many seconds the next one is due, None when an event will tell."""
        if not needs_look(seen):
            return None
        try:
            return await self._look(seen.metadata.namespace, seen.metadata.name)
        except Changed:
            return SOON
        except Withdrawn:
            return AGAIN
        except (ClaimLost, Vanished):
            return LATER

    async def _look(self, namespace: str, name: str) -> float | None:
        sandbox = await self._cluster.sandbox(namespace, name)
        marks = await self._cluster.marks(sandbox) if sandbox is not None and needs_look(sandbox) else None
        if sandbox is None or marks is None:
            return None  # no workspace yet, or no more: the operator is about to say so
        match decide_restore(sandbox, marks):
            case Outcome() as outcome:
                await self._end(sandbox, outcome)
                return AGAIN
            case Wanted() as wanted:
                return await self._bring(sandbox, marks, wanted)
            case None:
                return None

    def withdraw(self, sandbox: SandboxObject, *, deleted: bool = False) -> None:
        """Stops what is being done for a Sandbox when it is not wanted any more: it goes, or asks for something else."""
        key = _work_key(sandbox)
        running = self._context.work.running(key)
        if running is None:
            return
        restore = sandbox.spec.restore
        fill = running.startswith("source:")
        if deleted or sandbox.metadata.deletion_timestamp is not None or not (fill or (restore is not None and restore.request_id == running)):
            self._context.work.withdraw(key)

    async def _bring(self, sandbox: SandboxObject, marks: Marks, wanted: Wanted) -> float | None:
        last = sandbox.status.last_restore
        if last is not None and last.phase not in ENDED_RESTORES:
            held = self._context.claims.wait_for(_work_key(sandbox), last.claimed_by, last.claimed_at)
            if held:
                return held
        snapshot = await self._cluster.snapshot(sandbox.metadata.namespace, wanted.snapshot_name)
        if snapshot is None or snapshot.status.phase != "Ready" or snapshot.metadata.deletion_timestamp is not None:
            await self._not_ready(sandbox, wanted, snapshot)
            return None
        started = self._context.now()
        claimed = await self._claim(sandbox, wanted, started)
        key = _work_key(sandbox)

        async def renew() -> None:
            fresh = await self._fresh(claimed, wanted)
            await self._cluster.write_restore(fresh, claim_fields(self._context.claims.identity, self._context.now()))

        try:
            await self._context.work.run(key, wanted.request_id, self._restore(claimed, marks, wanted, snapshot), renew)
        except SandboxError as error:
            again = "" if wanted.first_fill else "; use a new requestID to try again"
            await self._end(claimed, wanted.told("Failed", error.message + again))
            return None
        taken = snapshot.status.taken_at
        told = f"the files are those of Snapshot {wanted.snapshot_name}" + (f" of {taken:%Y-%m-%d %H:%M:%S} UTC" if taken else "")
        await self._end(claimed, wanted.told("Succeeded", told))
        return None

    async def _not_ready(self, sandbox: SandboxObject, wanted: Wanted, snapshot: SnapshotObject | None) -> None:
        """A Snapshot that may still become Ready is waited for; a missing one only by a fill, since a rollback holds up a sandbox in use."""
        namespace = sandbox.metadata.namespace
        if snapshot is not None and (snapshot.status.phase == "Failed" or snapshot.metadata.deletion_timestamp is not None):
            why = "is being deleted" if snapshot.metadata.deletion_timestamp is not None else f"failed: {snapshot.status.message or 'see its status'}"
            await self._end(sandbox, wanted.told("Failed", f"Snapshot {wanted.snapshot_name} {why}; use another one"))
            return
        if snapshot is None and not wanted.first_fill:
            message = f"there is no Snapshot {wanted.snapshot_name} in namespace {namespace}: nothing was changed; use a new requestID with one that is there"
            await self._end(sandbox, wanted.told("Failed", message))
            return
        self._await_snapshot((namespace, wanted.snapshot_name), (namespace, sandbox.metadata.name))
        state = "does not exist yet" if snapshot is None else f"is {snapshot.status.phase or 'Pending'}"
        message = f"it waits for Snapshot {wanted.snapshot_name}, which {state}"
        last = sandbox.status.last_restore
        if last is None or (last.request_id, last.phase, last.message) != (wanted.request_id, "Pending", message):
            waiting = wanted.told("Pending", message)
            fields = restore_state(waiting, started=None, finished=None, claim=claim_fields(None, self._context.now()))
            await self._cluster.write_restore(sandbox, fields)

    async def _restore(self, sandbox: SandboxObject, marks: Marks, wanted: Wanted, snapshot: SnapshotObject) -> None:
        key = (sandbox.metadata.namespace, sandbox.metadata.name)
        place = self._vault.place_of(snapshot)
        limits = self._context.limits

        async def attempt() -> None:
            async with (
                self._context.slots.transfer(key),
                self._vault.read(place, snapshot.status.digest) as opened,
                self._cluster.guest(sandbox) as guest,
            ):
                record = opened.record
                await guest.restore(opened.chunks, bytes=record.data_bytes, entries=record.entries, max_bytes=limits.max_snapshot_bytes)
                if not wanted.first_fill and sandbox.spec.workspace.ephemeral and not sandbox.spec.read_only_root_filesystem:
                    # What was written outside the workspace goes with the container. A PVC's sandbox gets a new pod from the operator.
                    await guest.shutdown()

        await patiently(attempt, limits.patience_seconds, lambda error: self._tell(sandbox, wanted, error))
        await self._cluster.mark(sandbox, marks.after(wanted.request_id, Origin(wanted.snapshot_name, snapshot_api_id(snapshot.metadata))))

    async def _claim(self, sandbox: SandboxObject, wanted: Wanted, started: datetime) -> SandboxObject:
        running = wanted.told("Running", f"the files of Snapshot {wanted.snapshot_name} are being brought in")
        fields = restore_state(running, started=started, finished=None, claim=claim_fields(self._context.claims.identity, started))
        return await self._cluster.write_restore(sandbox, fields)

    async def _tell(self, sandbox: SandboxObject, wanted: Wanted, error: SandboxError) -> None:
        """Says in the status what is being tried again."""
        await self._write(sandbox, {"message": f"{error.message} (tried again for {self._context.limits.patience_seconds:.0f} s)"})

    async def _end(self, sandbox: SandboxObject, outcome: Outcome) -> None:
        """The last word about a request."""
        now, last = self._context.now(), sandbox.status.last_restore
        started = last.started_at if last is not None and last.request_id == outcome.request_id else None
        fields = restore_state(outcome, started=started, finished=now, claim=claim_fields(None, now))
        await self._write(sandbox, fields)
        failed = outcome.phase == "Failed"
        name = f"{sandbox.metadata.namespace}/{sandbox.metadata.name}"
        level = logging.WARNING if failed else logging.INFO
        logger.log(level, "restore %s of Sandbox %s: %s: %s", outcome.request_id, name, outcome.phase, outcome.message)
        await self._cluster.tell(sandbox, f"Restore{outcome.phase}", outcome.message, warning=failed)

    async def _write(self, sandbox: SandboxObject, fields: dict[str, Any]) -> None:
        """Written again over what the operator changed meanwhile, as long as the request is still ours to speak about."""
        while True:
            try:
                await self._cluster.write_restore(sandbox, fields)
            except Changed:
                sandbox = await self._still(sandbox)
            else:
                return

    async def _still(self, sandbox: SandboxObject) -> SandboxObject:
        found = await self._cluster.sandbox(sandbox.metadata.namespace, sandbox.metadata.name)
        if found is None or found.metadata.uid != sandbox.metadata.uid:
            raise Vanished
        before, after = sandbox.status.last_restore, found.status.last_restore
        if _holder(before) != _holder(after):
            raise ClaimLost
        return found

    async def _fresh(self, claimed: SandboxObject, wanted: Wanted) -> SandboxObject:
        found = await self._still(claimed)
        last = found.status.last_restore
        if last is None or last.claimed_by != self._context.claims.identity or last.request_id != wanted.request_id:
            raise ClaimLost
        return found


def _work_key(sandbox: SandboxObject) -> tuple[str, str, str]:
    return ("Sandbox", sandbox.metadata.namespace, sandbox.metadata.name)


def _holder(last: LastRestore | None) -> tuple[str | None, str | None, bool]:
    """What must not have changed when a word about a restore is written."""
    return (None, None, True) if last is None else (last.request_id, last.claimed_by, last.phase in ENDED_RESTORES)
