"""`network=true`: a bridge on which sandboxes do not see each other, and a guard inside each sandbox's own network namespace.

Docker's API alone cannot close private networks, so before any channel into such a sandbox is opened, sandbox-init's netguard must have
loaded its rules there and read them back. That is checked for each start of each container, whoever started it; without it there is no
channel.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agent_sandbox_core import hardening
from agent_sandbox_core.errors import BackendError, InvalidRequest

from . import labels, specs
from .client import EngineClient
from .faults import EngineRefusal
from .helpers import ensure_helper_image, run_helper
from .options import DockerOptions

logger = logging.getLogger(__name__)

ICC: Final = "com.docker.network.bridge.enable_icc"
SURVEY_SECONDS: Final = 300.0
"""How long the engine's addresses and resolvers are taken to be what they were."""
GUARDED_RUNTIMES: Final = frozenset({"", "runc", "crun", "youki", "io.containerd.runc.v2"})
"""Runtimes whose sandboxes use the kernel's network stack. Others (gVisor, Kata) bring their own, and its packets never meet the rules."""
MAPPED_V4: Final = ipaddress.IPv6Network("::ffff:0:0/96")
"""IPv4 in IPv6. A packet to such an address is an IPv4 packet, so IPv4's rules cover it; netguard refuses the range as one of IPv6."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The engine's own network: every address of it, the subnets of its networks, and the resolvers that it uses."""

    addresses: tuple[str, ...]
    subnets: tuple[str, ...]
    resolvers: tuple[str, ...]


