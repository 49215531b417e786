"""Domain models shared by facade, backends and clients. Field names of Sandbox, Snapshot and FileInfo are the HTTP contract's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer


def rfc3339(value: datetime) -> str:
    """RFC 3339 in UTC with a trailing Z, microseconds kept."""
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")


Timestamp = Annotated[AwareDatetime, PlainSerializer(rfc3339, return_type=str, when_used="json")]


class Model(BaseModel):
    """Base: immutable, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SandboxSpec(Model):
    """What a sandbox shall be, complete (defaults filled in, limits checked). `env` values are secret: hidden from repr."""

    image: str
    cpus: float = Field(gt=0)
    memory_mb: int = Field(ge=16)
    pids_limit: int = Field(ge=8)
    network: bool = False
    read_only_rootfs: bool = True
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    labels: dict[str, str] = Field(default_factory=dict)

    def without_env_values(self) -> dict[str, Any]:
        """The spec as it may be stored in manifests and labels: `env_names` in place of `env`."""
        data = self.model_dump(mode="json", exclude={"env"})
        data["env_names"] = sorted(self.env)
        return data


Phase = Literal["Pending", "Running", "Restarting", "Restoring", "Stopped", "Failed", "Deleting"]


class Termination(Model):
    """Why a sandbox last died."""

    reason: str
    message: str
    exit_code: int | None = None
    time: Timestamp


class Sandbox(Model):
    """A sandbox as the API shows it. `reason` and `message` say why it is not running, and what to do next."""

    id: str
    status: Literal["running", "stopped"]
    image: str
    cpus: float
    memory_mb: int
    pids_limit: int
    network: bool
    read_only_rootfs: bool
    created_at: Timestamp
    expires_at: Timestamp
    source_snapshot_id: str | None = None
    phase: Phase = "Running"
    reason: str | None = None
    message: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    incarnation: int = 1
    last_termination: Termination | None = None


class Snapshot(Model):
    """A snapshot as the API shows it; `size_bytes` is the stored (compressed) size of its blob."""

    id: str
    sandbox_id: str
    name: str | None
    image: str
    size_bytes: int
    created_at: Timestamp
    file_count: int | None = None
    digest: str | None = None
    parent_id: str | None = None


class FileInfo(Model):
    """One file. Bytes of `name` and `path` that are not UTF-8 appear as %XX. Exactly these keys (strict readers)."""

    name: str
    path: str
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    modified_at: Timestamp


class Command(Model):
    """A command: a string for `/bin/sh -c`, or an argv list. `timeout_seconds` is already bounded by the caller."""

    command: str | list[str] = Field(repr=False)
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    workdir: str = "/workspace"
    timeout_seconds: float = Field(gt=0)


class ExecResult(Model):
    """The outcome of a command that ended. Exactly these keys (strict readers)."""

    stdout: str = Field(repr=False)
    stderr: str = Field(repr=False)
    exit_code: int
    timed_out: bool
    truncated: bool
    duration_ms: int


class OutputEvent(Model):
    """Output of a running command: valid text, decoded over the whole stream."""

    type: Literal["stdout", "stderr"]
    data: str = Field(repr=False)


class ExitEvent(Model):
    """The last event of a command's stream."""

    type: Literal["exit"] = "exit"
    exit_code: int
    timed_out: bool
    duration_ms: int


StreamEvent = OutputEvent | ExitEvent
