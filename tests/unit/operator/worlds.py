"""Sandboxes, pods and PVCs as the API server gives them, for tests of pure code."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from agent_sandbox_core.v1alpha1 import ANNOTATION_RESTORED, SandboxObject, child_name
from agent_sandbox_operator.seen import NetworkView, Seen
from agent_sandbox_operator.specs import Birth, PodOptions, build_pod, build_pvc
from agent_sandbox_operator.views import PodView, PvcView, read_pod, read_pvc

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
UID = "0123abcd-1111-2222-3333-444455556666"
OPTIONS = PodOptions(init_image="registry.test/sandbox-init@sha256:1")
NETWORK = NetworkView("Unknown", "NotVerified", "nobody has looked")
CHILD = child_name("one", UID)


def wire(moment: datetime) -> str:
    """As the API server writes a time."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def ago(seconds: float) -> str:
    """So long before NOW."""
    return wire(NOW - timedelta(seconds=seconds))


def sandbox(status: dict[str, Any] | None = None, *, age: float = 60, deleting: bool = False, generation: int = 1, **spec: Any) -> SandboxObject:
    """A Sandbox called `one`, with fields of its spec by their wire names."""
    metadata: dict[str, Any] = {"name": "one", "namespace": "ns", "uid": UID, "generation": generation, "creationTimestamp": ago(age)}
    if deleting:
        metadata["deletionTimestamp"] = ago(0)
    return SandboxObject.read({"metadata": metadata, "spec": {"image": "python:3", **spec}, "status": status or {}})


def pvc(
    of: SandboxObject, *, phase: str = "Bound", marker: str | None = None, owner: str = UID, deleted: bool = False, size: str | None = None
) -> PvcView:
    """Its PVC."""
    raw = build_pvc(of)
    raw["metadata"] |= {"uid": "pvc-uid", "resourceVersion": "1"}
    raw["metadata"]["ownerReferences"][0]["uid"] = owner
    if marker is not None:
        raw["metadata"]["annotations"][ANNOTATION_RESTORED] = marker
    if deleted:
        raw["metadata"]["deletionTimestamp"] = ago(1)
    if size is not None:
        raw["spec"]["resources"]["requests"]["storage"] = size
    raw["status"] = {"phase": phase}
    return read_pvc(raw)


RUNNING = {"running": {"startedAt": ago(30)}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    """A container's state."""
    return {"waiting": {"reason": reason, "message": message}}


def ended(reason: str = "Error", code: int = 1, *, seconds: float = 5, message: str = "") -> dict[str, Any]:
    """A container's state."""
    return {"terminated": {"reason": reason, "exitCode": code, "startedAt": ago(30), "finishedAt": ago(seconds), "message": message}}


def raw_pod(
    of: SandboxObject,
    state: dict[str, Any] | None = None,
    *,
    last: dict[str, Any] | None = None,
    restarts: int = 0,
    age: float = 40,
    birth: Birth | None = None,
    options: PodOptions = OPTIONS,
    node: str = "node1",
    deleted: float | None = None,
    status: dict[str, Any] | None = None,
    conditions: list[dict[str, Any]] | None = None,
    owner: str = UID,
    marker: str | None = None,
) -> dict[str, Any]:
    """Its pod. `state` is that of the container, None before the kubelet has told anything."""
    raw = build_pod(of, options, birth or Birth())
    raw["metadata"] |= {"uid": "pod-uid", "creationTimestamp": ago(age), "resourceVersion": "1"}
    raw["metadata"]["ownerReferences"][0]["uid"] = owner
    if marker is not None:
        raw["metadata"]["annotations"][ANNOTATION_RESTORED] = marker
    if deleted is not None:
        raw["metadata"]["deletionTimestamp"] = ago(deleted)
    if node:
        raw["spec"]["nodeName"] = node
    found: dict[str, Any] = {"phase": "Running" if state and "running" in state else "Pending", "conditions": conditions or []}
    if state is not None:
        found["containerStatuses"] = [{"name": "sandbox", "state": state, "lastState": last or {}, "restartCount": restarts}]
    raw["status"] = found | (status or {})
    return raw


def pod(of: SandboxObject, state: dict[str, Any] | None = None, **more: Any) -> PodView:
    """Its pod, read."""
    return read_pod(raw_pod(of, state, **more))


def seen(of: SandboxObject, the_pod: PodView | None = None, the_pvc: PvcView | None = None, **more: Any) -> Seen:
    """All that a decision is made from."""
    return Seen(sandbox=of, pod=the_pod, pvc=the_pvc, **{"now": NOW, "network": NETWORK, **more})
