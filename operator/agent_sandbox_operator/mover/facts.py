"""What a Snapshot keeps of its Sandbox beside the files: its spec without env values, for forks on a cluster and in Docker mode."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from decimal import ROUND_CEILING
from typing import Any

from agent_sandbox_core.snapshots import Manifest, StoredSpec
from agent_sandbox_core.v1alpha1 import SandboxObject, SnapshotObject, api_labels, sandbox_api_id, snapshot_api_id
from agent_sandbox_core.v1alpha1.quantities import MEBIBYTE, parse_quantity
from agent_sandbox_core.v1alpha1.snapshot import SourceSpec
from pydantic import ValidationError


def source_spec(sandbox: SandboxObject, env_names: Collection[str], env_secret_name: str | None) -> SourceSpec:
    """What the Sandbox is, as a Snapshot's status keeps it."""
    spec = sandbox.spec
    return SourceSpec(
        image=spec.image,
        cpu=spec.resources.cpu,
        memory=spec.resources.memory,
        pids_limit=spec.pids_limit,
        network_mode=spec.network.mode,
        read_only_root_filesystem=spec.read_only_root_filesystem,
        runtime_class_name=spec.runtime_class_name,
        workspace_size=spec.workspace.size,
        storage_class_name=spec.workspace.storage_class_name,
        ephemeral=spec.workspace.ephemeral,
        env_names=sorted(env_names),
        env_secret_name=env_secret_name,
        labels=api_labels(sandbox.metadata.annotations),
    )


def build_manifest(
    snapshot: SnapshotObject, sandbox: SandboxObject, source: SourceSpec, *, parent_id: str | None, installation: str, now: datetime
) -> Manifest:
    """The archive's first member."""
    return Manifest(
        id=snapshot_api_id(snapshot.metadata),
        sandbox_id=sandbox_api_id(sandbox.metadata),
        name=snapshot.spec.display_name,
        spec=StoredSpec(
            image=source.image,
            cpus=float(parse_quantity(source.cpu)),
            memory_mb=int((parse_quantity(source.memory) / MEBIBYTE).to_integral_value(ROUND_CEILING)),
            pids_limit=source.pids_limit,
            network=source.network_mode != "None",
            read_only_rootfs=source.read_only_root_filesystem,
            labels=source.labels,
            env_names=source.env_names,
        ),
        created_at=now,
        parent_id=parent_id,
        instance=installation,
        resource=resource_of(source),
    )


def resource_of(source: SourceSpec) -> dict[str, Any]:
    """The spec as the manifest keeps it: the Secret's name means nothing elsewhere."""
    return source.model_copy(update={"env_secret_name": None}).to_wire()


def recall_source(manifest: Manifest, env_secret_name: str | None = None) -> SourceSpec:
    """The spec that a manifest tells of, one from Docker mode too."""
    if manifest.resource is not None:
        try:
            return SourceSpec.model_validate(manifest.resource).model_copy(update={"env_secret_name": env_secret_name})
        except ValidationError:
            pass  # from a version that says it differently: the part that both modes share is there
    spec = manifest.spec
    return SourceSpec(
        image=spec.image,
        cpu=f"{spec.cpus:g}",
        memory=f"{spec.memory_mb}Mi",
        pids_limit=spec.pids_limit,
        network_mode="Open" if spec.network else "None",
        read_only_root_filesystem=spec.read_only_rootfs,
        env_names=spec.env_names[:512],
        env_secret_name=env_secret_name,
        labels=spec.labels,
    )
