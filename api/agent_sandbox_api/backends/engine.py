"""What an engine does for LocalBackend (local.py): instances of sandboxes, and nothing about quotas, TTLs, snapshots or locks.

State lives in the engine itself (labels, names) so that the next process finds it. Implementations: docker/, memory.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, Protocol, runtime_checkable

from agent_sandbox_core.interfaces import Guest
from agent_sandbox_core.models import SandboxSpec, Termination


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """What identifies a sandbox and never changes; kept with the instance (Docker: labels, env in the container's config)."""

    sandbox_id: str
    spec: SandboxSpec
    created_at: datetime
    expires_at: datetime
    """As it was at creation; LocalBackend keeps later changes."""
    source_snapshot_id: str | None = None
    idempotency_key: str | None = None
    """sha256 of the caller's key; None when it gave none."""
    request_digest: str | None = None
    """sha256 of the create request, to tell a retry from another request with the same key."""


@dataclass(frozen=True, slots=True)
class Instance:
    """What the engine has now of one sandbox."""

    record: InstanceRecord
    committed: bool
    """False: half-made, its create never finished; nobody was told its id."""
    state: Literal["running", "exited", "lost"]
    """`lost`: its volume or container is gone and it cannot come back."""
    termination: Termination | None = field(default=None)
    incarnation: int = 1
    """How often it was started."""


class Engine(Protocol):
    """Every method may be called again after a crash anywhere inside it. Errors are those of core's errors.py."""

    @property
    def name(self) -> str:
        """What /healthz shows: docker, memory."""

    async def open(self) -> None:
        """Connects, prepares what all sandboxes share (guest volume, network). Must not need the engine to answer for ever: a dead engine raises BackendError."""

    async def close(self) -> None:
        """Stops background work and closes connections; instances live on."""

    async def ping(self) -> None:
        """Raises BackendError when the engine does not answer now. Cheap; bounded to 3 s."""

    def max_cpus(self) -> float | None: ...

    async def create(self, record: InstanceRecord) -> None:
        """Makes and starts an uncommitted instance; its guest answers when this returns. On failure nothing is left."""

    async def commit(self, sandbox_id: str) -> None:
        """Marks the instance as made; atomic."""

    async def instances(self) -> Sequence[Instance]:
        """All instances of this installation, one call to the engine whatever their number."""

    async def inspect(self, sandbox_id: str) -> Instance | None: ...

    async def restart(self, sandbox_id: str) -> None:
        """Starts an exited instance again on its workspace; its guest answers when this returns."""

    async def renew(self, sandbox_id: str) -> None:
        """After a rollback: gives an instance with a writable root filesystem a fresh one, same id and workspace. A no-op for a read-only root."""

    async def remove(self, sandbox_id: str) -> None:
        """Removes the instance and everything of it; fine when it is already gone."""

    async def sweep(self) -> None:
        """Removes leftovers that belong to no instance (helper containers, orphaned volumes of this installation)."""

    def guest(self, sandbox_id: str) -> Guest:
        """A guest over fresh channels; LocalBackend keeps one per sandbox and closes it."""

    def changes(self) -> AsyncIterator[str]:
        """Ids of sandboxes whose state changed outside (died, removed by hand); ends on close(). Reconnects by itself; a missed event is healed by LocalBackend's periodic instances()."""


@runtime_checkable
class CountsChannels(Protocol):
    """What an engine, and the backend over it, may also tell: how many channels to sandboxes are open now. For the metrics."""

    def open_channels(self) -> int:
        """The number of open channels."""
