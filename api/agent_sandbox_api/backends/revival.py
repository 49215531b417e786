"""Coming back: a sandbox that died starts again on its workspace, a few times; then it stays stopped and says why."""

from __future__ import annotations

import logging
from typing import Final

from agent_sandbox_core.errors import SandboxError
from agent_sandbox_core.models import Termination

from .box import RETURNS, WINDOW_SECONDS, Box
from .clock import Clock
from .engine import Engine, Instance
from .tasks import TaskOwner

logger = logging.getLogger(__name__)

ENGINE_PAUSE: Final = 1.0
"""Seconds between two tries while the engine itself is away: those do not count as returns."""
COMING_BACK: Final = "it is being started again on its workspace; try again in a few seconds"
WHAT_NEXT: Final = "roll it back to a snapshot, or delete it"


class Revival:
    """Brings dead sandboxes back, one task each."""

    def __init__(self, engine: Engine, clock: Clock, tasks: TaskOwner) -> None:
        self._engine = engine
        self._clock = clock
        self._tasks = tasks

    def begin(self, box: Box, instance: Instance) -> None:
        """Takes note of a death and starts to bring the sandbox back."""
        death = instance.termination or Termination(reason="Died", message="its container ended for an unknown reason", time=self._clock.now())
        box.termination = death
        logger.warning("sandbox %s died (%s): %s", box.id, death.reason, death.message)
        box.set("Restarting", death.reason, f"{death.message}; {COMING_BACK}")
        box.reviving = self._tasks.spawn(self._bring_back(box, death))

    async def _bring_back(self, box: Box, death: Termination) -> None:
        try:
            while True:
                delay = box.lives.next_delay(self._clock.monotonic())
                if delay is None:
                    message = f"it died more than {RETURNS} times in {WINDOW_SECONDS / 60:.0f} minutes, the last time: {death.message}; {WHAT_NEXT}"
                    box.set("Stopped", "CrashLoop", message)
                    logger.warning("sandbox %s stays stopped: %s", box.id, message)
                    return
                await self._clock.sleep(delay)
                try:
                    await self._engine.restart(box.id)
                except SandboxError as error:
                    if not await self._engine_answers():
                        await self._clock.sleep(ENGINE_PAUSE)
                        continue
                    box.lives.count(self._clock.monotonic())
                    death = Termination(reason="StartFailed", message=f"it could not be started again: {error.message}", time=self._clock.now())
                    box.set("Restarting", death.reason, f"{death.message}; {COMING_BACK}")
                    continue
                box.lives.count(self._clock.monotonic())
                await self._settle(box)
                return
        finally:
            box.reviving = None

    async def _settle(self, box: Box) -> None:
        try:
            instance = await self._engine.inspect(box.id)
        except SandboxError:
            instance = None  # it was just started; the reaper learns the rest
        if instance is not None:
            box.run_on(instance)
        else:
            box.set("Running")

    async def _engine_answers(self) -> bool:
        try:
            await self._engine.ping()
        except SandboxError:
            return False
        return True
