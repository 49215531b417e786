"""Test images without a registry or a container engine: archives in Docker's format, written by ourselves, imported into every node.

localhost/pause:1     the first process of every pod
localhost/coredns:1   the cluster's DNS
localhost/busybox:1   a shell; its user is root by default
localhost/static:1    one static binary, no shell, no libc; its user is 65532
localhost/python:1    Debian with Python, git and procps; its user is 1000
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import build, versions
from tests.cluster.console import locked, run_logged, say

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
AIRGAP = versions.HERE.parents[1] / "tools" / "airgap_image.py"
DEBOOTSTRAP_SECONDS = 1500


@dataclass(frozen=True)
class Image:
    """One image: its name, what its only layer holds, how it runs."""

    name: str
    layer: Callable[[], Path | bytes]
    config: dict[str, Any]

    @property
    def archive(self) -> Path:
        """Where its archive is kept; under the build's digest, since binaries of the build are in it."""
        return build.folder() / "images" / f"{self.name.removeprefix('localhost/').replace(':', '-')}.tar"


def packed(
    *files: tuple[str, Path, int], links: dict[str, str] | None = None, texts: dict[str, str] | None = None, folders: tuple[str, ...] = ()
) -> bytes:
    """A layer: files of root, symbolic links, small texts and folders that everybody may write."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for folder in folders:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(entry)
        for name, source, mode in files:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = source.stat().st_size, mode
            with source.open("rb") as data:
                tar.addfile(entry, data)
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
        for name, text in (texts or {}).items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text.encode()), 0o644
            tar.addfile(entry, io.BytesIO(text.encode()))
    return sink.getvalue()


def binary(name: str) -> Path:
    """A program of the build."""
    return build.binaries() / name


def busybox_layer() -> bytes:
    """Debian's static busybox under all of its names."""
    names = subprocess.run(["/bin/busybox", "--list"], capture_output=True, text=True, check=True, timeout=10).stdout.split()
    return packed(
        ("bin/busybox", Path("/bin/busybox"), 0o755),
        links={f"bin/{name}": "busybox" for name in names if name != "busybox"},
        texts={"etc/passwd": "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n", "etc/group": "root:x:0:\n"},
        folders=("tmp",),
    )


def python_layer() -> Path:
    """The root file system that tools/airgap_image.py makes by debootstrap, once for the whole project."""
    command = [sys.executable, str(AIRGAP), "--tar"]
    with locked(versions.cache_dir() / "debootstrap.lock", seconds=DEBOOTSTRAP_SECONDS, what="the Python image"):
        run_logged("root file system of the Python image", command, versions.cache_dir() / "logs" / "debootstrap.log", seconds=DEBOOTSTRAP_SECONDS)
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return Path(shown.stdout.strip())


def catalogue() -> list[Image]:
    """All test images, the big one last."""
    return [
        Image("localhost/pause:1", lambda: packed(("pause", binary("pause"), 0o755)), {"Entrypoint": ["/pause"], "User": "65535:65535"}),
        Image("localhost/coredns:1", lambda: packed(("coredns", binary("coredns"), 0o755)), {"Entrypoint": ["/coredns"], "User": "65532:65532"}),
        Image("localhost/busybox:1", busybox_layer, {"Cmd": ["sh"], "Env": [PATH]}),
        Image("localhost/static:1", lambda: packed(("static", binary("static"), 0o755)), {"Entrypoint": ["/static"], "User": "65532:65532"}),
        Image("localhost/python:1", python_layer, {"Cmd": ["python3"], "Env": [PATH, "LANG=C.UTF-8"], "User": "1000:1000"}),
    ]


def ensure(*, few: bool = False) -> list[Path]:
    """Writes the archives that are missing; returns all of them, or all but the big one."""
    images = catalogue()[:-1] if few else catalogue()
    if any(not image.archive.exists() for image in images):
        with locked(versions.cache_dir() / "images.lock", seconds=2 * DEBOOTSTRAP_SECONDS, what="the test images"):
            for image in images:
                if not image.archive.exists():
                    write(image, image.archive)
                    say(f"image {image.name}: {image.archive.stat().st_size / 1e6:.0f} MB")
    return [image.archive for image in images]


def portable() -> list[Path]:
    """Archives of those images that tests use on clusters of other providers too."""
    ensure()
    return [image.archive for image in catalogue() if image.name not in {"localhost/pause:1", "localhost/coredns:1"}]


def write(image: Image, archive: Path) -> None:
    """Writes one archive, in one step: manifest.json, the configuration, the layer."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    unfinished = archive.with_suffix(f".{os.getpid()}")
    content = image.layer()
    layer: io.BufferedReader | io.BytesIO = content.open("rb") if isinstance(content, Path) else io.BytesIO(content)
    try:
        with layer, tarfile.open(unfinished, "w") as tar:
            digest = hashlib.file_digest(layer, "sha256").hexdigest()
            size = layer.seek(0, io.SEEK_END)
            layer.seek(0)
            config = {
                "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
                "os": "linux",
                "config": image.config,
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
                "history": [{"created_by": "agent-sandbox test images"}],
            }
            described = json.dumps(config).encode()
            described_name = f"{hashlib.sha256(described).hexdigest()}.json"
            manifest = [{"Config": described_name, "RepoTags": [image.name], "Layers": [f"{digest}.tar"]}]
            for name, text in (("manifest.json", json.dumps(manifest).encode()), (described_name, described)):
                entry = tarfile.TarInfo(name)
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text))
            entry = tarfile.TarInfo(f"{digest}.tar")
            entry.size = size
            tar.addfile(entry, layer)
        unfinished.replace(archive)
    finally:
        unfinished.unlink(missing_ok=True)
