"""Builds the two container images with buildah, also where no registry can be reached: `python tools/build_images.py [--archive DIR]`. Standard library only.

localhost/agent-sandbox-init:dev   sandbox-init alone
localhost/agent-sandbox:dev        operator, mover and facade

The base is BASE when given; else, without a registry, the root filesystem of tools/airgap_image.py. Python packages are fetched by this machine's pip, with its
own settings, and go into the build as a folder: nothing in the build needs a network. `--archive` writes each as an archive for `docker load` or a cluster.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import airgap_image
import build_guest

ROOT = Path(__file__).resolve().parents[1]
INIT, SERVER, BASE = "localhost/agent-sandbox-init:dev", "localhost/agent-sandbox:dev", "localhost/agent-sandbox-base:dev"
BASE_PYTHON = "3.13"
LOCK = ROOT / "requirements-server.lock"
EPOCH = "0"
"""Timestamps in the images, so that the same sources give the same image."""


def say(text: str) -> None:
    """Progress goes to stderr."""
    print(f"[images] {text}", file=sys.stderr, flush=True)


def buildah(*arguments: str) -> str:
    """Runs buildah without a daemon, as root in a chroot; its output."""
    # Chosen for machines without user namespaces and overlay mounts; a developer's own settings win.
    environment = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"} | os.environ
    done = subprocess.run(["buildah", *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(f"buildah {arguments[0]} failed with {done.returncode}; its messages are above")
    return done.stdout.strip()


def ensure_base() -> str:
    """The base image: a root filesystem without a registry, made once."""
    known = subprocess.run(["buildah", "inspect", BASE], env={"STORAGE_DRIVER": "vfs"} | os.environ, capture_output=True, check=False)
    if known.returncode != 0:
        say("base: a root filesystem by debootstrap (2 minutes, once)")
        container = buildah("from", "scratch")
        buildah("add", "--quiet", container, str(airgap_image.build()), "/")
        buildah("config", "--env", "LANG=C.UTF-8", container)
        buildah("commit", "--quiet", "--rm", container, BASE)
    return BASE


def fetch_wheels(python: str) -> Path:
    """The locked packages of the server image as wheels, in the cache folder."""
    folder = build_guest.cache_dir() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    say(f"fetching the locked packages for Python {python}")
    target = ["--python-version", python, "--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_28_x86_64", "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps", *target]
    subprocess.run([*command, "--dest", str(folder), "--requirement", str(LOCK)], check=True, timeout=900, stdout=sys.stderr)
    return folder


def build(base: str | None) -> None:
    """Builds both images."""
    if shutil.which("buildah") is None:
        raise SystemExit("buildah is missing: apt-get install buildah, or build the Dockerfile with docker")
    build_guest.build()
    common = ["build", "--quiet", "--layers", "--timestamp", EPOCH, "--file", "Dockerfile"]
    say("sandbox-init")
    buildah(*common, "--target", "init", "--tag", INIT, ".")
    chosen = base or ensure_base()
    wheels = fetch_wheels(BASE_PYTHON)
    say("operator, mover and facade")
    offline = ["--build-arg", "PIP_OPTIONS=--no-index --find-links /wheels", "--volume", f"{wheels}:/wheels:ro", "--network", "none"]
    buildah(*common, "--build-arg", f"BASE={chosen}", *(offline if base is None else []), "--target", "server", "--tag", SERVER, ".")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="an image with Python 3.11 or newer; default: one made without a registry")
    parser.add_argument("--archive", type=Path, help="a folder for init.tar and server.tar")
    options = parser.parse_args()
    build(options.base)
    if options.archive:
        options.archive.mkdir(parents=True, exist_ok=True)
        for name, image in (("init", INIT), ("server", SERVER)):
            path = options.archive / f"{name}.tar"
            path.unlink(missing_ok=True)
            buildah("push", "--quiet", image, f"docker-archive:{path}:{image}")
            print(path)


if __name__ == "__main__":
    main()
