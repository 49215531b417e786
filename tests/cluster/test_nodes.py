"""What only more than one node can show: drain, attachment to one node at a time, loss of a node. Needs NODES=2."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import nodes, own
from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.layout import Node
from tests.cluster.objects import FOREVER, Object, claim, deployment, pod, service
from tests.cluster.test_smoke import SERVE, reaches, run_in, start
from tests.support.waiting import eventually


@pytest.fixture
def second(cluster: Cluster) -> Iterator[Node]:
    """The second node, to break; whole again after the test."""
    node = cluster.node(2)
    yield node
    own.up(cluster.name, cluster.record.count)
    cluster.kubectl.run("uncordon", node.name)
    cluster.kubectl.run("taint", "node", node.name, "node.kubernetes.io/out-of-service-", check=False)


def at(node: str) -> Object:
    """Fields of a spec: the scheduler's own choice would be no test."""
    return {"nodeSelector": {"kubernetes.io/hostname": node}}


def preferring(node: str) -> Object:
    """Fields of a spec: that node as long as it can be had."""
    wish = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}
    return {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": wish}]}}}


def placed(kubectl: Kubectl, name: str, *, within: float) -> tuple[str, str]:
    """(pod, node) of a deployment's only living pod, as soon as it is ready."""
    eventually(lambda: where(kubectl, name), within=within, every=0.3, why=f"the only pod of {name} is ready")
    found = where(kubectl, name)
    assert found is not None
    return found


def where(kubectl: Kubectl, name: str) -> tuple[str, str] | None:
    """The same, looked at once."""
    living = [item for item in kubectl.list("pods", selector=f"app={name}") if "deletionTimestamp" not in item["metadata"]]
    ready = [item for item in living if any(c["type"] == "Ready" and c["status"] == "True" for c in item["status"].get("conditions", []))]
    return (ready[0]["metadata"]["name"], ready[0]["spec"]["nodeName"]) if len(living) == len(ready) == 1 else None


def test_pods_of_different_nodes_reach_each_other_and_services(cluster: Cluster, namespace: Kubectl, second: Node) -> None:
    python = cluster.image("python")
    web = pod("web", python, *SERVE, labels={"role": "web"}, **at("node1"))
    start(namespace, service("web", 8080, {"role": "web"}), web, pod("far", python, *FOREVER, **at(second.name)))
    assert eventually(lambda: reaches(namespace, "far", namespace.get("pod", "web")["status"]["podIP"]), within=20)
    assert eventually(lambda: reaches(namespace, "far", "web"), within=20)


def test_a_drain_moves_a_pod_and_its_disk_to_the_other_node(cluster: Cluster, namespace: Kubectl, second: Node) -> None:
    spec = {**preferring(second.name), "securityContext": {"fsGroup": 1000}}
    namespace.apply(claim("work", "disk"), deployment("app", cluster.image("python"), 1, *FOREVER, claim="work", **spec))
    name, node = placed(namespace, "app", within=60)
    assert node == second.name
    run_in(namespace, name, "sh", "-c", "echo moved > /data/file && sync")
    namespace.run("drain", second.name, "--pod-selector=app=app", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s", seconds=90)
    name, node = placed(namespace, "app", within=90)
    assert node == "node1"
    assert run_in(namespace, name, "cat", "/data/file") == "moved\n"


def test_a_disk_is_attached_to_one_node_at_a_time(cluster: Cluster, namespace: Kubectl, second: Node) -> None:
    python = cluster.image("python")
    group: Object = {"securityContext": {"fsGroup": 1000}}
    start(namespace, claim("work", "disk"), pod("one", python, *FOREVER, claim="work", **at("node1"), **group))
    run_in(namespace, "one", "sh", "-c", "echo first > /data/file && sync")
    namespace.apply(pod("two", python, *FOREVER, claim="work", **at(second.name), **group))

    def complaints() -> list[str]:
        return [
            event["message"]
            for event in namespace.list("events")
            if event["involvedObject"]["name"] == "two" and "Multi-Attach error" in event["message"]
        ]

    eventually(complaints, within=30, why="the second node is told that the disk is attached elsewhere")
    namespace.delete("pod", "one")
    namespace.wait("condition=Ready", "pod/two", seconds=90)
    assert run_in(namespace, "two", "cat", "/data/file") == "first\n"


def test_a_lost_node_is_noticed_and_its_pod_moves_once_the_node_is_declared_out_of_service(
    cluster: Cluster, namespace: Kubectl, second: Node
) -> None:
    spec = {**preferring(second.name), "securityContext": {"fsGroup": 1000}}
    namespace.apply(claim("work", "disk"), deployment("app", cluster.image("python"), 1, *FOREVER, claim="work", **spec))
    name, node = placed(namespace, "app", within=60)
    assert node == second.name
    run_in(namespace, name, "sh", "-c", "echo survived > /data/file && sync")
    nodes.power_off(second)
    cluster.kubectl.wait("condition=Ready=Unknown", f"node/{second.name}", seconds=60)
    cluster.kubectl.run("taint", "node", second.name, "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute")
    name, node = placed(namespace, "app", within=120)
    assert node == "node1"
    assert run_in(namespace, name, "cat", "/data/file") == "survived\n"


def test_a_node_that_is_cut_off_comes_back(cluster: Cluster, namespace: Kubectl, second: Node) -> None:
    start(namespace, pod("worker", cluster.image("busybox"), *FOREVER, **at(second.name)))
    nodes.set_links(cluster.record.layout, second, "down")
    try:
        cluster.kubectl.wait("condition=Ready=Unknown", f"node/{second.name}", seconds=60)
    finally:
        nodes.set_links(cluster.record.layout, second, "up")
    cluster.kubectl.wait("condition=Ready", f"node/{second.name}", seconds=60)
    assert run_in(namespace, "worker", "echo", "still here") == "still here\n"
