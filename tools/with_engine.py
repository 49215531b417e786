"""Runs a command with a Docker engine and a sandbox image at hand: `python tools/with_engine.py -- make-something …`. Standard library only.

The engine: the one that answers (DOCKER_HOST, or the default socket). Where none does and we are root on Debian or Ubuntu, docker.io is
installed and a private dockerd started: own data root in the cache folder, own socket; it ends with the command.
The image: AGENT_SANDBOX_TEST_IMAGE when set; else python:3.12-slim when it is there or can be pulled; else the air-gapped image of
tools/airgap_image.py. The command sees DOCKER_HOST, AGENT_SANDBOX_TEST_IMAGE and AGENT_SANDBOX_DEFAULT_IMAGE.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import airgap_image
from build_guest import cache_dir

PUBLIC_IMAGE = "python:3.12-slim"
PULL_SECONDS = 120


def say(text: str) -> None:
    """Progress goes to stderr; the command owns stdout."""
    print(f"[engine] {text}", file=sys.stderr, flush=True)


def docker(*arguments: str, host: str | None = None, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs the docker client, bounded; a client that is missing or hangs is an ordinary failure."""
    environment = os.environ | ({"DOCKER_HOST": host} if host else {})
    try:
        return subprocess.run(["docker", *arguments], env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(arguments, 1, "", str(error))


def answers(host: str | None = None) -> bool:
    """Whether an engine answers there."""
    return docker("version", "--format", "{{.Server.Version}}", host=host, seconds=10).returncode == 0


def install_engine() -> None:
    """Installs docker.io by apt, or says what to do by hand."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SystemExit("no Docker engine answers, and only root on Debian or Ubuntu can have one installed here: start Docker, or set DOCKER_HOST")
    say("no Docker engine answers: installing docker.io")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-q"],
        ["apt-get", "install", "-q", "-y", "--no-install-recommends", "docker.io", "iptables", "ca-certificates"],
    ):
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True, timeout=900)


@contextlib.contextmanager
def private_engine() -> Iterator[str]:
    """A dockerd of our own for the time of the block; yields its DOCKER_HOST. Images stay in the cache folder for the next time."""
    state = cache_dir() / "docker"
    run = Path("/run/agent-sandbox-docker")
    for folder in (state, run):
        folder.mkdir(parents=True, exist_ok=True)
    host = f"unix://{run}/docker.sock"
    log = state / "dockerd.log"
    command = ["dockerd", f"--data-root={state}/data", f"--exec-root={run}/exec", f"--pidfile={run}/docker.pid", f"--host={host}"]
    with log.open("wb") as sink:
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not answers(host):
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"dockerd did not come up; the end of {log}:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.3)
        say(f"started a private engine at {host}")
        yield host
    finally:
        daemon.terminate()
        try:
            daemon.wait(60)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


@contextlib.contextmanager
def engine() -> Iterator[None]:
    """Makes sure that an engine answers for the time of the block, DOCKER_HOST set where it is not the default."""
    if answers():
        yield
        return
    if shutil.which("dockerd") is None:
        install_engine()
    with private_engine() as host:
        os.environ["DOCKER_HOST"] = host
        yield


def find_image() -> str:
    """The image to use, present in the engine when this returns."""
    wanted = os.environ.get("AGENT_SANDBOX_TEST_IMAGE")
    if wanted:
        if docker("image", "inspect", wanted).returncode != 0:
            raise SystemExit(f"AGENT_SANDBOX_TEST_IMAGE is {wanted}, but the engine does not have it: load or pull it, or unset the variable")
        return wanted
    for image in (PUBLIC_IMAGE, airgap_image.IMAGE):
        if docker("image", "inspect", image).returncode == 0:
            return image
    say(f"pulling {PUBLIC_IMAGE}")
    if docker("pull", "-q", PUBLIC_IMAGE, seconds=PULL_SECONDS).returncode == 0:
        return PUBLIC_IMAGE
    say("no registry can be reached: building an image without one (debootstrap, about 2 minutes once)")
    airgap_image.load(airgap_image.build())
    return airgap_image.IMAGE


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status; the engine we started ends with it, also on Ctrl-C and SIGTERM."""
    command = arguments[1:] if arguments[:1] == ["--"] else arguments
    if not command:
        print(__doc__, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with engine():
        image = find_image()
        os.environ["AGENT_SANDBOX_TEST_IMAGE"] = image
        os.environ.setdefault("AGENT_SANDBOX_DEFAULT_IMAGE", image)
        child = subprocess.Popen(command)
        try:
            return child.wait()
        except BaseException:
            child.terminate()
            child.wait(30)
            raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
