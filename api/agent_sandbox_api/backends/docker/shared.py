"""What all sandboxes on an engine share, prepared at the first need and again when it is found missing."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Final

from agent_sandbox_api.backends.engine import InstanceRecord

from . import binary, specs
from .client import EngineClient
from .faults import EngineRefusal
from .images import Images
from .network import GUARDED_RUNTIMES, Network, is_missing_network
from .options import DockerOptions

logger = logging.getLogger(__name__)

LIMITS: Final = {
    "SwapLimit": "swap: a sandbox may use twice its memory where the machine swaps (boot with swapaccount=1)",
    "MemoryLimit": "memory: one sandbox may use all of it",
    "PidsLimit": "processes: a fork bomb in a sandbox reaches the whole machine",
    "CpuCfsQuota": "CPU time: one sandbox may use all of it",
}
"""What an engine may say that it cannot enforce, and what that means."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the engine said about itself."""

    arch: str
    cpus: float
    default_runtime: str
    runtimes: frozenset[str]


class Shared:
    """The shared parts of one engine. Each is made once; concurrent callers wait for the same work."""

    def __init__(self, client: EngineClient, options: DockerOptions) -> None:
        self._client = client
        self._options = options
        self._lock = asyncio.Lock()
        self._guest: str | None = None
        self.facts: Facts | None = None
        self.images = Images(client, options)
        self.network = Network(client, options)

    async def close(self) -> None:
        """Ends what runs in the background."""
        await self.images.close()

    async def prepare(self) -> str:
        """The verified guest volume. Also asks the engine for its facts, and says once what it cannot enforce."""
        async with self._lock:
            if self.facts is None:
                info = await self._client.run("asking the Docker engine about itself", lambda api: api.info())
                self.facts = read_facts(info)
                self._warn(info)
            if self._guest is None:
                runtime = self._options.docker_runtime or self.facts.default_runtime
                readable = runtime not in GUARDED_RUNTIMES
                self._guest = await binary.ensure_guest_volume(self._client, self._options, self.facts.arch, readable=readable)
            return self._guest

    async def place(self, record: InstanceRecord, image: specs.Image | None = None) -> specs.Placement:
        """Everything that a container of this record needs. `image`: the one that it has already."""
        guest = await self.prepare()
        assert self.facts is not None
        if record.spec.network:
            network: str | None = await self.network.ensure(guest, self.facts.default_runtime)
        else:
            network = None
        return specs.Placement(image or await self.images.prepare(record.spec.image), guest, network)

    def blame(self, error: EngineRefusal, place: specs.Placement) -> bool:
        """Whether a shared part was removed from the engine meanwhile; it is then forgotten, so that another try makes it again."""
        if binary.names_missing_guest(error):
            self._guest = None
        elif is_missing_network(error, self._options.network_name):
            self.network.forget()
        elif error.missing and "image" in error.detail.lower():
            self.images.forget(place.image)
        else:
            return False
        return True

    def _warn(self, info: dict[str, Any]) -> None:
        assert self.facts is not None
        for name, meaning in LIMITS.items():
            if info.get(name) is False:
                logger.warning("the Docker engine at %s does not limit %s", self._client.address.text, meaning)
        runtime = self._options.docker_runtime
        if runtime and runtime not in self.facts.runtimes:
            has = ", ".join(sorted(self.facts.runtimes))
            logger.warning("the Docker engine at %s has no runtime %s, it has %s", self._client.address.text, runtime, has)


def read_facts(info: dict[str, Any]) -> Facts:
    """The facts in the answer to `GET /info`."""
    return Facts(
        arch=binary.normal_arch(str(info["Architecture"])),
        cpus=float(info["NCPU"]),
        default_runtime=str(info.get("DefaultRuntime") or ""),
        runtimes=frozenset(info.get("Runtimes") or {}),
    )
