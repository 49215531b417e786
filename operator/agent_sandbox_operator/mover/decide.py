"""What has to be done about a Snapshot or a restore: pure, from what was seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from agent_sandbox_core.v1alpha1 import ENDED_RESTORES, SandboxObject, SnapshotObject, SnapshotReason, source_marker
from agent_sandbox_core.v1alpha1.sandbox import LastRestore

from .marks import UNFILLED, Marks

NOT_FOUND_PATIENCE: Final = timedelta(minutes=1)
"""A Snapshot may be applied together with its Sandbox, in any order."""
NOT_RUNNING_PATIENCE: Final = timedelta(minutes=10)
INTERRUPTED_PATIENCE: Final = timedelta(minutes=10)
"""A snapshot whose mover died is taken again only so long after its creation: later it would show another state than was meant."""
ENDED_PHASES: Final = frozenset({"Failed", "Expired", "Deleting"})


RestorePhase = Literal["Pending", "Running", "Succeeded", "Failed", "Superseded"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What lastRestore has to say; as a decision: with nothing to be done."""

    request_id: str
    snapshot_name: str
    phase: RestorePhase
    message: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Files that have to be brought in."""

    request_id: str
    snapshot_name: str
    first_fill: bool

    def told(self, phase: RestorePhase, message: str) -> Outcome:
        """What is said about it."""
        return Outcome(self.request_id, self.snapshot_name, phase, message)


def needs_look(sandbox: SandboxObject) -> bool:
    """Whether there can be anything to do: asked for every event, so it looks at what is in the object only."""
    last = sandbox.status.last_restore
    if sandbox.metadata.deletion_timestamp is not None:
        return False
    return sandbox.status.phase == "Restoring" or (last is not None and last.phase not in ENDED_RESTORES)


def decide_restore(sandbox: SandboxObject, marks: Marks) -> Wanted | Outcome | None:
    """The next thing about a Sandbox's files: first what is unfinished, then the first fill, then a rollback."""
    if sandbox.metadata.deletion_timestamp is not None:
        return None
    last = sandbox.status.last_restore
    wanted = _wanted(sandbox, marks)
    if last is not None and last.phase not in ENDED_RESTORES:
        if last.request_id == marks.restored:
            return Outcome(last.request_id, last.snapshot_name, "Succeeded", f"the files are those of Snapshot {last.snapshot_name}")
        if wanted is None:
            return _superseded(last, "spec.restore does not ask for it any more")
        if wanted.request_id != last.request_id:
            return _superseded(last, f"request {wanted.request_id} took its place")
    if wanted is not None and not wanted.first_fill and wanted.request_id in marks.done:
        message = "this requestID was carried out before, and is carried out once: nothing was changed; use a new requestID for another rollback"
        return Outcome(wanted.request_id, wanted.snapshot_name, "Superseded", message)
    return wanted


def _wanted(sandbox: SandboxObject, marks: Marks) -> Wanted | None:
    source, restore = sandbox.spec.source, sandbox.spec.restore
    if source is not None and marks.restored == UNFILLED:
        marker = source_marker(sandbox.metadata.uid)
        return None if _is_final(sandbox.status.last_restore, marker) else Wanted(marker, source.snapshot_name, first_fill=True)
    if restore is None or marks.carried_out(restore.request_id) or _is_final(sandbox.status.last_restore, restore.request_id):
        return None
    return Wanted(restore.request_id, restore.snapshot_name, first_fill=False)


def _is_final(last: LastRestore | None, request_id: str) -> bool:
    return last is not None and last.request_id == request_id and last.phase in ENDED_RESTORES


def _superseded(last: LastRestore, why: str) -> Outcome:
    return Outcome(last.request_id, last.snapshot_name, "Superseded", f"it was not carried out: {why}")


@dataclass(frozen=True, slots=True)
class Go:
    """It can be taken now."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Not yet; `until` is when it is given up."""

    reason: SnapshotReason
    message: str
    until: datetime


