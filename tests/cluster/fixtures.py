"""Fixtures for tests on a real cluster: the cluster itself, a namespace for each test, what is gathered when one fails.

A conftest.py takes them by import: `from tests.cluster.fixtures import cluster, namespace, pytest_runtest_makereport`.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import own, providers
from tests.cluster.console import ClusterError, say
from tests.cluster.gathering import gather
from tests.cluster.kubectl import Kubectl
from tests.cluster.layout import Node

GONE_SECONDS = 60.0
REPORTS = pytest.StashKey[dict[str, pytest.CollectReport | pytest.TestReport]]()
ARTIFACTS = Path(__file__).resolve().parents[1] / "artifacts" / "cluster"
PUBLIC_IMAGES = {"python": "python:3.12-slim", "busybox": "busybox:1.36", "static": "registry.k8s.io/pause:3.10"}


@dataclass(frozen=True)
class Cluster:
    """A cluster that works, whoever provides it."""

    provider: str
    name: str
    kubectl: Kubectl

    @property
    def record(self) -> own.Record:
        """Of a cluster of our own."""
        record = own.find(self.name)
        assert record is not None
        return record

    def image(self, kind: str) -> str:
        """A test image: python, busybox or static."""
        given = os.environ.get(f"AGENT_SANDBOX_TEST_IMAGE_{kind.upper()}")
        return given or (f"localhost/{kind}:1" if self.provider in {"own", "kind"} else PUBLIC_IMAGES[kind])

    def needs(self, kind: str, name: str) -> None:
        """Skips the test on a cluster that lacks a class or driver which only ours promises."""
        if self.kubectl.find(kind, name) is None:
            if self.provider == "own":
                pytest.fail(f"the cluster has no {kind} {name}, which is part of it: `make cluster-status` says what else is missing")
            pytest.skip(f"this cluster has no {kind} {name}")

    def needs_own(self) -> None:
        """Skips the test on a cluster whose insides are not ours to touch."""
        if self.provider != "own":
            pytest.skip("looks into or breaks the machine's own cluster")

    def node(self, index: int) -> Node:
        """A node to break; skips the test when there are fewer."""
        self.needs_own()
        if self.record.count < index:
            pytest.skip(f"needs NODES={index}")
        return self.record.layout.node(index)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster named by NAME and PROVIDER, started with NODES nodes when it is not up. Only what this session started is taken down."""
    provider, name = os.environ.get("PROVIDER") or "own", os.environ.get("NAME") or "main"
    source = providers.choose(provider)
    was_up = provider == "existing" or (own.find(name) is not None if provider == "own" else source.status(name)[-1] == "everything works")
    source.up(name, int(os.environ.get("NODES") or 1))
    try:
        yield Cluster(provider, name, source.access(name))
    finally:
        if not was_up and not os.environ.get("KEEP"):
            source.down(name)


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """kubectl in a namespace of the test's own. At the end the namespace must disappear by itself: nothing is helped, forced or patched."""
    name = f"t-{secrets.token_hex(4)}"
    cluster.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": {"purpose": "test"}}})
    inside = cluster.kubectl.within(name)
    inside.until(f"service account of {name}", "serviceaccount", "default", bool, seconds=30)
    folder = ARTIFACTS / re.sub(r"[^\w.-]+", "-", request.node.nodeid)[-150:]
    try:
        yield inside
    finally:
        if any(report.failed for report in request.node.stash.get(REPORTS, {}).values()):
            gather(inside, folder)
            say(f"objects, events and logs of {name} are in {folder}")
        cluster.kubectl.delete("namespace", name, wait=False)
        try:
            cluster.kubectl.run("wait", "--for=delete", f"namespace/{name}", f"--timeout={GONE_SECONDS:.0f}s", seconds=GONE_SECONDS + 10)
        except ClusterError:
            gather(inside, folder)
            status = (cluster.kubectl.find("namespace", name) or {}).get("status")
            pytest.fail(f"namespace {name} has not disappeared within {GONE_SECONDS:.0f} s; it says {status}; what is left in it is in {folder}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Lets fixtures know at their end how the test went."""
    report = yield
    item.stash.setdefault(REPORTS, {})[report.when or "call"] = report
    return report
