"""Between the HTTP API's models and the custom resources. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

from agent_sandbox_core.errors import (
    BackendError,
    Conflict,
    InvalidRequest,
    LimitExceeded,
    PayloadTooLarge,
    SandboxError,
    SandboxNotFound,
    SnapshotNotFound,
)
from agent_sandbox_core.models import Phase, Sandbox, SandboxSpec, Snapshot, Termination, rfc3339
from agent_sandbox_core.v1alpha1 import (
    ANNOTATION_API_LABELS,
    GROUP,
    LABEL_API_ID,
    SandboxObject,
    SnapshotObject,
    api_labels,
)
from agent_sandbox_core.v1alpha1.common import API_VERSION
from agent_sandbox_core.v1alpha1.quantities import MEBIBYTE, parse_quantity

Object = dict[str, Any]

ANNOTATION_CREATED: Final = f"{GROUP}/created-at"
"""When the API made it: a CR's own time of creation has no fractions of a second, and lists are sorted by it."""
ANNOTATION_REQUEST: Final = f"{GROUP}/request-digest"
"""sha256 of the create request, to tell a retry from another request with the same Idempotency-Key."""
ANNOTATION_SANDBOX: Final = f"{GROUP}/sandbox-id"
"""On a Snapshot: the API id of its sandbox, which may be gone."""

NO_END: Final = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""What `expires_at` says of a Sandbox without an end; the contract wants a time."""

_API_NAME = re.compile(r"(sb|snap)-([0-9a-f]{16})\Z")
_API_ID = re.compile(r"(sb|snap)_([0-9a-f]{16})\Z")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?\Z")
_PHASES: Final[dict[str, Phase]] = {
    "Pending": "Pending", "Running": "Running", "Replacing": "Restarting", "Restoring": "Restoring", "Stopped": "Stopped", "Failed": "Failed",
    "Expired": "Stopped", "Deleting": "Deleting",
}  # fmt: skip
_CREATE_ERRORS: Final[dict[str, type[SandboxError]]] = {
    "QuotaExceeded": LimitExceeded, "InvalidImage": InvalidRequest, "SnapshotMissing": Conflict,
}  # fmt: skip
_SNAPSHOT_ERRORS: Final[dict[str, type[SandboxError]]] = {"TooLarge": PayloadTooLarge, "SandboxNotRunning": InvalidRequest}


def name_of(api_id: str) -> str:
    """The CR's name for an id of the API, as it is when no CR can have it (it then finds none)."""
    found = _API_ID.match(api_id)
    return f"{found[1]}-{found[2]}" if found else api_id


def is_name(name: str) -> bool:
    """Whether a CR can have this name; nothing else may become part of a path."""
    return _NAME.match(name) is not None


def id_of(name: str) -> str:
    """The API's id of a CR: with `_` for one of ours, the name itself for one that somebody applied."""
    found = _API_NAME.match(name)
    return f"{found[1]}_{found[2]}" if found else name


def quantity(text: str) -> Decimal:
    """The value of a Kubernetes quantity; 0 for what is none."""
    try:
        return parse_quantity(text)
    except ValueError:
        return Decimal(0)


def env_secret_name(name: str) -> str:
    """The Secret with the env values of a sandbox that the API made."""
    return f"{name}-env"


def sandbox_manifest(
    name: str,
    spec: SandboxSpec,
    *,
    created_at: datetime,
    expires_at: datetime,
    source: str | None,
    digest: str | None,
    workspace: Mapping[str, Any],
    runtime_class: str,
) -> Object:
    """The Sandbox for a create request. Values of env are not in it: they go into a Secret that it owns."""
    annotations = {ANNOTATION_CREATED: rfc3339(created_at)}
    if digest is not None:
        annotations[ANNOTATION_REQUEST] = digest
    if spec.labels:
        annotations[ANNOTATION_API_LABELS] = json.dumps(spec.labels, sort_keys=True)
    body: Object = {
        "image": spec.image,
        "resources": {"cpu": f"{max(1, round(spec.cpus * 1000))}m", "memory": f"{spec.memory_mb}Mi"},
        "pidsLimit": spec.pids_limit,
        "readOnlyRootFilesystem": spec.read_only_rootfs,
        "network": {"mode": "Open" if spec.network else "None"},
        "workspace": dict(workspace),
        "expiresAt": rfc3339(expires_at),
        "shutdownPolicy": "Delete",
    }
    if spec.env:
        body["envFrom"] = [{"secretName": env_secret_name(name)}]
    if source is not None:
        body["source"] = {"snapshotName": name_of(source)}
    if runtime_class:
        body["runtimeClassName"] = runtime_class
    metadata = {"name": name, "labels": {LABEL_API_ID: id_of(name)}, "annotations": annotations}
    return {"apiVersion": API_VERSION, "kind": "Sandbox", "metadata": metadata, "spec": body}


