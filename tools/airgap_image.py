"""Builds a Python sandbox image without any registry: debootstrap into a folder, packed as a root filesystem, loaded by `docker import`.

    sudo python tools/airgap_image.py            # build (once, about 2 minutes) and load into the Docker engine
    sudo python tools/airgap_image.py --tar      # build only, print the path of the root filesystem's tar

Needs root, debootstrap (installed by apt when missing) and a Debian mirror. The tar is kept in the cache folder: copy it to a machine with no
network at all and load it there with `docker import`. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from build_guest import cache_dir

SUITE = "trixie"
PACKAGES = ("python3", "python3-venv", "ca-certificates", "git", "procps")
IMAGE = "localhost/agent-sandbox-python:1"
# What only costs room in a sandbox: caches, manuals, translations.
DROPPED = ("var/cache/apt/archives", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info")


def tar_path() -> Path:
    """Where the packed root filesystem is kept, by suite and packages."""
    return cache_dir() / "images" / f"python-{SUITE}.tar"


def build() -> Path:
    """Builds the root filesystem's tar, unless it is there, and returns its path."""
    target = tar_path()
    if target.exists():
        return target
    if os.geteuid() != 0:
        raise SystemExit(
            "building an image with debootstrap needs root: run this with sudo, or load an image of your own and set AGENT_SANDBOX_DEFAULT_IMAGE"
        )
    if shutil.which("debootstrap") is None:
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-q"], ["apt-get", "install", "-q", "-y", "--no-install-recommends", "debootstrap"]):
            subprocess.run(command, env=environment, stdout=sys.stderr, check=True, timeout=600)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="debootstrap-") as work:
        root = Path(work) / "root"
        log = Path(work) / "log"
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root)]
        with log.open("wb") as sink:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, check=False, timeout=1200)
        if done.returncode != 0:
            raise SystemExit(f"debootstrap failed with {done.returncode}; its last lines:\n{log.read_text(errors='replace')[-3000:]}")
        for name in DROPPED:
            folder = root / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        (root / "usr/bin/python").unlink(missing_ok=True)
        (root / "usr/bin/python").symlink_to("python3")
        packed = Path(work) / "root.tar"
        subprocess.run(["tar", "-C", str(root), "--numeric-owner", "-cf", str(packed), "."], check=True, timeout=600)
        packed.replace(target)
    return target


def load(tar: Path, image: str = IMAGE) -> None:
    """Loads the tar into the Docker engine as `image`."""
    changes = ["--change", 'CMD ["python3"]', "--change", "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8"]
    subprocess.run(["docker", "import", *changes, str(tar), image], stdout=sys.stderr, check=True, timeout=600)


if __name__ == "__main__":
    built = build()
    if "--tar" in sys.argv[1:]:
        print(built)
    else:
        load(built)
        print(f"{IMAGE} is loaded; use it with AGENT_SANDBOX_DEFAULT_IMAGE={IMAGE}")
