"""The status of a Sandbox: computed whole from what was seen, written only where it differs.

Conditions, each with a cause in `reason` and a next step in `message`:

Ready                True: a command can be run in it now.
WorkspaceReady       True: its files are there, and stay where its pod goes.
NetworkEnforced      True: it was seen that the network policies bite in this cluster. Unknown: nobody has looked.
Isolation            True: root in the sandbox is nobody on the node (a user namespace), or the sandbox has a kernel of its own (a RuntimeClass).
PidsLimitEnforced    True: the kernel holds spec.pidsLimit for the sandbox as a whole.

`lastRestore` is the mover's and never written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, Literal

from agent_sandbox_core import hardening
from agent_sandbox_core.v1alpha1 import Condition, SandboxStatus

from .seen import Seen, Verdict, effective_expiry
from .views import PvcView

Status = Literal["True", "False", "Unknown"]
Finding = tuple[Status, str, str]
MAX_MESSAGE: Final = 2000
_NEWS: Final = frozenset({"phase", "reason", "message", "observedGeneration", "expiresAt", "lastTermination"})
_MOVERS: Final = frozenset({"last_restore"})
_NOT_RUNNING: Final[Finding] = ("Unknown", "NotRunning", "it is told once the sandbox runs")

_NO_PVC: Final[Finding] = ("Unknown", "Creating", "its PVC is being made")


def build_status(seen: Seen, verdict: Verdict) -> dict[str, Any]:
    """The operator's part of the status, as JSON; what is unset is left out."""
    before, pod, life = seen.sandbox.status, seen.pod, seen.life
    answered = seen.probe if seen.probe is not None and seen.probe.state == "answered" else None
    pvc_name = seen.pvc.name if seen.pvc is not None and seen.pvc.owner_uid == seen.sandbox.metadata.uid else before.pvc_name
    ours = pod is not None and pod.owner_uid == seen.sandbox.metadata.uid
    status = SandboxStatus(
        phase=verdict.phase,
        reason=verdict.reason,
        message=verdict.message[:MAX_MESSAGE],
        conditions=build_conditions(seen, verdict),
        observed_generation=seen.sandbox.metadata.generation,
        pod_name=pod.name if pod is not None and ours else None,
        pvc_name=None if seen.ephemeral else pvc_name,
        node_name=(pod.node or None) if pod is not None and ours else None,
        image=pod.image if pod is not None and ours and pod.running else None,
        pod_template_hash=pod.template_hash if pod is not None and ours else before.pod_template_hash,
        expires_at=effective_expiry(seen.sandbox),
        incarnation=life.incarnation,
        recent_starts=list(life.recent),
        last_termination=life.last_termination,
        init_version=answered.version if answered is not None else before.init_version,
    )
    return status.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=set(_MOVERS))


def status_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The merge patch from one to the other, empty when nothing differs. The mover's fields are not in it."""
    theirs = {"lastRestore"}
    patch: dict[str, Any] = {key: value for key, value in after.items() if before.get(key) != value}
    patch |= {key: None for key in before if key not in after and key not in theirs}
    # A merge patch goes into objects: a field that the new one lacks would stay.
    for key, value in patch.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, Mapping):
            patch[key] = {**dict.fromkeys(old, None), **value}
    return patch


def is_news(patch: Mapping[str, Any], before: Mapping[str, Any], verdict: Verdict) -> bool:
    """Whether a patch is worth a write now. On the way to Ready the small steps (a node, a volume, a first start) go with the next one that is."""
    if verdict.ready == "True" or _NEWS & patch.keys():
        return True
    return "conditions" in patch and _workspace(patch["conditions"]) != _workspace(before.get("conditions") or ())


def _workspace(conditions: Iterable[Mapping[str, Any]]) -> list[str]:
    return [one["reason"] for one in conditions if one["type"] == "WorkspaceReady" and one["status"] == "False"]


