"""Images: pulled when they are missing, and made ready once: an owned, empty /workspace on top, from which new volumes take their owner."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import posixpath
import tarfile
import time
from typing import Any, Final
from urllib.parse import urlencode

import docker
import docker.auth
import docker.utils
from agent_sandbox_core import hardening
from agent_sandbox_core.errors import BackendError, InvalidRequest, SandboxError

from agent_sandbox_api.images import is_reference

from . import calls, labels, specs
from .client import EngineClient
from .faults import EngineRefusal
from .helpers import helper_container
from .options import DockerOptions

DERIVED: Final = "agent-sandbox-image"
FORMAT: Final = "1"
"""Part of a derived image's name: changes when what is put on top changes."""
BASE: Final = f"{labels.PREFIX}/base"
PULL_SECONDS: Final = 25.0
"""How long a create waits for a pull. The pull itself goes on, so that a big image is there at a later try."""
PULL_LIMIT_SECONDS: Final = 1800.0
ID_PREFIX: Final = "sha256:"


class Images:
    """The images of one engine."""

    def __init__(self, client: EngineClient, options: DockerOptions) -> None:
        self._client = client
        self._options = options
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._derivations: dict[str, asyncio.Task[str]] = {}

    async def close(self) -> None:
        """Ends what runs; the engine forgets a pull whose caller is gone."""
        tasks: list[asyncio.Task[Any]] = [*self._pulls.values(), *self._derivations.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def prepare(self, reference: str) -> specs.Image:
        """The image of a reference, ready for sandboxes. InvalidRequest for one that cannot be, BackendError when it cannot be had now."""
        if not is_reference(reference) and not is_image_id(reference):
            raise InvalidRequest(f"{reference!r} is no image reference: write it like python:3.12-slim")
        base = await self._find(reference)
        declared = tuple(sorted((base.get("Config") or {}).get("Volumes") or {}))
        if hardening.WORKSPACE in map(posixpath.normpath, declared):
            # A volume hides that folder from whoever would change the image.
            return specs.Image(str(base["Id"]), declared, owned=False)
        return specs.Image(await self._derived(reference, base["Id"]), declared)

    async def _find(self, reference: str) -> dict[str, Any]:
        doing = f"looking for the image {reference}"
        try:
            found: dict[str, Any] = await self._client.run(doing, lambda api: calls.inspect_image(api, reference))
        except EngineRefusal as error:
            if not error.missing:
                raise
            await self._pull(reference)
            found = await self._client.run(doing, lambda api: calls.inspect_image(api, reference))
        if found.get("Os", "linux") != "linux":
            raise InvalidRequest(f"the image {reference} is for {found['Os']}: sandboxes run Linux images")
        return found

    async def _pull(self, reference: str) -> None:
        """Waits for a pull that all callers share, 25 s at most."""
        if is_image_id(reference):
            raise InvalidRequest(f"the image {reference} is not on the engine, and an id cannot be pulled: give its name")
        pull = self._pulls.get(reference)
        if pull is None:
            pull = asyncio.get_running_loop().create_task(self._carry_out_pull(reference))
            self._pulls[reference] = pull
            pull.add_done_callback(lambda done: self._forget_pull(reference, done))
        ended, _ = await asyncio.wait({pull}, timeout=PULL_SECONDS)
        if not ended:
            waited = f"its pull takes longer than {PULL_SECONDS:.0f} s and goes on"
            raise BackendError(f"the image {reference} is not on the engine; {waited}: try again later")
        if pull.cancelled():
            raise BackendError(f"the pull of the image {reference} was ended: try again")
        pull.result()

    def _forget_pull(self, reference: str, done: asyncio.Task[None]) -> None:
        del self._pulls[reference]
        if not done.cancelled():
            done.exception()

    async def _carry_out_pull(self, reference: str) -> None:
        repository, tag = docker.utils.parse_repository_tag(reference)
        query = urlencode({"fromImage": repository, "tag": tag or "latest"})
        target = await self._client.path(f"/images/create?{query}")
        doing = f"pulling the image {reference}, which is not on the engine,"
        login = await self._client.run(doing, lambda api: login_header(api, repository))
        try:
            async with (
                self._client.connection(doing) as connection,
                asyncio.timeout(PULL_LIMIT_SECONDS),
                contextlib.aclosing(connection.follow(doing, "POST", target, login)) as lines,
            ):
                async for line in lines:
                    if isinstance(line, dict) and "error" in line:
                        raise BackendError(f"the image {reference} is not on the engine and cannot be pulled: {line['error']}")
        except EngineRefusal as error:
            if error.missing:
                why = f"no registry gives it out: {error.detail}: check its name, or `docker login`"
                raise InvalidRequest(f"the image {reference} is not on the engine and {why}") from error
            raise BackendError(f"the image {reference} is not on the engine and cannot be pulled: {error.detail}") from error

    async def _derived(self, reference: str, base_id: str) -> str:
        """The name of the image with the owned workspace; made by the first caller, the others wait."""
        name = derived_name(base_id, self._options.sandbox_user)
        task = self._derivations.get(name)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._derive(reference, base_id, name))
            self._derivations[name] = task
            task.add_done_callback(lambda done: self._forget_derivation(name, done))
        return await asyncio.shield(task)

    def _forget_derivation(self, name: str, done: asyncio.Task[str]) -> None:
        """A success stays known; a failure is tried again by the next caller."""
        if done.cancelled() or done.exception() is not None:
            self._derivations.pop(name, None)

    def forget(self, image: specs.Image) -> None:
        """The engine does not have this image any more: the next caller makes it again."""
        for name, task in list(self._derivations.items()):
            if task.done() and not task.cancelled() and task.exception() is None and task.result() == image.id:
                del self._derivations[name]

    async def _derive(self, reference: str, base_id: str, name: str) -> str:
        client = self._client
        doing = f"preparing the image {reference} for sandboxes"
        with contextlib.suppress(SandboxError):
            found = await client.run(doing, lambda api: calls.inspect_image(api, name))
            if (found["Config"].get("Labels") or {}).get(BASE) == base_id:
                return str(found["Id"])
        top = pack_workspace(*self._options.user_ids, empty=True)
        async with helper_container(client, specs.derive_config(self._options, base_id), doing) as container:
            await client.run(doing, lambda api: api.put_archive(container, "/", top))
            return await client.run(doing, lambda api: commit(api, container, name, base_id))

    async def sweep(self, *, unused_seconds: float, now: float) -> None:
        """Removes derived images that nothing uses: at once where the base has lost its name, else after `unused_seconds`."""
        images, containers = await asyncio.gather(
            self._client.run("listing images", lambda api: api.images(all=False)),
            self._client.run("listing containers", calls.list_containers),
        )
        used = {row["ImageID"] for row in containers}
        named = {row["Id"] for row in images if any(tag != "<none>:<none>" for tag in row.get("RepoTags") or [])}
        for row in images:
            base = (row.get("Labels") or {}).get(BASE)
            if base is None or row["Id"] in used:
                continue
            if base not in named or now - row["Created"] > unused_seconds:
                await self._remove(row["Id"])

    async def _remove(self, image_id: str) -> None:
        self.forget(specs.Image(image_id))
        try:
            await self._client.run(f"removing the image {image_id}", lambda api: api.remove_image(image_id, force=False))
        except EngineRefusal as error:
            if not error.missing and not error.conflicting:
                raise


