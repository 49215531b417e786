"""Custom resources as the API server gives them, for tests."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from agent_sandbox_core.v1alpha1 import SandboxObject, SnapshotObject

NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)
UID = "5f0c8a3e-1111-4222-8333-444455556666"


def sandbox(*, spec: dict[str, Any] | None = None, status: dict[str, Any] | None = None, **metadata: Any) -> SandboxObject:
    return SandboxObject.read(
        {
            "apiVersion": "agentsandbox.dev/v1alpha1",
            "kind": "Sandbox",
            "metadata": {"name": "box", "namespace": "agents", "uid": UID, "generation": 1, "creationTimestamp": "2026-12-01T11:59:00Z", **metadata},
            "spec": {"image": "python:3.12-slim", **(spec or {})},
            "status": {"phase": "Running", "podName": "box-5f0c8a3e", "pvcName": "box-5f0c8a3e", **(status or {})},
        }
    )


def snapshot(*, spec: dict[str, Any] | None = None, status: dict[str, Any] | None = None, **metadata: Any) -> SnapshotObject:
    return SnapshotObject.read(
        {
            "apiVersion": "agentsandbox.dev/v1alpha1",
            "kind": "Snapshot",
            "metadata": {
                "name": "nightly",
                "namespace": "agents",
                "uid": "aaaabbbb-1111-4222-8333-444455556666",
                "generation": 3,
                "creationTimestamp": "2026-12-01T11:59:50Z",
                **metadata,
            },
            "spec": {"source": {"sandboxName": "box"}, **(spec or {})},
            "status": status or {},
        }
    )


def last(request_id: str, phase: str, **more: Any) -> dict[str, Any]:
    return {"requestID": request_id, "snapshotName": "nightly", "phase": phase, **more}
