"""What the parts of the mover share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, TypeVar

from agent_sandbox_core.errors import ChannelError, Conflict, OutcomeUnknown, SandboxDied, SandboxError, Unavailable
from agent_sandbox_core.snapshots import StoreUnreachable

from .claims import Claims, Slots, Work
from .cluster import Cluster
from .vault import Vault, now_utc

logger = logging.getLogger(__name__)
T = TypeVar("T")
Key = tuple[str, str]
"""Namespace and name."""

FIRST_PAUSE_SECONDS: Final = 0.2
LAST_PAUSE_SECONDS: Final = 5.0
TRANSIENT: Final[tuple[type[SandboxError], ...]] = (ChannelError, Conflict, OutcomeUnknown, SandboxDied, StoreUnreachable, Unavailable)
"""What may be otherwise a moment later: a store or a sandbox that does not answer, or one that is busy. All that is tried again may be done twice."""


@dataclass(frozen=True, slots=True)
class MoverLimits:
    """What the mover is told by its settings."""

    max_snapshot_bytes: int = 1 << 30
    patience_seconds: float = 120.0
    """How long something transient is tried again."""


@dataclass(frozen=True, slots=True)
class Context:
    """Held by Snapshots and Restores alike."""

    cluster: Cluster
    vault: Vault
    claims: Claims
    limits: MoverLimits
    slots: Slots
    work: Work = field(default_factory=Work)
    now: Callable[[], datetime] = now_utc


async def patiently(attempt: Callable[[], Awaitable[T]], seconds: float, tell: Callable[[SandboxError], Awaitable[None]] | None = None) -> T:
    """Makes an attempt again and again while it fails for what may pass, so many seconds from its first failure on. `tell` hears the first failure."""
    first: float | None = None
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return await attempt()
        except TRANSIENT as error:
            now = time.monotonic()
            if first is None:
                first = now
                logger.info("tried again for up to %.0f s: %s", seconds, error.message)
                if tell is not None:
                    await tell(error)
            elif now - first + pause > seconds:
                raise
        await asyncio.sleep(pause)
        pause = min(LAST_PAUSE_SECONDS, pause * 2)
