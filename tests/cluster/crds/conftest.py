"""The API server with the CRDs of this checkout, and small objects."""

from __future__ import annotations

import pytest

from tests.cluster.e2e.installation import prepare_definitions
from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl


@pytest.fixture(scope="session")
def defined(cluster: Cluster) -> None:
    """The CRDs of this checkout."""
    prepare_definitions(cluster)


@pytest.fixture(scope="session")
def judge(cluster: Cluster, defined: None) -> Kubectl:
    """kubectl for questions that leave nothing behind."""
    return cluster.kubectl.within("default")


@pytest.fixture
def api(namespace: Kubectl, defined: None) -> Kubectl:
    """kubectl in a namespace of the test's own, where nobody acts on our objects."""
    return namespace
