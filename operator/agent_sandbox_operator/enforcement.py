"""Whether network policies bite in this cluster. An API server takes them and says nothing when no network plugin carries them out, so it is tried.

Two pods dial the API server's service: one cut off like a sandbox without a network, one that no policy selects. Only when the second gets through
and the first does not is it known that the policies did it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable
from typing import Any, Final

from agent_sandbox_core.v1alpha1 import SandboxObject
from agent_sandbox_kube.errors import KubeError

from .cluster import Cluster, Refused
from .policies import Policies
from .seen import NetworkView
from .settings import OperatorSettings
from .specs import CANARY, CONTROL, build_canary
from .store import Object

logger = logging.getLogger(__name__)

EVERY_SECONDS: Final = 3600.0
AGAIN_SECONDS: Final = 120.0
"""Until the next try when nothing could be said, or something was wrong."""
WAIT_SECONDS: Final = 90.0
POLL_SECONDS: Final = 0.5

UNVERIFIED = "the policies are there; whether this cluster's network enforces them was not verified yet"
UNCHECKED = "the policies are there; whether this cluster's network enforces them is not verified (verification is switched off)"
ENFORCED = "a canary pod under the policies could not reach the API server, while one without them could"
TOOTHLESS = (
    "a canary pod under the policies reached {}: this cluster's network does not enforce NetworkPolicies. Install a network plugin that does "
    "(Calico, Cilium, kube-router …), or take sandboxes for open"
)
NO_CONTROL = "the API server could not be reached from a pod without policies either, so nothing can be said about them"


class Enforcement:
    """The newest finding, and the checks."""

    def __init__(self, settings: OperatorSettings, cluster: Cluster, policies: Policies, namespace: str) -> None:
        self._settings = settings
        self._cluster = cluster
        self._policies = policies
        self._namespace = namespace
        self._found = NetworkView(
            "Unknown",
            "NotVerified",
            UNVERIFIED if settings.verify_network else UNCHECKED,
            required=settings.require_network_enforcement,
        )

    def view(self, sandbox: SandboxObject) -> NetworkView:
        """For the condition NetworkEnforced of a Sandbox; the same for all of a cluster."""
        return self._found

    async def run(self, on_change: Callable[[], None]) -> None:
        """Checks for ever. `on_change` is called when the finding is another one."""
        while True:
            found = await self._look()
            if found != self._found:
                logger.info("network policies: %s (%s)", found.reason, found.message)
                self._found = found
                on_change()
            await asyncio.sleep(EVERY_SECONDS if found.status == "True" else AGAIN_SECONDS)

    async def _look(self) -> NetworkView:
        try:
            try:
                await self._sweep()
                return await self._check()
            finally:
                await self._sweep()
        except Refused as error:
            return self._unknown(str(error))
        except KubeError as error:
            return self._unknown(f"the canary pods in namespace {self._namespace} could not be made or read: {error}")

    async def _check(self) -> NetworkView:
        await self._policies.ensure(self._namespace, now=True)
        mark = secrets.token_hex(4)
        names = {component: f"agent-sandbox-{component}-{mark}" for component in (CANARY, CONTROL)}
        for component, name in names.items():
            await self._cluster.create_canary(build_canary(name, self._namespace, component, self._settings.init_image))
        ends = dict(zip(names, await asyncio.gather(*(self._end_of(name) for name in names.values())), strict=True))
        control, canary = ends[CONTROL], ends[CANARY]
        if control is None or canary is None:
            return self._unknown(f"the canary pods in namespace {self._namespace} did not come to an end within {WAIT_SECONDS:.0f} s")
        if control["exitCode"] != 0:
            return self._unknown(NO_CONTROL)
        required = self._settings.require_network_enforcement
        if canary["exitCode"] == 0:
            return NetworkView("True", "Enforced", ENFORCED, required=required)
        return NetworkView("False", "NotEnforced", TOOTHLESS.format(_answered(canary)), required=required)

    async def _end_of(self, name: str) -> Object | None:
        """How the container of a canary ended, None when it did not in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WAIT_SECONDS
        while loop.time() < deadline:
            pod = await self._cluster.canary((self._namespace, name))
            if pod is None:
                return None
            for status in pod["status"].get("containerStatuses") or ():
                ended: Object | None = (status.get("state") or {}).get("terminated")
                if ended is not None:
                    return ended
            await asyncio.sleep(POLL_SECONDS)
        return None

    async def _sweep(self) -> None:
        for component in (CANARY, CONTROL):
            await self._cluster.remove_canaries(self._namespace, component)

    def _unknown(self, why: str) -> NetworkView:
        return NetworkView("Unknown", "NotVerified", why, required=self._settings.require_network_enforcement)


def _answered(ended: Object) -> str:
    try:
        told: Any = json.loads(ended.get("message") or "")
    except ValueError:
        return "an address"
    return str(told.get("answered") or "an address") if isinstance(told, dict) else "an address"
