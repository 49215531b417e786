"""Containers that live for one step, and the empty image that they are made of. A helper that a dead process left is swept."""

from __future__ import annotations

import asyncio
import contextlib
import io
import secrets
import tarfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import docker
from agent_sandbox_core.errors import SandboxError

from . import calls, labels
from .client import EngineClient
from .faults import EngineRefusal

HELPER_IMAGE: Final = "agent-sandbox-helper"
HELPER_TAG: Final = "1"
HELPER_SECONDS: Final = 30
OUTPUT_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class HelperResult:
    """How a helper ended."""

    code: int
    output: str


async def ensure_helper_image(client: EngineClient) -> str:
    """The id of an image with nothing in it, imported where it is missing: no registry is asked."""
    return await client.run("preparing the helper image", find_or_import)


def find_or_import(api: docker.APIClient) -> str:
    """Finds our image by name and label, or makes it."""
    name = f"{HELPER_IMAGE}:{HELPER_TAG}"
    try:
        found = calls.inspect_image(api, name)
    except docker.errors.ImageNotFound:
        found = None
    own = labels.shared_labels(labels.IMAGE)
    if found is None or (found["Config"].get("Labels") or {}).get(labels.ROLE) != labels.IMAGE:
        changes = ["LABEL " + " ".join(f'{key}="{value}"' for key, value in own.items())]
        api.import_image_from_data(empty_root(), repository=HELPER_IMAGE, tag=HELPER_TAG, changes=changes)
        found = calls.inspect_image(api, name)
    return str(found["Id"])


def empty_root() -> bytes:
    """A root file system of one empty folder."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo("opt")
        member.type = tarfile.DIRTYPE
        member.mode = 0o755
        tar.addfile(member)
    return packed.getvalue()


@contextlib.asynccontextmanager
async def helper_container(client: EngineClient, config: Mapping[str, Any], doing: str) -> AsyncIterator[str]:
    """A container for the time of the block, removed also when the block or its task ends early."""
    name = f"agent-sandbox-helper-{secrets.token_hex(6)}"
    making = asyncio.ensure_future(client.run(doing, lambda api: calls.create_container(api, dict(config), name)))
    try:
        await asyncio.shield(making)
        yield name
    finally:
        # Not before its creation has ended, or it would be made after it was removed.
        await asyncio.shield(remove_helper(client, making, name))


async def remove_helper(client: EngineClient, making: asyncio.Future[Any], name: str) -> None:
    """Removes a helper once its creation has ended; what cannot be removed now is swept later."""
    await asyncio.gather(making, return_exceptions=True)
    with contextlib.suppress(SandboxError):
        await client.run(f"removing the helper container {name}", lambda api: api.remove_container(name, force=True, v=True))


async def run_helper(client: EngineClient, config: Mapping[str, Any], doing: str) -> HelperResult:
    """Starts a helper, waits for its end (30 s at most) and gives what it printed."""
    async with helper_container(client, config, doing) as name:
        await client.run(doing, lambda api: api.start(name))
        ended = await client.run(doing, lambda api: api.wait(name, timeout=HELPER_SECONDS), HELPER_SECONDS + 5)
        printed = await client.run(doing, lambda api: api.logs(name, stdout=True, stderr=True, tail=100))
        return HelperResult(int(ended["StatusCode"]), printed[:OUTPUT_BYTES].decode(errors="replace").strip())


def is_missing(error: SandboxError) -> bool:
    """Whether the engine does not have the object of the call."""
    return isinstance(error, EngineRefusal) and error.missing
