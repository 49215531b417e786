"""Guests of running sandboxes: one for each pod, over channels by pods/exec, and the truth about a channel that broke."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any, Final

import httpcore
from agent_sandbox_core.channel import CHANNEL_ERRORS, Channel, ChannelBudget, Request
from agent_sandbox_core.errors import SandboxDied, SandboxError
from agent_sandbox_core.guest import ChannelGuest
from agent_sandbox_core.v1alpha1 import CONTAINER
from agent_sandbox_kube.client import Kube, Object
from agent_sandbox_kube.errors import KubeError, NotFound
from agent_sandbox_kube.exec import open_guest
from agent_sandbox_kube.resources import PODS

LOOK_SECONDS: Final = 9.0
"""How long the end of a container is looked for: the kubelet tells it a second or two after it happened."""
PAUSE_SECONDS: Final = 0.3
PROBE_SECONDS: Final = 3.0


@dataclass(eq=False, slots=True)
class _Kept:
    guest: ChannelGuest
    pod: str
    restarts: asyncio.Task[int | None]
    """Restarts of the container when the guest was made: a later one is a death that this guest has seen."""


class Guests:
    """All guests of this process."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._budget = ChannelBudget()
        self._kept: dict[str, _Kept] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def open_channels(self) -> int:
        """Channels that are open now."""
        return self._budget.open

    def of(self, uid: str, name: str, pod: str) -> ChannelGuest:
        """The guest in the pod of a Sandbox; another pod than before means another guest. Asks nobody: this is the quick path."""
        kept = self._kept.get(uid)
        if kept is not None and kept.pod == pod:
            return kept.guest
        if kept is not None:
            self.drop(uid)
        kept = self._kept[uid] = self._make(name, pod)
        return kept.guest

    def drop(self, uid: str) -> None:
        """Closes the guest of a Sandbox that is gone, or whose pod is."""
        kept = self._kept.pop(uid, None)
        if kept is not None:
            task = asyncio.create_task(_close(kept))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def keep_only(self, uids: set[str]) -> None:
        """Drops the guests of all other Sandboxes."""
        for uid in self._kept.keys() - uids:
            self.drop(uid)

    async def aclose(self) -> None:
        """Closes all of them."""
        self.keep_only(set())
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _make(self, name: str, pod: str) -> _Kept:
        async def open_one() -> httpcore.AsyncNetworkStream:
            return await open_guest(self._kube, self._namespace, pod)

        restarts = asyncio.create_task(self._restarts(pod))

        async def explain() -> SandboxError | None:
            return await self._explain(name, pod, guest.boot_id, await restarts)

        guest = ChannelGuest(open_one, budget=self._budget, explain=explain)
        return _Kept(guest, pod, restarts)

    async def _restarts(self, pod: str) -> int | None:
        with contextlib.suppress(KubeError):
            return int(_container(await self._kube.get(PODS, pod, self._namespace)).get("restartCount", 0))
        return None

    async def _explain(self, name: str, pod: str, boot: str, restarts: int | None) -> SandboxError | None:
        """Why a channel broke: the sandbox died, and of what; None when it lives (a bridge was killed, a connection was cut)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LOOK_SECONDS
        while True:
            try:
                container = _container(await self._kube.get(PODS, pod, self._namespace))
            except NotFound:
                return SandboxDied(f"the pod {pod} of sandbox {name} is gone, and what ran in it with it: look at the sandbox, then try again")
            except KubeError:
                return None
            ended = container.get("state", {}).get("terminated")
            if ended is None and restarts is not None and int(container.get("restartCount", 0)) > restarts:
                ended = container.get("lastState", {}).get("terminated") or {}
            if ended is not None:
                return _died(name, ended)
            if await self._answers(pod, boot) or loop.time() > deadline:
                return None
            await asyncio.sleep(PAUSE_SECONDS)

    async def _answers(self, pod: str, boot: str) -> bool:
        """Whether the init that we spoke with still is there."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                channel = Channel(await open_guest(self._kube, self._namespace, pod))
                try:
                    answer = await channel.exchange(Request("GET", "/v1/health"))
                finally:
                    await channel.aclose()
        except CHANNEL_ERRORS:
            return False
        return not boot or answer.boot_id == boot


async def _close(kept: _Kept) -> None:
    kept.restarts.cancel()
    with contextlib.suppress(SandboxError):
        await kept.guest.aclose()


def _container(pod: Object) -> dict[str, Any]:
    for status in pod.get("status", {}).get("containerStatuses") or ():
        if status["name"] == CONTAINER:
            return dict(status)
    return {}


def _died(name: str, ended: dict[str, Any]) -> SandboxDied:
    if ended.get("reason") == "OOMKilled":
        return SandboxDied(f"sandbox {name} went over its memory limit and was killed: give it more memory_mb", out_of_memory=True)
    told = f"{ended.get('reason') or 'Error'}, exit code {ended.get('exitCode', '?')}"
    return SandboxDied(f"the container of sandbox {name} ended ({told}): it comes back by itself; look at the sandbox, then try again")