@dataclass(frozen=True, slots=True)
class Fail:
    """Never."""

    reason: SnapshotReason
    message: str


TakeDecision = Go | Wait | Fail


@dataclass(frozen=True, slots=True)
class TakeSeen:
    """What a decision about taking a snapshot is made from: the newest versions of both, and the time."""

    snapshot: SnapshotObject
    sandbox: SandboxObject
    now: datetime

    @property
    def born(self) -> datetime:
        """When the Snapshot was made."""
        return self.snapshot.metadata.creation_timestamp or self.now

    @property
    def begun(self) -> bool:
        """A mover that is gone had begun with it."""
        return self.snapshot.status.phase == "Running"

    @property
    def name(self) -> str:
        """Of the Sandbox."""
        return self.sandbox.metadata.name


def check_same_sandbox(seen: TakeSeen) -> TakeDecision | None:
    """What was begun with one Sandbox is not ended with another of its name."""
    if seen.begun and seen.snapshot.status.sandbox_uid not in {None, seen.sandbox.metadata.uid}:
        return Fail("Interrupted", f"the mover was stopped while it took this, and Sandbox {seen.name} is another one now: make a new Snapshot")
    return None


def check_interruption(seen: TakeSeen) -> TakeDecision | None:
    """Taken again much later it would show another state than was meant."""
    if seen.begun and seen.now >= seen.born + INTERRUPTED_PATIENCE:
        return Fail("Interrupted", "the mover was stopped while it took this, too long ago to take it again: make a new Snapshot")
    return None


def check_end(seen: TakeSeen) -> TakeDecision | None:
    """A Sandbox that comes back no more."""
    status, deleting = seen.sandbox.status, seen.sandbox.metadata.deletion_timestamp is not None
    if not deleting and status.phase not in ENDED_PHASES:
        return None
    shown = "being deleted" if deleting else status.phase
    return Fail("SandboxNotRunning", f"Sandbox {seen.name} is {shown}: nothing can be taken of it; {status.message or 'use another one'}")


def check_running(seen: TakeSeen) -> TakeDecision | None:
    """A Sandbox that starts, returns or is rolled back is waited for."""
    status = seen.sandbox.status
    if status.phase == "Running" and status.pod_name:
        return None
    told = f"Sandbox {seen.name} is {status.phase or 'Pending'}" + (f" ({status.reason})" if status.reason else "")
    if seen.now < seen.born + NOT_RUNNING_PATIENCE:
        return Wait("Waiting", f"{told}: it is taken as soon as it runs", seen.born + NOT_RUNNING_PATIENCE)
    minutes = NOT_RUNNING_PATIENCE.seconds // 60
    return Fail("SandboxNotRunning", f"{told} and was not ready for {minutes} minutes: make a new Snapshot when it is")


TAKE_CHECKS: Final[tuple[Callable[[TakeSeen], TakeDecision | None], ...]] = (check_same_sandbox, check_interruption, check_end, check_running)


def decide_take(snapshot: SnapshotObject, sandbox: SandboxObject | None, now: datetime) -> TakeDecision:
    """Whether a snapshot can be taken: the first check that has something to say, else Go."""
    if sandbox is None:
        until = (snapshot.metadata.creation_timestamp or now) + NOT_FOUND_PATIENCE
        told = f"Sandbox {snapshot.spec.source.sandbox_name} is not in namespace {snapshot.metadata.namespace}"
        if snapshot.status.phase == "Running" or now >= until:
            return Fail("SandboxNotFound", f"{told}: make a new Snapshot of one that is")
        return Wait("SandboxNotFound", f"{told}: create it, or delete this Snapshot", until)
    seen = TakeSeen(snapshot, sandbox, now)
    return next((found for check in TAKE_CHECKS if (found := check(seen)) is not None), Go())
