"""Pods that find out whether network policies bite: one that they cut off, and one that nothing is said about."""

from __future__ import annotations

from typing import Any, Final

from agent_sandbox_core import hardening
from agent_sandbox_core.v1alpha1 import LABEL_COMPONENT, LABEL_NETWORK

from .pod import IMAGE_BINARY, container_security

CANARY: Final = "canary"
"""Component of the pod that is cut off like a sandbox without a network."""
CONTROL: Final = "canary-control"
"""Component of the pod that no policy of ours selects."""
DEADLINE_SECONDS: Final = 120
PATIENCE: Final = "20s"


def build_canary(name: str, namespace: str, component: str, init_image: str) -> dict[str, Any]:
    """A pod that dials the API server's service, whose address every pod is told: until nobody answers, or until somebody does."""
    expect = ["--open"] if component == CONTROL else []
    few = {"cpu": "50m", "memory": "32Mi", "ephemeral-storage": "16Mi"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {LABEL_COMPONENT: component, LABEL_NETWORK: "none"}},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": hardening.UID,
                "runAsGroup": hardening.GID,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "canary",
                    "image": init_image,
                    "command": [IMAGE_BINARY, "reach", f"--time={PATIENCE}", *expect],
                    "resources": {"limits": few, "requests": few},
                    "securityContext": {**container_security(), "readOnlyRootFilesystem": True},
                }
            ],
        },
    }
