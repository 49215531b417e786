"""What keeps a Sandbox from being Ready is said within ten seconds, in its condition and in an event, with the next step; and it heals when the cause goes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.cluster.console import wait_for
from tests.cluster.e2e.installation import Installation, condition, sandbox
from tests.cluster.e2e.life import FAST, edit, pods_of, shell, until_incarnation, until_ready, until_reason
from tests.cluster.e2e.nodes import run_out_of_memory
from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl, Object

PROMPTLY = 10.0
"""Seconds until the cause is told."""
HEALING = 60.0


@dataclass(frozen=True)
class Trouble:
    """What is wrong with a spec, how it is told, and what must be in the message."""

    reason: str
    spec: Object
    message: str
    cure: Object | None = None


BIG = {"cpu": "64", "memory": "96Mi", "requests": {"cpu": "64", "memory": "32Mi"}}
SMALL = {"cpu": "500m", "memory": "96Mi", "requests": {"cpu": "10m", "memory": "32Mi"}}
TROUBLES = {
    "an image that is not there": Trouble("ImagePullFailed", {"image": "127.0.0.1:1/none:1"}, "127.0.0.1:1/none:1", {}),
    "an image that is none": Trouble("InvalidImage", {"image": "UPPER/Case:bad"}, "UPPER/Case:bad", {}),
    "no room": Trouble("Unschedulable", {"resources": BIG}, "Insufficient cpu", {"resources": SMALL}),
    "no such node": Trouble("Unschedulable", {"nodeSelector": {"no": "such"}}, "node", {"nodeSelector": None}),
    "no such class": Trouble("WorkspaceUnbound", {"workspace": {"size": "32Mi", "storageClassName": "nosuch"}}, "nosuch"),
    "no such runtime": Trouble("AdmissionRejected", {"runtimeClassName": "nosuch"}, "nosuch"),
    "no such Secret": Trouble("EnvSecretMissing", {"envFrom": [{"secretName": "nosuch"}]}, "nosuch", {"envFrom": None}),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_cause_is_told_in_condition_and_event_and_heals_by_an_edit(
    cluster: Cluster, namespace: Kubectl, operator: Installation, trouble: str
) -> None:
    case = TROUBLES[trouble]
    image = cluster.image("busybox")
    namespace.apply(sandbox("one", image, **case.spec))
    found = until_reason(namespace, "one", case.reason, seconds=PROMPTLY)
    assert condition(found)["status"] == "False"
    assert found["status"]["phase"] == "Pending"
    assert case.message in condition(found)["message"]
    event = until_event(namespace, "one", case.reason)
    assert event["type"] == "Warning"
    assert case.message in event["message"]
    if case.cure is not None:
        edit(namespace, "one", **({"image": image} | case.cure))
        healed = until_ready(namespace, "one", seconds=HEALING)
        assert len(pods_of(namespace, "one")) == 1
        assert healed["status"]["incarnation"] == 1


def test_a_full_quota_is_told_with_its_name_and_heals_when_it_goes(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    namespace.run("create", "quota", "small", "--hard=pods=1")
    namespace.apply(sandbox("one", cluster.image("busybox")))
    until_ready(namespace, "one")
    namespace.apply(sandbox("two", cluster.image("busybox")))
    found = until_reason(namespace, "two", "QuotaExceeded", seconds=PROMPTLY)
    assert "small" in condition(found)["message"]
    assert until_event(namespace, "two", "QuotaExceeded")["type"] == "Warning"
    assert not pods_of(namespace, "two")
    namespace.delete("quota", "small")
    until_ready(namespace, "two", seconds=HEALING)
    assert len(namespace.list("pods")) == 2


def test_a_place_in_a_quota_goes_to_who_waits_for_it(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    namespace.run("create", "quota", "small", "--hard=pods=1")
    namespace.apply(sandbox("one", cluster.image("busybox")))
    until_ready(namespace, "one")
    namespace.apply(sandbox("two", cluster.image("busybox")))
    until_reason(namespace, "two", "QuotaExceeded", seconds=PROMPTLY)
    namespace.delete("sandbox", "one")
    until_ready(namespace, "two", seconds=20)


def test_pod_security_that_refuses_it_is_told_and_heals(cluster: Cluster, namespace: Kubectl, install: Callable[..., Installation]) -> None:
    assert namespace.namespace is not None
    # Sandboxes fit the strictest profile, so a policy of the cluster has to stand in for a stricter one of tomorrow.
    install(namespace.namespace, mover=False)
    refuse = policy(namespace.namespace, 'violates PodSecurity "future:v9": something else')
    cluster.kubectl.apply(*refuse)
    try:
        namespace.apply(sandbox("one", cluster.image("busybox")))
        found = until_reason(namespace, "one", "PodSecurityRejected", seconds=PROMPTLY)
        assert "future:v9" in condition(found)["message"]
    finally:
        cluster.kubectl.delete("validatingadmissionpolicybinding", namespace.namespace)
        cluster.kubectl.delete("validatingadmissionpolicy", namespace.namespace)
    until_ready(namespace, "one", seconds=HEALING)


def test_another_policy_that_refuses_it_is_told_and_heals(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    assert namespace.namespace is not None
    cluster.kubectl.apply(*policy(namespace.namespace, "no sandboxes on Tuesdays"))
    try:
        namespace.apply(sandbox("one", cluster.image("busybox")))
        found = until_reason(namespace, "one", "AdmissionRejected", seconds=PROMPTLY)
        assert "no sandboxes on Tuesdays" in condition(found)["message"]
    finally:
        cluster.kubectl.delete("validatingadmissionpolicybinding", namespace.namespace)
        cluster.kubectl.delete("validatingadmissionpolicy", namespace.namespace)
    until_ready(namespace, "one", seconds=HEALING)


def test_a_name_that_somebody_else_has_is_never_touched_and_heals_when_it_is_free(
    cluster: Cluster, namespace: Kubectl, operator: Installation
) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST))
    uid = until_ready(namespace, "one")["metadata"]["uid"]
    operator.stop()
    child = f"one-{uid[:8]}"
    namespace.delete("pod", child)
    stranger = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": child},
        "spec": {**HARDENED_POD, "containers": [{**HARDENED_POD["containers"][0], "image": cluster.image("busybox")}]},
    }
    namespace.apply(stranger)
    operator.start()
    found = until_reason(namespace, "one", "NameConflict", seconds=PROMPTLY)
    assert child in condition(found)["message"]
    assert "ownerReferences" not in namespace.get("pod", child)["metadata"]
    namespace.delete("pod", child)
    until_incarnation(namespace, "one", 2, seconds=HEALING)


def test_out_of_memory_is_told_with_its_limit_and_still_there_after_it_is_back(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox"), resources=SMALL))
    pod = until_ready(namespace, "one")["status"]["podName"]
    # A full /tmp and a full /dev/shm outlive the container: the next one has to find room beside them.
    namespace.execute(pod, "dd", "if=/dev/zero", "of=/tmp/fill", "bs=1M")
    run_out_of_memory(cluster, namespace, namespace.get("pod", pod))
    after = until_incarnation(namespace, "one", 2)
    assert after["status"]["lastTermination"]["reason"] == "OOMKilled"
    assert "96Mi" in after["status"]["lastTermination"]["message"]
    assert "96Mi" in condition(after)["message"]
    assert "96Mi" in until_event(namespace, "one", "OOMKilled")["message"]
    assert shell(namespace, "one", "ls /tmp /dev/shm | grep fill || true") == ""


def test_an_evicted_pod_is_replaced_and_the_eviction_is_told(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST))
    pod = until_ready(namespace, "one")["status"]["podName"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace.namespace}}
    path = f"/api/v1/namespaces/{namespace.namespace}/pods/{pod}/eviction"
    namespace.run("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    after = until_incarnation(namespace, "one", 2)
    assert after["status"]["lastTermination"]["reason"] == "Evicted"
    assert until_event(namespace, "one", "Evicted")["type"] == "Warning"


def test_a_namespace_without_the_operators_role_is_told_and_works_once_it_is_bound(
    cluster: Cluster, namespace: Kubectl, install: Callable[..., Installation], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert namespace.namespace is not None
    account = restricted_account(cluster, namespace)
    kubeconfig = tmp_path_factory.mktemp("account") / "kubeconfig"
    kubeconfig.write_text(account)
    install(namespace.namespace, mover=False, settings={"KUBECONFIG": str(kubeconfig), "AGENT_SANDBOX_OPERATOR_LEASE": "false"})
    namespace.apply(sandbox("one", cluster.image("busybox")))
    found = until_reason(namespace, "one", "NamespaceNotEnabled", seconds=PROMPTLY)
    assert "role" in condition(found)["message"]
    namespace.run("create", "rolebinding", "enabled", "--clusterrole=admin", f"--serviceaccount={namespace.namespace}:watcher")
    until_ready(namespace, "one", seconds=HEALING)


HARDENED_POD: Object = {
    "terminationGracePeriodSeconds": 0,
    "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [
        {
            "name": "main",
            "command": ["sleep", "1000000"],
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
    ],
}


def until_event(kubectl: Kubectl, name: str, reason: str) -> Object:
    """The newest event of that reason on a Sandbox, once there is one."""

    def find() -> Object | None:
        events = [event for event in kubectl.list("events") if event["involvedObject"]["name"] == name and event["reason"] == reason]
        return next((event for event in events if event["involvedObject"]["kind"] == "Sandbox"), None)

    found = wait_for(f"an event {reason} on {name}", find, seconds=5)
    assert found is not None
    return found


def policy(namespace: str, message: str) -> tuple[Object, Object]:
    """A policy that refuses all pods of a namespace with these words."""
    api = "admissionregistration.k8s.io/v1"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    where = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}, "resourceRules": [rule]}
    spec = {"failurePolicy": "Fail", "matchConstraints": where, "validations": [{"expression": "false", "message": message, "reason": "Forbidden"}]}
    return (
        {"apiVersion": api, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": namespace}, "spec": spec},
        {
            "apiVersion": api,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": namespace},
            "spec": {"policyName": namespace, "validationActions": ["Deny"]},
        },
    )


def restricted_account(cluster: Cluster, namespace: Kubectl) -> str:
    """A kubeconfig of an account that may watch, and write the status of Sandboxes, and nothing else."""
    namespace.run("create", "serviceaccount", "watcher")
    rules = [
        {"apiGroups": ["agentsandbox.dev"], "resources": ["sandboxes", "sandboxes/status"], "verbs": ["get", "list", "watch", "patch"]},
        {"apiGroups": [""], "resources": ["pods", "persistentvolumeclaims"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "list"]},
    ]
    namespace.apply({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "watcher"}, "rules": rules})
    namespace.run("create", "rolebinding", "watcher", "--role=watcher", f"--serviceaccount={namespace.namespace}:watcher")
    token = namespace.say("create", "token", "watcher", "--duration=1h").strip()
    admin = json.loads(namespace.say("config", "view", "--raw", "--minify", "--output=json"))
    admin["users"] = [{"name": admin["users"][0]["name"], "user": {"token": token}}]
    return json.dumps(admin)
