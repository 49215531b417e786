"""kind: Snapshot. The files of a workspace, kept outside the sandbox; they outlive it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from agent_sandbox_core.models import Timestamp

from .common import API_VERSION, KIND_SANDBOX, KIND_SNAPSHOT, Condition, Meta, Resource
from .rules import Rule, own_name, own_name_field, schema, shaped

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

    location: Annotated[
        str,
        Field(
            min_length=1,
            max_length=1024,
            json_schema_extra=schema(
                Rule(
                    "!self.startsWith('/') && !self.matches(r'(^|/)[.]{1,2}(/|$)')",
                    "must be a path below the store's root, without a leading '/' and without '.' and '..'",
                )
            ),
        ),
    ]
    """Where the file is: a path below the store's root."""
    digest: Annotated[str, shaped(r"^sha256:[0-9a-f]{64}$", "must be sha256: and 64 hexadecimal digits in lower case", 71)]
    """sha256 of the whole file; another content is refused."""


class SnapshotSource(Resource):
    """What is kept: exactly one of the two."""

    model_config = ConfigDict(
        json_schema_extra=schema(
            Rule("has(self.sandboxName) != has(self.archive)", "give exactly one of sandboxName (a snapshot of it) and archive (an import)"),
            map_type="atomic",
        )
    )

    sandbox_name: Annotated[str, own_name_field(KIND_SANDBOX)] | None = None
    """A Sandbox of the same namespace."""
    archive: ArchiveSource | None = None
    """An import."""


class SnapshotSpec(Resource):
    """What to keep. source is immutable."""

    model_config = ConfigDict(
        json_schema_extra=schema(
            Rule("self.source == oldSelf.source", "source is immutable, a Snapshot is of one moment: create another Snapshot", path=".source"),
        )
    )

    source: SnapshotSource
    """What is kept: exactly one of the two."""
    display_name: Annotated[str, Field(max_length=128)] | None = None
    """A name for people; any text."""
    deletion_policy: Literal["Delete", "Retain"] = "Delete"
    """What becomes of the stored file when the Snapshot is deleted."""


class SourceSpec(Resource):
    """What the sandbox was: as much as a fork needs. No env values."""

    image: str
    """Its image."""
    cpu: str
    """Its CPU limit."""
    memory: str
    """Its memory limit."""
    pids_limit: int
    """How many processes and threads it could have."""
    network_mode: str
    """What it could reach."""
    read_only_root_filesystem: bool
    """Whether only /workspace and /tmp were writable."""
    runtime_class_name: str | None = None
    """Its RuntimeClass."""
    workspace_size: str | None = None
    """The size of its workspace."""
    storage_class_name: str | None = None
    """The StorageClass of its workspace."""
    ephemeral: bool = False
    """Whether its workspace was an emptyDir."""
    env_names: Annotated[list[str], Field(max_length=512, json_schema_extra=schema(list_type="atomic"))] = Field(default_factory=list)
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
    conditions: Annotated[list[Condition], Field(max_length=8, json_schema_extra=schema(list_type="map", list_map_keys=["type"]))] = Field(
        default_factory=list
    )
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
    """When it last said so; renewed while it works."""


class SnapshotObject(Resource):
    """The files of a sandbox's workspace, kept outside it: for rollbacks and forks. It outlives the sandbox."""

    model_config = ConfigDict(json_schema_extra=schema(own_name(KIND_SNAPSHOT)))

    api_version: str = API_VERSION
    kind: str = KIND_SNAPSHOT
    metadata: Meta
    spec: SnapshotSpec
    status: SnapshotStatus = SnapshotStatus()

    @classmethod
    def read(cls, raw: dict[str, Any]) -> SnapshotObject:
        """From the API server's JSON."""
        return cls.model_validate(raw)
