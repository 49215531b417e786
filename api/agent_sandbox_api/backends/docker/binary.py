"""sandbox-init on the engine: a volume named by what it holds, filled and verified without a running container, shared by all instances."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import tarfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

import docker
from agent_sandbox_core import hardening
from agent_sandbox_core.errors import BackendError

from . import specs
from .client import EngineClient
from .faults import EngineRefusal
from .helpers import ensure_helper_image, helper_container
from .options import DockerOptions

INIT_DIR: Final = "AGENT_SANDBOX_INIT_DIR"
FILE_NAME: Final = Path(hardening.GUEST_PATH).name
HASH_CHARACTERS: Final = 12
ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
CLOSED_MODE: Final = 0o111
"""Nobody may read it, so the kernel makes its process untraceable from the first instruction on."""
READABLE_MODE: Final = 0o555
"""For runtimes with a kernel of their own, which must read what they load."""
VOLUME_PREFIX: Final = "agent-sandbox-init-"


@dataclass(frozen=True, slots=True)
class GuestVolume:
    """A volume with one file in it."""

    name: str
    content: bytes
    mode: int


def guest_binary(arch: str) -> bytes:
    """sandbox-init for Linux on `arch` (amd64, arm64): from the folder AGENT_SANDBOX_INIT_DIR, else from this package."""
    name = f"{FILE_NAME}-linux-{arch}"
    folder = os.environ.get(INIT_DIR)
    try:
        if folder:
            return (Path(folder) / name).read_bytes()
        return (resources.files("agent_sandbox_core") / "_guest" / name).read_bytes()
    except OSError as error:
        where = f"{INIT_DIR} ({folder}) has no {name}" if folder else f"this installation has no {name}"
        raise BackendError(
            f"{where}, which the Docker engine needs: install a released wheel, run tools/build_guest.py in a checkout, "
            f"or set {INIT_DIR} to a folder that has it"
        ) from error


def guest_volume(content: bytes, arch: str, *, readable: bool) -> GuestVolume:
    """The volume for a binary. Its name tells content and mode apart, so a volume never changes what it holds."""
    digest = hashlib.sha256(content).hexdigest()[:HASH_CHARACTERS]
    suffix = "-readable" if readable else ""
    return GuestVolume(f"{VOLUME_PREFIX}{arch}-{digest}{suffix}", content, READABLE_MODE if readable else CLOSED_MODE)


def pack(volume: GuestVolume) -> bytes:
    """The archive that fills the volume: one file of root."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo(FILE_NAME)
        member.size = len(volume.content)
        member.mode = volume.mode
        tar.addfile(member, io.BytesIO(volume.content))
    return packed.getvalue()


def is_exact(archive: bytes, volume: GuestVolume) -> bool:
    """Whether the archive of the file, as the engine gives it back, is what was meant: content, owner, mode, kind."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            member = tar.next()
            if member is None or not member.isreg() or (member.uid, member.gid, member.mode & 0o7777) != (0, 0, volume.mode):
                return False
            file = tar.extractfile(member)
            return file is not None and file.read() == volume.content
    except tarfile.TarError:
        return False


def normal_arch(engine_arch: str) -> str:
    """The architecture in Go's words."""
    return ARCHITECTURES.get(engine_arch, engine_arch)


async def ensure_guest_volume(client: EngineClient, options: DockerOptions, arch: str, *, readable: bool) -> str:
    """The name of the volume, its content verified by reading it back; filled when it is missing, half-filled or not ours."""
    content = await asyncio.to_thread(guest_binary, arch)
    volume = guest_volume(content, arch, readable=readable)
    image = await ensure_helper_image(client)
    config = specs.filler_config(options, image, volume.name)
    async with helper_container(client, config, f"preparing the volume {volume.name}") as container:
        if not await client.run(f"reading the volume {volume.name}", lambda api: holds(api, container, volume)):
            await client.run(f"filling the volume {volume.name}", lambda api: api.put_archive(container, hardening.GUEST_FOLDER, pack(volume)))
            if not await client.run(f"reading the volume {volume.name}", lambda api: holds(api, container, volume)):
                raise BackendError(f"the volume {volume.name} does not hold what was written to it: `docker volume rm` it and try again")
    return volume.name


def holds(api: docker.APIClient, container: str, volume: GuestVolume) -> bool:
    """Whether the volume, mounted in the container, holds exactly the binary."""
    limit = len(volume.content) + (1 << 20)
    archive = bytearray()
    try:
        stream, _ = api.get_archive(container, hardening.GUEST_PATH)
    except docker.errors.NotFound:
        return False
    for chunk in stream:
        archive += chunk
        if len(archive) > limit:
            return False
    return is_exact(bytes(archive), volume)


def names_missing_guest(error: EngineRefusal) -> bool:
    """Whether a start failed since the guest was not in its volume: somebody removed the volume and the engine made an empty one."""
    return hardening.GUEST_PATH in error.detail and "no such file" in error.detail.lower()