def secret_manifest(name: str, owner: Object, values: Mapping[str, str]) -> Object:
    """A Secret with env values that goes with its Sandbox."""
    reference = {"apiVersion": API_VERSION, "kind": "Sandbox", "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
    metadata = {"name": name, "labels": {f"{GROUP}/component": "env"}, "ownerReferences": [reference]}
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "stringData": dict(values)}


def snapshot_manifest(name: str, sandbox: str, display_name: str | None, created_at: datetime) -> Object:
    """The Snapshot for a request to take one."""
    annotations = {ANNOTATION_CREATED: rfc3339(created_at), ANNOTATION_SANDBOX: id_of(sandbox)}
    spec: Object = {"source": {"sandboxName": sandbox}}
    if display_name is not None:
        spec["displayName"] = display_name
    metadata = {"name": name, "labels": {LABEL_API_ID: id_of(name)}, "annotations": annotations}
    return {"apiVersion": API_VERSION, "kind": "Snapshot", "metadata": metadata, "spec": spec}


def is_going(raw: Object) -> bool:
    """It is being deleted: for the API it is gone."""
    return bool(raw["metadata"].get("deletionTimestamp"))


def is_whole(raw: Object) -> bool:
    """The Snapshot is in the store, and stays."""
    return not is_going(raw) and (raw.get("status") or {}).get("phase") == "Ready"


def is_ready(raw: Object) -> bool:
    """The condition Ready holds: a command can run in it. Not asked of the newest generation: a changed expiry is no reason to refuse a command."""
    return any(one["type"] == "Ready" and one["status"] == "True" for one in (raw.get("status") or {}).get("conditions") or ())


def reason_of(raw: Object) -> tuple[str, str]:
    """Reason and message of what it is now, empty while nothing is known."""
    status = raw.get("status") or {}
    return status.get("reason") or "", status.get("message") or ""


def created_at(metadata: Any) -> datetime:
    """When it was created, as exactly as is known."""
    told = metadata.annotations.get(ANNOTATION_CREATED)
    if told:
        try:
            return datetime.fromisoformat(told)
        except ValueError:
            pass  # somebody edited it
    return metadata.creation_timestamp or datetime.now(UTC)


def sandbox_of(raw: Object) -> Sandbox:
    """A Sandbox as the API shows it."""
    found = SandboxObject.read(raw)
    spec, status = found.spec, found.status
    phase = _PHASES.get(status.phase or "Pending", "Pending")
    runs = is_ready(raw) or phase == "Restoring"
    if runs and phase not in ("Running", "Restoring"):
        phase = "Running"
    elif not runs and phase == "Running":
        phase = "Pending"
    last = status.last_termination
    return Sandbox(
        id=id_of(found.metadata.name),
        status="running" if runs else "stopped",
        image=spec.image,
        cpus=float(quantity(spec.resources.cpu)),
        memory_mb=int(quantity(spec.resources.memory) / MEBIBYTE),
        pids_limit=spec.pids_limit,
        network=spec.network.mode != "None",
        read_only_rootfs=spec.read_only_root_filesystem,
        created_at=created_at(found.metadata),
        expires_at=spec.expires_at or status.expires_at or NO_END,
        source_snapshot_id=id_of(spec.source.snapshot_name) if spec.source else None,
        phase=phase,
        reason=None if runs and phase == "Running" else status.reason,
        message=None if runs and phase == "Running" else status.message,
        labels=api_labels(found.metadata.annotations),
        incarnation=status.incarnation or 1,
        last_termination=Termination(reason=last.reason, message=last.message, exit_code=last.exit_code, time=last.time) if last else None,
    )


