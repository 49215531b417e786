"""The memory engine: instances in a dict. `crash`, `lose` and `unplug` let a test play what engines do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agent_sandbox_core.errors import BackendError
from agent_sandbox_core.interfaces import Guest
from agent_sandbox_core.models import Termination

from ..clock import Clock, SystemClock
from ..engine import Instance, InstanceRecord
from .guest import Machine, MemoryGuest
from .programs import Program


@dataclass(slots=True)
class _Slot:
    instance: Instance
    machine: Machine


class MemoryEngine:
    """An Engine without an engine. It may be opened again after close: its instances live on with it."""

    name = "memory"

    def __init__(self, programs: Mapping[str, Program] | None = None, *, clock: Clock | None = None) -> None:
        self._programs = dict(programs or {})
        self._clock = clock or SystemClock()
        self._slots: dict[str, _Slot] = {}
        self._changes: asyncio.Queue[str | None] = asyncio.Queue()
        self._away = ""

    # For tests

    def crash(self, sandbox_id: str, *, reason: str = "Died", message: str = "its container was killed") -> None:
        """The sandbox dies; its workspace stays."""
        slot = self._slots[sandbox_id]
        termination = Termination(reason=reason, message=message, exit_code=137, time=self._clock.now())
        slot.instance = replace(slot.instance, state="exited", termination=termination)
        slot.machine.dead = message
        slot.machine.end_all("the sandbox died")
        self._changes.put_nowait(sandbox_id)

    def lose(self, sandbox_id: str) -> None:
        """The sandbox's workspace is gone for good."""
        slot = self._slots[sandbox_id]
        slot.instance = replace(slot.instance, state="lost")
        slot.machine.dead = "its workspace is gone"
        slot.machine.end_all("the sandbox died")
        self._changes.put_nowait(sandbox_id)

    def unplug(self, why: str = "the engine was unplugged") -> None:
        """Every call fails from now on."""
        self._away = why

    def plug_in(self) -> None:
        """Calls succeed again."""
        self._away = ""

    def machine(self, sandbox_id: str) -> Machine:
        """The inside of a sandbox."""
        return self._slots[sandbox_id].machine

    # Engine

    async def open(self) -> None:
        """See Engine."""
        await self.ping()
        self._changes = asyncio.Queue()

    async def close(self) -> None:
        """See Engine."""
        self._changes.put_nowait(None)

    async def ping(self) -> None:
        """See Engine."""
        if self._away:
            raise BackendError(f"the memory engine does not answer: {self._away}")

    def max_cpus(self) -> float | None:
        """Unlimited."""
        return None

    async def create(self, record: InstanceRecord) -> None:
        """See Engine."""
        await self.ping()
        self._slots[record.sandbox_id] = _Slot(Instance(record, committed=False, state="running"), Machine(record.spec.env, self._programs))

    async def commit(self, sandbox_id: str) -> None:
        """See Engine."""
        slot = await self._slot(sandbox_id)
        slot.instance = replace(slot.instance, committed=True)

    async def instances(self) -> Sequence[Instance]:
        """See Engine."""
        await self.ping()
        return [slot.instance for slot in self._slots.values()]

    async def inspect(self, sandbox_id: str) -> Instance | None:
        """See Engine."""
        await self.ping()
        slot = self._slots.get(sandbox_id)
        return slot.instance if slot else None

    async def restart(self, sandbox_id: str) -> None:
        """See Engine."""
        slot = await self._slot(sandbox_id)
        if slot.instance.state == "running":
            return
        if slot.instance.state == "lost":
            raise BackendError(f"sandbox {sandbox_id} cannot be started: its workspace is gone")
        slot.instance = replace(slot.instance, state="running", incarnation=slot.instance.incarnation + 1)
        slot.machine.dead = None
        slot.machine.reboot()

    async def renew(self, sandbox_id: str) -> None:
        """Nothing to do: there is no root filesystem beside the workspace."""
        await self._slot(sandbox_id)

    async def remove(self, sandbox_id: str) -> None:
        """See Engine."""
        await self.ping()
        slot = self._slots.pop(sandbox_id, None)
        if slot is not None:
            slot.machine.dead = "it was deleted"
            slot.machine.end_all("the sandbox was deleted")

    async def sweep(self) -> None:
        """Nothing is ever left over."""
        await self.ping()

    def guest(self, sandbox_id: str) -> Guest:
        """See Engine."""
        return MemoryGuest(lambda: self._present(sandbox_id))

    async def changes(self) -> AsyncIterator[str]:
        """See Engine."""
        while (sandbox_id := await self._changes.get()) is not None:
            yield sandbox_id

    def open_channels(self) -> int:
        """There are none."""
        return 0

    def _present(self, sandbox_id: str) -> Machine:
        if self._away or sandbox_id not in self._slots:
            raise BackendError(f"sandbox {sandbox_id} does not answer: {self._away or 'it was deleted'}")
        return self._slots[sandbox_id].machine

    async def _slot(self, sandbox_id: str) -> _Slot:
        await self.ping()
        if sandbox_id not in self._slots:
            raise BackendError(f"the memory engine has no sandbox {sandbox_id}: it was deleted")
        return self._slots[sandbox_id]
