"""What the Docker backend is told, already checked."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DockerOptions:
    """Where sandboxes run and how. `instance_id` separates this installation from others on the same engine."""

    instance_id: str
    sandbox_user: str = "1000:1000"
    """uid:gid of everything in a sandbox."""
    docker_runtime: str = ""
    """Name of an OCI runtime that the engine has; empty for the engine's default."""
    tmp_size_mb: int = 256
    network_name: str = "agent-sandbox-net"
    host: str | None = None
    """Address of the engine; None for DOCKER_HOST, or the context of the docker command line."""

    process_id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Tells what this process is making from what a dead one of the same instance left half-made."""

    @property
    def user_ids(self) -> tuple[int, int]:
        """uid and gid as numbers."""
        uid, gid = self.sandbox_user.split(":")
        return int(uid), int(gid)
