"""How a Sandbox comes up: made once for each Idempotency-Key, with its Secret, and waited for with patience that depends on what is in its way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final

from agent_sandbox_core.errors import Conflict, SandboxNotFound
from agent_sandbox_core.models import Sandbox, SandboxSpec
from agent_sandbox_kube.client import Object
from agent_sandbox_kube.errors import AlreadyExists, NotFound
from agent_sandbox_kube.errors import Conflict as ChangedMeanwhile
from agent_sandbox_kube.resources import SANDBOXES, SECRETS

from .faults import translated
from .mapping import ANNOTATION_REQUEST, create_error, env_secret_name, id_of, is_going, is_ready, reason_of, sandbox_of, secret_manifest
from .objects import POLL_SECONDS, Objects, exactly

GOING_SECONDS: Final = 20.0
"""How long an earlier sandbox with the same Idempotency-Key, which is being deleted, is waited for."""

AT_ONCE: Final = 0.0
GRACE: Final = {
    # What does not heal while a caller waits.
    "QuotaExceeded": AT_ONCE, "InvalidImage": AT_ONCE, "PodSecurityRejected": AT_ONCE, "AdmissionRejected": AT_ONCE, "NameConflict": AT_ONCE,
    "NamespaceNotEnabled": AT_ONCE, "SnapshotMissing": AT_ONCE, "SnapshotFailed": AT_ONCE, "WorkspaceLost": AT_ONCE, "CrashLoop": AT_ONCE,
    # What may: a pull is tried again, a node may be freed by what is just being deleted.
    "ImagePullFailed": 10.0, "Unschedulable": 15.0, "WorkspaceUnbound": 45.0, "EnvSecretMissing": 20.0,
}  # fmt: skip
"""Seconds that a Sandbox may stay with this reason before its create fails."""


class Creation:
    """Makes Sandboxes. `seconds`: how long one may take; `drop(uid)`: the guest of one that did not come up is not needed."""

    def __init__(self, objects: Objects, *, seconds: float, drop: Callable[[str], None]) -> None:
        self._objects = objects
        self._seconds = seconds
        self._drop = drop

    async def make(self, manifest: Object, spec: SandboxSpec) -> Sandbox:
        """Makes it and waits until a command can run in it; when it raises, nothing of it is left. A keyed one may be there already."""
        keyed = ANNOTATION_REQUEST in manifest["metadata"]["annotations"]
        if keyed and (known := await self._earlier(manifest)) is not None:
            # Its maker may have died before it made the Secret. Who waits for it does not remove it: it is another request's too.
            await self._give_env(known, spec.env)
            return sandbox_of(await self._await_ready(known))
        created = await self._objects.post(SANDBOXES, manifest, self._objects.clear_sandbox)
        if created is None:
            return await self.make(manifest, spec)  # another facade was quicker, with the same key
        self._objects.sandboxes.put(created)
        try:
            await self._give_env(created, spec.env)
            return sandbox_of(await self._await_ready(created))
        except BaseException:
            await asyncio.shield(self._objects.tasks.spawn(self._objects.clear_sandbox(created)))
            self._drop(created["metadata"]["uid"])
            raise

    async def _earlier(self, manifest: Object) -> Object | None:
        """The Sandbox that an earlier request with this key made; None when there is none, or none any more."""
        name = manifest["metadata"]["name"]
        deadline = asyncio.get_running_loop().time() + GOING_SECONDS
        while True:
            with translated():
                try:
                    found = await self._objects.kube.get(SANDBOXES, name, self._objects.namespace)
                except NotFound:
                    return None
            if not is_going(found):
                break
            if asyncio.get_running_loop().time() > deadline:
                raise Conflict(f"the sandbox {id_of(name)} of an earlier request with this Idempotency-Key is still being deleted: use a new key")
            await asyncio.sleep(POLL_SECONDS)
        if found["metadata"].get("annotations", {}).get(ANNOTATION_REQUEST) != manifest["metadata"]["annotations"][ANNOTATION_REQUEST]:
            raise Conflict("this Idempotency-Key was used for another request: use a new key for each request, and the same one only to repeat it")
        self._objects.sandboxes.put(found)
        return found

    async def _give_env(self, owner: Object, values: Mapping[str, str]) -> None:
        """The Secret with its env values, if it has any. One that an earlier Sandbox of this name has left behind goes first."""
        if not values:
            return
        name, uid = env_secret_name(owner["metadata"]["name"]), owner["metadata"]["uid"]
        deadline = asyncio.get_running_loop().time() + GOING_SECONDS
        while True:
            with translated():
                try:
                    await self._objects.kube.create(SECRETS, secret_manifest(name, owner, values), self._objects.namespace)
                except AlreadyExists:
                    if await self._is_ours(name, uid):
                        return
                else:
                    return
            if asyncio.get_running_loop().time() > deadline:
                raise Conflict(f"the Secret {self._objects.namespace}/{name} is somebody else's: delete it, or use another Idempotency-Key")
            await asyncio.sleep(POLL_SECONDS)

    async def _is_ours(self, name: str, owner: str) -> bool:
        """Whether the Secret belongs to this Sandbox; one of a Sandbox that is gone is removed."""
        try:
            found = await self._objects.kube.get(SECRETS, name, self._objects.namespace)
            owners = [one["uid"] for one in found["metadata"].get("ownerReferences") or () if one["kind"] == "Sandbox"]
            if owner not in owners and owners:
                await self._objects.kube.delete(SECRETS, name, self._objects.namespace, exactly(found))
        except (NotFound, ChangedMeanwhile):
            return False
        return owner in owners

    async def _await_ready(self, created: Object) -> Object:
        """The Sandbox once a command can run in it; the error that its condition tells, when it does not get there."""
        key = (self._objects.namespace, created["metadata"]["name"])
        uid, loop = created["metadata"]["uid"], asyncio.get_running_loop()
        end = loop.time() + self._seconds
        reason, since = "", loop.time()
        while True:
            found = self._objects.sandboxes.get(key)
            if found is None or is_going(found) or found["metadata"]["uid"] != uid:
                raise SandboxNotFound(id_of(key[1]))
            if is_ready(found):
                return found
            now = loop.time()
            if reason_of(found)[0] != reason:
                reason, since = reason_of(found)[0], now
            patience = min(end, since + GRACE[reason] if reason in GRACE else end)
            if now >= patience:
                raise create_error(found)
            seen = found["metadata"]["resourceVersion"]

            def is_news(one: Object | None, seen: str = seen) -> bool:
                return one is None or one["metadata"]["resourceVersion"] != seen

            with contextlib.suppress(TimeoutError):
                await self._objects.sandboxes.wait_for(key, is_news, patience - now)
