"""Pure builders: what exactly the engine is asked to make. Each gives the whole JSON of one call, so that a test can compare it whole."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agent_sandbox_core import hardening
from agent_sandbox_core.models import Termination

from agent_sandbox_api.backends.engine import InstanceRecord

from . import labels
from .options import DockerOptions

SERVE: Final = hardening.GUEST_SERVE
NO_NETWORK: Final = "none"
MEBIBYTE: Final = 1 << 20
NANO: Final = 10**9

OOM_SCORE: Final = 500
"""When the engine's own machine is short of memory, sandboxes go before everything else on it. Commands in a sandbox are at 1000."""
SMALL_SHM_SHARE: Final = 4
"""Shared memory counts against the memory limit, so it is at most this part of it."""
NO_DNS: Final = ("127.0.0.1",)
"""Nobody answers there, at once: without a network a look-up fails in milliseconds instead of after the resolver's time-outs."""
NO_DNS_OPTIONS: Final = ("timeout:1", "attempts:1")

HELPER_SECURITY: Final[dict[str, Any]] = {
    "ReadonlyRootfs": True,
    "CapDrop": list(hardening.CAPABILITIES_DROPPED),
    "SecurityOpt": ["no-new-privileges"],
    "RestartPolicy": {"Name": "no"},
    "Memory": 128 * MEBIBYTE,
    "MemorySwap": 128 * MEBIBYTE,
    "PidsLimit": 64,
}


def container_name(sandbox_id: str) -> str:
    """The name of a sandbox's container once it is committed; part of the contract."""
    return f"agent-sandbox-{sandbox_id}"


def making_name(sandbox_id: str) -> str:
    """Its name until then: the rename is the commit."""
    return f"{container_name(sandbox_id)}.creating"


def next_name(sandbox_id: str) -> str:
    """The name of a container that replaces the committed one, until it does."""
    return f"{container_name(sandbox_id)}.next"


def volume_name(sandbox_id: str) -> str:
    """The name of its workspace."""
    return f"agent-sandbox-{sandbox_id}"


def tombstone_name(sandbox_id: str) -> str:
    """An empty volume that says: this sandbox is being removed. It comes first and goes last, so a removal once begun is ended."""
    return f"agent-sandbox-{sandbox_id}.removing"


@dataclass(frozen=True, slots=True)
class Image:
    """An image made ready for sandboxes: its id, and the paths that it declares as volumes.

    `owned`: it has an empty /workspace of the sandbox's user, from which a new volume takes its owner.
    """

    id: str
    volumes: tuple[str, ...] = ()
    owned: bool = True


@dataclass(frozen=True, slots=True)
class Placement:
    """What a sandbox's container needs from what all of them share. `network` is None for a sandbox without one."""

    image: Image
    guest_volume: str
    network: str | None


def sandbox_config(
    options: DockerOptions,
    record: InstanceRecord,
    place: Placement,
    *,
    incarnation: int = 1,
    termination: Termination | None = None,
    fresh: bool = True,
) -> dict[str, Any]:
    """The container of a sandbox. `fresh`: its workspace does not exist yet."""
    spec = record.spec
    environment = {"HOME": hardening.HOME} | spec.env
    return {
        "Image": place.image.id,
        "Entrypoint": list(SERVE[:1]),
        "Cmd": list(SERVE[1:]),
        "User": options.sandbox_user,
        "WorkingDir": hardening.WORKSPACE,
        "Hostname": hardening.HOSTNAME,
        "Env": [f"{name}={value}" for name, value in environment.items()],
        # A health check of the image would run in the sandbox, outside of its rules.
        "Healthcheck": {"Test": ["NONE"]},
        "Labels": labels.container_labels(options, record, incarnation, termination),
        "HostConfig": host_config(options, record, place, fresh=fresh and place.image.owned),
    }


