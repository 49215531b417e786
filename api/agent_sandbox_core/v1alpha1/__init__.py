"""The custom resources of group agentsandbox.dev, version v1alpha1. The single source: `crds/` is generated from here."""

from .common import (
    ANNOTATION_RESTORED,
    GROUP,
    KIND_SANDBOX,
    KIND_SNAPSHOT,
    LABEL_API_ID,
    LABEL_COMPONENT,
    LABEL_NETWORK,
    LABEL_SANDBOX,
    LABEL_SANDBOX_UID,
    MAX_NAME_LENGTH,
    VERSION,
    Condition,
    EnvVar,
    Meta,
)
from .sandbox import (
    SandboxObject,
    SandboxPhase,
    SandboxReason,
    SandboxSpec,
    SandboxStatus,
)
from .snapshot import SnapshotObject, SnapshotPhase, SnapshotReason, SnapshotSpec, SnapshotStatus

__all__ = [
    "ANNOTATION_RESTORED",
    "GROUP",
    "KIND_SANDBOX",
    "KIND_SNAPSHOT",
    "LABEL_API_ID",
    "LABEL_COMPONENT",
    "LABEL_NETWORK",
    "LABEL_SANDBOX",
    "LABEL_SANDBOX_UID",
    "MAX_NAME_LENGTH",
    "VERSION",
    "Condition",
    "EnvVar",
    "Meta",
    "SandboxObject",
    "SandboxPhase",
    "SandboxReason",
    "SandboxSpec",
    "SandboxStatus",
    "SnapshotObject",
    "SnapshotPhase",
    "SnapshotReason",
    "SnapshotSpec",
    "SnapshotStatus",
]
