"""The Docker engine as the suites see it: what is there of a sandbox, images made without a registry, and an engine of one's own."""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import docker as docker_py
import docker.errors as docker_errors

from .waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
SCRATCH_IMAGE = "localhost/agent-sandbox-test-scratch:1"
LABEL = "agent-sandbox"


class Docker:
    """One engine."""

    def __init__(self, host: str | None = None) -> None:
        self.host = host
        self.client: Any = docker_py.DockerClient(base_url=host, timeout=60) if host else docker_py.from_env(timeout=60)

    def container(self, sandbox: str) -> Any:
        """The container of a sandbox, by the name that the contract gives it."""
        return self.client.containers.get(f"agent-sandbox-{sandbox}")

    def inspect(self, sandbox: str) -> dict[str, Any]:
        """`docker inspect` of a sandbox's container."""
        attributes: dict[str, Any] = self.container(sandbox).attrs
        return attributes

    def everything(self) -> list[tuple[str, str, str]]:
        """(kind, name, text of its labels) of all containers and volumes in the engine."""
        containers = self.client.api.containers(all=True)
        volumes = self.client.api.volumes().get("Volumes") or []
        found = [("container", ",".join(row["Names"] or [row["Id"][:12]]), str(row.get("Labels") or {})) for row in containers]
        return found + [("volume", row["Name"], str(row.get("Labels") or {})) for row in volumes]

    def of_sandboxes(self, sandboxes: Iterable[str]) -> list[str]:
        """What is in the engine of these sandboxes, by name or label."""
        wanted = list(sandboxes)
        return [f"{kind} {name}" for kind, name, labels in self.everything() if any(one in name or one in labels for one in wanted)]

    def of_installation(self, data: Path) -> list[str]:
        """What is in the engine of the installation whose data folder this is."""
        instance = installation_id(data)
        return [f"{kind} {name}" for kind, name, labels in self.everything() if instance and instance in labels]

    def everything_of(self, data: Path) -> list[str]:
        """Like `of_installation`, with the labels in the text."""
        instance = installation_id(data)
        return [f"{kind} {name} {labels}" for kind, name, labels in self.everything() if instance and instance in labels]

    def remove_installation(self, data: Path) -> None:
        """Takes away what a failed test left, so that the next one is not blamed."""
        instance = installation_id(data)
        if not instance:
            return
        for row in self.client.api.containers(all=True):
            if instance in str(row.get("Labels") or {}):
                self._gone(lambda row=row: self.client.api.remove_container(row["Id"], force=True, v=True))
        for row in self.client.api.volumes().get("Volumes") or []:
            if instance in str(row.get("Labels") or {}):
                self._gone(lambda row=row: self.client.api.remove_volume(row["Name"], force=True))

    @staticmethod
    def _gone(remove: Any) -> None:
        try:
            remove()
        except docker_errors.APIError as error:
            if error.status_code not in (404, 409):
                raise

    def has_image(self, image: str) -> bool:
        """Whether the engine has this image."""
        try:
            self.client.images.get(image)
        except docker_errors.ImageNotFound:
            return False
        return True

    def import_root(self, image: str, entries: dict[str, bytes | None]) -> str:
        """Makes an image from nothing but these entries: path -> content of a 0755 file, or None for a folder."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for path, content in entries.items():
                member = tarfile.TarInfo(path)
                member.mode = 0o755
                if content is None:
                    member.type = tarfile.DIRTYPE
                    tar.addfile(member)
                else:
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        repository, tag = image.rsplit(":", 1)
        self.client.api.import_image_from_data(packed.getvalue(), repository=repository, tag=tag)
        return image

    def scratch_image(self) -> str:
        """An image with no shell, no libc, no program: one empty folder."""
        return SCRATCH_IMAGE if self.has_image(SCRATCH_IMAGE) else self.import_root(SCRATCH_IMAGE, {"empty": None})


def installation_id(data: Path) -> str | None:
    """The instance id that a facade keeps in its data folder."""
    file = data / "instance-id"
    return file.read_text().strip() if file.is_file() else None


def _tool(name: str) -> ModuleType:
    """A module of tools/, which is no package: scripts that must run with the standard library alone."""
    folder = str(ROOT / "tools")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None, f"tools/{name}.py is missing"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def ensured_engine() -> Iterator[Docker]:
    """The engine that answers, else a private one; with the test image in it. Under tools/with_engine.py both are there already."""
    tool = _tool("with_engine")
    with tool.engine():
        os.environ["AGENT_SANDBOX_TEST_IMAGE"] = tool.find_image()
        yield Docker()


class PrivateEngine:
    """A dockerd of the suite's own, to be stopped, hung and killed: own data, exec root, socket, pidfile; no bridge, no firewall."""

    def __init__(self) -> None:
        # Unix socket paths end at 107 bytes: pytest's own temporary folders are too deep.
        self.home = Path(tempfile.mkdtemp(prefix="asb-dockerd-"))
        self.host = f"unix://{self.home}/s"
        self.log = self.home / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self.docker: Docker | None = None

    def start(self, within: float = 60) -> Docker:
        """Starts it and waits until it answers."""
        name = self.home.name
        command = [
            "dockerd",
            f"--data-root={self.home}/data",
            f"--exec-root={self.home}/exec",
            f"--pidfile={self.home}/pid",
            f"--host={self.host}",
        ]
        command += ["--bridge=none", "--iptables=false", f"--containerd-namespace={name}", f"--containerd-plugins-namespace={name}-plugins"]
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)

        def answers() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise RuntimeError(f"the private dockerd ended:\n{self.log.read_text(errors='replace')[-3000:]}")
            try:
                return subprocess.run(["docker", "-H", self.host, "version"], capture_output=True, timeout=10, check=False).returncode == 0
            except subprocess.TimeoutExpired:
                return False

        eventually(answers, within=within, every=0.2, why="the private dockerd answers")
        self.docker = Docker(self.host)
        return self.docker

    def stop(self) -> None:
        """SIGTERM: its containers stop with it."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL: its containers are orphaned until it is back."""
        self._end(signal.SIGKILL)
        # Its containerd dies with it; where nobody reaps that, the next dockerd would take the zombie for a living one and wait for it.
        (self.home / "exec/containerd/containerd.pid").unlink(missing_ok=True)

    def hang(self) -> None:
        """It accepts connections and says nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _end(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(number)
        self.process.wait(60)

    def remove(self) -> None:
        """Ends it and takes its folder away."""
        if self.process is not None and self.process.poll() is None:
            self.stop()
        for line in Path("/proc/self/mounts").read_text().splitlines():
            point = line.split()[1]
            if point.startswith(f"{self.home}/"):
                subprocess.run(["umount", "-l", point], check=False, timeout=30)
        shutil.rmtree(self.home, ignore_errors=True)
