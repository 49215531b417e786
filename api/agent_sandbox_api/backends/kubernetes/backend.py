"""The Backend over custom resources.

The truth is in the API server: lists and single objects are read there, so that all replicas of the facade agree and a 404 never comes from a cache. The
watch caches serve waits and the quick path (exec, files), which costs no call to the API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from agent_sandbox_core.errors import (
    BackendError,
    Conflict,
    InvalidRequest,
    SandboxNotFound,
    Unavailable,
)
from agent_sandbox_core.interfaces import Guest
from agent_sandbox_core.models import Sandbox, SandboxSpec, Snapshot, rfc3339
from agent_sandbox_core.names import new_sandbox_id, new_snapshot_id
from agent_sandbox_core.v1alpha1 import ENDED_RESTORES
from agent_sandbox_kube.client import Kube, Object, connect
from agent_sandbox_kube.config import ConfigError
from agent_sandbox_kube.errors import AlreadyExists, Forbidden, KubeError
from agent_sandbox_kube.informer import Informer
from agent_sandbox_kube.resources import QUOTAS, SANDBOXES, SNAPSHOTS

from ..tasks import TaskOwner
from .creation import Creation
from .faults import translated
from .guests import Guests
from .mapping import (
    ANNOTATION_SANDBOX,
    id_of,
    is_going,
    is_ready,
    is_whole,
    name_of,
    reason_of,
    restore_error,
    sandbox_manifest,
    sandbox_of,
    snapshot_error,
    snapshot_manifest,
    snapshot_of,
    snapshot_spec_of,
    spec_of,
    why_stopped,
)
from .objects import POLL_SECONDS, Objects

logger = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_SECONDS: Final = 5.0
SNAPSHOT_SECONDS: Final = 1800.0
RESTORE_SECONDS: Final = 1800.0
READY_SECONDS: Final = 120.0
"""How long a sandbox may take to answer again after a rollback."""
DELETE_SECONDS: Final = 4.0
QUOTA_START_SECONDS: Final = 15.0
QUOTA: Final = "agent-sandbox-api"


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """What the facade's settings say about sandboxes on a cluster. `namespace`: empty for that of the kubeconfig or the pod."""

    namespace: str = ""
    max_sandboxes: int = 20
    workspace_size: str = "1Gi"
    storage_class: str = ""
    workspace_ephemeral: bool = False
    runtime_class: str = ""
    create_seconds: float = 180.0

    def workspace(self) -> dict[str, Any]:
        """spec.workspace of every sandbox."""
        found: dict[str, Any] = {"size": self.workspace_size, "ephemeral": self.workspace_ephemeral}
        if self.storage_class:
            found["storageClassName"] = self.storage_class
        return found


