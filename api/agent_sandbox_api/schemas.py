"""Bodies of requests and the lists in answers. Unknown fields are refused; values are checked for shape here, for policy in policy.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from agent_sandbox_core.models import FileInfo, Sandbox, Snapshot
from pydantic import BaseModel, ConfigDict, Field, model_validator

Cpus = Annotated[float, Field(gt=0, allow_inf_nan=False, description="CPUs, fractions allowed")]
MemoryMb = Annotated[int, Field(ge=16, description="Memory limit in MiB; there is no swap")]
TimeoutSeconds = Annotated[int, Field(ge=1, description="Time to live in seconds, counted from now")]
Env = Annotated[dict[str, str], Field(default_factory=dict, repr=False, description="Environment variables; their values are never shown again")]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_no_text(cls, body: Any) -> Any:
        # JSON can hold half a surrogate pair (\ud800), which no process, file or database takes.
        for text in _texts(body):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ValueError("a string holds half a surrogate pair, which is no text: send UTF-8") from None
        return body


def _texts(value: Any) -> Iterator[str]:
    """All strings in a decoded JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)


class CreateSandbox(_Request):
    """A new sandbox. Everything has a default; an empty object is fine."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{}, {"image": "python:3.12-slim", "memory_mb": 1024, "timeout_seconds": 3600, "env": {"CI": "1"}}]}
    )

    image: str | None = Field(default=None, description="Image reference; absent, null or empty means the server's default")
    cpus: Cpus | None = None
    memory_mb: MemoryMb | None = None
    pids_limit: int | None = Field(default=None, ge=8, description="Most processes and threads at once")
    network: bool = Field(default=False, description="Outbound access; never to other sandboxes, the host, private ranges or metadata addresses")
    read_only_rootfs: bool = Field(default=True, description="/workspace and /tmp are writable in any case")
    timeout_seconds: TimeoutSeconds | None = None
    env: Env


class ForkSnapshot(_Request):
    """Changes to the source's spec; what is absent or null stays as it was (the time to live: the server's default)."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}, {"memory_mb": 2048, "timeout_seconds": 600}]})

    timeout_seconds: TimeoutSeconds | None = None
    network: bool | None = None
    cpus: Cpus | None = None
    memory_mb: MemoryMb | None = None


class SetTimeout(_Request):
    """A new time to live."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"timeout_seconds": 3600}]})

    timeout_seconds: TimeoutSeconds


class Rollback(_Request):
    """Which snapshot the workspace goes back to; it may be another sandbox's."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"snapshot_id": "snap_0123456789abcdef"}]})

    snapshot_id: str


class TakeSnapshot(_Request):
    """A snapshot's name, for people; any text."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "before the upgrade"}]})

    name: str | None = Field(default=None, max_length=128)


class RunCommand(_Request):
    """A command: a string for `/bin/sh -c`, or a list of arguments that goes through no shell."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"command": "python3 -m pytest -q"}, {"command": ["python3", "-c", "print(1)"], "env": {"A": "b"}, "timeout_seconds": 5.5}]
        }
    )

    command: str | list[str] = Field(repr=False)
    env: Env
    workdir: str | None = Field(default=None, description="Where it starts, absolute or relative to /workspace, which is the default")
    timeout_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="Wall-clock limit in seconds")


class SandboxList(BaseModel):
    """Sandboxes, oldest first."""

    sandboxes: list[Sandbox]


class SnapshotList(BaseModel):
    """Snapshots, oldest first."""

    snapshots: list[Snapshot]


class FileList(BaseModel):
    """The entries of a directory, by name."""

    path: str
    entries: list[FileInfo]


class ErrorDetail(BaseModel):
    """What happened and what to do next."""

    code: str
    message: str


class ErrorBody(BaseModel):
    """Every error but 422."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"error": {"code": "not_found", "message": "sandbox sb_0123456789abcdef not found"}}]})

    error: ErrorDetail


class Health(BaseModel):
    """The server is up."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "ok", "backend": "docker", "version": "0.1.0"}]})

    status: str
    backend: str
    version: str
