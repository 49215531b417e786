"""The two interfaces: *where a sandbox runs* (Backend) and *what can be done in there* (Guest).

A backend has the lifecycle of sandboxes and gives a Guest for each. Exec, files, archives and processes are written once, on top of Guest.
`ChannelGuest` (guest.py) is the real one, over a channel; the memory backend ships one of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import httpcore

from .models import Command, ExecResult, Sandbox, SandboxSpec, Snapshot, StreamEvent

OpenChannel = Callable[[], Awaitable[httpcore.AsyncNetworkStream]]
"""Opens a duplex byte stream to `sandbox-init` in one sandbox; raises ChannelError when that fails."""


@dataclass(frozen=True, slots=True)
class GuestFile:
    """A file as the guest sees it: raw name and path bytes, size in bytes, mtime in nanoseconds, mode as permission bits."""

    name: bytes
    path: bytes
    type: str
    size: int
    mode: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class FileBody:
    """An open file: its info and its bytes, `start`..`end` (exclusive) of `info.size`."""

    info: GuestFile
    start: int
    end: int
    chunks: AsyncIterator[bytes]


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What a restore brought back."""

    boot_id: str
    entries: int
    bytes: int


class Guest(Protocol):
    """What can be done in one running sandbox. All methods raise errors of errors.py; paths are bytes, absolute or relative to /workspace."""

    async def run(self, command: Command, *, max_output_bytes: int) -> ExecResult:
        """Runs a command to its end; cancelling the call kills its whole process tree."""

    def stream(self, command: Command, *, on_start: Callable[[], None] | None = None) -> AsyncIterator[StreamEvent]:
        """Events as they come, the ExitEvent last; closing the iterator kills the tree. No ExitEvent (an OutcomeUnknown is raised) = outcome unknown.

        `on_start` is called once the command has started: what is wrong with the request was raised before that.
        """

    def read_file(
        self, path: bytes, *, start: int = 0, end: int | None = None, max_bytes: int | None = None
    ) -> AbstractAsyncContextManager[FileBody]:
        """Opens a regular file; PayloadTooLarge over max_bytes, NotFound, InvalidRequest for a directory."""

    async def write_file(self, path: bytes, body: AsyncIterator[bytes], *, mode: int = 0o644, max_bytes: int | None = None) -> GuestFile:
        """Writes atomically, parents included; when `body` raises or max_bytes is passed, nothing is left."""

    async def stat(self, path: bytes) -> GuestFile: ...

    async def list_dir(self, path: bytes) -> Sequence[GuestFile]:
        """Entries in byte order of their names."""

    async def make_dir(self, path: bytes, *, mode: int = 0o755) -> GuestFile: ...

    async def remove(self, path: bytes, *, recursive: bool = False) -> None: ...

    async def move(self, source: bytes, target: bytes, *, overwrite: bool = False) -> GuestFile: ...

    def archive(self, manifest: bytes) -> AsyncIterator[bytes]:
        """The workspace as the plain tar of init/API.md, `manifest` its first member; the sandbox is frozen until the iterator ends or is closed."""

    async def restore(self, body: AsyncIterator[bytes], *, bytes: int, entries: int, max_bytes: int) -> RestoreResult:  # noqa: A002 - the guest API's name
        """Replaces the workspace by such a tar and ends all processes; on any error the old state is back."""

    async def health(self) -> dict[str, object]: ...

    async def resources(self) -> dict[str, object]: ...

    async def aclose(self) -> None:
        """Closes all channels; attached commands end by their lease or by their kill."""


class Backend(Protocol):
    """Where sandboxes run. Implementations: docker, memory, kubernetes. Specs that arrive here are complete and within the policy's limits."""

    name: str

    async def start(self) -> None:
        """Finds what is there (live sandboxes, orphans, half-made ones) and heals it; starts the reaper."""

    async def close(self) -> None:
        """Stops background work and closes channels; sandboxes live on."""

    async def ready(self) -> None:
        """Raises BackendError or Unavailable when the engine cannot be used now."""

    def max_cpus(self) -> float | None:
        """CPUs of the engine, None when unknown or many nodes."""

    async def create(
        self,
        spec: SandboxSpec,
        *,
        expires_at: datetime,
        source: str | None = None,
        idempotency_key: str | None = None,
        request_digest: str | None = None,
    ) -> Sandbox:
        """Running and able to exec when it returns; when it raises, nothing is left. `source`: a snapshot id whose files it starts with.

        The same idempotency_key again gives the same sandbox as long as it lives; with another request it is a Conflict. `request_digest`
        identifies the caller's request (spec and expiry alone would differ between two tries of one request); None: the spec does.
        Cancelled without a key, nothing is left; with one, it goes to its end, so that a retry finds it.
        """

    async def list(self) -> Sequence[Sandbox]:
        """Oldest first."""

    async def get(self, sandbox_id: str) -> Sandbox: ...

    async def spec(self, sandbox_id: str) -> SandboxSpec: ...

    async def delete(self, sandbox_id: str) -> None: ...

    async def set_expiry(self, sandbox_id: str, expires_at: datetime) -> Sandbox: ...

    async def guest(self, sandbox_id: str) -> Guest:
        """The guest of a running sandbox. InvalidRequest when it is stopped (says why), Conflict during a rollback."""

    async def snapshot(self, sandbox_id: str, *, name: str | None) -> Snapshot: ...

    async def list_snapshots(self, sandbox_id: str | None = None) -> Sequence[Snapshot]:
        """Oldest first."""

    async def get_snapshot(self, snapshot_id: str) -> Snapshot: ...

    async def snapshot_spec(self, snapshot_id: str) -> SandboxSpec:
        """The spec of the sandbox it was taken of, env values included, for a fork."""

    async def delete_snapshot(self, snapshot_id: str) -> None: ...

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> Sandbox: ...