class KubernetesBackend:
    """Sandboxes and Snapshots of one namespace."""

    name = "kubernetes"

    def __init__(self, options: KubernetesOptions) -> None:
        self._options = options
        self._open = contextlib.AsyncExitStack()
        self._tasks = TaskOwner()
        self._kube: Kube
        self._guests: Guests
        self._objects: Objects
        self._creation: Creation
        self._sandboxes: Informer
        self._snapshots: Informer
        self._namespace = options.namespace
        self._busy: dict[str, str] = {}
        """Names of Sandboxes with work of this process on them, and which."""

    # Life of the backend

    async def start(self) -> None:
        """Connects and follows what is there. BackendError when the cluster cannot be used."""
        try:
            self._kube = await self._open.enter_async_context(connect())
            self._namespace = self._namespace or self._kube.connection.namespace
            with translated(BackendError("the cluster does not know Sandboxes: install the CRDs (kubectl apply -f crds/, or the Helm chart)")):
                await self._kube.list(SANDBOXES, self._namespace)
                await self._kube.list(SNAPSHOTS, self._namespace)
            self._sandboxes = await self._open.enter_async_context(Informer(self._kube, SANDBOXES, self._namespace))
            self._snapshots = await self._open.enter_async_context(Informer(self._kube, SNAPSHOTS, self._namespace))
            with translated():
                await self._sandboxes.wait_synced()
                await self._snapshots.wait_synced()
        except ConfigError as error:
            raise BackendError(str(error)) from error
        self._guests = Guests(self._kube, self._namespace)
        self._open.push_async_callback(self._close_guests)
        self._objects = Objects(self._kube, self._namespace, self._sandboxes, self._tasks, max_sandboxes=self._options.max_sandboxes)
        self._creation = Creation(self._objects, seconds=self._options.create_seconds, drop=self._guests.drop)
        self._open.enter_context(self._sandboxes.listen(self._changed))
        await self._ensure_quota()

    async def close(self) -> None:
        """Stops what this process does; sandboxes live on."""
        await self._tasks.aclose(CLOSE_SECONDS)
        await self._open.aclose()

    async def ready(self) -> None:
        """Raises BackendError when the API server does not answer now."""
        with translated():
            await self._kube.version()

    def max_cpus(self) -> float | None:
        """Many nodes: unknown."""
        return None

    def open_channels(self) -> int:
        """Channels to sandboxes that are open now."""
        return self._guests.open_channels

    # Sandboxes

    async def create(
        self,
        spec: SandboxSpec,
        *,
        expires_at: datetime,
        source: str | None = None,
        idempotency_key: str | None = None,
        request_digest: str | None = None,
    ) -> Sandbox:
        """See Backend. The name comes from the key, so that two facades with one key make one sandbox."""
        if idempotency_key is None:
            name, digest = name_of(new_sandbox_id()), None
        else:
            name = f"sb-{_sha256(idempotency_key)[:16]}"
            # The request holds env values: without the key, which is stored nowhere, its digest must not let anybody try guesses.
            asked = request_digest or _sha256(spec.model_dump_json() + (source or ""))
            digest = hmac.new(idempotency_key.encode(), asked.encode(), "sha256").hexdigest()
        manifest = sandbox_manifest(
            name,
            spec,
            created_at=datetime.now(UTC),
            expires_at=expires_at,
            source=source,
            digest=digest,
            workspace=self._options.workspace(),
            runtime_class=self._options.runtime_class,
        )
        task = self._tasks.spawn(self._creation.make(manifest, spec))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if idempotency_key is None:
                task.cancel()
            elif task.cancelled():
                raise Unavailable("the server stopped before the sandbox was up: send the request again with the same Idempotency-Key") from None
            raise

    async def list(self) -> Sequence[Sandbox]:
        """Oldest first, as the API server has them."""
        with translated():
            items, _ = await self._kube.list(SANDBOXES, self._namespace)
        shown = [sandbox_of(item) for item in items if not is_going(item)]
        return sorted(shown, key=lambda one: (one.created_at, one.id))

    async def get(self, sandbox_id: str) -> Sandbox:
        """As the API server has it."""
        return sandbox_of(await self._objects.find_sandbox(sandbox_id))

    async def spec(self, sandbox_id: str) -> SandboxSpec:
        """The complete spec."""
        found = await self._objects.find_sandbox(sandbox_id)
        env: dict[str, str] = {}
        for source in found["spec"].get("envFrom") or ():
            env |= await self._objects.secret(source["secretName"]) or {}
        return spec_of(found, env)

    async def delete(self, sandbox_id: str) -> None:
        """Asks for its deletion, which ends by itself; the place in the quota is free when the pod is gone."""
        found = await self._objects.find_sandbox(sandbox_id)
        await self._objects.remove_sandbox(found)
        self._guests.drop(found["metadata"]["uid"])
        # Usually a second: whoever creates the next one at the limit then finds the place free.
        key, uid = (self._namespace, found["metadata"]["name"]), found["metadata"]["uid"]
        with contextlib.suppress(TimeoutError):
            await self._sandboxes.wait_for(key, lambda one: one is None or one["metadata"]["uid"] != uid, DELETE_SECONDS)

    async def set_expiry(self, sandbox_id: str, expires_at: datetime) -> Sandbox:
        """Changes the time at which it goes."""
        found = await self._objects.find_sandbox(sandbox_id)
        changed = await self._objects.change_sandbox(found, {"expiresAt": rfc3339(expires_at)})
        return sandbox_of(changed)

    async def guest(self, sandbox_id: str) -> Guest:
        """The guest, kept while its pod lives. Asks the API server only about what the cache does not have."""
        found = self._sandboxes.get((self._namespace, name_of(sandbox_id)))
        if found is None or is_going(found) or not is_ready(found):
            found = await self._objects.find_sandbox(sandbox_id)
            self._sandboxes.put(found)
        self._check_restore(found)
        if not is_ready(found):
            raise InvalidRequest(why_stopped(found))
        return self._guests.of(found["metadata"]["uid"], sandbox_id, found["status"]["podName"])

    # Snapshots

    async def snapshot(self, sandbox_id: str, *, name: str | None) -> Snapshot:
        """Asks the mover for one and waits for it. Cancelled or failed, none is left."""
        await self.guest(sandbox_id)
        sandbox = name_of(sandbox_id)
        manifest = snapshot_manifest(name_of(new_snapshot_id()), sandbox, name, datetime.now(UTC))
        return await self._work(sandbox, "snapshot", self._take(manifest))

    async def list_snapshots(self, sandbox_id: str | None = None) -> Sequence[Snapshot]:
        """Oldest first; those that are whole."""
        with translated():
            items, _ = await self._kube.list(SNAPSHOTS, self._namespace)
        shown = [snapshot_of(item) for item in items if is_whole(item)]
        return sorted((one for one in shown if sandbox_id is None or one.sandbox_id == sandbox_id), key=lambda one: (one.created_at, one.id))

    async def get_snapshot(self, snapshot_id: str) -> Snapshot:
        """Its facts."""
        return snapshot_of(await self._objects.find_snapshot(snapshot_id))

    async def snapshot_spec(self, snapshot_id: str) -> SandboxSpec:
        """The spec of the sandbox it was taken of, env values included."""
        found = await self._objects.find_snapshot(snapshot_id)
        secret = ((found["status"].get("sourceSpec") or {}).get("envSecretName")) or ""
        return snapshot_spec_of(found, (await self._objects.secret(secret) or {}) if secret else {})

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Removes it; the mover removes its file."""
        found = await self._objects.find_snapshot(snapshot_id)
        await self._objects.remove_snapshot(found)

    async def rollback(self, sandbox_id: str, snapshot_id: str) -> Sandbox:
        """Asks the mover for it and waits until the sandbox answers again; also revives a stopped one."""
        snapshot = await self._objects.find_snapshot(snapshot_id)
        found = await self._objects.find_sandbox(sandbox_id)
        self._check_restore(found)
        return await self._work(found["metadata"]["name"], "rollback", self._roll_back(found, sandbox_id, snapshot["metadata"]["name"]))

    # Work that holds a sandbox

    async def _work(self, name: str, kind: str, work: Coroutine[Any, Any, T]) -> T:
        if name in self._busy:
            work.close()
            what = "is being rolled back" if self._busy[name] == "rollback" else "has a snapshot taken of it"
            raise Conflict(f"sandbox {id_of(name)} {what}: try again when that is done")
        self._busy[name] = kind
        task = self._tasks.spawn(work)
        task.add_done_callback(lambda _: self._busy.pop(name, None))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Unavailable("the server stopped before it was done: look at the sandbox, then try again") from None
            if kind == "snapshot":
                task.cancel()  # nobody will be told of it, so it must not be there
            raise

    async def _take(self, manifest: Object) -> Snapshot:
        name = manifest["metadata"]["name"]
        created = await self._objects.post(SNAPSHOTS, manifest, self._objects.clear_snapshot)
        if created is None:
            raise BackendError(f"the new name {name} of a snapshot is taken already: try again")
        self._snapshots.put(created)
        try:
            return await self._await_snapshot(name)
        except BaseException as error:
            await asyncio.shield(self._tasks.spawn(self._objects.clear_snapshot(created)))
            if isinstance(error, TimeoutError):
                sandbox = manifest["metadata"]["annotations"][ANNOTATION_SANDBOX]
                raise BackendError(f"no snapshot of sandbox {sandbox} within {SNAPSHOT_SECONDS:.0f} s: look whether the mover runs") from error
            raise

    async def _await_snapshot(self, name: str) -> Snapshot:
        key = (self._namespace, name)
        found = await self._snapshots.wait_for(key, _has_ended, SNAPSHOT_SECONDS)
        if found is None:
            raise Conflict(f"snapshot {id_of(name)} was deleted while it was taken")
        if found["status"]["phase"] == "Failed":
            raise snapshot_error(found)
        return snapshot_of(found)

    async def _roll_back(self, found: Object, sandbox_id: str, snapshot: str) -> Sandbox:
        name, request = found["metadata"]["name"], secrets.token_hex(16)
        key = (self._namespace, name)
        await self._objects.change_sandbox(found, {"restore": {"snapshotName": snapshot, "requestID": request}})
        try:
            done = await self._sandboxes.wait_for(key, lambda one: one is None or is_going(one) or _is_restored(one, request), RESTORE_SECONDS)
            if done is None or is_going(done):
                raise SandboxNotFound(sandbox_id)
            last = done["status"]["lastRestore"]
            if last["phase"] != "Succeeded":
                raise restore_error(sandbox_id, id_of(snapshot), last)
            ready = await self._sandboxes.wait_for(
                key, lambda one: one is None or is_going(one) or (is_ready(one) and not _wants_restore(one)), READY_SECONDS
            )
        except TimeoutError as error:
            last_seen = self._sandboxes.get(key) or found
            raise BackendError(f"sandbox {sandbox_id} does not come back from its rollback: {why_stopped(last_seen)}") from error
        if ready is None or is_going(ready):
            raise SandboxNotFound(sandbox_id)
        return sandbox_of(ready)

    # Small parts

    async def _close_guests(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._guests.aclose()

    def _check_restore(self, found: Object) -> None:
        name = found["metadata"]["name"]
        if self._busy.get(name) == "rollback" or _wants_restore(found):
            raise Conflict(f"sandbox {id_of(name)} is being rolled back: try again when that is done")

    def _changed(self, key: tuple[str, str]) -> None:
        if self._sandboxes.get(key) is None:
            self._guests.keep_only({one["metadata"]["uid"] for one in self._sandboxes.items().values()})

    async def _ensure_quota(self) -> None:
        """MAX_SANDBOXES as a ResourceQuota: atomic at admission, also with many facades."""
        spec = {"hard": {"count/sandboxes.agentsandbox.dev": str(self._options.max_sandboxes)}}
        manifest = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": QUOTA}, "spec": spec}
        try:
            try:
                await self._kube.create(QUOTAS, manifest, self._namespace)
            except AlreadyExists:
                await self._kube.patch(QUOTAS, QUOTA, self._namespace, {"spec": spec})
            # Until its count is known, admission lets everything in or nothing.
            deadline = asyncio.get_running_loop().time() + QUOTA_START_SECONDS
            while asyncio.get_running_loop().time() < deadline:
                found = await self._kube.get(QUOTAS, QUOTA, self._namespace)
                if (found.get("status") or {}).get("hard") == spec["hard"]:
                    break
                await asyncio.sleep(POLL_SECONDS)
        except Forbidden:
            logger.info("no right to write a ResourceQuota in %s: the limit of sandboxes there is the cluster admin's alone", self._namespace)
        except KubeError as error:
            raise BackendError(str(error)) from error


def _has_ended(raw: Object | None) -> bool:
    return raw is None or (raw.get("status") or {}).get("phase") in ("Ready", "Failed")


def _is_restored(raw: Object, request: str) -> bool:
    last = (raw.get("status") or {}).get("lastRestore") or {}
    return last.get("requestID") == request and last.get("phase") in ENDED_RESTORES


def _wants_restore(raw: Object) -> bool:
    """A rollback was asked for and has not ended. One that was there at the creation counts as done, and Ready says so."""
    return (raw.get("status") or {}).get("phase") == "Restoring" and reason_of(raw)[0] == "Restoring"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
