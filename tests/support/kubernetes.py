"""The Kubernetes backend under test: one operator with its mover for the session, and a namespace for each facade."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.e2e.installation import Installation, installed
from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl

from .waiting import eventually

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted", "purpose": "test"}


class Ground:
    """What facades on a cluster stand on."""

    def __init__(self, cluster: Cluster, installation: Installation) -> None:
        self.cluster = cluster
        self.installation = installation

    @property
    def kubectl(self) -> Kubectl:
        return self.cluster.kubectl

    @contextmanager
    def namespace(self) -> Iterator[str]:
        """A namespace of a facade's own, which enforces the restricted profile; nothing of a sandbox may be left in it at the end."""
        name = make_namespace(self.kubectl)
        inside = self.kubectl.within(name)
        try:
            yield name
            eventually(lambda: not left(inside), within=60, why=f"nothing of a sandbox is left in {name}: {left(inside)}")
        finally:
            self.kubectl.delete("namespace", name, wait=False)


def make_namespace(kubectl: Kubectl) -> str:
    """A new namespace that enforces the restricted profile of Pod Security."""
    name = f"f-{secrets.token_hex(4)}"
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}})
    return name


def left(kubectl: Kubectl) -> list[str]:
    """Sandboxes, pods, claims and Secrets of sandboxes that are in a namespace."""
    return [
        f"{kind} {item['metadata']['name']}"
        for kind in ("sandboxes.agentsandbox.dev", "snapshots.agentsandbox.dev", "pods", "persistentvolumeclaims", "secrets")
        for item in kubectl.list(kind)
        if not item["metadata"]["name"].startswith("agent-sandbox-canary")
    ]


@contextmanager
def standing(cluster: Cluster, folder: Path) -> Iterator[Ground]:
    """CRDs, operator and mover on a cluster. Facades that are started meanwhile find it by KUBECONFIG."""
    own = make_namespace(cluster.kubectl)
    before = os.environ.get("KUBECONFIG")
    os.environ["KUBECONFIG"] = str(cluster.kubectl.kubeconfig)
    try:
        with installed(cluster, (own,), folder, settings={"AGENT_SANDBOX_NAMESPACES": ""}) as installation:
            yield Ground(cluster, installation)
    finally:
        if before is None:
            os.environ.pop("KUBECONFIG")
        else:
            os.environ["KUBECONFIG"] = before
        cluster.kubectl.delete("namespace", own, wait=False)
