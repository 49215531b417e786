"""Fixtures for tests on a real cluster: the cluster itself, a namespace for each test, what is gathered when one fails.

A conftest.py takes them by import: `from tests.cluster.fixtures import cluster, departures, namespace, pytest_runtest_makereport`.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cluster import own, providers
from tests.cluster.console import say
from tests.cluster.gathering import gather
from tests.cluster.kubectl import Kubectl
from tests.cluster.layout import Node

GONE_SECONDS = 60.0
REPORTS = pytest.StashKey[dict[str, pytest.TestReport]]()
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


@dataclass
class Departures:
    """Namespaces that were deleted and must disappear by themselves: nothing is helped, forced or patched."""

    kubectl: Kubectl
    leaving: dict[str, tuple[str, float, Path]] = field(default_factory=dict)

    def add(self, name: str, test: str, folder: Path) -> None:
        """Deletes a namespace. Nobody waits for it here: Kubernetes alone takes ten seconds for each."""
        self.kubectl.delete("namespace", name, wait=False)
        self.leaving[name] = (test, time.monotonic() + GONE_SECONDS, folder)

    def check(self) -> None:
        """Fails when one is still there after its time."""
        there = {item["metadata"]["name"]: item for item in self.kubectl.list("namespaces")} if self.leaving else {}
        stuck = []
        for name, (test, deadline, folder) in list(self.leaving.items()):
            if name not in there:
                del self.leaving[name]
            elif time.monotonic() > deadline:
                del self.leaving[name]
                gather(self.kubectl.within(name), folder)
                stuck.append(f"namespace {name} of {test} has not disappeared within {GONE_SECONDS:.0f} s: {there[name]['status']}; see {folder}")
        if stuck:
            pytest.fail("\n".join(stuck))

    def finish(self) -> None:
        """Waits for all of them."""
        while self.leaving:
            self.check()
            time.sleep(0.5)


@pytest.fixture(scope="session")
def departures(cluster: Cluster) -> Iterator[Departures]:
    """Watches over the namespaces that tests have left."""
    leaving = Departures(cluster.kubectl)
    yield leaving
    leaving.finish()


@pytest.fixture
def namespace(cluster: Cluster, departures: Departures, request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """kubectl in a namespace of the test's own, which must disappear by itself after the test. One that does not fails a later test or the session, by name."""
    departures.check()
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
        departures.add(name, request.node.nodeid, folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Lets fixtures know at their end how the test went."""
    report = yield
    item.stash.setdefault(REPORTS, {})[report.when] = report
    return report
