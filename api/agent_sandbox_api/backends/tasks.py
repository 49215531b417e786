"""Background tasks with an owner: none is lost, none outlives its backend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from agent_sandbox_core.errors import SandboxError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class TaskOwner:
    """Starts tasks and ends them all."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def aclose(self, seconds: float) -> None:
        """Cancels all tasks and waits until they have ended, also those that they start meanwhile to clean up."""
        for task in self._tasks:
            task.cancel()
        deadline = asyncio.get_running_loop().time() + seconds
        while self._tasks and (left := deadline - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait({*self._tasks}, timeout=left)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, SandboxError):
            logger.error("a background task met an unexpected fault", exc_info=error)
