"""What the operator does to the cluster: each call once, with the errors that matter told apart. Decides nothing."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Final

import httpcore
from agent_sandbox_core.v1alpha1 import KIND_SANDBOX, LABEL_COMPONENT, LABEL_SANDBOX, SandboxObject
from agent_sandbox_core.v1alpha1.common import API_VERSION
from agent_sandbox_kube import resources
from agent_sandbox_kube.client import Kube
from agent_sandbox_kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, NotFound, Unavailable
from agent_sandbox_kube.events import EventPoster
from agent_sandbox_kube.exec import open_guest
from agent_sandbox_kube.resources import Resource

from .metrics import Metrics
from .refusals import Refusal, read_refusal
from .seen import Trouble
from .store import Key, Kind, Object
from .views import read_time

NAMES: Final[dict[str, str]] = {"pods": "pod", "persistentvolumeclaims": "PVC", "networkpolicies": "NetworkPolicy"}

COMPONENT: Final = "agent-sandbox-operator"
WEBHOOK: Final = "failed calling webhook"
NODE_TRUST_SECONDS: Final = 4.0
TROUBLE_AGE: Final = timedelta(seconds=150)
SILENT_EVENTS: Final = frozenset({"FailedScheduling", "BackOff", "Failed", "InspectFailed", "ErrImageNeverPull", "NetworkNotReady"})
"""Told by the pod's own status, and better, or passing by themselves."""
REMOVE_QUICKLY: Final = {"propagationPolicy": "Background"}
RESOURCES: Final[dict[str, Resource]] = {
    one.plural: one
    for one in (
        resources.SANDBOXES,
        resources.PODS,
        resources.CLAIMS,
        resources.SECRETS,
        resources.EVENTS,
        resources.NODES,
        resources.NETWORK_POLICIES,
    )
}


