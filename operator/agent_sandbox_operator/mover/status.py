"""What the mover writes into status: merge patches, built here and nowhere else. None in a patch removes a field."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from agent_sandbox_core.errors import PayloadTooLarge, SandboxError
from agent_sandbox_core.models import rfc3339
from agent_sandbox_core.snapshots import Damaged, InvalidArchive, ObjectMissing, Record, StoreFull, StoreUnreachable
from agent_sandbox_core.v1alpha1 import SnapshotObject, SnapshotPhase, SnapshotReason
from agent_sandbox_core.v1alpha1.snapshot import SourceSpec

from .decide import Outcome

MAX_MESSAGE: Final = 1000
READY: Final = "Ready"
_REASONS: Final[tuple[tuple[type[SandboxError], SnapshotReason], ...]] = (
    (PayloadTooLarge, "TooLarge"),
    (StoreUnreachable, "StoreUnreachable"),
    (StoreFull, "StoreFull"),
    (Damaged, "DigestMismatch"),
    (InvalidArchive, "HostileArchive"),
    (ObjectMissing, "BlobMissing"),
)


def reason_of(error: SandboxError) -> SnapshotReason:
    """The reason that an error stands for."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "Failed")


def snapshot_state(snapshot: SnapshotObject, phase: SnapshotPhase, reason: SnapshotReason, message: str, now: datetime) -> dict[str, Any]:
    """Phase, reason, message and the condition Ready; the condition's time stays while its status does."""
    status = "True" if phase == "Ready" else "False"
    known = next((one for one in snapshot.status.conditions if one.type == READY), None)
    since = known.last_transition_time if known is not None and known.status == status else now
    condition = {
        "type": READY,
        "status": status,
        "reason": reason,
        "message": message[:MAX_MESSAGE],
        "lastTransitionTime": rfc3339(since.replace(microsecond=0)),
        "observedGeneration": snapshot.metadata.generation,
    }
    return {
        "phase": phase,
        "reason": reason,
        "message": message[:MAX_MESSAGE],
        "conditions": [condition],
        "observedGeneration": snapshot.metadata.generation,
    }


def claim_fields(identity: str | None, now: datetime) -> dict[str, Any]:
    """Who works on it; nobody with None."""
    return {"claimedBy": identity, "claimedAt": None if identity is None else rfc3339(now)}


def snapshot_ready(
    snapshot: SnapshotObject, record: Record, *, location: str, source: SourceSpec, sandbox_uid: str | None, parent: str | None, now: datetime
) -> dict[str, Any]:
    """It is in the store."""
    message = f"{record.file_count} files, {record.size_bytes} bytes stored"
    if record.skipped:
        message += f"; {record.skipped} sockets, pipes or devices were left out"
    return {
        **snapshot_state(snapshot, "Ready", "Ready", message, now),
        **claim_fields(None, now),
        "location": location,
        "digest": record.digest,
        "sizeBytes": record.size_bytes,
        "fileCount": record.file_count,
        "takenAt": rfc3339(record.manifest.created_at),
        "sandboxUid": sandbox_uid,
        "parent": parent,
        "sourceSpec": source.to_wire(),
    }


def restore_state(outcome: Outcome, *, started: datetime | None, finished: datetime | None, claim: dict[str, Any]) -> dict[str, Any]:
    """The whole of lastRestore: every field is set or removed, nothing of an earlier request is left."""
    return {
        "requestID": outcome.request_id,
        "snapshotName": outcome.snapshot_name,
        "phase": outcome.phase,
        "message": outcome.message[:MAX_MESSAGE],
        "startedAt": rfc3339(started) if started else None,
        "finishedAt": rfc3339(finished) if finished else None,
        **claim,
    }
