"""DockerEngine: the Engine of LocalBackend over one Docker engine. It decides what is asked when; the modules beside it do the asking."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, Final

from agent_sandbox_core.channel import ChannelBudget
from agent_sandbox_core.errors import BackendError, SandboxError, SandboxNotFound
from agent_sandbox_core.guest import ChannelGuest
from agent_sandbox_core.interfaces import Guest

from agent_sandbox_api.backends.engine import Instance, InstanceRecord

from . import calls, labels, specs
from .bridges import Bridges
from .client import EngineClient
from .events import follow_changes
from .lifecycle import Lifecycle
from .links import Link
from .options import DockerOptions
from .shared import Shared
from .state import RUNNING, Found, read_env, read_instance, read_termination, sort_out
from .sweeping import Sweeper

logger = logging.getLogger(__name__)

PING_SECONDS: Final = 3.0
CLOSE_SECONDS: Final = 8.0


class DockerEngine:
    """See Engine. Sandboxes are containers with labels; everything that must outlive this process is in the engine."""

    name: Final = "docker"

    def __init__(self, options: DockerOptions, *, budget: ChannelBudget | None = None) -> None:
        self._options = options
        self._budget = budget or ChannelBudget()
        self._client = EngineClient(options.host)
        self._bridges = Bridges(self._client)
        self._shared = Shared(self._client, options)
        self._lifecycle = Lifecycle(self._client, options, self._shared, self._bridges)
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._uncommitted: set[str] = set()
        self._env: dict[str, dict[str, str]] = {}
        self._closing = asyncio.Event()
        self._sweeper = Sweeper(self._client, options, self._lifecycle, self._shared)

    async def open(self) -> None:
        """See Engine. Where it fails, the next call that needs what it prepares tries again."""
        await self._client.open()
        await self._client.ping(PING_SECONDS)
        await self._shared.prepare()

    async def close(self) -> None:
        """See Engine. Steps that were begun may end, for a few seconds; what they leave half done the next process heals."""
        self._closing.set()
        if self._busy:
            _, late = await asyncio.wait(self._busy.values(), timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._bridges.close()
        await self._shared.close()
        await self._client.close()

    async def ping(self) -> None:
        """See Engine."""
        await self._client.ping(PING_SECONDS)

    def max_cpus(self) -> float | None:
        """See Engine."""
        return self._shared.facts.cpus if self._shared.facts else None

    def open_channels(self) -> int:
        """See CountsChannels."""
        return self._budget.open

    async def create(self, record: InstanceRecord) -> None:
        """See Engine. A cancelled call is finished in the background and its sandbox removed: half a container cannot be called back."""
        sandbox_id = record.sandbox_id
        self._uncommitted.add(sandbox_id)
        try:
            await self._step(sandbox_id, lambda: self._lifecycle.make(record))
        except asyncio.CancelledError:
            self._begin(sandbox_id, lambda: self._undo(sandbox_id))
            raise
        except BaseException:
            self._uncommitted.discard(sandbox_id)
            raise

    async def _undo(self, sandbox_id: str) -> None:
        try:
            await self._lifecycle.remove(sandbox_id)
        except SandboxError as error:
            logger.warning("a cancelled create is cleaned up by the next sweep: %s", error.message)
        finally:
            self._uncommitted.discard(sandbox_id)

    async def commit(self, sandbox_id: str) -> None:
        """See Engine."""
        await self._step(sandbox_id, lambda: self._lifecycle.rename(sandbox_id, specs.making_name(sandbox_id)))
        self._uncommitted.discard(sandbox_id)

    async def instances(self) -> Sequence[Instance]:
        """See Engine. Two calls whatever their number, and an inspect for each that does not run or whose environment is not known."""
        found = await self._inventory()
        read = await asyncio.gather(*(self._read(sandbox_id, one) for sandbox_id, one in found.items()))
        self._forget_gone(found)
        return sorted((instance for instance in read if instance is not None), key=lambda one: one.record.created_at)

    async def inspect(self, sandbox_id: str) -> Instance | None:
        """See Engine."""
        found = await self._inventory(sandbox_id)
        return await self._read(sandbox_id, found[sandbox_id]) if sandbox_id in found else None

    async def _inventory(self, sandbox_id: str | None = None) -> dict[str, Found]:
        mine = {"instance": self._options.instance_id} | ({"sandbox": sandbox_id} if sandbox_id else {})
        doing = f"looking for the sandbox {sandbox_id}" if sandbox_id else "listing sandboxes"
        filters = labels.label_filter(**mine)
        containers, volumes = await asyncio.gather(
            self._client.run(doing, lambda api: calls.list_containers(api, filters)),
            self._client.run(doing, lambda api: calls.list_volumes(api, filters)),
        )
        return sort_out(containers, volumes)

    async def _read(self, sandbox_id: str, found: Found) -> Instance | None:
        """One instance. What cannot be understood is left alone and logged: it may be of a newer version."""
        try:
            row = found.container
            if row is None or found.removing:
                return read_instance(found, None, {})
            if found.committed is None and found.replacing is not None and sandbox_id not in self._busy:
                await self._step(sandbox_id, lambda: self._lifecycle.rename(sandbox_id, specs.next_name(sandbox_id)))
            inspected: dict[str, Any] | None = None
            env = self._env.get(row["Id"])
            if row["State"] != RUNNING or (env is None and labels.env_names(row["Labels"])):
                inspected = await self._lifecycle.inspect_container(row["Id"])
                if inspected is not None:
                    env = self._env[row["Id"]] = read_env(inspected)
            return read_instance(found, inspected, env or {})
        except labels.LabelError as error:
            logger.warning("the sandbox %s on the Docker engine cannot be understood and is left alone: %s", sandbox_id, error)
            return None

    def _forget_gone(self, found: dict[str, Found]) -> None:
        present = {one.container["Id"] for one in found.values() if one.container is not None}
        self._env = {container: env for container, env in self._env.items() if container in present}

    async def restart(self, sandbox_id: str) -> None:
        """See Engine. A container that ended is replaced: the new one counts its starts and remembers how the one before it ended."""
        await self._step(sandbox_id, lambda: self._restart(sandbox_id))

    async def _restart(self, sandbox_id: str) -> None:
        instance, inspected = await self._present(sandbox_id)
        state = inspected["State"]
        name = str(inspected["Id"])
        if state["Paused"]:
            await self._client.run(f"resuming the sandbox {sandbox_id}", lambda api: api.unpause(name))
        if state["Running"]:
            # Someone else has started it, or it was only paused.
            stream = await self._lifecycle.wait_ready(instance.record, name)
            await stream.aclose()
            return
        termination = read_termination(instance.record, inspected)
        await self._lifecycle.replace(instance.record, inspected, incarnation=instance.incarnation + 1, termination=termination)

    async def renew(self, sandbox_id: str) -> None:
        """See Engine."""
        await self._step(sandbox_id, lambda: self._renew(sandbox_id))

    async def _renew(self, sandbox_id: str) -> None:
        instance, inspected = await self._present(sandbox_id)
        if instance.record.spec.read_only_rootfs:
            return
        before = labels.read_termination(inspected["Config"]["Labels"])
        await self._lifecycle.replace(instance.record, inspected, incarnation=instance.incarnation, termination=before)

    async def _present(self, sandbox_id: str) -> tuple[Instance, dict[str, Any]]:
        """The instance and its container's inspect; an error that says what to do when it has none to work with."""
        instance = await self.inspect(sandbox_id)
        if instance is None:
            raise SandboxNotFound(sandbox_id)
        inspected = await self._lifecycle.inspect_container(specs.container_name(sandbox_id))
        if instance.state == "lost" or inspected is None:
            reason = instance.termination.message if instance.termination else "its container is gone"
            raise BackendError(f"the sandbox {sandbox_id} cannot be started again: {reason}")
        return instance, inspected

    async def remove(self, sandbox_id: str) -> None:
        """See Engine."""
        await self._step(sandbox_id, lambda: self._lifecycle.remove(sandbox_id))
        self._uncommitted.discard(sandbox_id)

    async def sweep(self) -> None:
        """See Engine."""
        await self._sweeper.sweep(set(self._busy) | self._uncommitted, time.time())

    def guest(self, sandbox_id: str) -> Guest:
        """See Engine."""
        link = Link(sandbox_id, self._options.instance_id, self._client, self._bridges, self._shared)
        return ChannelGuest(link.open, budget=self._budget, explain=link.explain)

    def changes(self) -> AsyncGenerator[str]:
        """See Engine."""
        return follow_changes(self._client, self._options, self._closing)

    async def _step(self, sandbox_id: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """One step of a sandbox to its end, also when the caller is cancelled; a second one waits for the first."""
        await asyncio.shield(self._begin(sandbox_id, work))

    def _begin(self, sandbox_id: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        before = self._busy.get(sandbox_id)

        async def in_turn() -> None:
            if before is not None:
                await asyncio.gather(before, return_exceptions=True)
            await work()

        task = asyncio.get_running_loop().create_task(in_turn())
        self._busy[sandbox_id] = task
        task.add_done_callback(lambda done: self._end(sandbox_id, done))
        return task

    def _end(self, sandbox_id: str, task: asyncio.Task[None]) -> None:
        if self._busy.get(sandbox_id) is task:
            del self._busy[sandbox_id]
        if not task.cancelled():
            # Whoever still waits gets it; for a cancelled caller nobody does, and that is no fault.
            task.exception()
