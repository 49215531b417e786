"""The workspace's PVC."""

from __future__ import annotations

from typing import Any

from agent_sandbox_core.v1alpha1 import ANNOTATION_RESTORE_AT_CREATION, ANNOTATION_RESTORED, SandboxObject, child_name

from .identity import child_labels, owner_reference


def restore_marks(sandbox: SandboxObject) -> dict[str, str]:
    """What a fresh workspace says about restores.

    Without a source a requestID that is there at the creation counts as done, so that an applied backup rolls nothing back. With a source the
    workspace is unfilled (an empty marker), and that requestID is kept beside it until the mover has filled it.
    """
    restore = sandbox.spec.restore
    if sandbox.spec.source is None:
        return {ANNOTATION_RESTORED: restore.request_id if restore else "none"}
    marks = {ANNOTATION_RESTORED: ""}
    if restore is not None:
        marks[ANNOTATION_RESTORE_AT_CREATION] = restore.request_id
    return marks


def build_pvc(sandbox: SandboxObject) -> dict[str, Any]:
    """The PVC of a Sandbox that has no ephemeral workspace."""
    workspace = sandbox.spec.workspace
    spec: dict[str, Any] = {"accessModes": [workspace.access_mode], "resources": {"requests": {"storage": workspace.size}}}
    if workspace.storage_class_name is not None:
        spec["storageClassName"] = workspace.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": child_name(sandbox.metadata.name, sandbox.metadata.uid),
            "namespace": sandbox.metadata.namespace,
            "labels": child_labels(sandbox, "workspace"),
            "annotations": restore_marks(sandbox),
            "ownerReferences": [owner_reference(sandbox)],
        },
        "spec": spec,
    }
