"""The image with sandbox-init that sandbox pods mount, made of the guest that tools/build_guest.py builds: nothing else is in it."""

from __future__ import annotations

import hashlib
import platform
import sys
from pathlib import Path

from tests.cluster import versions
from tests.cluster.console import locked, run_logged
from tests.cluster.images import ARCHITECTURES, Image, packed, write

NAME = "localhost/agent-sandbox-init:dev"
ROOT = versions.HERE.parents[1]
BUILD_SECONDS = 600


def binary() -> Path:
    """The guest for this machine, built when its sources have changed."""
    log = versions.cache_dir() / "logs" / "guest.log"
    with locked(versions.cache_dir() / "guest.lock", seconds=2 * BUILD_SECONDS, what="sandbox-init"):
        run_logged("sandbox-init", [sys.executable, str(ROOT / "tools" / "build_guest.py")], log, seconds=BUILD_SECONDS)
    return ROOT / "api" / "agent_sandbox_core" / "_guest" / f"sandbox-init-linux-{ARCHITECTURES.get(platform.machine(), platform.machine())}"


def archive() -> Path:
    """Its archive; one for each content, so that whoever loads it knows whether it is news."""
    guest = binary()
    # gVisor cannot load a binary that it cannot read, so 0555 and not 0111.
    image = Image(NAME, lambda: packed(("sandbox-init", guest, 0o555)), {"Entrypoint": ["/sandbox-init"], "User": "65532:65532"})
    path = versions.cache_dir() / "guest-images" / f"{hashlib.sha256(guest.read_bytes()).hexdigest()[:16]}.tar"
    if not path.exists():
        write(image, path)
    return path
