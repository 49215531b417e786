"""Which backend a server gets: the one that was asked for, or the one that is found. Engines are imported only when they are chosen."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from agent_sandbox_core.interfaces import Backend
from agent_sandbox_core.snapshots import SnapshotStore

from ..settings import PREFIX, Settings, SettingsError
from .folder import SNAPSHOTS, SPOOL, DataFolder
from .local import LocalBackend, LocalLimits

if TYPE_CHECKING:
    from .engine import Engine


def choose_backend(settings: Settings) -> str:
    """The name of the backend. SettingsError when it cannot be used here."""
    wanted = settings.backend
    if wanted == "auto":
        wanted = "kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ and not _has_docker() else "docker"
    if wanted == "kubernetes" and find_spec("kubernetes") is None:
        raise SettingsError(f"{PREFIX}BACKEND: the kubernetes backend needs the kubernetes package: pip install 'agent-sandbox-operator[kubernetes]'")
    if wanted == "docker" and find_spec("docker") is None:
        raise SettingsError(
            f"{PREFIX}BACKEND: the docker backend needs the docker package: pip install 'agent-sandbox-operator[docker]', or use memory"
        )
    return wanted


def build_backend(settings: Settings, folder: DataFolder, name: str) -> Backend:
    """The backend `name`. Call it inside the event loop that it will run in."""
    if name != "kubernetes":
        return build_local(settings, folder, name)
    from .kubernetes import KubernetesBackend, KubernetesOptions  # noqa: PLC0415 - see the module's first line

    return KubernetesBackend(
        KubernetesOptions(
            namespace=settings.namespace,
            max_sandboxes=settings.max_sandboxes,
            workspace_size=settings.workspace_size,
            storage_class=settings.storage_class,
            workspace_ephemeral=settings.workspace_ephemeral,
            runtime_class=settings.runtime_class,
            create_seconds=settings.create_seconds,
        )
    )


def build_local(settings: Settings, folder: DataFolder, name: str) -> LocalBackend:
    """A LocalBackend over the engine `name`. Call it inside the event loop that it will run in."""
    address = settings.store_url or (folder.path / SNAPSHOTS).as_uri()
    store = SnapshotStore.open(address, spool=folder.path / SPOOL)
    limits = LocalLimits(settings.max_sandboxes, settings.max_snapshot_bytes, settings.reap_interval_seconds)
    return LocalBackend(_build_engine(settings, folder, name), store, folder, limits)


def _build_engine(settings: Settings, folder: DataFolder, name: str) -> Engine:
    if name == "memory":
        from .memory import MemoryEngine  # noqa: PLC0415 - see the module's first line

        return MemoryEngine()
    from .docker.engine import DockerEngine  # noqa: PLC0415
    from .docker.options import DockerOptions  # noqa: PLC0415

    return DockerEngine(
        DockerOptions(
            instance_id=folder.instance_id,
            sandbox_user=settings.sandbox_user,
            docker_runtime=settings.docker_runtime,
            tmp_size_mb=settings.tmp_size_mb,
            network_name=settings.network_name,
        )
    )


def _has_docker() -> bool:
    """A pod may have an engine beside it, and says so."""
    return "DOCKER_HOST" in os.environ or Path("/var/run/docker.sock").exists()
