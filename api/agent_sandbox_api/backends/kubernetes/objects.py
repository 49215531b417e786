"""The objects of one namespace in the API server: each call with the HTTP API's errors, and nothing left by one that was cancelled half-way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from base64 import b64decode
from collections.abc import Awaitable, Callable
from typing import Any, Final

from agent_sandbox_core.errors import NotFound as Missing
from agent_sandbox_core.errors import SandboxError, SandboxNotFound, SnapshotNotFound
from agent_sandbox_kube.client import Kube, Object
from agent_sandbox_kube.errors import AlreadyExists, Forbidden, NotFound
from agent_sandbox_kube.errors import Conflict as ChangedMeanwhile
from agent_sandbox_kube.informer import Informer
from agent_sandbox_kube.resources import SANDBOXES, SECRETS, SNAPSHOTS, Resource

from ..tasks import TaskOwner
from .faults import translated
from .mapping import id_of, is_going, is_name, is_whole, name_of

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.3
QUOTA_SECONDS: Final = 5.0
"""How long a quota that is not counted yet, or lags behind a delete, is waited for."""


class Objects:
    """What the backend does to the API server. `max_sandboxes`: the limit that the facade's own quota holds."""

    def __init__(self, kube: Kube, namespace: str, sandboxes: Informer, tasks: TaskOwner, *, max_sandboxes: int) -> None:
        self.kube = kube
        self.namespace = namespace
        self.sandboxes = sandboxes
        self.tasks = tasks
        self._max_sandboxes = max_sandboxes

    async def find_sandbox(self, sandbox_id: str) -> Object:
        """The Sandbox with this id; SandboxNotFound also for one that is being deleted."""
        return await self._find(SANDBOXES, sandbox_id, SandboxNotFound(sandbox_id), lambda found: not is_going(found))

    async def find_snapshot(self, snapshot_id: str) -> Object:
        """The Snapshot with this id; SnapshotNotFound also for one that is not whole."""
        return await self._find(SNAPSHOTS, snapshot_id, SnapshotNotFound(snapshot_id), is_whole)

    async def secret(self, name: str) -> dict[str, str] | None:
        """The values of a Secret, None when there is none."""
        with translated():
            try:
                found = await self.kube.get(SECRETS, name, self.namespace)
            except NotFound:
                return None
        return {key: b64decode(value).decode(errors="replace") for key, value in (found.get("data") or {}).items()}

    async def post(self, resource: Resource, manifest: Object, clear: Callable[[Object], Awaitable[None]]) -> Object | None:
        """The new object; None when its name is taken. Cancelled while the answer is on its way, what may have been made is cleared."""

        async def send() -> Object | None:
            deadline = asyncio.get_running_loop().time() + QUOTA_SECONDS
            while True:
                with translated():
                    try:
                        return await self.kube.create(resource, manifest, self.namespace)
                    except AlreadyExists:
                        return None
                    except Forbidden as error:
                        if not self._may_pass_soon(error) or asyncio.get_running_loop().time() > deadline:
                            raise
                await asyncio.sleep(POLL_SECONDS)

        async def undo() -> None:
            with contextlib.suppress(SandboxError):
                if (made := await sending) is not None:
                    await clear(made)

        sending = self.tasks.spawn(send())
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            self.tasks.spawn(undo())
            raise

    async def change_sandbox(self, found: Object, spec: dict[str, Any]) -> Object:
        """Changes these fields of its spec, unless another Sandbox has its name now."""
        name, uid = found["metadata"]["name"], found["metadata"]["uid"]
        with translated(SandboxNotFound(id_of(name))):
            changed = await self.kube.patch(SANDBOXES, name, self.namespace, {"metadata": {"uid": uid}, "spec": spec})
        self.sandboxes.put(changed)
        return changed

    async def remove_sandbox(self, found: Object) -> None:
        """Asks for the deletion of exactly this one, which is seen here at once."""
        name = found["metadata"]["name"]
        gone = SandboxNotFound(id_of(name))
        with translated(gone):
            try:
                left = await self.kube.delete(SANDBOXES, name, self.namespace, {**exactly(found), "propagationPolicy": "Foreground"})
            except ChangedMeanwhile:
                raise gone from None  # another object has the name now
        if left.get("kind") == "Sandbox":
            self.sandboxes.put(left)  # so that a command that comes next is refused

    async def remove_snapshot(self, found: Object) -> None:
        """Asks for the deletion of exactly this one."""
        name = found["metadata"]["name"]
        with translated(SnapshotNotFound(id_of(name))):
            await self.kube.delete(SNAPSHOTS, name, self.namespace, exactly(found))

    async def clear_sandbox(self, created: Object) -> None:
        """Removes a half-made one; never fails."""
        await _tidy(
            self.remove_sandbox(created), f"the half-made sandbox {created['metadata']['name']} could not be removed; it goes when it expires"
        )

    async def clear_snapshot(self, created: Object) -> None:
        """Removes one that nobody was told of; never fails."""
        await _tidy(self.remove_snapshot(created), f"snapshot {id_of(created['metadata']['name'])}, which nobody was told of, could not be removed")

    def _may_pass_soon(self, error: Forbidden) -> bool:
        """A quota whose count is not known yet, or lags behind a delete."""
        if "status unknown for quota" in error.message:
            return True
        return error.by_quota and sum(not is_going(one) for one in self.sandboxes.items().values()) < self._max_sandboxes

    async def _find(self, resource: Resource, api_id: str, missing: Missing, is_there: Callable[[Object], bool]) -> Object:
        name = name_of(api_id)
        if not is_name(name) or id_of(name) != api_id:
            raise missing
        with translated(missing):
            found = await self.kube.get(resource, name, self.namespace)
        if not is_there(found):
            raise missing
        return found


def exactly(found: Object) -> Object:
    """Delete options: this one, and no other of its name."""
    return {"preconditions": {"uid": found["metadata"]["uid"]}}


async def _tidy(removal: Awaitable[None], told: str) -> None:
    try:
        await removal
    except Missing:
        pass  # somebody else was quicker
    except SandboxError as error:
        logger.warning("%s: %s", told, error.message)
