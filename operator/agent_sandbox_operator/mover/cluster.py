"""What the mover does to the cluster: each call once, with the errors that matter told apart. Decides nothing."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import AsyncIterator, Awaitable, Collection
from typing import Any, Final, TypeVar

import httpcore
from agent_sandbox_core.channel import ChannelBudget
from agent_sandbox_core.errors import BackendError, Conflict, Forbidden
from agent_sandbox_core.guest import ChannelGuest
from agent_sandbox_core.v1alpha1 import GROUP, SandboxObject, SnapshotObject, child_name
from agent_sandbox_core.v1alpha1.common import API_VERSION
from agent_sandbox_kube import errors as kube_errors
from agent_sandbox_kube.client import Kube
from agent_sandbox_kube.errors import KubeError
from agent_sandbox_kube.events import EventPoster
from agent_sandbox_kube.exec import open_guest
from agent_sandbox_kube.resources import CLAIMS, CUSTOM_RESOURCE_DEFINITIONS, NAMESPACES, PODS, SANDBOXES, SECRETS, SNAPSHOTS, Resource

from .marks import Marks

T = TypeVar("T")
Object = dict[str, Any]

UNPROCESSABLE: Final = 422
COMPONENT: Final = "agent-sandbox-mover"
MAX_SECRET_BYTES: Final = 1 << 20


class Trouble(Exception):
    """The API server did not do what it was asked for a reason that may pass: the same is tried again later."""


class Changed(Exception):
    """The object was changed meanwhile: look at it again."""


class Vanished(Exception):
    """The object is gone, or another one has its name."""


class Cluster:
    """The API server, as the mover needs it."""

    def __init__(self, kube: Kube, identity: str) -> None:
        self._kube = kube
        self._events = EventPoster(kube, COMPONENT, identity)
        self._budget = ChannelBudget()

    # Reading

    async def sandbox(self, namespace: str, name: str) -> SandboxObject | None:
        """Its newest version."""
        raw = await self._find(SANDBOXES, namespace, name)
        return None if raw is None else SandboxObject.read(raw)

    async def snapshot(self, namespace: str, name: str) -> SnapshotObject | None:
        """Its newest version."""
        raw = await self._find(SNAPSHOTS, namespace, name)
        return None if raw is None else SnapshotObject.read(raw)

    async def snapshots(self, namespaces: Collection[str]) -> list[SnapshotObject]:
        """All of these namespaces, or of all with none given; all of them, or Trouble."""
        found: list[SnapshotObject] = []
        for namespace in namespaces or (None,):
            items, _ = await _called(self._kube.list(SNAPSHOTS, namespace))
            found += [SnapshotObject.read(item) for item in items]
        return found

    async def crd_stands(self) -> bool:
        """The CRD of Snapshots is there and stays. One that may not be looked at counts as that."""
        try:
            raw = await self._kube.get(CUSTOM_RESOURCE_DEFINITIONS, f"{SNAPSHOTS.plural}.{GROUP}")
        except kube_errors.Forbidden:
            return True
        except kube_errors.NotFound:
            return False
        except KubeError as error:
            raise _trouble(error) from error
        return "deletionTimestamp" not in raw["metadata"]

    async def cluster_id(self) -> str:
        """The uid of kube-system, which no two clusters share."""
        try:
            raw = await self._kube.get(NAMESPACES, "kube-system")
        except (kube_errors.Forbidden, kube_errors.NotFound) as error:
            raise Forbidden(
                "the namespace kube-system may not be looked at: set AGENT_SANDBOX_INSTALLATION to a name for this installation"
            ) from error
        except KubeError as error:
            raise _trouble(error) from error
        return str(raw["metadata"]["uid"])

    # Status

    async def write_snapshot(self, snapshot: SnapshotObject, status: Object) -> SnapshotObject:
        """Writes these fields of a Snapshot's status over the version that was seen. Changed, Vanished."""
        return SnapshotObject.read(await self._write(SNAPSHOTS, snapshot, {"status": status}))

    async def write_restore(self, sandbox: SandboxObject, last_restore: Object) -> SandboxObject:
        """Writes these fields of status.lastRestore over the version that was seen. Changed, Vanished."""
        return SandboxObject.read(await self._write(SANDBOXES, sandbox, {"status": {"lastRestore": last_restore}}))

    async def _write(self, resource: Resource, seen: SandboxObject | SnapshotObject, patch: Object) -> Object:
        meta = seen.metadata
        body = {"metadata": {"uid": meta.uid, "resourceVersion": meta.resource_version}, **patch}
        try:
            return await self._kube.patch(resource, meta.name, meta.namespace, body, subresource="status")
        except kube_errors.Conflict as error:
            raise Changed from error
        except kube_errors.NotFound as error:
            raise Vanished from error
        except KubeError as error:
            raise _trouble(error) from error

    # Marks on the workspace

    async def marks(self, sandbox: SandboxObject) -> Marks | None:
        """What its workspace says; None when there is none."""
        resource, name = _workspace(sandbox)
        raw = await self._find(resource, sandbox.metadata.namespace, name)
        if raw is None or not _is_owned(raw, sandbox.metadata.uid) or "deletionTimestamp" in raw["metadata"]:
            return None
        return Marks.read(raw["metadata"].get("annotations") or {})

    async def mark(self, sandbox: SandboxObject, annotations: dict[str, str]) -> None:
        """Writes on its workspace what was carried out. Vanished."""
        resource, name = _workspace(sandbox)
        try:
            await self._kube.patch(resource, name, sandbox.metadata.namespace, {"metadata": {"annotations": annotations}})
        except kube_errors.NotFound as error:
            raise Vanished from error
        except KubeError as error:
            raise _trouble(error) from error

    # Env values, as base64: they are carried, not read

    async def env(self, sandbox: SandboxObject) -> dict[str, str]:
        """All variables of a Sandbox with their values in base64, as its pod has them: those of spec.env win."""
        values: dict[str, str] = {}
        for source in sandbox.spec.env_from:
            raw = await self._find(SECRETS, sandbox.metadata.namespace, source.secret_name)
            if raw is not None:
                values |= raw.get("data") or {}
            elif not source.optional:
                raise Conflict(
                    f"Secret {source.secret_name} of Sandbox {sandbox.metadata.name} is gone, so its environment cannot be kept: create it again"
                )
        return values | {one.name: base64.b64encode(one.value.encode()).decode() for one in sandbox.spec.env}

    async def keep_env(self, snapshot: SnapshotObject, values: dict[str, str]) -> str:
        """Keeps a copy of the values in a Secret that goes with the Snapshot; returns its name."""
        if sum(len(value) for value in values.values()) > MAX_SECRET_BYTES:
            raise BackendError(f"the environment has more than {MAX_SECRET_BYTES} bytes, which no Secret can hold: make its values smaller")
        meta, name = snapshot.metadata, _secret_name(snapshot)
        manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": meta.namespace, "ownerReferences": [_owner(snapshot)]},
            "type": "Opaque",
            "data": values,
        }
        try:
            await self._kube.create(SECRETS, manifest, meta.namespace)
        except kube_errors.Conflict as error:
            found = await self._find(SECRETS, meta.namespace, name)
            if found is None or not _is_owned(found, meta.uid):
                raise Conflict(f"Secret {name} in namespace {meta.namespace} belongs to somebody else: delete or rename it") from error
            stale = {key: None for key in found.get("data") or {} if key not in values}
            await _called(self._kube.patch(SECRETS, name, meta.namespace, {"data": {**stale, **values}}))
        except KubeError as error:
            raise _trouble(error) from error
        return name

    async def env_secret(self, snapshot: SnapshotObject) -> str | None:
        """The name of the copy, None when there is none."""
        name = _secret_name(snapshot)
        found = await self._find(SECRETS, snapshot.metadata.namespace, name)
        return name if found is not None and _is_owned(found, snapshot.metadata.uid) else None

    # Guests and events

    @contextlib.asynccontextmanager
    async def guest(self, sandbox: SandboxObject) -> AsyncIterator[ChannelGuest]:
        """The guest in a Sandbox's pod, over channels that are closed with the block."""
        namespace, pod = sandbox.metadata.namespace, sandbox.status.pod_name or child_name(sandbox.metadata.name, sandbox.metadata.uid)

        async def connect() -> httpcore.AsyncNetworkStream:
            return await open_guest(self._kube, namespace, pod)

        guest = ChannelGuest(connect, budget=self._budget)
        try:
            yield guest
        finally:
            await guest.aclose()

    async def tell(self, about: SandboxObject | SnapshotObject, reason: str, message: str, *, warning: bool = False) -> None:
        """An Event."""
        await self._events.post(_reference(about), reason, message, warning=warning)

    async def _find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        try:
            return await self._kube.get(resource, name, namespace)
        except kube_errors.NotFound:
            return None
        except KubeError as error:
            raise _trouble(error) from error


