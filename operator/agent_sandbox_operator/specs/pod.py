"""The sandbox's pod: hardened as the restricted Pod Security profile asks, and more."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, Literal

from agent_sandbox_core import hardening
from agent_sandbox_core.v1alpha1 import CONTAINER, LABEL_NETWORK, SandboxObject, SandboxSpec, child_name
from agent_sandbox_core.v1alpha1.quantities import MEBIBYTE, format_bytes, parse_quantity

from . import identity
from .workspace import restore_marks

INSTALLER: Final = "sandbox-init"
IMAGE_BINARY: Final = "/sandbox-init"
INSTALL_FOLDER: Final = "/install"

SHM_PATH: Final = "/dev/shm"  # noqa: S108 - the mount point itself

CPU_REQUEST: Final = "100m"
DISK_REQUEST: Final = "64Mi"
"""Logs and the container's own layer: what the scheduler sets aside. The limit is the user's."""
GRACE_SECONDS: Final = 1
"""sandbox-init discards SIGTERM on purpose: an orderly end is asked for over the channel, so waiting here would wait in vain."""
NO_DNS: Final = {"nameservers": ["127.0.0.1"], "options": [{"name": "timeout", "value": "1"}, {"name": "attempts", "value": "1"}]}
"""Nobody answers there, at once: without a network a look-up fails in milliseconds instead of after the resolver's time-outs."""


@dataclass(frozen=True, slots=True)
class PodOptions:
    """What pods need to know of the installation and of what the cluster can."""

    init_image: str
    delivery: Literal["image-volume", "init-container"] = "image-volume"
    user_namespace: bool = True
    tmp_size_mb: int = 256


@dataclass(frozen=True, slots=True)
class Birth:
    """What a new pod carries of the sandbox's life so far. `home_given`: a Secret of envFrom holds HOME."""

    cause: identity.Cause = "create"
    starts_before: int = 0
    home_given: bool = False


def build_pod(sandbox: SandboxObject, options: PodOptions, birth: Birth) -> dict[str, Any]:
    """The pod of a Sandbox."""
    spec = sandbox.spec
    annotations = {
        identity.ANNOTATION_TEMPLATE_HASH: identity.template_hash(spec),
        identity.ANNOTATION_STARTS_BEFORE: str(birth.starts_before),
        identity.ANNOTATION_CAUSE: birth.cause,
        identity.ANNOTATION_DELIVERY: options.delivery,
    }
    if spec.workspace.ephemeral:
        annotations |= restore_marks(sandbox)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": child_name(sandbox.metadata.name, sandbox.metadata.uid),
            "namespace": sandbox.metadata.namespace,
            "labels": identity.child_labels(sandbox, "sandbox") | {LABEL_NETWORK: spec.network.mode.lower()},
            "annotations": annotations,
            # A foreground deletion of the Sandbox ends when the pod has: its place in a quota is free then.
            "ownerReferences": [identity.owner_reference(sandbox, blocks=True)],
        },
        "spec": pod_spec(sandbox, options, birth),
    }


def pod_spec(sandbox: SandboxObject, options: PodOptions, birth: Birth) -> dict[str, Any]:
    """Its spec."""
    spec = sandbox.spec
    result: dict[str, Any] = {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": hardening.HOSTNAME,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": hardening.UID,
            "runAsGroup": hardening.GID,
            "fsGroup": hardening.GID,
            # A big workspace is not walked through at every start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container(spec, options, home_given=birth.home_given)],
        "volumes": volumes(sandbox, options),
    }
    if options.user_namespace:
        result["hostUsers"] = False
    if spec.network.mode == "None":
        result |= {"dnsPolicy": "None", "dnsConfig": NO_DNS}
    if options.delivery == "init-container":
        result["initContainers"] = [installer(options)]
    if spec.runtime_class_name is not None:
        result["runtimeClassName"] = spec.runtime_class_name
    if spec.node_selector:
        result["nodeSelector"] = dict(spec.node_selector)
    if spec.tolerations:
        result["tolerations"] = [one.to_wire() for one in spec.tolerations]
    if spec.image_pull_secrets:
        result["imagePullSecrets"] = [one.to_wire() for one in spec.image_pull_secrets]
    return result


