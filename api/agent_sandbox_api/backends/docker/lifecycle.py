"""Making, replacing and removing a sandbox's container and workspace. Each step leaves something that the next process can finish or undo.

made       `….creating` with its workspace   → running and serving → renamed (the commit)
replaced   `….next` made → old one killed → new one running and serving → old one removed → renamed
removed    tombstone → containers removed → workspace removed → tombstone removed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import docker
from agent_sandbox_core.errors import BackendError, InvalidRequest, SandboxError
from agent_sandbox_core.models import Termination

from agent_sandbox_api.backends.engine import InstanceRecord

from . import calls, labels, specs
from .bridges import SAY_SECONDS, Bridges, says_ready
from .channel import ExecStream
from .client import EngineClient
from .faults import EngineRefusal
from .helpers import ensure_helper_image, helper_container
from .images import pack_workspace
from .options import DockerOptions
from .shared import Shared
from .state import read_termination

logger = logging.getLogger(__name__)

BAD_REQUEST: Final = 400
GONE_SECONDS: Final = 30
RELEASE_SECONDS: Final = 5.0
PAUSE_SECONDS: Final = 0.1
TRIES: Final = 3
"""How often a container is made when shared parts go missing under it: image, guest volume and network once each at most."""


class Lifecycle:
    """The steps on one engine. Callers see to it that one sandbox has one step at a time."""

    def __init__(self, client: EngineClient, options: DockerOptions, shared: Shared, bridges: Bridges) -> None:
        self._client = client
        self._options = options
        self._shared = shared
        self._bridges = bridges

    async def make(self, record: InstanceRecord) -> None:
        """A running, serving, uncommitted container; its first channel is being opened. On failure nothing is left."""
        sandbox_id = record.sandbox_id

        def build(place: specs.Placement) -> dict[str, Any]:
            return specs.sandbox_config(self._options, record, place)

        try:
            container = await self._bring_up(record, specs.making_name(sandbox_id), build, None)
        except BaseException:
            with contextlib.suppress(SandboxError):
                await self.remove(sandbox_id)
            raise
        self._bridges.keep_warm(sandbox_id, self._bridges.open(container))

    async def _bring_up(
        self, record: InstanceRecord, name: str, build: Callable[[specs.Placement], dict[str, Any]], image: specs.Image | None
    ) -> str:
        """Creates, starts and guards; gives the container's id. Again from the beginning when a part that all share was found missing."""
        for left in reversed(range(TRIES)):
            place = await self._shared.place(record, image)
            try:
                container = await self._create(record.sandbox_id, name, build(place))
                if image is None and not place.image.owned:
                    await self._own_workspace(record.sandbox_id)
                await self._start(record, container, place)
            except EngineRefusal as error:
                if not left or not self._shared.blame(error, place):
                    raise
                logger.warning("a shared part was missing and is made again: %s", error.message)
                await self.discard(name)
            else:
                return container
        raise AssertionError("unreachable: the last try returns or raises")

    async def _create(self, sandbox_id: str, name: str, config: dict[str, Any]) -> str:
        doing = f"creating the container of the sandbox {sandbox_id}"
        try:
            return await self._client.run(doing, lambda api: calls.create_container(api, config, name))
        except EngineRefusal as error:
            if error.engine_status == BAD_REQUEST:
                raise InvalidRequest(error.message) from error
            if not error.conflicting:
                raise
            # Left by an earlier try of the same step that died; nobody was told of it.
            await self.discard(name)
            return await self._client.run(doing, lambda api: calls.create_container(api, config, name))

    async def _own_workspace(self, sandbox_id: str) -> None:
        """Gives a new workspace its owner where the image could not."""
        doing = f"preparing the workspace of the sandbox {sandbox_id}"
        config = specs.owner_config(self._options, await ensure_helper_image(self._client), sandbox_id)
        owner = pack_workspace(*self._options.user_ids, empty=False)
        async with helper_container(self._client, config, doing) as helper:
            await self._client.run(doing, lambda api: api.put_archive(helper, "/", owner))

    async def _start(self, record: InstanceRecord, container: str, place: specs.Placement) -> None:
        """Starts a container, and returns once its guest serves and its network is closed to private addresses."""
        output = await self._bridges.attach(container)
        try:
            await self._client.run(f"starting the sandbox {record.sandbox_id}", lambda api: api.start(container))
            if record.spec.network:
                await self._shared.network.guard(record.sandbox_id, container, place.guest_volume)
            await self._wait_serving(record, container, output)
        finally:
            await output.aclose()

    async def _wait_serving(self, record: InstanceRecord, container: str, output: ExecStream) -> None:
        try:
            async with asyncio.timeout(SAY_SECONDS):
                serves = await says_ready(output)
        except TimeoutError:
            stream = await self.wait_ready(record, container)
            await stream.aclose()
            return
        if not serves:
            ended = await self._why_dead(record, container) or "its guest ended"
            raise BackendError(f"the sandbox ended while it was started: {ended}; {output.complaint or 'it did not say why'}")

    async def wait_ready(self, record: InstanceRecord, name: str) -> ExecStream:
        """The first channel over which the guest of a started container answers."""
        return await self._bridges.wait_ready(name, lambda: self._why_dead(record, name))

    async def _why_dead(self, record: InstanceRecord, container: str) -> str | None:
        inspected = await self.inspect_container(container)
        if inspected is None:
            return "its container was removed"
        return None if inspected["State"]["Running"] else read_termination(record, inspected).message

    async def replace(self, record: InstanceRecord, old: Mapping[str, Any], *, incarnation: int, termination: Termination | None) -> None:
        """A fresh container on the same workspace, made of the same image, with the same user, in place of `old` (its inspect)."""
        sandbox_id, name = record.sandbox_id, specs.next_name(record.sandbox_id)
        options = replace(self._options, sandbox_user=str(old["Config"].get("User") or self._options.sandbox_user))
        image = specs.Image(str(old["Image"]), tuple(sorted(old["Config"].get("Volumes") or {})))

        def build(place: specs.Placement) -> dict[str, Any]:
            return specs.sandbox_config(options, record, place, incarnation=incarnation, termination=termination, fresh=False)

        self._bridges.drop_warm(sandbox_id)
        if old["State"]["Running"]:
            # Before the new one starts: a workspace has one sandbox at a time.
            await self._client.run(f"stopping the sandbox {sandbox_id}", lambda api: kill(api, str(old["Id"])))
        try:
            container = await self._bring_up(record, name, build, image)
        except BaseException:
            with contextlib.suppress(SandboxError):
                await asyncio.shield(self.discard(name))
            raise
        await self.discard(str(old["Id"]))
        await self.rename(sandbox_id, name)
        self._bridges.keep_warm(sandbox_id, self._bridges.open(container))

    async def rename(self, sandbox_id: str, name: str) -> None:
        """Gives a container the sandbox's name: the one step that makes it the sandbox. Fine when it was done already."""
        final = specs.container_name(sandbox_id)
        doing = f"committing the sandbox {sandbox_id}"
        try:
            await self._client.run(doing, lambda api: api.rename(name, final))
        except EngineRefusal as error:
            if not error.missing or await self.inspect_container(final) is None:
                raise

    async def inspect_container(self, name: str) -> dict[str, Any] | None:
        """What the engine knows of a container; None when there is none."""
        try:
            found: dict[str, Any] = await self._client.run(f"looking at the container {name}", lambda api: api.inspect_container(name))
        except EngineRefusal as error:
            if error.missing:
                return None
            raise
        return found

    async def discard(self, container: str) -> None:
        """Removes a container and its anonymous volumes; returns when it is gone, whoever removes it."""
        doing = f"removing the container {container}"
        problem = f"{doing} failed"
        try:
            async with asyncio.timeout(GONE_SECONDS):
                while True:
                    try:
                        await self._client.run(doing, lambda api: api.remove_container(container, force=True, v=True))
                    except EngineRefusal as error:
                        if error.missing:
                            return
                        # Somebody else removes it, or its file system is busy for a moment.
                        problem = error.message
                    else:
                        return
                    await asyncio.sleep(PAUSE_SECONDS)
        except TimeoutError as error:
            raise BackendError(f"{problem}; gave up after {GONE_SECONDS:.0f} s: try again, or look at the engine's log") from error

    async def remove(self, sandbox_id: str) -> None:
        """Removes everything of a sandbox. With the tombstone it is gone for everybody, and a sweep ends what is not ended here."""
        self._bridges.drop_warm(sandbox_id)
        self._shared.network.release(sandbox_id)
        doing = f"removing the sandbox {sandbox_id}"
        mine = labels.label_filter(instance=self._options.instance_id, sandbox=sandbox_id)
        containers, volumes = await asyncio.gather(
            self._client.run(doing, lambda api: calls.list_containers(api, mine)),
            self._client.run(doing, lambda api: calls.list_volumes(api, mine)),
        )
        if not containers and not volumes:
            return
        tombstone = specs.tombstone_name(sandbox_id)
        own = labels.own_labels(labels.TOMBSTONE, self._options, sandbox_id)
        await self._client.run(doing, lambda api: api.create_volume(tombstone, labels=own))
        await asyncio.gather(*(self.discard(row["Id"]) for row in containers))
        names = {row["Name"] for row in volumes} | {specs.volume_name(sandbox_id)}
        gone = [await self._remove_volume(name) for name in sorted(names - {tombstone})]
        if all(gone):
            await self._remove_volume(tombstone)

    async def _remove_volume(self, name: str) -> bool:
        """Removes a volume. False when something outside still holds it: the tombstone stays then, and the next sweep tries again."""
        problem = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_SECONDS):
                while True:
                    try:
                        await self._client.run(f"removing the volume {name}", lambda api: api.remove_volume(name))
                    except EngineRefusal as error:
                        if error.missing:
                            return True
                        if not error.conflicting:
                            raise
                        problem = error.message
                    else:
                        return True
                    await asyncio.sleep(PAUSE_SECONDS)
        logger.warning("%s; it is removed once nothing uses it", problem)
        return False


def kill(api: docker.APIClient, container: str) -> None:
    """Ends a container's processes at once and waits for it. PID 1 discards every signal that it can, so there is no gentler way."""
    try:
        api.kill(container)
    except docker.errors.APIError as error:
        if error.response is None or error.response.status_code not in (404, 409):
            raise
    api.wait(container, timeout=GONE_SECONDS)
