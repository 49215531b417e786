"""The lock of a directory store: whoever holds it is its only mover. The kernel gives it back when the process dies, however it dies."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from agent_sandbox_core.snapshots.faults import disk_error

logger = logging.getLogger(__name__)

WAIT_SECONDS: Final = 0.5


@contextlib.asynccontextmanager
async def held(path: Path) -> AsyncIterator[None]:
    """Waits for the lock, for ever (a standby does nothing else), and holds it for the block."""
    descriptor = await asyncio.to_thread(_open, path)
    try:
        told = False
        while not _try(descriptor):
            if not told:
                logger.info("another mover has the store %s: this one waits until it ends", path.parent)
                told = True
            await asyncio.sleep(WAIT_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise disk_error(error, f"the lock {path} of the snapshot store cannot be opened") from error


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
