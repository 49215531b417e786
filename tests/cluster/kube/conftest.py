from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from agent_sandbox_kube.client import Kube, connect

from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.objects import FOREVER, pod


@pytest_asyncio.fixture
async def kube(cluster: Cluster) -> AsyncIterator[Kube]:
    """A client of the cluster."""
    async with connect(str(cluster.kubectl.kubeconfig), cluster.kubectl.context) as client:
        yield client


@pytest.fixture
def worker(cluster: Cluster, namespace: Kubectl) -> str:
    """A pod with busybox that waits; its namespace."""
    assert namespace.namespace is not None
    namespace.apply(pod("worker", cluster.image("busybox"), *FOREVER))
    namespace.wait("condition=Ready", "pod/worker")
    return namespace.namespace