def spec_of(raw: Object, env: Mapping[str, str]) -> SandboxSpec:
    """The complete spec of a Sandbox, with the values of its env."""
    shown = sandbox_of(raw)
    plain = {one["name"]: one.get("value", "") for one in raw["spec"].get("env") or ()}
    return SandboxSpec(
        image=shown.image,
        cpus=shown.cpus,
        memory_mb=shown.memory_mb,
        pids_limit=shown.pids_limit,
        network=shown.network,
        read_only_rootfs=shown.read_only_rootfs,
        env=plain | dict(env),
        labels=shown.labels,
    )


def snapshot_of(raw: Object) -> Snapshot:
    """A Snapshot as the API shows it."""
    found = SnapshotObject.read(raw)
    status = found.status
    sandbox = found.metadata.annotations.get(ANNOTATION_SANDBOX) or id_of(found.spec.source.sandbox_name or "")
    return Snapshot(
        id=id_of(found.metadata.name),
        sandbox_id=sandbox,
        name=found.spec.display_name,
        image=status.source_spec.image if status.source_spec else "",
        size_bytes=status.size_bytes or 0,
        created_at=created_at(found.metadata),
        file_count=status.file_count,
        digest=status.digest,
        parent_id=id_of(status.parent) if status.parent else None,
    )


def snapshot_spec_of(raw: Object, env: Mapping[str, str]) -> SandboxSpec:
    """The spec of the sandbox that a Snapshot was taken of, for a fork. BackendError when values of its env are not known any more."""
    found = SnapshotObject.read(raw)
    source = found.status.source_spec
    shown = id_of(found.metadata.name)
    if source is None:
        raise BackendError(f"snapshot {shown} does not tell what its sandbox was, so it cannot be forked: create a sandbox and roll it back to it")
    missing = [name for name in source.env_names if name not in env]
    if missing:
        raise BackendError(
            f"the values of {', '.join(missing[:10])} in the environment of snapshot {shown} are gone, so it cannot be forked: "
            "create a sandbox with them and roll it back to the snapshot"
        )
    return SandboxSpec(
        image=source.image,
        cpus=float(quantity(source.cpu)),
        memory_mb=int(quantity(source.memory) / MEBIBYTE),
        pids_limit=source.pids_limit,
        network=source.network_mode != "None",
        read_only_rootfs=source.read_only_root_filesystem,
        env={name: env[name] for name in source.env_names},
        labels=dict(source.labels),
    )


def create_error(raw: Object) -> SandboxError:
    """Why a Sandbox did not come up, with the API's status code for it."""
    reason, message = reason_of(raw)
    kind = _CREATE_ERRORS.get(reason, BackendError)
    return kind(f"the sandbox did not start ({reason or 'no reason is known'}): {message or 'the operator said nothing; look whether it runs'}")


def snapshot_error(raw: Object) -> SandboxError:
    """Why a Snapshot failed."""
    reason, message = reason_of(raw)
    sandbox = raw["metadata"].get("annotations", {}).get(ANNOTATION_SANDBOX, "")
    if reason == "SandboxNotFound":
        return SandboxNotFound(sandbox)
    return _SNAPSHOT_ERRORS.get(reason, BackendError)(f"no snapshot was taken of sandbox {sandbox} ({reason}): {message}")


def restore_error(sandbox_id: str, snapshot_id: str, last: Mapping[str, Any]) -> SandboxError:
    """Why a rollback did not happen."""
    if last["phase"] == "Superseded":
        return Conflict(f"the rollback of sandbox {sandbox_id} gave way to a newer one: {last.get('message', '')}")
    message = last.get("message", "")
    if "does not exist" in message and "Snapshot" in message:
        return SnapshotNotFound(snapshot_id)
    return BackendError(f"sandbox {sandbox_id} was not rolled back to {snapshot_id}: {message}")


def why_stopped(raw: Object) -> str:
    """For messages: what happened to it."""
    reason, message = reason_of(raw)
    shown = id_of(raw["metadata"]["name"])
    return f"sandbox {shown} is stopped ({reason or 'Pending'}): {message or 'it is being started; try again in a few seconds'}"
