"""The NetworkPolicies of namespaces with sandboxes, and of Sandboxes with an allowlist: there before anything can run, and put back when somebody changes them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from agent_sandbox_core.v1alpha1 import LABEL_COMPONENT, SandboxObject, child_name

from .cluster import Cluster, Refused
from .refusals import Refusal
from .specs import allow_policy, namespace_policies
from .store import Key, Object
from .views import controller_uid

logger = logging.getLogger(__name__)

TRUST_SECONDS: Final = 300.0
"""How long policies that were there are taken to be there still."""


class Policies:
    """Keeps them as they should be."""

    def __init__(self, cluster: Cluster, blocked: tuple[str, ...]) -> None:
        self._cluster = cluster
        self._blocked = blocked
        self._ensured: dict[str, float] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._allowed: dict[Key, tuple[str, ...]] = {}

    async def ensure(self, namespace: str, *, now: bool = False) -> None:
        """The three of a namespace. `now`: look even when they were there a short while ago. Raises Refused."""
        if not now and time.monotonic() - self._ensured.get(namespace, -TRUST_SECONDS) < TRUST_SECONDS:
            return
        async with self._locks.setdefault(namespace, asyncio.Lock()):
            if not now and time.monotonic() - self._ensured.get(namespace, -TRUST_SECONDS) < TRUST_SECONDS:
                return
            for manifest in namespace_policies(namespace, self._blocked):
                await self._ensure(manifest, mine=lambda found: LABEL_COMPONENT in (found["metadata"].get("labels") or {}))
            self._ensured[namespace] = time.monotonic()

    async def ensure_allowed(self, sandbox: SandboxObject) -> None:
        """The one of a Sandbox of mode Allowlist. Edits of the list need no new pod. Raises Refused."""
        network, metadata = sandbox.spec.network, sandbox.metadata
        key = (metadata.namespace, metadata.name)
        if metadata.deletion_timestamp is not None or (network.mode != "Allowlist" and key not in self._allowed):
            return
        if network.mode != "Allowlist":
            await self._cluster.delete_policy((metadata.namespace, child_name(metadata.name, metadata.uid)))
            del self._allowed[key]
            return
        wanted = (metadata.uid, *network.allow)
        if self._allowed.get(key) == wanted:
            return
        await self._ensure(allow_policy(sandbox), mine=lambda found: controller_uid(found) == metadata.uid)
        self._allowed[key] = wanted

    async def ensure_quietly(self, namespace: str) -> None:
        """The three of a namespace, looked at now. What is refused is told by the Sandboxes of that namespace, when they need it."""
        try:
            await self.ensure(namespace, now=True)
        except Refused as error:
            logger.warning("network policies of namespace %s: %s", namespace, error)

    def forget(self, key: Key) -> None:
        """A Sandbox is gone, and its policy with it."""
        self._allowed.pop(key, None)

    def distrust(self) -> None:
        """Look at everything again when it is next needed."""
        self._ensured.clear()
        self._allowed.clear()

    async def _ensure(self, manifest: Object, mine: Callable[[Object], bool]) -> None:
        found = await self._cluster.create_policy(manifest)
        if found is None or found["spec"] == manifest["spec"]:
            return
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        if not mine(found):
            message = f"NetworkPolicy {name} exists in namespace {namespace} and is not the operator's: delete or rename it"
            raise Refused(Refusal("NameConflict", message, 5.0))
        logger.warning("NetworkPolicy %s/%s was not as it should be, and is put back", namespace, name)
        await self._cluster.replace_policy(manifest, found)