async def _called(call: Awaitable[T]) -> T:
    try:
        return await call
    except KubeError as error:
        raise _trouble(error) from error


def _trouble(error: KubeError) -> Exception:
    """What only somebody else can change is told in the status; everything else may pass."""
    if isinstance(error, kube_errors.Forbidden):
        return Forbidden(f"the mover may not do this in the namespace: {error.message}; bind its role there, or correct what forbids it")
    if error.status == UNPROCESSABLE:
        return BackendError(f"the API server refuses it: {error.message}; the CRD that is installed is not this mover's")
    return Trouble(str(error))


def _workspace(sandbox: SandboxObject) -> tuple[Resource, str]:
    """What holds the marks."""
    return PODS if sandbox.spec.workspace.ephemeral else CLAIMS, child_name(sandbox.metadata.name, sandbox.metadata.uid)


def _secret_name(snapshot: SnapshotObject) -> str:
    return child_name(snapshot.metadata.name, snapshot.metadata.uid)


def _reference(about: SandboxObject | SnapshotObject) -> Object:
    meta = about.metadata
    return {"apiVersion": API_VERSION, "kind": about.kind, "name": meta.name, "namespace": meta.namespace, "uid": meta.uid}


def _owner(about: SnapshotObject) -> Object:
    return {"apiVersion": API_VERSION, "kind": about.kind, "name": about.metadata.name, "uid": about.metadata.uid, "controller": True}


def _is_owned(raw: Object, uid: str) -> bool:
    return any(one.get("uid") == uid for one in raw["metadata"].get("ownerReferences") or ())
