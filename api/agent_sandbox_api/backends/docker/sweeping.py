"""Removes what belongs to nothing: what a process that died left half-made or half-removed, and what all instances share and none uses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import docker
from agent_sandbox_core.errors import SandboxError

from . import binary, calls, labels
from .client import EngineClient
from .faults import EngineRefusal
from .lifecycle import Lifecycle
from .options import DockerOptions
from .shared import Shared
from .state import read_time, sort_out

logger = logging.getLogger(__name__)

STALE_SECONDS: Final = 120.0
"""Age from which a helper or an uncommitted container is left behind also when this process made it. No step takes that long."""
SHARED_EVERY_SECONDS: Final = 600.0
SHARED_SECONDS: Final = 15.0
UNUSED_SECONDS: Final = 86_400.0
"""How long a shared image or guest volume may lie unused: another instance may be about to use it again."""


class Sweeper:
    """Sweeps one engine. Everything is found by the labels of this instance, or by those of shared things; nothing else is looked at."""

    def __init__(self, client: EngineClient, options: DockerOptions, lifecycle: Lifecycle, shared: Shared) -> None:
        self._client = client
        self._options = options
        self._lifecycle = lifecycle
        self._shared = shared
        self._shared_swept_at: float | None = None

    async def sweep(self, in_hand: set[str], now: float) -> None:
        """Removes leftovers. `in_hand`: sandboxes at which this process is working."""
        mine = labels.label_filter(instance=self._options.instance_id)
        containers, volumes = await asyncio.gather(
            self._client.run("listing containers", lambda api: calls.list_containers(api, mine)),
            self._client.run("listing volumes", lambda api: calls.list_volumes(api, mine)),
        )
        for sandbox_id, found in sort_out(containers, volumes).items():
            if sandbox_id in in_hand:
                continue
            if found.removing or (found.making is not None and found.committed is None and self._is_left(found.making, now)):
                await self._carefully(self._lifecycle.remove(sandbox_id))
            elif found.committed is not None and found.replacing is not None:
                await self._carefully(self._lifecycle.discard(found.replacing["Id"]))
        for row in containers:
            if row["Labels"].get(labels.ROLE) == labels.HELPER and self._is_left(row, now):
                await self._carefully(self._lifecycle.discard(row["Id"]))
        of_images = [row for row in volumes if row["Labels"].get(labels.ROLE) == labels.CONTAINER]
        await self._remove_unused(row["Name"] for row in of_images if row["Labels"].get(labels.SANDBOX) not in in_hand)
        if self._shared_swept_at is None or now - self._shared_swept_at > SHARED_EVERY_SECONDS:
            self._shared_swept_at = now
            try:
                async with asyncio.timeout(SHARED_SECONDS):
                    await self._sweep_shared(now)
            except TimeoutError:
                # One wedged container of anybody can make an engine's image calls wait: no reason to keep a server from starting.
                logger.warning("the engine takes long over unused images and volumes: they are left for a later sweep")

    def _is_left(self, row: dict[str, Any], now: float) -> bool:
        """Whether a half-made container is one that nobody is working at any more."""
        made_here = row["Labels"].get(labels.PROCESS) == self._options.process_id
        return not made_here or now - float(row["Created"]) > STALE_SECONDS

    async def _sweep_shared(self, now: float) -> None:
        """Guest volumes and images that nobody used for a day. The engine refuses to remove what is in use, which is the check."""
        ours = labels.label_filter(role=labels.GUEST)
        volumes: list[dict[str, Any]] = await self._client.run("listing volumes", lambda api: calls.list_volumes(api, ours))
        await self._remove_unused(row["Name"] for row in volumes if row["Name"].startswith(binary.VOLUME_PREFIX) and is_old(row, now))
        await self._carefully(self._shared.images.sweep(unused_seconds=UNUSED_SECONDS, now=now))

    async def _remove_unused(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                await self._client.run(f"removing the volume {name}", partial(remove_volume, name))
            except EngineRefusal as error:
                if not error.missing and not error.conflicting:
                    logger.warning("%s", error.message)

    async def _carefully(self, work: Awaitable[None]) -> None:
        """One failed removal does not keep the others from being tried; the next sweep comes anyway."""
        try:
            await work
        except SandboxError as error:
            logger.warning("left for the next sweep: %s", error.message)


def remove_volume(name: str, api: docker.APIClient) -> None:
    """`DELETE /volumes/{name}`; the engine refuses while a container has it."""
    api.remove_volume(name)


def is_old(volume: dict[str, Any], now: float) -> bool:
    """Whether a shared volume was made long ago."""
    made = read_time(volume.get("CreatedAt") or "") or datetime.now(UTC)
    return now - made.timestamp() > UNUSED_SECONDS
