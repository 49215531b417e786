"""The link of one guest to its sandbox: opens its channels and says why one broke."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import httpcore
from agent_sandbox_core.errors import BackendError, ChannelError, SandboxDied, SandboxError

from agent_sandbox_api.backends.engine import InstanceRecord

from . import labels, specs
from .bridges import Bridges
from .client import EngineClient
from .faults import EngineRefusal
from .shared import Shared
from .state import read_termination

EXPLAIN_SECONDS: Final = 10.0
"""How long the engine may take to notice that a container has ended."""
PAUSE_SECONDS: Final = 0.2


class Link:
    """Holds to one container: a channel that broke is explained by what became of the container it was opened in."""

    def __init__(self, sandbox_id: str, instance_id: str, client: EngineClient, bridges: Bridges, shared: Shared) -> None:
        self._sandbox_id = sandbox_id
        self._instance_id = instance_id
        self._client = client
        self._bridges = bridges
        self._shared = shared
        self._container: str | None = None

    async def open(self) -> httpcore.AsyncNetworkStream:
        """A channel to the sandbox. With a network, never before that is closed to private addresses."""
        try:
            container = await self._enter()
        except BackendError as error:
            raise ChannelError(error.message) from error
        self._container = container
        return await self._bridges.take_warm(self._sandbox_id) or await self._bridges.open(container)

    async def _enter(self) -> str:
        """The container to open a channel in, its network closed where it has one."""
        inspected = await self._inspect()
        if inspected is None:
            raise ChannelError(f"the sandbox {self._sandbox_id} has no container any more: look at its state")
        container = str(inspected["Id"])
        if self._record(inspected).spec.network:
            await self._shared.network.guard(self._sandbox_id, container, await self._shared.prepare())
        return container

    async def explain(self) -> SandboxError | None:
        """See Explain in core. Looks until the engine has noticed a death, or the guest answers again, 10 s at most."""
        try:
            async with asyncio.timeout(EXPLAIN_SECONDS):
                while True:
                    inspected = await self._inspect()
                    verdict = self._judge(inspected)
                    if verdict is not None:
                        return verdict
                    if inspected is not None and await self._bridges.is_alive(str(inspected["Id"])):
                        return None
                    await asyncio.sleep(PAUSE_SECONDS)
        except TimeoutError:
            return None

    def _judge(self, inspected: dict[str, Any] | None) -> SandboxError | None:
        """Why the container of the last channel is gone; None while it runs."""
        if inspected is None:
            return BackendError(f"the container of the sandbox {self._sandbox_id} was removed: look at the sandbox's state")
        record = self._record(inspected)
        if inspected["State"]["Running"] and not inspected["State"]["Paused"]:
            if self._container is None or self._container == inspected["Id"]:
                return None
            ended = labels.read_termination(inspected["Config"]["Labels"])
            if ended is None:
                return BackendError(f"the sandbox {self._sandbox_id} was replaced by a rollback")
        else:
            ended = read_termination(record, inspected)
        return SandboxDied(ended.message, out_of_memory=ended.reason == "OOMKilled")

    def _record(self, inspected: dict[str, Any]) -> InstanceRecord:
        try:
            return labels.read_record(inspected["Config"]["Labels"], {})
        except labels.LabelError as error:
            raise BackendError(f"the container of the sandbox {self._sandbox_id} cannot be understood: {error}") from error

    async def _inspect(self) -> dict[str, Any] | None:
        """The container that is the sandbox now, or is becoming it; only one of ours."""
        doing = f"looking at the sandbox {self._sandbox_id}"
        for name in (specs.container_name(self._sandbox_id), specs.making_name(self._sandbox_id)):
            target = f"/containers/{name}/json"
            try:
                found: dict[str, Any] = await self._client.call(doing, "GET", target, seconds=EXPLAIN_SECONDS)
            except EngineRefusal as error:
                if not error.missing:
                    raise
            else:
                return found if (found["Config"].get("Labels") or {}).get(labels.INSTANCE) == self._instance_id else None
        return None
