"""Fixtures of the tests of the operator, the mover and the facade on a real cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.e2e.installation import Installation, installed
from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl


@pytest.fixture
def install(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Installation]]:
    """Starts installations with settings of the test's own: install("ns", mover=False, settings={...})."""
    with ExitStack() as stack:
        count = 0

        def start(*namespaces: str, mover: bool = True, settings: dict[str, str] | None = None) -> Installation:
            nonlocal count
            count += 1
            return stack.enter_context(installed(cluster, namespaces, tmp_path / f"installation{count}", mover=mover, settings=settings))

        yield start


@pytest.fixture
def installation(namespace: Kubectl, install: Callable[..., Installation]) -> Installation:
    """Operator and mover for the test's own namespace."""
    assert namespace.namespace is not None
    return install(namespace.namespace)


@pytest.fixture
def operator(namespace: Kubectl, install: Callable[..., Installation]) -> Installation:
    """The operator alone for the test's own namespace, which enforces the restricted profile of Pod Security."""
    assert namespace.namespace is not None
    namespace.run("label", "namespace", namespace.namespace, "pod-security.kubernetes.io/enforce=restricted")
    return install(namespace.namespace, mover=False)