def container(spec: SandboxSpec, options: PodOptions, *, home_given: bool) -> dict[str, Any]:
    """The one container that runs; sandbox-init is its first process."""
    result: dict[str, Any] = {
        "name": CONTAINER,
        "image": spec.image,
        "command": list(hardening.GUEST_SERVE),
        "workingDir": hardening.WORKSPACE,
        "env": environment(spec, home_given=home_given),
        "resources": resources(spec, options),
        "securityContext": {**container_security(), "readOnlyRootFilesystem": spec.read_only_root_filesystem},
        "volumeMounts": [
            {"name": "workspace", "mountPath": hardening.WORKSPACE},
            {"name": "tmp", "mountPath": hardening.TMP_PATH},
            {"name": "shm", "mountPath": SHM_PATH},
            {"name": "sandbox-init", "mountPath": hardening.GUEST_FOLDER, "readOnly": True},
        ],
    }
    if spec.env_from:
        result["envFrom"] = [{"secretRef": {"name": one.secret_name, "optional": one.optional}} for one in spec.env_from]
    return result


def container_security() -> dict[str, Any]:
    """What every container of ours has."""
    return {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "capabilities": {"drop": list(hardening.CAPABILITIES_DROPPED)},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def environment(spec: SandboxSpec, *, home_given: bool) -> list[dict[str, str]]:
    """HOME unless it is given, then the spec's. The kubelet would expand `$(NAME)`; values here are meant as they stand."""
    given = [{"name": one.name, "value": one.value.replace("$", "$$")} for one in spec.env]
    if home_given or any(one.name == "HOME" for one in spec.env):
        return given
    return [{"name": "HOME", "value": hardening.HOME}, *given]


def resources(spec: SandboxSpec, options: PodOptions) -> dict[str, Any]:
    """Limits: the user's, and what sandbox-init needs itself. An ephemeral workspace is on the node's disk too."""
    limits, requests = spec.resources, spec.resources.requests
    own = Decimal(hardening.GUEST_ALLOWANCE.memory_mb * MEBIBYTE)
    memory = parse_quantity(limits.memory) + own
    disk = parse_quantity(limits.ephemeral_storage)
    if spec.workspace.ephemeral:
        disk += parse_quantity(spec.workspace.size)
    cpu_request = requests.cpu or min(CPU_REQUEST, limits.cpu, key=parse_quantity)
    memory_request = min(memory, parse_quantity(requests.memory) + own) if requests.memory is not None else memory
    return {
        "limits": {"cpu": limits.cpu, "memory": format_bytes(memory), "ephemeral-storage": format_bytes(disk)},
        "requests": {
            "cpu": cpu_request,
            "memory": format_bytes(memory_request),
            "ephemeral-storage": format_bytes(min(disk, parse_quantity(DISK_REQUEST))),
        },
    }


def volumes(sandbox: SandboxObject, options: PodOptions) -> list[dict[str, Any]]:
    """The workspace, /tmp and /dev/shm in memory, and sandbox-init.

    What is in memory outlives the container and counts against the pod: both together leave a quarter of the limit, or the next container could not
    be started after a full /tmp.
    """
    spec = sandbox.spec
    memory_mb = max(4, int(parse_quantity(spec.resources.memory) / MEBIBYTE))
    if spec.workspace.ephemeral:
        workspace: dict[str, Any] = {"name": "workspace", "emptyDir": {"sizeLimit": spec.workspace.size}}
    else:
        workspace = {"name": "workspace", "persistentVolumeClaim": {"claimName": child_name(sandbox.metadata.name, sandbox.metadata.uid)}}
    if options.delivery == "image-volume":
        guest: dict[str, Any] = {"name": "sandbox-init", "image": {"reference": options.init_image}}
    else:
        guest = {"name": "sandbox-init", "emptyDir": {"sizeLimit": "32Mi"}}
    return [workspace, _memory("tmp", min(options.tmp_size_mb, memory_mb // 2)), _memory("shm", min(hardening.SHM_MB, memory_mb // 4)), guest]


def _memory(name: str, size_mb: int) -> dict[str, Any]:
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{size_mb}Mi"}}


def installer(options: PodOptions) -> dict[str, Any]:
    """The init container that puts sandbox-init into a volume, where a cluster has no image volumes. It needs no shell: the binary copies itself."""
    few = {"cpu": "100m", "memory": "32Mi", "ephemeral-storage": "64Mi"}
    return {
        "name": INSTALLER,
        "image": options.init_image,
        "command": [IMAGE_BINARY, "install", INSTALL_FOLDER],
        "resources": {"limits": few, "requests": few},
        "securityContext": {**container_security(), "readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "sandbox-init", "mountPath": INSTALL_FOLDER}],
    }