def host_config(options: DockerOptions, record: InstanceRecord, place: Placement, *, fresh: bool) -> dict[str, Any]:
    """What the engine enforces. `fresh`: the workspace takes its owner from the image."""
    spec = record.spec
    memory = (spec.memory_mb + hardening.GUEST_ALLOWANCE.memory_mb) * MEBIBYTE
    config: dict[str, Any] = {
        "ReadonlyRootfs": spec.read_only_rootfs,
        "CapDrop": list(hardening.CAPABILITIES_DROPPED),
        "SecurityOpt": ["no-new-privileges"],
        "Privileged": False,
        "IpcMode": "private",
        "NetworkMode": place.network or NO_NETWORK,
        "Memory": memory,
        "MemorySwap": memory,
        "NanoCpus": int(spec.cpus * NANO),
        "PidsLimit": spec.pids_limit + hardening.GUEST_ALLOWANCE.pids,
        "OomScoreAdj": OOM_SCORE,
        "ShmSize": min(hardening.SHM_MB, max(1, spec.memory_mb // SMALL_SHM_SHARE)) * MEBIBYTE,
        "Tmpfs": {hardening.TMP_PATH: tmp_options(options.tmp_size_mb)},
        # Only what lowers a limit: a rootless or nested engine may raise none, and would not start the sandbox.
        "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
        "Mounts": [
            workspace_mount(options, record, fresh=fresh),
            guest_mount(place.guest_volume, read_only=True),
            *image_mounts(options, record, place.image),
        ],
        "LogConfig": {"Type": "none"},
        # sandbox-init is the init; LocalBackend decides about restarts.
        "Init": False,
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
    }
    if options.docker_runtime:
        config["Runtime"] = options.docker_runtime
    if place.network is None:
        config |= {"Dns": list(NO_DNS), "DnsOptions": list(NO_DNS_OPTIONS)}
    return config


def tmp_options(size_mb: int) -> str:
    """Mount options of /tmp. The engine's own default would be noexec."""
    return ",".join((*hardening.TMP_OPTIONS, "exec", f"size={size_mb * MEBIBYTE}"))


def workspace_mount(options: DockerOptions, record: InstanceRecord, *, fresh: bool) -> dict[str, Any]:
    """The workspace. It is made together with its container, and takes its owner from /workspace of the image."""
    owner = labels.record_labels(labels.WORKSPACE, options, record)
    return {
        "Type": "volume",
        "Source": volume_name(record.sandbox_id),
        "Target": hardening.WORKSPACE,
        "VolumeOptions": {"NoCopy": not fresh, "Labels": owner},
    }


def guest_mount(volume: str, *, read_only: bool) -> dict[str, Any]:
    """The volume with sandbox-init. NoCopy: nothing of an image may get into what all sandboxes run."""
    return {
        "Type": "volume",
        "Source": volume,
        "Target": hardening.GUEST_FOLDER,
        "ReadOnly": read_only,
        "VolumeOptions": {"NoCopy": True, "Labels": labels.shared_labels(labels.GUEST)},
    }


def image_mounts(options: DockerOptions, record: InstanceRecord, image: Image) -> list[dict[str, Any]]:
    """Paths that the image declares as volumes: part of the root like any other, so read-only when that is, and gone with the container.

    Writable ones are anonymous and go with their container. Only named ones can be read-only; they never differ from the image.
    """
    taken = {hardening.WORKSPACE, hardening.TMP_PATH, hardening.GUEST_FOLDER, "/"}
    owner = {"Labels": labels.own_labels(labels.CONTAINER, options, record.sandbox_id)}
    mounts: list[dict[str, Any]] = []
    for number, path in enumerate(sorted({posixpath.normpath(path) for path in image.volumes} - taken)):
        mount: dict[str, Any] = {"Type": "volume", "Target": path, "VolumeOptions": owner}
        if record.spec.read_only_rootfs:
            mount |= {"Source": f"{volume_name(record.sandbox_id)}.image-{number}", "ReadOnly": True}
        mounts.append(mount)
    return mounts


def owner_config(options: DockerOptions, helper_image: str, sandbox_id: str) -> dict[str, Any]:
    """The container through which a workspace gets its owner where the image cannot give it; it is never started."""
    mount = {"Type": "volume", "Source": volume_name(sandbox_id), "Target": hardening.WORKSPACE, "VolumeOptions": {"NoCopy": True}}
    return {
        "Image": helper_image,
        "Entrypoint": ["/none"],
        "Labels": labels.own_labels(labels.HELPER, options, sandbox_id),
        "HostConfig": {"NetworkMode": NO_NETWORK, "Mounts": [mount]},
    }


def filler_config(options: DockerOptions, helper_image: str, volume: str) -> dict[str, Any]:
    """The container through which the guest volume is filled and read back; it is never started."""
    return {
        "Image": helper_image,
        "Entrypoint": ["/none"],
        "Labels": labels.own_labels(labels.HELPER, options),
        "HostConfig": {"NetworkMode": NO_NETWORK, "Mounts": [guest_mount(volume, read_only=False)]},
    }


def derive_config(options: DockerOptions, base_id: str) -> dict[str, Any]:
    """The container from which an image with an owned workspace is committed; it is never started."""
    return {
        "Image": base_id,
        "Entrypoint": ["/none"],
        "Labels": labels.own_labels(labels.HELPER, options),
        "HostConfig": {"NetworkMode": NO_NETWORK},
    }


@dataclass(frozen=True, slots=True)
class Helper:
    """What every helper that runs sandbox-init is made of."""

    options: DockerOptions
    image: str
    guest_volume: str


def guard_config(helper: Helper, sandbox_id: str, container_id: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The container that closes private networks to a sandbox: in its network namespace, with the one capability that this takes."""
    host = {"NetworkMode": f"container:{container_id}", "CapAdd": ["NET_ADMIN"]}
    return helper_config(helper, ["netguard", *arguments], host, sandbox_id)


def survey_config(helper: Helper) -> dict[str, Any]:
    """The container that looks at the engine's own network: which addresses it has, and which resolvers it uses. It has no capability."""
    return helper_config(helper, ["netguard", "--survey"], {"NetworkMode": "host", "UsernsMode": "host"})


def helper_config(helper: Helper, arguments: Sequence[str], host: Mapping[str, Any], sandbox_id: str = "") -> dict[str, Any]:
    """A container that runs sandbox-init for one step, as root without capabilities, and is removed."""
    return {
        "Image": helper.image,
        "Entrypoint": [hardening.GUEST_PATH],
        "Cmd": list(arguments),
        "User": "0:0",
        "Labels": labels.own_labels(labels.HELPER, helper.options, sandbox_id),
        "HostConfig": HELPER_SECURITY | {"Mounts": [guest_mount(helper.guest_volume, read_only=True)]} | dict(host),
    }
