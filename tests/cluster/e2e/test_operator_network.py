"""What a sandbox can reach, and what is said about that."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.cluster.console import wait_for
from tests.cluster.e2e.installation import Installation, condition, sandbox
from tests.cluster.e2e.life import edit, shell, until_ready, until_reason
from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl, Object

VERIFY = {"AGENT_SANDBOX_OPERATOR_VERIFY_NETWORK": "true"}
API_SERVER = "$KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT"


DIAL = "import os, socket, sys; socket.create_connection((os.path.expandvars(sys.argv[1]), int(os.path.expandvars(sys.argv[2]))), 2).close()"


def reaches(kubectl: Kubectl, name: str, address: str) -> bool:
    """Whether a TCP connection comes about from a sandbox, within two seconds."""
    return shell(kubectl, name, f"python3 -c '{DIAL}' {address} 2>/dev/null && echo yes || echo no") == "yes\n"


def test_nothing_is_reached_without_a_network_and_nothing_inside_the_cluster_with_one(
    cluster: Cluster, namespace: Kubectl, operator: Installation
) -> None:
    image = cluster.image("python")
    server = {"command": ["python3", "-m", "http.server", "8080"]}
    namespace.apply(
        sandbox("none", image), sandbox("open", image, network={"mode": "Open"}), sandbox("other", image, network={"mode": "Open"}, **server)
    )
    for name in ("none", "open", "other"):
        until_ready(namespace, name)
    addresses = {
        "the API server": API_SERVER,
        "the kubelet": f"{node_address(cluster)} 10250",
        "another sandbox": f"{pod_address(namespace, 'other')} 8080",
        "the metadata address": "169.254.169.254 80",
    }
    assert reaches(namespace, "other", "127.0.0.1 8080")
    for name in ("none", "open"):
        found = {what: reaches(namespace, name, address) for what, address in addresses.items()}
        assert found == dict.fromkeys(addresses, False), name
    began = time.monotonic()
    assert shell(namespace, "none", "getent hosts example.org || echo failed") == "failed\n"
    assert time.monotonic() - began < 3
    assert "example" not in shell(namespace, "none", "cat /etc/resolv.conf")
    assert shell(namespace, "open", "getent hosts kubernetes.default.svc.cluster.local >/dev/null && echo resolved") == "resolved\n"


def test_an_allowlist_opens_what_it_names_and_an_edit_of_it_needs_no_new_pod(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    image = cluster.image("python")
    target = plain_pod(image)
    namespace.apply(target)
    namespace.wait("condition=Ready", "pod/target")
    address = namespace.get("pod", "target")["status"]["podIP"]
    namespace.apply(sandbox("one", image, network={"mode": "Allowlist", "allow": [f"{address}/32"]}))
    pod = until_ready(namespace, "one")["status"]["podName"]
    uid = namespace.get("pod", pod)["metadata"]["uid"]
    wait_for("the target is reached", lambda: reaches(namespace, "one", f"{address} 8080"), seconds=15)
    assert not reaches(namespace, "one", API_SERVER)
    edit(namespace, "one", network={"mode": "Allowlist", "allow": ["192.0.2.1/32"]})
    wait_for("the target is not reached any more", lambda: not reaches(namespace, "one", f"{address} 8080"), seconds=15)
    assert namespace.get("pod", pod)["metadata"]["uid"] == uid
    edit(namespace, "one", network={"mode": "Allowlist", "allow": []})
    wait_for("an empty list allows nothing", lambda: not reaches(namespace, "one", f"{address} 8080"), seconds=15)


def test_policies_that_somebody_deletes_or_changes_are_put_back(cluster: Cluster, namespace: Kubectl, install: Callable[..., Installation]) -> None:
    assert namespace.namespace is not None
    install(namespace.namespace, mover=False, settings={"AGENT_SANDBOX_OPERATOR_RESYNC_SECONDS": "5"})
    namespace.apply(sandbox("one", cluster.image("busybox")))
    until_ready(namespace, "one")
    namespace.delete("networkpolicy", "agent-sandbox-deny-all")
    namespace.run("patch", "networkpolicy", "agent-sandbox-open", "--type=merge", "--patch", '{"spec":{"egress":[{}]}}')
    wait_for("it is back", lambda: namespace.find("networkpolicy", "agent-sandbox-deny-all") is not None, seconds=20)
    wait_for("it is as before", lambda: "ipBlock" in str(namespace.get("networkpolicy", "agent-sandbox-open")["spec"]), seconds=20)


def test_that_policies_bite_is_said_only_after_it_was_seen(cluster: Cluster, namespace: Kubectl, install: Callable[..., Installation]) -> None:
    assert namespace.namespace is not None
    namespace.run("label", "namespace", namespace.namespace, "pod-security.kubernetes.io/enforce=restricted")
    install(namespace.namespace, mover=False, settings=VERIFY)
    namespace.apply(sandbox("one", cluster.image("busybox")))
    found = namespace.until("it is verified", "sandbox", "one", lambda one: condition(one, "NetworkEnforced").get("status") == "True", seconds=90)
    assert condition(found, "NetworkEnforced")["reason"] == "Enforced"
    wait_for("the canaries are gone", lambda: [pod["metadata"]["name"] for pod in namespace.list("pods")] == [found["status"]["podName"]], seconds=30)


def test_a_network_that_enforces_nothing_is_told_and_where_it_is_required_nothing_is_ready(
    cluster: Cluster, namespace: Kubectl, install: Callable[..., Installation]
) -> None:
    assert namespace.namespace is not None
    install(namespace.namespace, mover=False, settings={**VERIFY, "AGENT_SANDBOX_OPERATOR_REQUIRE_NETWORK_ENFORCEMENT": "true"})
    # Policies add up, so one that allows everything is what a network without enforcement looks like.
    namespace.apply(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "everything"},
            "spec": {"podSelector": {}, "policyTypes": ["Egress"], "egress": [{}]},
        },
        sandbox("one", cluster.image("busybox")),
    )
    found = until_reason(namespace, "one", "NetworkNotEnforced", seconds=90)
    told = namespace.until("it is told", "sandbox", "one", lambda one: condition(one, "NetworkEnforced").get("status") == "False", seconds=90)
    assert condition(found)["status"] == "False"
    assert "reached" in condition(told, "NetworkEnforced")["message"]


def plain_pod(image: str) -> Object:
    """A pod that listens on port 8080, and fits the restricted profile."""
    security = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {
        "name": "main",
        "image": image,
        "command": ["python3", "-m", "http.server", "8080"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {"terminationGracePeriodSeconds": 0, "securityContext": security, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "target"}, "spec": spec}


def node_address(cluster: Cluster) -> str:
    """The address of a node."""
    addresses = cluster.kubectl.list("nodes")[0]["status"]["addresses"]
    return str(next(one["address"] for one in addresses if one["type"] == "InternalIP"))


def pod_address(kubectl: Kubectl, name: str) -> str:
    """The address of a sandbox's pod."""
    return str(kubectl.get("pod", kubectl.get("sandbox", name)["status"]["podName"])["status"]["podIP"])
