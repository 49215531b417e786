"""kind: Snapshot. The files of a workspace, kept outside the sandbox; they outlive it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agent_sandbox_core.models import Timestamp

from .common import API_VERSION, KIND_SNAPSHOT, NAME_PATTERN, Condition, Meta, Resource

SnapshotPhase = Literal["Pending", "Running", "Ready", "Failed", "Deleting"]
SnapshotReason = Literal[
    "Ready",
    "Waiting",
    "Taking",
    "Importing",
    "SandboxNotFound",
    "SandboxNotRunning",
    "TooLarge",
    "StoreUnreachable",
    "StoreFull",
    "DigestMismatch",
    "HostileArchive",
    "Interrupted",
    "BlobMissing",
    "Failed",
]
"""Reasons of the condition Ready."""


class ArchiveSource(Resource):
    """A snapshot file that is in the store already, or was put there for import."""

    location: Annotated[str, Field(min_length=1, max_length=1024)]
    """Where the file is: a path below the store's root."""
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    """sha256 of the whole file; another content is refused."""


class SnapshotSource(Resource):
    """What is kept: exactly one of the two."""

    sandbox_name: Annotated[str, Field(min_length=1, max_length=50, pattern=NAME_PATTERN)] | None = None
    """A Sandbox of the same namespace."""
    archive: ArchiveSource | None = None
    """An import."""


class SnapshotSpec(Resource):
    """What to keep. source is immutable."""

    source: SnapshotSource
    """What is kept."""
    display_name: Annotated[str, Field(max_length=128)] | None = None
    """A name for people; any text."""
    deletion_policy: Literal["Delete", "Retain"] = "Delete"
    """What becomes of the stored file when the Snapshot is deleted."""


class SourceSpec(Resource):
    """What the sandbox was: as much as a fork needs. No env values."""

    image: str
    cpu: str
    memory: str
    pids_limit: int
    network_mode: str
    read_only_root_filesystem: bool
    runtime_class_name: str | None = None
    workspace_size: str | None = None
    storage_class_name: str | None = None
    ephemeral: bool = False
    env_names: Annotated[list[str], Field(max_length=512)] = Field(default_factory=list)
    """Names of the variables; values are in the Secret."""
    env_secret_name: str | None = None
    """A Secret owned by the Snapshot with the values, for forks."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels given by the API's caller."""


class SnapshotStatus(Resource):
    """What is; written by the mover."""

    phase: SnapshotPhase | None = None
    """The state in one word."""
    reason: Annotated[str, Field(max_length=128)] | None = None
    """Reason of the condition Ready."""
    message: Annotated[str, Field(max_length=4096)] | None = None
    """Message of the condition Ready."""
    conditions: Annotated[list[Condition], Field(max_length=8)] = Field(default_factory=list)
    """Ready."""
    observed_generation: int | None = Field(default=None, ge=0)
    """The metadata.generation that this status is about."""
    location: str | None = None
    """Where the file is, below the store's root."""
    digest: str | None = None
    """sha256 of the file."""
    size_bytes: int | None = Field(default=None, ge=0)
    """Size of the file, compressed."""
    file_count: int | None = Field(default=None, ge=0)
    """Entries in it."""
    taken_at: Timestamp | None = None
    """The moment the files are from."""
    sandbox_uid: str | None = None
    """uid of the Sandbox it was taken of."""
    parent: str | None = None
    """The Snapshot that the sandbox's files came from last."""
    source_spec: SourceSpec | None = None
    """What the sandbox was."""
    claimed_by: Annotated[str, Field(max_length=253)] | None = None
    """The mover that works on it."""
    claimed_at: Timestamp | None = None
    """Since when."""


class SnapshotObject(Resource):
    """A Snapshot as the API server gives it."""

    api_version: str = API_VERSION
    kind: str = KIND_SNAPSHOT
    metadata: Meta
    spec: SnapshotSpec
    status: SnapshotStatus = SnapshotStatus()

    @classmethod
    def read(cls, raw: dict[str, Any]) -> SnapshotObject:
        """From the API server's JSON."""
        return cls.model_validate(raw)
