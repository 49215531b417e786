"""A Sandbox's life: made, Ready, edited, killed, expired, deleted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from tests.cluster.console import wait_for
from tests.cluster.e2e.installation import Installation, condition, reason_of, sandbox
from tests.cluster.e2e.life import FAST, edit, in_seconds, pods_of, shell, until_incarnation, until_ready, until_reason
from tests.cluster.e2e.nodes import kill_container
from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl, Object


@pytest.mark.parametrize("workspace", [{"ephemeral": True}, FAST], ids=["ephemeral", "volume"])
@pytest.mark.parametrize("delivery", ["image-volume", "init-container"])
def test_an_applied_sandbox_becomes_ready_and_takes_a_command_in_a_restricted_namespace(
    cluster: Cluster, namespace: Kubectl, install: Callable[..., Installation], workspace: Object, delivery: str
) -> None:
    assert namespace.namespace is not None
    namespace.run("label", "namespace", namespace.namespace, "pod-security.kubernetes.io/enforce=restricted")
    install(namespace.namespace, mover=False, settings={"AGENT_SANDBOX_INIT_DELIVERY": delivery})
    namespace.apply(sandbox("one", cluster.image("python"), workspace=workspace))
    found = until_ready(namespace, "one")
    assert found["status"]["phase"] == "Running"
    assert found["status"]["incarnation"] == 1
    assert found["status"]["observedGeneration"] == found["metadata"]["generation"]
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", found["status"]["initVersion"])
    assert condition(found, "WorkspaceReady")["status"] == "True"
    assert shell(namespace, "one", "echo $HOME; id -u; id -g; touch /workspace/a && ls /workspace; hostname; cat /proc/1/comm").split() == [
        "/workspace",
        "1000",
        "1000",
        "a",
        "sandbox",
        "sandbox-init",
    ]
    assert shell(namespace, "one", "touch /x 2>/dev/null || echo refused; ls /var/run/secrets 2>/dev/null || echo none").split() == [
        "refused",
        "none",
    ]
    violations = [event for event in namespace.list("events") if "violate" in event.get("message", "")]
    assert not violations


def test_a_runtime_class_that_knows_no_user_namespaces_gets_its_pod_without_and_isolation_says_what_isolates(
    cluster: Cluster, namespace: Kubectl, operator: Installation
) -> None:
    cluster.needs("runtimeclass", "gvisor")
    namespace.apply(sandbox("one", cluster.image("python"), runtimeClassName="gvisor"), sandbox("two", cluster.image("busybox")))
    found = until_ready(namespace, "one", seconds=60)
    assert condition(found, "Isolation")["reason"] == "RuntimeClass"
    assert "gvisor" in condition(found, "Isolation")["message"]
    assert found["status"]["incarnation"] == 1
    assert pods_of(namespace, "one")[0]["spec"].get("hostUsers") is not False
    # What one class lacks is no reason for another.
    assert condition(until_ready(namespace, "two"), "Isolation")["reason"] == "UserNamespace"


def test_env_comes_from_the_spec_as_it_stands_and_from_a_secret_that_may_come_late(
    cluster: Cluster, namespace: Kubectl, operator: Installation
) -> None:
    spec = {"env": [{"name": "GIVEN", "value": "a$(HOME)$b"}], "envFrom": [{"secretName": "late"}]}
    namespace.apply(sandbox("one", cluster.image("busybox"), **spec))
    found = until_reason(namespace, "one", "EnvSecretMissing", seconds=10)
    assert "late" in condition(found)["message"]
    assert not pods_of(namespace, "one")
    namespace.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "late"}, "stringData": {"TOKEN": "s3cr3t", "HOME": "/tmp"}})
    until_ready(namespace, "one", seconds=15)
    assert shell(namespace, "one", "echo $GIVEN $TOKEN $HOME").split() == ["a$(HOME)$b", "s3cr3t", "/tmp"]
    assert "s3cr3t" not in json.dumps(namespace.get("sandbox", "one")) + operator.log.read_text()


def test_its_command_runs_as_long_as_it_lives_and_one_that_cannot_start_is_told(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    namespace.apply(
        sandbox("good", cluster.image("busybox"), command=["sh", "-c", "date +%s%N > /workspace/began; exec sleep 1000"]),
        sandbox("bad", cluster.image("busybox"), command=["/no/such/program"]),
    )
    until_ready(namespace, "good")
    assert shell(namespace, "good", "cat /workspace/began; ps | grep -c '[s]leep 1000'").split()[1] == "1"
    found = until_reason(namespace, "bad", "Starting")
    assert "/no/such/program" in condition(found)["message"]
    assert condition(found)["status"] == "False"


def test_a_pod_that_is_deleted_comes_back_on_the_same_workspace(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST))
    before = until_ready(namespace, "one")
    shell(namespace, "one", "echo kept > /workspace/file; echo gone > /tmp/file")
    first = pods_of(namespace, "one")[0]["metadata"]["uid"]
    namespace.delete("pod", before["status"]["podName"])
    after = until_incarnation(namespace, "one", 2)
    assert after["status"]["incarnation"] == 2
    assert after["status"]["lastTermination"]["reason"] == "Deleted"
    assert shell(namespace, "one", "cat /workspace/file; ls /tmp").split() == ["kept"]
    assert [pod["metadata"]["uid"] for pod in pods_of(namespace, "one")] != [first]


def test_a_first_process_that_dies_is_started_again_in_the_same_pod_and_tmp_is_empty_then(
    cluster: Cluster, namespace: Kubectl, operator: Installation
) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox")))
    found = until_ready(namespace, "one")
    shell(namespace, "one", "echo kept > /workspace/file; echo gone > /tmp/file; echo gone > /dev/shm/file")
    kill_container(cluster, namespace.get("pod", found["status"]["podName"]))
    after = until_incarnation(namespace, "one", 2)
    assert after["status"]["incarnation"] == 2
    assert after["status"]["lastTermination"]["exitCode"] == 137
    assert len(after["status"]["recentStarts"]) == 1
    assert shell(namespace, "one", "cat /workspace/file; ls /tmp /dev/shm | grep file || true").split() == ["kept"]


def test_what_dies_too_often_stays_stopped_until_it_is_edited(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST))
    until_ready(namespace, "one")
    shell(namespace, "one", "echo kept > /workspace/file")
    for number in range(2, 7):
        namespace.delete("pod", namespace.get("sandbox", "one")["status"]["podName"])
        assert len(until_incarnation(namespace, "one", number)["status"]["recentStarts"]) == number - 1
    namespace.delete("pod", namespace.get("sandbox", "one")["status"]["podName"])
    found = until_reason(namespace, "one", "CrashLoop")
    assert found["status"]["phase"] == "Stopped"
    assert "spec.restore" in condition(found)["message"]
    assert not pods_of(namespace, "one")
    edit(namespace, "one", env=[{"name": "FIXED", "value": "yes"}])
    until_ready(namespace, "one")
    assert shell(namespace, "one", "cat /workspace/file; echo $FIXED").split() == ["kept", "yes"]
    assert namespace.get("sandbox", "one")["status"].get("recentStarts", []) == []


def test_an_ephemeral_workspace_that_is_lost_is_never_replaced_by_an_empty_one(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox")))
    found = until_ready(namespace, "one")
    namespace.delete("pod", found["status"]["podName"])
    lost = until_reason(namespace, "one", "WorkspaceLost")
    assert lost["status"]["phase"] == "Failed"
    assert "Snapshot" in condition(lost)["message"]
    operator.stop()
    operator.start()
    assert reason_of(namespace.get("sandbox", "one")) == "WorkspaceLost"
    assert not pods_of(namespace, "one")


def test_a_deleted_pvc_is_told_while_it_is_used_and_never_replaced_after_that(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST))
    found = until_ready(namespace, "one")
    namespace.delete("pvc", found["status"]["pvcName"], wait=False)
    warned = namespace.until("it is told", "sandbox", "one", lambda one: condition(one, "WorkspaceReady")["status"] == "False")
    assert condition(warned, "WorkspaceReady")["reason"] == "WaitingForDeletion"
    assert condition(warned)["status"] == "True"
    namespace.delete("pod", found["status"]["podName"])
    assert until_reason(namespace, "one", "WorkspaceLost")["status"]["phase"] == "Failed"
    assert not pods_of(namespace, "one")
    assert namespace.find("pvc", found["status"]["pvcName"]) is None


@pytest.mark.parametrize("policy", ["Delete", "Retain"])
def test_its_time_over_it_goes_or_keeps_its_workspace(cluster: Cluster, namespace: Kubectl, operator: Installation, policy: str) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST, timeoutSeconds=3600, shutdownPolicy=policy))
    found = until_ready(namespace, "one")
    created = datetime.fromisoformat(found["metadata"]["creationTimestamp"])
    assert datetime.fromisoformat(found["status"]["expiresAt"]) == created + timedelta(seconds=3600)
    edit(namespace, "one", expiresAt=in_seconds(1))
    if policy == "Delete":
        wait_for(
            "everything is gone", lambda: not namespace.list("sandboxes") and not namespace.list("pods") and not namespace.list("pvc"), seconds=20
        )
        return
    expired = until_reason(namespace, "one", "Expired", seconds=10)
    assert expired["status"]["phase"] == "Expired"
    wait_for("the pod is gone", lambda: not namespace.list("pods"), seconds=20)
    assert namespace.find("pvc", found["status"]["pvcName"]) is not None
    edit(namespace, "one", expiresAt=in_seconds(3600))
    again = until_incarnation(namespace, "one", 2)
    assert again["status"].get("recentStarts", []) == []


def test_a_deadline_that_passes_while_the_operator_is_down_is_kept_when_it_is_back(
    cluster: Cluster, namespace: Kubectl, operator: Installation
) -> None:
    namespace.apply(
        sandbox("one", cluster.image("busybox"), shutdownPolicy="Delete"), sandbox("two", cluster.image("busybox"), shutdownPolicy="Delete")
    )
    until_ready(namespace, "one")
    until_ready(namespace, "two")
    operator.kill()
    edit(namespace, "one", expiresAt=in_seconds(-1))
    edit(namespace, "two", expiresAt=in_seconds(3600))
    operator.start()
    wait_for("the one is gone", lambda: [item["metadata"]["name"] for item in namespace.list("sandboxes")] == ["two"], seconds=20)


def test_a_deletion_ends_at_once_and_takes_pod_and_workspace_with_it(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST))
    until_ready(namespace, "one")
    assert "finalizers" not in namespace.get("sandbox", "one")["metadata"]
    namespace.delete("sandbox", "one", seconds=5)
    wait_for("pod and PVC are gone", lambda: not namespace.list("pods") and not namespace.list("pvc"), seconds=30)
    # Again, waiting for the children: the pod alone blocks it.
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST))
    until_ready(namespace, "one")
    namespace.run("delete", "sandbox", "one", "--cascade=foreground", "--timeout=20s")
    assert not namespace.list("pods")


def test_a_sandbox_whose_pod_runs_costs_few_writes_and_then_none(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    namespace.apply(sandbox("warm", cluster.image("busybox")))
    until_ready(namespace, "warm")
    before = operator.metric("agent_sandbox_operator_writes_total")
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST))
    until_ready(namespace, "one")
    wait_for("the queue is empty", lambda: operator.metric("agent_sandbox_operator_queue_depth") == 0, seconds=5)
    made = operator.metric("agent_sandbox_operator_writes_total") - before
    assert made <= 5, f"{made} writes"
    version = namespace.get("sandbox", "one")["metadata"]["resourceVersion"]
    namespace.run("annotate", "sandbox", "warm", "poked=yes")
    wait_for("it was looked at", lambda: operator.metric("agent_sandbox_operator_watch_events_total") > 0, seconds=5)
    assert namespace.get("sandbox", "one")["metadata"]["resourceVersion"] == version