class Refused(Exception):
    """The API server refuses a child of a Sandbox, for a reason that belongs into its status."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Cluster:
    """The API server, as the operator needs it. `namespaces`: the ones to look after, empty for all."""

    def __init__(self, kube: Kube, metrics: Metrics, namespaces: tuple[str, ...]) -> None:
        self._kube = kube
        self._metrics = metrics
        self._namespaces = namespaces
        self._nodes: dict[str, tuple[float, bool]] = {}
        self._events = EventPoster(kube, COMPONENT, socket.gethostname())

    # -- reading

    async def get(self, kind: Kind, key: Key) -> Object | None:
        """One object, None when there is none."""
        return await self._find(kind, key)

    async def list_all(self, kind: Kind) -> AsyncIterator[tuple[str | None, list[Object], int]]:
        """All objects of a kind that are looked after: for each namespace (None: all at once) the objects and the resourceVersion of the list."""
        selector = "" if kind == "sandboxes" else LABEL_SANDBOX
        for namespace in self._namespaces or (None,):
            items, version = await self._kube.list(RESOURCES[kind], namespace, label_selector=selector)
            yield namespace, items, version

    async def secret_keys(self, key: Key) -> frozenset[str] | None:
        """The names in a Secret, None when there is none. The values are dropped here."""
        found = await self._find("secrets", key)
        return None if found is None else frozenset(found.get("data") or ())

    async def node_is_silent(self, name: str) -> bool:
        """Whether a node's kubelet has not been heard of for a while. One that is gone, or may not be looked at, counts as silent."""
        known = self._nodes.get(name)
        if known is not None and time.monotonic() - known[0] < NODE_TRUST_SECONDS:
            return known[1]
        silent = True
        try:
            node = await self._kube.get(RESOURCES["nodes"], name)
            silent = all(one["type"] != "Ready" or one["status"] != "True" for one in node["status"].get("conditions") or ())
        except (Forbidden, NotFound):
            pass
        self._nodes[name] = (time.monotonic(), silent)
        return silent

    async def newest_warning(self, child: Key, now: datetime) -> Trouble | None:
        """The newest warning about the pod and the PVC of that name."""
        namespace, name = child
        items, _ = await self._kube.list(RESOURCES["events"], namespace, field_selector=f"involvedObject.name={name},type=Warning")
        newest: tuple[datetime, Trouble] | None = None
        for item in items:
            kind, reason = item["involvedObject"].get("kind", ""), item.get("reason", "")
            moment = read_time(item.get("lastTimestamp") or item.get("eventTime") or item["metadata"].get("creationTimestamp"))
            if kind not in {"Pod", "PersistentVolumeClaim"} or reason in SILENT_EVENTS or moment is None or now - moment > TROUBLE_AGE:
                continue
            if newest is None or moment >= newest[0]:
                newest = (moment, Trouble(kind, reason, " ".join(item.get("message", "").split())[:1000]))
        return newest[1] if newest is not None else None

    # -- children

    async def create(self, kind: Kind, manifest: Object) -> Object:
        """Creates a child; when its name is taken, what has it. Raises Refused."""
        return await self._create(kind, manifest) or await self._taken(kind, manifest)

    async def delete(self, kind: Kind, key: Key, uid: str) -> Object | None:
        """Deletes exactly this object; what is left of it, None when it is gone. Another one of its name is not touched."""
        options: Object = {"preconditions": {"uid": uid}, **REMOVE_QUICKLY}
        try:
            left = await self._kube.delete(RESOURCES[kind], key[1], key[0], options)
        except NotFound:
            return None
        except Conflict:
            return await self._find(kind, key)
        self._metrics.writes.labels(kind, "delete").inc()
        return left if left.get("kind") != "Status" else None

    async def grow_pvc(self, key: Key, size: str) -> Object:
        """Asks for a larger volume. Raises Refused with what the API server says."""
        try:
            grown = await self._kube.patch(
                RESOURCES["persistentvolumeclaims"], key[1], key[0], {"spec": {"resources": {"requests": {"storage": size}}}}
            )
        except (Forbidden, Invalid) as error:
            raise Refused(Refusal("WorkspaceUnbound", error.message.strip().rstrip("."), 0.0)) from error
        self._metrics.writes.labels("persistentvolumeclaims", "patch").inc()
        return grown

    # -- the Sandbox itself

    async def delete_sandbox(self, key: Key, uid: str, version: str) -> bool:
        """Deletes the Sandbox as it was seen; False when it is not that one any more."""
        options: Object = {"preconditions": {"uid": uid, "resourceVersion": version}, **REMOVE_QUICKLY}
        try:
            await self._kube.delete(RESOURCES["sandboxes"], key[1], key[0], options)
        except NotFound:
            return True
        except Conflict:
            return False
        self._metrics.writes.labels("sandboxes", "delete").inc()
        return True

    async def patch_status(self, key: Key, patch: Object) -> Object | None:
        """Writes these fields of the status; None when the Sandbox is gone."""
        try:
            written = await self._kube.patch(RESOURCES["sandboxes"], key[1], key[0], {"status": patch}, subresource="status")
        except NotFound:
            return None
        self._metrics.writes.labels("sandboxes", "patch").inc()
        return written

    async def post_event(self, sandbox: SandboxObject, reason: str, message: str, *, warning: bool) -> None:
        """An Event on the Sandbox. One that cannot be written is no reason to stop: the status tells the same."""
        metadata = sandbox.metadata
        about = {"apiVersion": API_VERSION, "kind": KIND_SANDBOX, "namespace": metadata.namespace, "name": metadata.name, "uid": metadata.uid}
        if await self._events.post(about, reason, message, warning=warning):
            self._metrics.writes.labels("events", "create").inc()

    # -- network policies

    async def create_policy(self, manifest: Object) -> Object | None:
        """Creates a NetworkPolicy; when its name is taken, what has it, else None. Raises Refused."""
        return None if await self._create("networkpolicies", manifest) is not None else await self._taken("networkpolicies", manifest)

    async def replace_policy(self, manifest: Object, found: Object) -> None:
        """Puts a NetworkPolicy of ours back to what it should be."""
        key = (manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        await self._kube.patch(RESOURCES["networkpolicies"], key[1], key[0], {"spec": {**dict.fromkeys(found["spec"]), **manifest["spec"]}})
        self._metrics.writes.labels("networkpolicies", "patch").inc()

    async def delete_policy(self, key: Key) -> None:
        """Deletes a NetworkPolicy, if it is there."""
        with contextlib.suppress(NotFound):
            await self._kube.delete(RESOURCES["networkpolicies"], key[1], key[0], REMOVE_QUICKLY)

    # -- canaries

    async def create_canary(self, manifest: Object) -> None:
        """Creates a canary pod. Raises Refused."""
        if await self._create("pods", manifest) is None:
            name = manifest["metadata"]["name"]
            raise Refused(Refusal("NameConflict", f"pod {name} of an earlier check is still there", 5.0))

    async def canary(self, key: Key) -> Object | None:
        """A canary pod, None when it is gone."""
        return await self._find("pods", key)

    async def remove_canaries(self, namespace: str, component: str) -> None:
        """Deletes all canary pods of a component."""
        items, _ = await self._kube.list(resources.PODS, namespace, label_selector=f"{LABEL_COMPONENT}={component}")
        for item in items:
            with contextlib.suppress(NotFound):
                await self._kube.delete(resources.PODS, item["metadata"]["name"], namespace, {"gracePeriodSeconds": 0, **REMOVE_QUICKLY})

    # -- channels

    async def open_channel(self, key: Key, pod: str) -> httpcore.AsyncNetworkStream:
        """A channel to sandbox-init in that pod."""
        return await open_guest(self._kube, key[0], pod)

    async def _find(self, kind: str, key: Key) -> Object | None:
        try:
            return await self._kube.get(RESOURCES[kind], key[1], key[0])
        except NotFound:
            return None

    async def _create(self, kind: str, manifest: Object) -> Object | None:
        """What was created, None when the name is taken."""
        namespace = manifest["metadata"]["namespace"]
        try:
            created = await self._kube.create(RESOURCES[kind], manifest, namespace)
        except AlreadyExists:
            return None
        except (Forbidden, NotFound, Invalid) as error:
            raise Refused(read_refusal(NAMES[kind], namespace, error.message)) from error
        except Unavailable as error:
            if WEBHOOK not in error.message:
                raise
            raise Refused(read_refusal(NAMES[kind], namespace, error.message)) from error
        self._metrics.writes.labels(kind, "create").inc()
        return created

    async def _taken(self, kind: str, manifest: Object) -> Object:
        """What has this name already. When it has just gone, the whole reconcile is tried again."""
        key = (manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        found = await self._find(kind, key)
        if found is None:
            raise Refused(Refusal("WaitingForDeletion", f"{NAMES[kind]} {key[1]} of before is just going; it is made again", 0.1))
        return found