def login_header(api: docker.APIClient, repository: str) -> dict[str, str]:
    """The credentials of `docker login` for a repository's registry, as the engine takes them."""
    registry, _ = docker.auth.resolve_repository_name(repository)
    header = docker.auth.get_config_header(api, registry)
    if not header:
        return {}
    return {"X-Registry-Auth": header.decode() if isinstance(header, bytes) else str(header)}


def commit(api: docker.APIClient, container: str, name: str, base_id: str) -> str:
    """Commits the prepared container. Its labels say what it is; they replace those of the helper it was."""
    repository, tag = name.split(":")
    own = labels.shared_labels(labels.IMAGE) | {BASE: base_id}
    changes = [f"LABEL {key}={json.dumps(value)}" for key, value in own.items()]
    done = api.commit(container, repository=repository, tag=tag, message=f"owned {hardening.WORKSPACE}", changes=changes)
    return str(done["Id"])


def pack_workspace(uid: int, gid: int, *, empty: bool) -> bytes:
    """The archive that gives /workspace its owner.

    `empty`: whatever an image has there goes first, a folder with files or a link to somewhere else: a file in its place removes it.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        name = hardening.WORKSPACE.lstrip("/")
        if empty:
            tar.addfile(tarfile.TarInfo(name))
        member = tarfile.TarInfo(name)
        member.type, member.mode, member.uid, member.gid, member.mtime = tarfile.DIRTYPE, 0o755, uid, gid, int(time.time())
        tar.addfile(member)
    return packed.getvalue()


def derived_name(base_id: str, user: str) -> str:
    """One name for each image and user: two instances on an engine share it."""
    digest = hashlib.sha256(f"{FORMAT} {base_id} {user}".encode()).hexdigest()
    return f"{DERIVED}:{digest[:32]}"


def is_image_id(reference: str) -> bool:
    """Whether it is the id of an image, as the engine prints it."""
    digits = reference.removeprefix(ID_PREFIX)
    return reference.startswith(ID_PREFIX) and len(digits) == 64 and all(digit in "0123456789abcdef" for digit in digits)
