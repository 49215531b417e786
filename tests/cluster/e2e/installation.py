"""An operator (and mover) as a process of this machine, looking after the namespaces of a test and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster import guest_image, versions
from tests.cluster.console import locked, run_logged, tail, wait_for
from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl, Object

ROOT = versions.HERE.parents[1]
START_SECONDS = 60.0
STOP_SECONDS = 30.0
LOAD_SECONDS = 300.0


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def prepare(cluster: Cluster) -> None:
    """What every installation needs once: the CRDs of this checkout, and the image with sandbox-init."""
    prepare_definitions(cluster)
    with locked(versions.cache_dir() / f"prepare-{cluster.name}.lock", seconds=2 * LOAD_SECONDS, what="the image of sandbox-init"):
        load_guest(cluster)


def prepare_definitions(cluster: Cluster) -> None:
    """The CRDs of this checkout."""
    cluster.kubectl.run("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))
    for name in ("sandboxes.agentsandbox.dev", "snapshots.agentsandbox.dev"):
        cluster.kubectl.wait("condition=Established", "crd", name)


def load_guest(cluster: Cluster) -> None:
    """Puts the image with sandbox-init into every node, unless it is there with this content."""
    if cluster.provider != "own":
        return
    archive = guest_image.archive()
    done = cluster.record.layout.folder / f"loaded-{archive.stem}-{cluster.record.count}"
    if not done.exists():
        command = [sys.executable, "-m", "tests.cluster", "--name", cluster.name, "load", str(archive)]
        run_logged("the image with sandbox-init", command, versions.cache_dir() / "logs" / "load-guest.log", seconds=LOAD_SECONDS, cwd=ROOT)
        done.touch()


@dataclass
class Installation:
    """One operator process and what it needs. `namespaces` are those that it looks after; the first one also holds its Lease."""

    cluster: Cluster
    namespaces: tuple[str, ...]
    folder: Path
    mover: bool = True
    settings: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    port: int = 0

    @property
    def kubectl(self) -> Kubectl:
        """kubectl in the first namespace."""
        return self.cluster.kubectl.within(self.namespaces[0])

    @property
    def log(self) -> Path:
        """What all processes of this installation have said."""
        return self.folder / "operator.log"

    @property
    def store(self) -> Path:
        """Where snapshots lie."""
        return self.folder / "store"

    def environment(self) -> dict[str, str]:
        """The process' environment."""
        paths = [os.environ.get("PYTHONPATH", ""), str(ROOT / "api"), str(ROOT / "operator")]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("AGENT_SANDBOX_")}
        return {
            **inherited,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "KUBECONFIG": str(self.cluster.kubectl.kubeconfig),
            "AGENT_SANDBOX_NAMESPACES": ",".join(self.namespaces),
            "AGENT_SANDBOX_STORE_URL": self.store.as_uri(),
            "AGENT_SANDBOX_INIT_IMAGE": os.environ.get("AGENT_SANDBOX_TEST_INIT_IMAGE", guest_image.NAME),
            "AGENT_SANDBOX_OPERATOR_HEALTH_HOST": "127.0.0.1",
            "AGENT_SANDBOX_OPERATOR_HEALTH_PORT": str(self.port),
            "AGENT_SANDBOX_OPERATOR_LEASE_NAMESPACE": self.namespaces[0],
            "AGENT_SANDBOX_OPERATOR_LOG_LEVEL": "debug",
            # Its pods would count against the quotas that tests set.
            "AGENT_SANDBOX_OPERATOR_VERIFY_NETWORK": "false",
            **self.settings,
        }

    def start(self, *, wait: bool = True) -> None:
        """Starts the operator; returns when it is ready."""
        assert self.process is None
        self.store.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        command = [sys.executable, "-m", "agent_sandbox_client", "operator", *(["--with-mover"] if self.mover else [])]
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment(), stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
            )
        if wait:
            self.until_ready()

    def until_ready(self) -> None:
        """Waits until it works."""
        wait_for("the operator is ready", self.is_ready, seconds=START_SECONDS, every=0.05, explain=lambda: f"\n{tail(self.log)}")

    def is_ready(self) -> bool:
        """Whether /readyz says so; an AssertionError when the process has ended."""
        assert self.process is not None and self.process.poll() is None, f"the operator has ended:\n{tail(self.log)}"
        return self.ask("readyz") == "ok\n"

    def ask(self, path: str) -> str:
        """What one of its pages says, empty when it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=5) as answer:
                text: str = answer.read().decode()
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return ""
        return text

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = (line.rsplit(" ", 1) for line in self.ask("metrics").splitlines() if not line.startswith("#"))
        return sum(float(value) for series, value in lines if series.split("{")[0] == name)

    def stop(self) -> None:
        """Ends it in order; it must end with 0."""
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the operator did not end within {STOP_SECONDS:.0f} s:\n{tail(self.log)}") from None
        assert code == 0, f"the operator ended with {code}:\n{tail(self.log)}"

    def kill(self) -> None:
        """kill -9, in the middle of whatever it does."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    def faults(self) -> list[str]:
        """Lines of its log that tell of a fault of its own."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return [line for line in lines if "Traceback" in line or " error " in line or "a fault of the operator" in line]


@contextlib.contextmanager
def installed(
    cluster: Cluster, namespaces: Sequence[str], folder: Path, *, mover: bool = True, settings: dict[str, str] | None = None
) -> Iterator[Installation]:
    """A running installation; it is stopped at the end, and must not have had a fault of its own."""
    prepare(cluster)
    folder.mkdir(parents=True, exist_ok=True)
    installation = Installation(cluster, tuple(namespaces), folder, mover=mover, settings=settings or {})
    try:
        installation.start()
        yield installation
        installation.stop()
        assert not installation.faults(), "\n".join(installation.faults()[:20])
    finally:
        installation.kill()


def sandbox(name: str, image: str, /, **spec: object) -> Object:
    """A small Sandbox with an ephemeral workspace; fields of its spec by their names on the wire."""
    base: Object = {
        "image": image,
        "workspace": {"ephemeral": True},
        "resources": {"cpu": "500m", "memory": "96Mi", "requests": {"cpu": "10m", "memory": "32Mi"}},
    }
    return {"apiVersion": "agentsandbox.dev/v1alpha1", "kind": "Sandbox", "metadata": {"name": name}, "spec": {**base, **spec}}


def condition(found: Object, kind: str = "Ready") -> Object:
    """A condition of an object, empty when it has none of that type."""
    conditions: list[Object] = found.get("status", {}).get("conditions", [])
    return next((one for one in conditions if one["type"] == kind), {})


def reason_of(found: Object) -> str:
    """The reason of its condition Ready."""
    return str(condition(found).get("reason", ""))
