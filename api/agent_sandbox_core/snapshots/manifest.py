"""What a snapshot says about itself: the manifest inside its archive, and the record beside it whose existence is the commit.

Both are JSON, format 1. Additions keep the number, so readers ignore keys that they do not know. Neither holds a value of `env`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from agent_sandbox_core.models import Model, SandboxSpec, Snapshot, Timestamp


class StoredSpec(Model):
    """A sandbox's spec as it may be stored: the names of its env variables, never their values."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    image: str
    cpus: float
    memory_mb: int
    pids_limit: int
    network: bool
    read_only_rootfs: bool
    labels: dict[str, str] = Field(default_factory=dict)
    env_names: list[str] = Field(default_factory=list)

    @classmethod
    def of(cls, spec: SandboxSpec) -> StoredSpec:
        """The spec without the values of its env."""
        return cls.model_validate(spec.without_env_values())

    def complete(self, env: dict[str, str]) -> SandboxSpec:
        """The whole spec again, with values that were kept elsewhere."""
        return SandboxSpec(**self.model_dump(exclude={"env_names"}), env=env)


class Manifest(Model):
    """First member of the archive."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal[1] = 1
    id: str
    sandbox_id: str
    name: str | None = None
    spec: StoredSpec
    created_at: Timestamp
    parent_id: str | None = None
    """The snapshot whose files the sandbox was last given (by a fork or a rollback)."""
    requested_by: str | None = None
    instance: str | None = None
    """The installation that took it."""
    resource: dict[str, Any] | None = None
    """On a cluster: what the Sandbox was, as its Snapshot's status.sourceSpec says it."""

    def to_bytes(self) -> bytes:
        """The bytes of the member."""
        return self.model_dump_json().encode()


class Record(Model):
    """`<id>.json` in the store: written last and only once. `digest` is `sha256:` and the hex digest of the whole blob."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal[1] = 1
    manifest: Manifest
    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    size_bytes: int = Field(ge=0)
    """Of the blob, compressed."""
    tar_bytes: int = Field(ge=0)
    entries: int = Field(ge=0)
    file_count: int = Field(ge=0)
    data_bytes: int = Field(ge=0)
    """Of the files, holes left out."""
    skipped: int = Field(default=0, ge=0)
    """Sockets, pipes and devices that were left out."""

    @property
    def id(self) -> str:
        """The snapshot's id."""
        return self.manifest.id

    def to_bytes(self) -> bytes:
        """The bytes of the object."""
        return self.model_dump_json().encode()

    def to_snapshot(self) -> Snapshot:
        """As the API shows it."""
        manifest = self.manifest
        return Snapshot(
            id=manifest.id,
            sandbox_id=manifest.sandbox_id,
            name=manifest.name,
            image=manifest.spec.image,
            size_bytes=self.size_bytes,
            created_at=manifest.created_at,
            file_count=self.file_count,
            digest=self.digest,
            parent_id=manifest.parent_id,
        )
