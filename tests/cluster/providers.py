"""Where a cluster comes from: our own, kind, or one that exists. Tests see the same three things of each: a kubeconfig, kubectl, load."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tests.cluster import build, images, own, versions
from tests.cluster.console import ClusterError, run, say
from tests.cluster.kubectl import Kubectl

KIND_SECONDS = 900


class Provider(Protocol):
    """What the commands need."""

    def up(self, name: str, count: int) -> None:
        """Makes it work."""

    def down(self, name: str) -> None:
        """Removes it."""

    def status(self, name: str) -> list[str]:
        """Lines for people; the last one is "everything works" when it does."""

    def load(self, name: str, image: str) -> None:
        """Puts an image into every node."""

    def access(self, name: str) -> Kubectl:
        """How to talk to it."""


class Own:
    """Built from Go modules and run in namespaces of this machine."""

    def up(self, name: str, count: int) -> None:
        own.up(name, count)

    def down(self, name: str) -> None:
        own.down(name)

    def status(self, name: str) -> list[str]:
        record = own.find(name)
        return own.status(record) if record else [f"cluster {name} is not up"]

    def load(self, name: str, image: str) -> None:
        own.load(self.record(name), image)

    def access(self, name: str) -> Kubectl:
        return own.kubectl(self.record(name).layout)

    def record(self, name: str) -> own.Record:
        """Of a cluster that is there."""
        record = own.find(name)
        if record is None:
            raise ClusterError(f"cluster {name} is not up: make cluster-up NAME={name}")
        return record


def required(command: str, hint: str) -> str:
    """A command of the machine."""
    found = shutil.which(command)
    if found is None:
        raise ClusterError(f"{command} is not on PATH: {hint}")
    return found


def summary(kubectl: Kubectl) -> list[str]:
    """Nodes of a cluster that is not ours, and whether it answers."""
    asked = kubectl.run("get", "nodes", "--output=wide", check=False, seconds=20)
    return [asked.stdout.rstrip(), "everything works"] if asked.returncode == 0 else [f"the API server does not answer: {asked.stderr.strip()}"]


class Kind:
    """A cluster of kind's, for machines with Docker and a registry. Not tested where this was written: no node image can be pulled there."""

    def kind(self, *words: str, seconds: float = 60, stdin: str | None = None) -> str:
        """Runs kind."""
        return run(required("kind", "https://kind.sigs.k8s.io says how to install it"), *words, seconds=seconds, stdin=stdin).stdout

    def cluster(self, name: str) -> str:
        """What kind calls it."""
        return f"agent-sandbox-{name}"

    def kubeconfig(self, name: str) -> Path:
        """A file of its own; kind's default would change the user's."""
        return versions.cache_dir() / "kind" / f"{name}.kubeconfig"

    def up(self, name: str, count: int) -> None:
        path = self.kubeconfig(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.cluster(name) not in self.kind("get", "clusters").split():
            roles = ["control-plane", *["worker"] * (count - 1)]
            config = "kind: Cluster\napiVersion: kind.x-k8s.io/v1alpha4\nfeatureGates: {ImageVolume: true}\nnodes:\n" + "".join(
                f"- role: {role}\n" for role in roles
            )
            say("kind makes the cluster (it pulls a node image the first time)")
            self.kind(
                "create",
                "cluster",
                "--name",
                self.cluster(name),
                "--kubeconfig",
                str(path),
                "--wait=180s",
                "--config=-",
                seconds=KIND_SECONDS,
                stdin=config,
            )
        path.write_text(self.kind("get", "kubeconfig", "--name", self.cluster(name)))
        path.chmod(0o600)
        for image in images.portable():
            self.kind("load", "image-archive", str(image), "--name", self.cluster(name), seconds=KIND_SECONDS)
        say(f"KUBECONFIG={path}")

    def down(self, name: str) -> None:
        self.kind("delete", "cluster", "--name", self.cluster(name), seconds=300)
        self.kubeconfig(name).unlink(missing_ok=True)

    def status(self, name: str) -> list[str]:
        return summary(self.access(name)) if self.kubeconfig(name).exists() else [f"kind has no cluster {self.cluster(name)}"]

    def load(self, name: str, image: str) -> None:
        with tempfile.TemporaryDirectory() as work:
            archive = Path(image) if Path(image).is_file() else own.export(image, Path(work) / "image.tar")
            self.kind("load", "image-archive", str(archive), "--name", self.cluster(name), seconds=KIND_SECONDS)

    def access(self, name: str) -> Kubectl:
        return Kubectl(any_kubectl(), self.kubeconfig(name))


class Existing:
    """A cluster that somebody else runs: KUBECONFIG, or kubectl's default. It is never changed outside the tests' own namespaces."""

    def up(self, name: str, count: int) -> None:
        lines = self.status(name)
        if lines[-1] != "everything works":
            raise ClusterError(lines[-1])
        say(f"using the cluster of {self.access(name).kubeconfig}:\n{lines[0]}")

    def down(self, name: str) -> None:
        say("a cluster that exists is not taken down")

    def status(self, name: str) -> list[str]:
        return summary(self.access(name))

    def load(self, name: str, image: str) -> None:
        raise ClusterError("images reach a cluster that exists through its registry: push it there, and name it in AGENT_SANDBOX_TEST_IMAGE_*")

    def access(self, name: str) -> Kubectl:
        given = os.environ.get("KUBECONFIG", "").split(":")[0]
        path = Path(given) if given else Path.home() / ".kube" / "config"
        if not path.exists():
            raise ClusterError(f"PROVIDER=existing uses KUBECONFIG or ~/.kube/config, but there is no {path}")
        return Kubectl(any_kubectl(), path)


def any_kubectl() -> str:
    """The machine's kubectl, or ours when it is built."""
    ours = build.binaries() / "kubectl"
    return shutil.which("kubectl") or (
        str(ours) if ours.exists() else required("kubectl", "install it, or build ours: python3 -m tests.cluster build")
    )


PROVIDERS: dict[str, Callable[[], Provider]] = {"own": Own, "kind": Kind, "existing": Existing}
NAMES = tuple(PROVIDERS)


def choose(name: str) -> Provider:
    """The provider of that name."""
    return PROVIDERS[name]()
