"""What an edit does, field by field."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Literal

from tests.cluster.e2e.installation import Installation, reason_of, sandbox
from tests.cluster.e2e.life import FAST, edit, in_seconds, pods_of, shell, until_incarnation, until_ready
from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl, Object

RESOURCES: Object = {"cpu": "500m", "memory": "96Mi", "requests": {"cpu": "10m", "memory": "32Mi"}}


@dataclass(frozen=True)
class Edit:
    """A field, its new value, and what comes of it."""

    spec: Object
    effect: Literal["new pod", "same pod", "refused"]


EDITS = {
    "image": Edit({"image": "localhost/python:1"}, "new pod"),
    "command": Edit({"command": ["sleep", "1000"]}, "new pod"),
    "env": Edit({"env": [{"name": "A", "value": "b"}]}, "new pod"),
    "envFrom": Edit({"envFrom": [{"secretName": "none", "optional": True}]}, "new pod"),
    "resources.memory": Edit({"resources": {**RESOURCES, "memory": "112Mi"}}, "new pod"),
    "resources.requests": Edit({"resources": {**RESOURCES, "requests": {"cpu": "20m", "memory": "32Mi"}}}, "new pod"),
    "network.mode": Edit({"network": {"mode": "Open"}}, "new pod"),
    "nodeSelector": Edit({"nodeSelector": {"kubernetes.io/os": "linux"}}, "new pod"),
    "tolerations": Edit({"tolerations": [{"key": "a", "operator": "Exists"}]}, "new pod"),
    "imagePullSecrets": Edit({"imagePullSecrets": [{"name": "none"}]}, "new pod"),
    "timeoutSeconds": Edit({"timeoutSeconds": 7200}, "same pod"),
    "expiresAt": Edit({"expiresAt": in_seconds(7200)}, "same pod"),
    "shutdownPolicy": Edit({"shutdownPolicy": "Delete"}, "same pod"),
    "pidsLimit": Edit({"pidsLimit": 100}, "same pod"),
    "workspace.size, larger": Edit({"workspace": {**FAST, "size": "64Mi"}}, "same pod"),
    "workspace.size, smaller": Edit({"workspace": {**FAST, "size": "16Mi"}}, "refused"),
    "workspace.storageClassName": Edit({"workspace": {**FAST, "storageClassName": "local-path"}}, "refused"),
    "workspace.ephemeral": Edit({"workspace": {**FAST, "ephemeral": True}}, "refused"),
    "workspace.accessMode": Edit({"workspace": {**FAST, "accessMode": "ReadWriteMany"}}, "refused"),
    "runtimeClassName": Edit({"runtimeClassName": "gvisor"}, "refused"),
    "readOnlyRootFilesystem": Edit({"readOnlyRootFilesystem": False}, "refused"),
    "source": Edit({"source": {"snapshotName": "some"}}, "refused"),
}
NEW = {name: case for name, case in EDITS.items() if case.effect == "new pod"}
SAME = {name: case for name, case in EDITS.items() if case.effect == "same pod"}
REFUSED = {name: case for name, case in EDITS.items() if case.effect == "refused"}


def is_observed(found: Object) -> bool:
    """The status is about the newest spec."""
    return bool(found["status"]["observedGeneration"] == found["metadata"]["generation"])


def uid_of_pod(kubectl: Kubectl, name: str) -> str:
    pods = pods_of(kubectl, name)
    assert len(pods) == 1
    uid: str = pods[0]["metadata"]["uid"]
    return uid


def test_edits_of_what_makes_the_pod_give_a_new_one_on_the_same_workspace(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    names = {field: f"e{number}" for number, field in enumerate(NEW)}
    namespace.apply(*(sandbox(name, cluster.image("busybox"), workspace=FAST, resources=RESOURCES) for name in names.values()))
    before = {}
    for name in names.values():
        hash_before = until_ready(namespace, name, seconds=60)["status"]["podTemplateHash"]
        shell(namespace, name, "echo kept > /workspace/file")
        before[name] = (uid_of_pod(namespace, name), hash_before)
    for field, name in names.items():
        edit(namespace, name, **NEW[field].spec)
    for field, name in names.items():
        after = until_incarnation(namespace, name, 2, seconds=90)
        assert after["status"]["incarnation"] == 2, field
        assert after["status"]["podTemplateHash"] != before[name][1], field
        assert uid_of_pod(namespace, name) != before[name][0], field
        assert after["status"]["observedGeneration"] == after["metadata"]["generation"], field
        assert "lastTermination" not in after["status"], field
        assert after["status"].get("recentStarts", []) == [], field
        assert shell(namespace, name, "cat /workspace/file") == "kept\n", field
    told = {event["involvedObject"]["name"] for event in namespace.list("events") if event["reason"] == "Replacing"}
    assert told == set(names.values())


def test_edits_of_anything_else_leave_the_pod_alone(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST, resources=RESOURCES))
    until_ready(namespace, "one")
    uid = uid_of_pod(namespace, "one")
    for case in SAME.values():
        edit(namespace, "one", **case.spec)
        namespace.until("the edit is seen", "sandbox", "one", is_observed, seconds=10)
        assert reason_of(namespace.get("sandbox", "one")) == "Ready"
    namespace.run("label", "sandbox", "one", "mine=yes")
    assert uid_of_pod(namespace, "one") == uid
    found = namespace.get("sandbox", "one")
    assert found["status"]["incarnation"] == 1
    # The class cannot grow volumes; that is told and nothing else.
    told = next(one for one in found["status"]["conditions"] if one["type"] == "WorkspaceReady")
    assert (told["status"], told["reason"]) == ("True", "NotGrown")


def test_edits_of_what_cannot_change_are_refused_with_a_reason(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST, resources=RESOURCES))
    accepted = []
    for field, case in REFUSED.items():
        done = namespace.run("patch", "sandbox", "one", "--type=merge", "--patch", json.dumps({"spec": case.spec}), check=False)
        if done.returncode == 0 or not re.search(r"immutable|cannot|never|fixed", done.stderr):
            accepted.append(f"{field}: {done.stderr or 'accepted'}")
    assert not accepted


def test_an_upgrade_of_the_operator_replaces_no_pod(cluster: Cluster, namespace: Kubectl, operator: Installation) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox"), resources=RESOURCES))
    until_ready(namespace, "one")
    uid, version = uid_of_pod(namespace, "one"), namespace.get("sandbox", "one")["metadata"]["resourceVersion"]
    operator.stop()
    # Another image, another way, another size of /tmp: all of the installation, none of the spec.
    operator.settings |= {
        "AGENT_SANDBOX_INIT_DELIVERY": "init-container",
        "AGENT_SANDBOX_OPERATOR_TMP_SIZE_MB": "32",
        "AGENT_SANDBOX_OPERATOR_USER_NAMESPACES": "off",
    }
    operator.start()
    namespace.apply(sandbox("two", cluster.image("busybox"), resources=RESOURCES))
    until_ready(namespace, "two")
    assert uid_of_pod(namespace, "one") == uid
    assert namespace.get("sandbox", "one")["metadata"]["resourceVersion"] == version
    assert pods_of(namespace, "two")[0]["spec"].get("hostUsers") is None


def test_an_edit_that_would_take_an_ephemeral_workspace_is_not_carried_out_and_told(
    cluster: Cluster, namespace: Kubectl, operator: Installation
) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox"), resources=RESOURCES))
    until_ready(namespace, "one")
    uid = uid_of_pod(namespace, "one")
    done = namespace.run("patch", "sandbox", "one", "--type=merge", "--patch", '{"spec":{"env":[{"name":"A","value":"b"}]}}', check=False)
    if done.returncode != 0:
        assert "ephemeral" in done.stderr
        return
    namespace.until("it is told", "sandbox", "one", lambda found: "not carried out" in found["status"]["message"], seconds=10)
    assert reason_of(namespace.get("sandbox", "one")) == "Ready"
    assert uid_of_pod(namespace, "one") == uid
