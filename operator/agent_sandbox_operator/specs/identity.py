"""Who a child belongs to, and what it was made from."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, Literal

from agent_sandbox_core.v1alpha1 import GROUP, KIND_SANDBOX, LABEL_COMPONENT, LABEL_SANDBOX, LABEL_SANDBOX_UID, VERSION, SandboxObject, SandboxSpec

Cause = Literal["create", "return", "replace"]
"""Why a pod was made: for a new Sandbox, because the one before died, or because somebody wanted another one (an edit, a longer life)."""

ANNOTATION_TEMPLATE_HASH: Final = f"{GROUP}/template-hash"
"""On the pod: hash of the part of the spec that it was made from."""
ANNOTATION_STARTS_BEFORE: Final = f"{GROUP}/starts-before"
"""On the pod: how often the sandbox had started before this pod. With the container's own count it gives the incarnation, whoever was killed when."""
ANNOTATION_CAUSE: Final = f"{GROUP}/cause"
"""On the pod: its Cause. Only what returns by itself counts against the crash-loop limit."""
ANNOTATION_DELIVERY: Final = f"{GROUP}/init-delivery"
"""On the pod: how sandbox-init got into it."""

_TEMPLATE_FIELDS: Final = frozenset({"image", "command", "env", "env_from", "resources", "node_selector", "tolerations", "image_pull_secrets"})


def owner_reference(sandbox: SandboxObject, *, blocks: bool = False) -> dict[str, Any]:
    """The Sandbox as the controller of a child. `blocks`: a foreground deletion of the Sandbox waits for the child."""
    reference: dict[str, Any] = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND_SANDBOX,
        "name": sandbox.metadata.name,
        "uid": sandbox.metadata.uid,
        "controller": True,
    }
    if blocks:
        reference["blockOwnerDeletion"] = True
    return reference


def child_labels(sandbox: SandboxObject, component: str) -> dict[str, str]:
    """Labels of every child."""
    return {LABEL_SANDBOX: sandbox.metadata.name, LABEL_SANDBOX_UID: sandbox.metadata.uid, LABEL_COMPONENT: component}


def template_hash(spec: SandboxSpec) -> str:
    """Hash of those parts of the spec whose change means a new pod.

    What is at its default is left out, so an operator that knows more fields gives the same hash: an upgrade replaces no running pod.
    """
    parts = spec.model_dump(mode="json", include=set(_TEMPLATE_FIELDS), exclude_defaults=True, exclude_none=True)
    if spec.network.mode != "None":
        parts["network"] = spec.network.mode
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
