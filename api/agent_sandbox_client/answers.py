"""What the SDK gives back, as plain immutable data. Unknown keys of newer servers are left out; nothing is validated a second time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeVar

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SandboxInfo:
    """A sandbox as the server showed it last. `reason` and `message` say why it is not running."""

    id: str
    status: Literal["running", "stopped"]
    image: str
    cpus: float
    memory_mb: int
    pids_limit: int
    network: bool
    read_only_rootfs: bool
    created_at: datetime
    expires_at: datetime
    source_snapshot_id: str | None = None
    phase: str | None = None
    reason: str | None = None
    message: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    incarnation: int = 1
    """How often it started: with a new number the commands of before are gone."""


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """The facts of a snapshot; `size_bytes` is what it takes in the store."""

    id: str
    sandbox_id: str
    name: str | None
    image: str
    size_bytes: int
    created_at: datetime
    file_count: int | None = None
    digest: str | None = None
    parent_id: str | None = None


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file. Bytes of `name` and `path` that are not UTF-8 appear as %XX."""

    name: str
    path: str
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    modified_at: datetime


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The outcome of a command that ended. Exit code 128+n is death by signal n, 127 not found, 126 not executable."""

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool
    truncated: bool
    """Output is missing: there was more than the server, or this result, keeps."""
    duration_ms: int

    @property
    def ok(self) -> bool:
        """Whether it exited with 0 and in time."""
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """A piece of a command's output. A `gap` has no text: output before it was dropped because nobody read it in time."""

    stream: Literal["stdout", "stderr", "gap"]
    text: str
    seq: int
    """Its number; following can go on after it, also from another program."""


@dataclass(frozen=True, slots=True)
class CommandInfo:
    """A background command as the server showed it last."""

    id: str
    command: str | list[str]
    state: Literal["running", "exited"]
    pid: int
    started_at: datetime
    tag: str | None = None
    exit_code: int | None = None
    reason: Literal["exited", "signaled", "timed_out", "out_of_memory", "could_not_start", "killed"] | None = None
    duration_ms: int | None = None
    pty: bool = False
    stdin: bool = False


_TIMES = frozenset({"created_at", "expires_at", "modified_at", "started_at"})
_Answer = TypeVar("_Answer", SandboxInfo, SnapshotInfo, FileInfo, CommandInfo)


def read_answer(kind: type[_Answer], data: Json) -> _Answer:
    """An answer's object from its JSON."""
    known = kind.__dataclass_fields__
    return kind(**{name: datetime.fromisoformat(value) if name in _TIMES else value for name, value in data.items() if name in known})