def build_conditions(seen: Seen, verdict: Verdict) -> list[Condition]:
    """All five, in their order; the time of a transition changes with the status only."""
    found: dict[str, Finding] = {
        "Ready": (verdict.ready, verdict.reason, verdict.message),
        "WorkspaceReady": judge_workspace(seen, verdict),
        "NetworkEnforced": (seen.network.status, seen.network.reason, seen.network.message),
        "Isolation": judge_isolation(seen),
        "PidsLimitEnforced": judge_pids(seen),
    }
    return [_condition(seen, kind, finding) for kind, finding in found.items()]


def judge_workspace(seen: Seen, verdict: Verdict) -> Finding:
    """Whether the files are there."""
    if verdict.reason in {"WorkspaceLost", "WorkspaceUnbound", "Filling", "SnapshotFailed", "SnapshotMissing"}:
        return "False", verdict.reason, verdict.message
    if seen.ephemeral:
        there = seen.pod is not None and seen.pod.running
        return ("True", "Ephemeral", "it lives in the pod and goes with it") if there else _NOT_RUNNING
    return _NO_PVC if seen.pvc is None else judge_pvc(seen, seen.pvc)


def judge_pvc(seen: Seen, pvc: PvcView) -> Finding:
    """Whether the PVC has a volume, and keeps it."""
    if pvc.deleted is not None:
        message = f"PVC {pvc.name} was deleted and goes with its last user, the pod. Take a Snapshot now, and make a new Sandbox from it"
        return "False", "WaitingForDeletion", message
    if pvc.phase != "Bound":
        return "Unknown", "Creating", f"PVC {pvc.name} has no volume yet"
    if seen.grow_refusal is not None:
        return "True", "NotGrown", f"it stays at {pvc.size}: {seen.grow_refusal}. Choose a class with allowVolumeExpansion for a new Sandbox"
    return "True", "Bound", f"PVC {pvc.name} is bound"


def judge_isolation(seen: Seen) -> Finding:
    """What stands between the sandbox's code and the node's kernel besides the container itself."""
    pod, name = seen.pod, seen.sandbox.spec.runtime_class_name
    if pod is None or not pod.running:
        return _NOT_RUNNING
    if name is not None:
        return "True", "RuntimeClass", f"it runs under RuntimeClass {name}; what that isolates is its handler's matter"
    if not pod.host_users:
        return "True", "UserNamespace", "it has a user namespace of its own"
    message = "it shares the node's user namespace: switched off, or the node's kernel, runtime or file system has none. spec.runtimeClassName may name a sandboxed runtime"
    return "False", "NoUserNamespace", message


def judge_pids(seen: Seen) -> Finding:
    """Whether the kernel holds spec.pidsLimit. The kubelet sets one limit for all pods of a node; a pod has none of its own."""
    if seen.pod is None or not seen.pod.running:
        return _NOT_RUNNING
    asked = seen.sandbox.spec.pids_limit
    if seen.probe is None or seen.probe.state != "answered" or not seen.probe.measured:
        known = seen.sandbox.condition("PidsLimitEnforced")
        return (known.status, known.reason, known.message) if known is not None else _NOT_RUNNING
    limit = seen.probe.pids_limit
    if limit is None:
        return (
            "False",
            "NoLimit",
            f"no limit of processes is seen in the sandbox: {asked} is not enforced. Set podPidsLimit in the kubelet's configuration",
        )
    if limit > asked + hardening.GUEST_ALLOWANCE.pids:
        return "False", "NodeLimit", f"the node's limit of {limit} processes holds, not {asked}: lower podPidsLimit in the kubelet's configuration"
    return "True", "NodeLimit", f"the node's limit of {limit} processes holds"


def _condition(seen: Seen, kind: str, finding: Finding) -> Condition:
    status, reason, message = finding
    before = seen.sandbox.condition(kind)
    since = before.last_transition_time if before is not None and before.status == status else _whole_seconds(seen.now)
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message[:MAX_MESSAGE],
        last_transition_time=since,
        observed_generation=seen.sandbox.metadata.generation,
    )


def _whole_seconds(time: datetime) -> datetime:
    return time.replace(microsecond=0)
