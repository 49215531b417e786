"""One sandbox as LocalBackend knows it: its record, its state, and the one piece of work that may hold it. No I/O here."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal

from agent_sandbox_core.interfaces import Guest
from agent_sandbox_core.models import Phase, Sandbox, Termination

from .engine import Instance, InstanceRecord

RETURNS: Final = 5
WINDOW_SECONDS: Final = 600.0
DELAYS: Final = (0.0, 0.5, 1.0, 2.0, 4.0)

Work = Literal["snapshot", "rollback"]


class Lives:
    """How often a sandbox may come back by itself: RETURNS times in WINDOW_SECONDS, with growing delays."""

    def __init__(self) -> None:
        self._returns: deque[float] = deque()

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before it comes back; None when it stays stopped."""
        while self._returns and now - self._returns[0] >= WINDOW_SECONDS:
            self._returns.popleft()
        return DELAYS[len(self._returns)] if len(self._returns) < RETURNS else None

    def count(self, now: float) -> None:
        """It was started again, or that was tried."""
        self._returns.append(now)

    def reset(self) -> None:
        """A fresh start, by a rollback."""
        self._returns.clear()


@dataclass(eq=False, slots=True)
class Box:
    """The mutable state. `version` counts its changes, so that an older look at the engine does not overrule a newer one."""

    record: InstanceRecord
    expires_at: datetime
    parent: str | None
    phase: Phase = "Running"
    reason: str | None = None
    message: str | None = None
    incarnation: int = 1
    termination: Termination | None = None
    whole: bool = True
    """False: it was lost before this process saw it, so its env values are unknown."""
    guest: Guest | None = None
    work: tuple[Work, asyncio.Task[object]] | None = None
    reviving: asyncio.Task[None] | None = None
    deleting: asyncio.Task[None] | None = None
    lives: Lives = field(default_factory=Lives)
    version: int = 0

    @property
    def id(self) -> str:
        """The sandbox's id."""
        return self.record.sandbox_id

    @property
    def settled(self) -> bool:
        """Nothing of ours is changing it now, so what the engine says counts."""
        return self.work is None and self.reviving is None and self.deleting is None

    def set(self, phase: Phase, reason: str | None = None, message: str | None = None) -> None:
        """Changes the phase."""
        self.phase, self.reason, self.message = phase, reason, message
        self.version += 1

    def run_on(self, instance: Instance) -> None:
        """It runs, as the engine has it."""
        self.incarnation = instance.incarnation
        self.termination = instance.termination or self.termination
        self.set("Running")

    def why_stopped(self) -> str:
        """For messages: what happened to it."""
        return (
            f"sandbox {self.id} is stopped ({self.reason or self.phase}): {self.message or 'it is being started again; try again in a few seconds'}"
        )

    def view(self) -> Sandbox:
        """As the API shows it."""
        spec = self.record.spec
        return Sandbox(
            id=self.id,
            status="running" if self.phase in ("Running", "Restoring") else "stopped",
            image=spec.image,
            cpus=spec.cpus,
            memory_mb=spec.memory_mb,
            pids_limit=spec.pids_limit,
            network=spec.network,
            read_only_rootfs=spec.read_only_rootfs,
            created_at=self.record.created_at,
            expires_at=self.expires_at,
            source_snapshot_id=self.record.source_snapshot_id,
            phase=self.phase,
            reason=self.reason,
            message=self.message,
            labels=spec.labels,
            incarnation=self.incarnation,
            last_termination=self.termination,
        )
