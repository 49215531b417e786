"""Faults that the operator survives: killed in the middle, volumes that do not go, namespaces that do, names that cannot be."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.cluster import nodes
from tests.cluster.console import wait_for
from tests.cluster.e2e.installation import Installation, condition, reason_of, sandbox
from tests.cluster.e2e.life import FAST, edit, pods_of, shell, until_incarnation, until_ready
from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl, Object
from tests.support.waiting import throughout

pytestmark = pytest.mark.slow


@pytest.fixture
def lone(namespace: Kubectl, install: Callable[..., Installation]) -> Installation:
    """An operator that needs no Lease: after a kill the next one begins at once, and does not wait until the Lease has run out."""
    assert namespace.namespace is not None
    return install(namespace.namespace, mover=False, settings={"AGENT_SANDBOX_OPERATOR_LEASE": "false"})


def test_killed_again_and_again_during_creates_it_leaves_one_pod_and_one_pvc_for_each_sandbox(
    cluster: Cluster, namespace: Kubectl, lone: Installation
) -> None:
    """B18 for creates: thirty Sandboxes, a kill -9 after each at a random moment, edits and deletions in between."""
    chance = random.Random(18)
    names = [f"s{number}" for number in range(30)]
    for number, name in enumerate(names):
        namespace.apply(sandbox(name, cluster.image("busybox"), **({"workspace": FAST} if number % 2 else {})))
        time.sleep(chance.uniform(0, 1.5))
        lone.kill()
        if number % 10 == 9:
            edit(namespace, names[number - 2], shutdownPolicy="Delete")
            namespace.delete("sandbox", names[number - 5], wait=False)
        lone.start(wait=False)
    lone.until_ready()
    gone = {names[number - 5] for number in range(9, 30, 10)}
    for name in names:
        if name not in gone:
            until_ready(namespace, name, seconds=120)
    wait_for("only what should be is there", lambda: stray(namespace) == [], seconds=60, explain=lambda: f": {stray(namespace)}")
    assert {item["metadata"]["name"] for item in namespace.list("sandboxes")} == set(names) - gone
    for name in sorted(set(names) - gone):
        assert len(pods_of(namespace, name)) == 1
        found = namespace.get("sandbox", name)
        assert found["status"]["incarnation"] == 1, name
        assert "lastTermination" not in found["status"], name
    assert shell(namespace, "s3", "echo works") == "works\n"


def stray(namespace: Kubectl) -> list[str]:
    """Children that belong to no Sandbox, or are too many."""
    uids = {item["metadata"]["uid"] for item in namespace.list("sandboxes")}
    found = []
    for kind in ("pods", "pvc"):
        owners = [item["metadata"]["labels"]["agentsandbox.dev/sandbox-uid"] for item in namespace.list(kind, selector="agentsandbox.dev/sandbox")]
        found += [f"{kind} of {uid}" for uid in owners if uid not in uids]
        found += [f"{owners.count(uid)} {kind} of {uid}" for uid in set(owners) if owners.count(uid) > 1]
    return found


def test_killed_during_replacements_it_ends_with_one_pod_and_counts_each_start_once(cluster: Cluster, namespace: Kubectl, lone: Installation) -> None:
    chance = random.Random(7)
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST))
    until_ready(namespace, "one")
    shell(namespace, "one", "echo kept > /workspace/file")
    for number in range(6):
        edit(namespace, "one", env=[{"name": "N", "value": str(number)}])
        time.sleep(chance.uniform(0, 1.0))
        lone.kill()
        lone.start()
        until_ready(namespace, "one", seconds=60)
        namespace.until(
            "the edit is carried out",
            "sandbox",
            "one",
            lambda found: found["status"]["observedGeneration"] == found["metadata"]["generation"],
            seconds=60,
        )
    until_ready(namespace, "one", seconds=60)
    found = namespace.get("sandbox", "one")
    assert 2 <= found["status"]["incarnation"] <= 7
    assert found["status"].get("recentStarts", []) == []
    assert shell(namespace, "one", "cat /workspace/file; echo $N").split() == ["kept", "5"]
    assert len(pods_of(namespace, "one")) == 1


def test_volumes_go_with_their_sandboxes_and_a_dying_one_is_never_mounted_by_the_next_of_its_name(
    cluster: Cluster, namespace: Kubectl, operator: Installation
) -> None:
    """B12, without the snapshot."""
    namespace.apply(*(sandbox(f"s{number}", cluster.image("busybox"), workspace=FAST) for number in range(10)))
    for number in range(10):
        until_ready(namespace, f"s{number}", seconds=120)
    volumes = {item["spec"]["volumeName"] for item in namespace.list("pvc")}
    namespace.delete("sandbox", *(f"s{number}" for number in range(10)), wait=False)
    wait_for("no PVC is left", lambda: not namespace.list("pvc"), seconds=60)
    wait_for("no volume is left", lambda: not volumes & {item["metadata"]["name"] for item in cluster.kubectl.list("pv")}, seconds=60)

    namespace.apply(sandbox("held", cluster.image("busybox"), workspace=FAST))
    first = until_ready(namespace, "held")["status"]["pvcName"]
    shell(namespace, "held", "echo old > /workspace/file")
    namespace.apply(holder(cluster.image("busybox"), first))
    namespace.wait("condition=Ready", "pod/holder")
    began = time.monotonic()
    namespace.delete("sandbox", "held")
    assert time.monotonic() - began < 5
    namespace.apply(sandbox("held", cluster.image("busybox"), workspace=FAST))
    again = until_ready(namespace, "held", seconds=60)
    assert again["status"]["pvcName"] != first
    assert shell(namespace, "held", "ls /workspace") == ""
    assert namespace.get("pvc", first)["metadata"].get("deletionTimestamp")
    namespace.delete("pod", "holder")
    wait_for("the old one is gone", lambda: namespace.find("pvc", first) is None, seconds=30)


def holder(image: str, claim: str) -> Object:
    """A pod that holds a claim."""
    security = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {
        "name": "main",
        "image": image,
        "command": ["sleep", "1000000"],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]
    spec = {"terminationGracePeriodSeconds": 0, "securityContext": security, "containers": [container], "volumes": volumes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "holder"}, "spec": spec}


@pytest.mark.parametrize("running", [True, False], ids=["operator running", "operator down"])
def test_a_namespace_always_goes(cluster: Cluster, namespace: Kubectl, lone: Installation, running: bool) -> None:
    """B13. The fixture waits for the namespace to go by itself; here it goes with everything in it, and the operator says nothing about it for long."""
    assert namespace.namespace is not None
    namespace.apply(*(sandbox(f"s{number}", cluster.image("busybox"), workspace=FAST) for number in range(3)))
    for number in range(3):
        until_ready(namespace, f"s{number}", seconds=60)
    if not running:
        lone.kill()
    cluster.kubectl.delete("namespace", namespace.namespace, wait=False)
    wait_for("the namespace is gone", lambda: cluster.kubectl.find("namespace", namespace.namespace or "") is None, seconds=120)
    if not running:
        lone.start()
    lines = lone.log.read_text().count("\n")
    throughout(lambda: lone.log.read_text().count("\n") - lines <= 1, seconds=5, why=lone.log.read_text()[-2000:])


def test_a_name_is_either_refused_or_works(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    """B20 for CRs."""
    image = cluster.image("busybox")
    for name in ("1abc", "a" * 50, "a-b-c"):
        namespace.apply(sandbox(name, image))
    for name in ("a.b.c", "a" * 51, "a" * 63, "a" * 64, "a" * 253):
        done = namespace.create(sandbox(name, image))
        assert done.returncode != 0, name
        assert "name" in done.stderr
    for name in ("1abc", "a" * 50, "a-b-c"):
        until_ready(namespace, name, seconds=60)


def test_a_pod_that_was_killed_by_force_is_replaced(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST))
    pod = until_ready(namespace, "one")["status"]["podName"]
    namespace.delete("pod", pod, now=True)
    until_incarnation(namespace, "one", 2, seconds=60)


def test_two_operators_share_a_lease_and_the_second_goes_on_when_the_first_is_killed(
    cluster: Cluster, namespace: Kubectl, operator: Installation
) -> None:
    second = Installation(operator.cluster, operator.namespaces, operator.folder / "second", mover=False)
    second.folder.mkdir()
    second.start(wait=False)
    try:
        wait_for("the second stands by", lambda: second.ask("readyz") == "standby\n", seconds=30)
        namespace.apply(sandbox("one", cluster.image("busybox")))
        until_ready(namespace, "one")
        assert second.metric("agent_sandbox_operator_reconciles_total") == 0
        operator.kill()
        namespace.apply(sandbox("two", cluster.image("busybox")))
        until_ready(namespace, "two", seconds=40)
        operator.start(wait=False)
        wait_for("the first stands by", lambda: operator.ask("readyz") == "standby\n", seconds=30)
        second.stop()
        namespace.apply(sandbox("three", cluster.image("busybox")))
        until_ready(namespace, "three", seconds=20)
    finally:
        second.kill()


def test_a_lost_node_is_told_and_never_forced_and_heals_when_it_is_back(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    node = cluster.node(2)
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST, nodeSelector={"kubernetes.io/hostname": node.name}))
    found = until_ready(namespace, "one")
    pod = pods_of(namespace, "one")[0]["metadata"]["uid"]
    nodes.set_links(cluster.record.layout, node, "down")
    try:
        lost = namespace.until("it is told", "sandbox", "one", lambda one: reason_of(one) == "NodeLost", seconds=60)
        assert node.name in condition(lost)["message"]
        assert "out-of-service" in condition(lost)["message"]
        assert pods_of(namespace, "one")[0]["metadata"]["uid"] == pod
    finally:
        nodes.set_links(cluster.record.layout, node, "up")
    until_ready(namespace, "one", seconds=90)
    assert found["status"]["podName"] == namespace.get("sandbox", "one")["status"]["podName"]