class Network:
    """The network of one engine that open sandboxes share, and the guards of those of this process."""

    def __init__(self, client: EngineClient, options: DockerOptions) -> None:
        self._client = client
        self._options = options
        self._lock = asyncio.Lock()
        self._ready = False
        self._survey: Survey | None = None
        self._surveyed_at = 0.0
        self._guarded: dict[str, str] = {}
        self._guarding: dict[str, asyncio.Lock] = {}

    async def ensure(self, guest_volume: str, default_runtime: str) -> str:
        """The name of the network, made where it is missing. InvalidRequest where a sandbox's network could not be guarded."""
        runtime = self._options.docker_runtime or default_runtime
        if runtime not in GUARDED_RUNTIMES:
            raise InvalidRequest(
                f"network=true is not possible with the runtime {runtime}: its network stack is its own and cannot be closed to private "
                "addresses from outside. Create the sandbox without a network, or serve with the runtime runc"
            )
        async with self._lock:
            if not self._ready:
                await self._find_or_make()
                self._ready = True
        await self._look_around(guest_volume)
        return self._options.network_name

    def forget(self) -> None:
        """The engine says that the network is missing: the next sandbox makes it again."""
        self._ready = False

    async def _find_or_make(self) -> None:
        name = self._options.network_name
        doing = f"preparing the network {name}"
        found = await self._named()
        if not found:
            body = network_config(name)
            made = await self._client.run(doing, lambda api: api.create_network(**body))
            found = await self._named()
            if len(found) > 1:
                # Another instance made it at the same moment, and names need not be unique: all keep the oldest.
                oldest = min(found, key=lambda row: (row["Created"], row["Id"]))
                if oldest["Id"] != made["Id"]:
                    await self._client.run(doing, lambda api: api.remove_network(made["Id"]))
                found = [oldest]
        problem = next((text for row in found if (text := why_unfit(row))), None)
        if problem:
            ways = f"`docker network rm {name}`, or set AGENT_SANDBOX_NETWORK_NAME to another name"
            raise BackendError(f"the network {name} {problem}: {ways}")

    async def _named(self) -> list[dict[str, Any]]:
        name = self._options.network_name
        rows = await self._client.run(f"looking for the network {name}", lambda api: api.networks(names=[name]))
        return [row for row in rows if row["Name"] == name]

    async def _look_around(self, guest_volume: str) -> Survey:
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._survey is None or loop.time() - self._surveyed_at > SURVEY_SECONDS:
                self._survey = await self._look(guest_volume)
                self._surveyed_at = loop.time()
            return self._survey

    async def _look(self, guest_volume: str) -> Survey:
        doing = "looking at the engine's own network"
        image = await ensure_helper_image(self._client)
        config = specs.survey_config(specs.Helper(self._options, image, guest_volume))
        ended, rows = await asyncio.gather(run_helper(self._client, config, doing), self._client.run("listing networks", lambda api: api.networks()))
        try:
            said: dict[str, list[str]] = json.loads(ended.output) if ended.code == 0 else {}
            return Survey(
                addresses=tuple(sorted(str(ipaddress.ip_address(text)) for text in said["addresses"])),
                subnets=tuple(sorted(subnets(rows))),
                resolvers=tuple(str(ipaddress.ip_address(text)) for text in said["resolvers"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            said_instead = f"exit code {ended.code}: {ended.output[:500]}"
            raise BackendError(f"{doing} failed, so no sandbox can have a network now ({said_instead})") from error

    async def guard(self, sandbox_id: str, container: str, guest_volume: str) -> None:
        """Returns once the container's network is closed to private addresses in its present start. BackendError otherwise."""
        lock = self._guarding.setdefault(sandbox_id, asyncio.Lock())
        async with lock:
            doing = f"looking at the sandbox {sandbox_id}"
            start = start_of(await self._client.run(doing, lambda api: api.inspect_container(container)))
            if self._guarded.get(sandbox_id) == start:
                return
            survey = await self._look_around(guest_volume)
            image = await ensure_helper_image(self._client)
            arguments = ["--config", encode(survey)]
            config = specs.guard_config(specs.Helper(self._options, image, guest_volume), sandbox_id, container, arguments)
            ended = await run_helper(self._client, config, f"closing private networks to the sandbox {sandbox_id}")
            if ended.code != 0:
                raise BackendError(
                    f"private networks could not be closed to the sandbox {sandbox_id}, so it gets no network: {ended.output[:500]}. "
                    "The engine's kernel needs nftables; or create the sandbox without a network"
                )
            again = start_of(await self._client.run(doing, lambda api: api.inspect_container(container)))
            if again != start:
                raise BackendError(f"the sandbox {sandbox_id} was started again while its network was being closed: try again")
            self._guarded[sandbox_id] = start

    def release(self, sandbox_id: str) -> None:
        """Forgets a sandbox that is gone."""
        self._guarded.pop(sandbox_id, None)
        self._guarding.pop(sandbox_id, None)


def network_config(name: str) -> dict[str, Any]:
    """The network, in docker-py's words: containers on it do not reach each other through it."""
    return {
        "name": name,
        "driver": "bridge",
        "check_duplicate": True,
        "options": {ICC: "false"},
        "labels": labels.shared_labels(labels.NETWORK),
    }


def why_unfit(row: dict[str, Any]) -> str | None:
    """Why a network of the wanted name cannot be used, as the rest of a sentence; None when it can."""
    if (row.get("Labels") or {}).get(labels.ROLE) != labels.NETWORK:
        return "is not one of agent-sandbox"
    if row.get("Driver") != "bridge" or (row.get("Options") or {}).get(ICC) != "false":
        return "does not keep its containers apart"
    return None


def start_of(inspected: dict[str, Any]) -> str:
    """What tells one start of a container from any other: the rules live in a network namespace, which lives as long as that."""
    return f"{inspected['Id']} {inspected['State']['StartedAt']} {inspected['State']['Pid']}"


def subnets(rows: Iterable[dict[str, Any]]) -> set[str]:
    """The subnets of the engine's networks: also one in a public range leads to containers."""
    found = set()
    for row in rows:
        for config in (row.get("IPAM") or {}).get("Config") or []:
            if config.get("Subnet"):
                found.add(str(ipaddress.ip_network(config["Subnet"], strict=False)))
    return found


def blocked(survey: Survey) -> list[str]:
    """Everything that an open sandbox must not reach, without what a wider network covers."""
    four: list[ipaddress.IPv4Network] = []
    six: list[ipaddress.IPv6Network] = []
    for text in (*hardening.BLOCKED_NETWORKS, *survey.subnets, *survey.addresses):
        network = ipaddress.ip_network(text)
        # The sandbox's loopback is its own, not the engine's.
        if network.network_address.is_loopback:
            continue
        if isinstance(network, ipaddress.IPv4Network):
            four.append(network)
        elif not network.subnet_of(MAPPED_V4):
            six.append(network)
    return [str(network) for network in (*ipaddress.collapse_addresses(four), *ipaddress.collapse_addresses(six))]


def encode(survey: Survey) -> str:
    """netguard's config. A resolver on the engine's loopback is asked by the engine itself, never from here."""
    resolvers: Sequence[str] = [text for text in survey.resolvers if not ipaddress.ip_address(text).is_loopback]
    return base64.b64encode(json.dumps({"block": blocked(survey), "resolvers": list(resolvers)}).encode()).decode()


def is_missing_network(error: EngineRefusal, name: str) -> bool:
    """Whether a start failed since the network was removed meanwhile."""
    return error.missing and "network" in error.detail and name in error.detail
