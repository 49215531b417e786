"""Each rule: the good case passes, the bad one is refused in words that say what to do."""

from __future__ import annotations

from typing import Any

import pytest
from agent_sandbox_core.v1alpha1 import SandboxObject, SnapshotObject

from tests.cluster.kubectl import Kubectl, Object

from .objects import accepted, edit, refusal, sandbox, snapshot

DIGEST = "sha256:" + "0" * 64
QUANTITY = "must be a quantity above zero"
TIME = "must be a time with its zone (RFC 3339)"
NO_LEAP_YEAR = "2029-02-29T00:00:00Z"
CREATE: dict[str, tuple[list[dict[str, Any]], list[tuple[dict[str, Any], str]]]] = {
    "image": ([{"image": "registry:5000/a/b:c@sha256:0"}], [({"image": "a b"}, "named without spaces"), ({"image": ""}, "named without spaces")]),
    "command": ([{"command": ["a", ""]}, {"command": []}], [({"command": [""]}, "first word of command")]),
    "env": (
        [{"env": [{"name": "_A1"}]}],
        [({"env": [{"name": "1A"}]}, "name of a variable"), ({"env": [{"name": "A"}, {"name": "A"}]}, "Duplicate value")],
    ),
    "envFrom": ([{"envFrom": [{"secretName": "a.b-c"}]}], [({"envFrom": [{"secretName": "A"}]}, "no name that a Secret can have")]),
    "quantities": (
        [{"resources": {"memory": 268435456, "cpu": 2}}, {"resources": {"cpu": "0.5", "memory": "1.5Gi", "ephemeralStorage": "1e9"}}],
        [
            ({"resources": {"cpu": "lots"}}, QUANTITY),
            ({"resources": {"cpu": 0}}, QUANTITY),
            ({"resources": {"memory": "-1Gi"}}, QUANTITY),
            ({"resources": {"memory": "512MB"}}, QUANTITY),
            ({"resources": {"ephemeralStorage": "0Gi"}}, QUANTITY),
            ({"resources": {"requests": {"cpu": ""}}}, QUANTITY),
            ({"workspace": {"size": "1ki"}}, QUANTITY),
        ],
    ),
    "limits": (
        [{"resources": {"cpu": "1m", "memory": "16Mi", "requests": {"cpu": "0.001", "memory": "16384Ki"}}}, {"workspace": {"size": "1Mi"}}],
        [
            ({"resources": {"cpu": "0.0001"}}, "at least 1m"),
            ({"resources": {"memory": "512"}}, "at least 16Mi"),
            ({"resources": {"memory": "512m"}}, "at least 16Mi"),
            ({"workspace": {"size": "1k"}}, "at least 1Mi"),
            ({"resources": {"requests": {"cpu": "1001m"}}}, "requests.cpu must not be above the limit"),
            ({"resources": {"memory": "1Gi", "requests": {"memory": "1025Mi"}}}, "requests.memory must not be above the limit"),
        ],
    ),
    "numbers": (
        [{"pidsLimit": 8, "timeoutSeconds": 1}],
        [({"pidsLimit": 7}, "greater than or equal to 8"), ({"timeoutSeconds": 0}, "greater than or equal to 1")],
    ),
    "classes": (
        [{"runtimeClassName": "gvisor", "workspace": {"storageClassName": "a.b"}}],
        [
            ({"runtimeClassName": "g_visor"}, "no name that a RuntimeClass can have"),
            ({"workspace": {"storageClassName": "-x"}}, "no name that a StorageClass can have"),
        ],
    ),
    "network": (
        [
            {"network": {"mode": "Allowlist", "allow": ["203.0.113.0/24", "2001:db8::/32", "10.0.0.1/32"]}},
            {"network": {"mode": "Allowlist"}},
            {"network": {"mode": "Open", "allow": []}},
        ],
        [
            ({"network": {"allow": ["203.0.113.0/24"]}}, "network.allow goes with network.mode Allowlist only"),
            ({"network": {"mode": "Open", "allow": ["203.0.113.0/24"]}}, "network.allow goes with network.mode Allowlist only"),
            ({"network": {"mode": "Allowlist", "allow": ["203.0.113.7"]}}, "must be a CIDR"),
            ({"network": {"mode": "Allowlist", "allow": ["example.org"]}}, "must be a CIDR"),
            ({"network": {"mode": "Allowlist", "allow": ["300.0.0.0/8"]}}, "must be a CIDR"),
            ({"network": {"mode": "Closed"}}, 'supported values: "None", "Open", "Allowlist"'),
        ],
    ),
    "expiresAt": (
        [{"expiresAt": text} for text in ("2030-12-24T18:00:00Z", "2030-12-24T18:00:00.123456789+05:30", "2000-02-29T00:00:00-11:00")],
        [
            ({"expiresAt": text}, TIME)
            for text in (
                "tomorrow",
                "2030-12-24",
                "2030-12-24T18:00:00",
                NO_LEAP_YEAR,
                "2030-02-30T00:00:00Z",
                "2030-06-31T00:00:00Z",
                "1999-13-01T00:00:00Z",
                "",
            )
        ],
    ),
    "names of Snapshots": (
        [{"source": {"snapshotName": "1a"}, "restore": {"snapshotName": "a" * 50, "requestID": "A.b_c-1"}}],
        [
            ({"source": {"snapshotName": "a.b"}}, "no name that a Snapshot can have"),
            ({"restore": {"snapshotName": "a" * 51, "requestID": "r"}}, "may not be more than 50"),
            ({"restore": {"snapshotName": "a", "requestID": "source:1"}}, "a requestID has at most 64"),
            ({"restore": {"snapshotName": "a", "requestID": "none"}}, "requestID none is reserved"),
        ],
    ),
    "scheduling": (
        [
            {"nodeSelector": {"kubernetes.io/arch": "amd64", "disk": ""}},
            {"tolerations": [{"operator": "Exists"}, {"key": "a", "value": "b", "effect": "NoExecute", "tolerationSeconds": 3}]},
            {"imagePullSecrets": [{"name": "a"}]},
        ],
        [
            ({"nodeSelector": {"a b": "c"}}, "no labels that a node can have"),
            ({"nodeSelector": {"a": "c/d"}}, "no labels that a node can have"),
            ({"tolerations": [{"effect": "NoSchedule"}]}, "needs operator Exists"),
            ({"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}, "operator Exists takes no value"),
            ({"tolerations": [{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 3}]}, "goes with effect NoExecute only"),
            ({"imagePullSecrets": [{"name": "A"}]}, "no name that a Secret can have"),
        ],
    ),
}
BAD_SNAPSHOTS: list[tuple[dict[str, Any], str]] = [
    ({"source": {}}, "exactly one of sandboxName"),
    ({"source": {"sandboxName": "s", "archive": {"location": "a", "digest": DIGEST}}}, "exactly one of sandboxName"),
    ({"source": {"sandboxName": "a.b"}}, "no name that a Sandbox can have"),
    ({"source": {"archive": {"location": "/a", "digest": DIGEST}}}, "a path below the store's root"),
    ({"source": {"archive": {"location": "a/../b", "digest": DIGEST}}}, "a path below the store's root"),
    ({"source": {"archive": {"location": "..", "digest": DIGEST}}}, "a path below the store's root"),
    ({"source": {"archive": {"location": "a", "digest": "md5:0"}}}, "must be sha256:"),
    ({"deletionPolicy": "Keep"}, 'supported values: "Delete", "Retain"'),
    ({"displayName": "x" * 129}, "may not be more than 128"),
]


@pytest.mark.parametrize("subject", CREATE)
def test_a_good_sandbox_is_taken_and_the_models_read_it(judge: Kubectl, subject: str) -> None:
    for spec in CREATE[subject][0]:
        SandboxObject.read(accepted(judge, sandbox(**spec)))


@pytest.mark.parametrize("subject", CREATE)
def test_a_bad_sandbox_is_refused_with_what_to_do(judge: Kubectl, subject: str) -> None:
    for spec, words in CREATE[subject][1]:
        said = refusal(judge, sandbox(**spec)) or "taken"
        assert words in said, spec
        assert "evaluating rule" not in said or spec == {"expiresAt": NO_LEAP_YEAR}, spec


def test_a_bad_snapshot_is_refused_with_what_to_do(judge: Kubectl) -> None:
    for spec, words in BAD_SNAPSHOTS:
        assert words in (refusal(judge, snapshot(**spec)) or "taken"), spec


def test_a_good_snapshot_is_taken_and_the_models_read_it(judge: Kubectl) -> None:
    imported = snapshot("imported", source={"archive": {"location": "imports/..a/b.tar.zst", "digest": DIGEST}}, deletionPolicy="Retain")
    named = snapshot("named", displayName="émoji 🙂 ../x\nsecond line " + "y" * 100)
    for wanted in (imported, named):
        assert SnapshotObject.read(accepted(judge, wanted)).to_wire()["spec"].items() >= wanted["spec"].items()


IMMUTABLE = [
    ({"source": {"snapshotName": "b"}}, "source is immutable"),
    ({"source": None}, "source is immutable"),
    ({"runtimeClassName": "kata"}, "runtimeClassName is immutable"),
    ({"runtimeClassName": None}, "runtimeClassName is immutable"),
    ({"readOnlyRootFilesystem": False}, "readOnlyRootFilesystem is immutable"),
    ({"workspace": {"ephemeral": True}}, "workspace is immutable but for a growing size"),
    ({"workspace": {"accessMode": "ReadWriteMany"}}, "workspace is immutable but for a growing size"),
    ({"workspace": {"storageClassName": None}}, "workspace is immutable but for a growing size"),
    ({"workspace": {"size": "1023Mi"}}, "workspace.size may grow but never shrink"),
    ({"restore": {"snapshotName": "b"}}, "a requestID stands for one Snapshot for ever"),
]
MUTABLE = [
    {"image": "y"},
    {"env": [{"name": "A", "value": "2"}]},
    {"resources": {"memory": "1Gi"}},
    {"network": {"mode": "Open"}},
    {"timeoutSeconds": 5, "expiresAt": "2030-01-01T00:00:00Z", "shutdownPolicy": "Delete"},
    {"workspace": {"size": "1024Mi"}},
    {"workspace": {"size": "1025Mi"}},
    {"restore": {"snapshotName": "b", "requestID": "2"}},
    {"restore": None},
]


def test_what_is_immutable_is_refused_and_what_is_not_is_edited(api: Kubectl) -> None:
    first = sandbox(
        source={"snapshotName": "a"},
        runtimeClassName="gvisor",
        workspace={"size": "1Gi", "storageClassName": "fast"},
        restore={"snapshotName": "a", "requestID": "1"},
    )
    assert refusal(api, first, really=True) is None
    for change, words in IMMUTABLE:
        assert words in (edit(api, "sandbox", "s", {"spec": change}) or "taken"), change
    for change in MUTABLE:
        assert edit(api, "sandbox", "s", {"spec": change}) is None, change


def test_what_was_left_out_cannot_be_added_later_where_it_is_immutable(api: Kubectl) -> None:
    assert refusal(api, sandbox(), really=True) is None
    for change, words in (
        ({"source": {"snapshotName": "a"}}, "source is immutable"),
        ({"runtimeClassName": "gvisor"}, "runtimeClassName is immutable"),
        ({"workspace": {"storageClassName": "fast"}}, "workspace is immutable"),
    ):
        assert words in (edit(api, "sandbox", "s", {"spec": change}) or "taken"), change
    assert edit(api, "sandbox", "s", {"spec": {"restore": {"snapshotName": "a", "requestID": "1"}}}) is None


def test_an_ephemeral_sandbox_that_has_started_refuses_edits_that_would_cost_its_files(api: Kubectl) -> None:
    assert refusal(api, sandbox(workspace={"ephemeral": True}), really=True) is None
    costly: list[Object] = [
        {"image": "y"},
        {"command": ["a"]},
        {"env": [{"name": "A"}]},
        {"envFrom": [{"secretName": "a"}]},
        {"resources": {"cpu": "2"}},
        {"nodeSelector": {"a": "b"}},
        {"tolerations": [{"operator": "Exists"}]},
        {"imagePullSecrets": [{"name": "a"}]},
        {"network": {"mode": "Open"}},
        {"workspace": {"size": "2Gi"}},
    ]
    for change in costly:
        assert edit(api, "sandbox", "s", {"spec": change}) is None, f"before its start it can be put right: {change}"
    assert edit(api, "sandbox", "s", {"status": {"incarnation": 1}}, status=True, really=True) is None
    for change in costly:
        assert "the workspace is ephemeral and would go with the pod" in (edit(api, "sandbox", "s", {"spec": change}) or "taken"), change
    for harmless in ({"timeoutSeconds": 5}, {"restore": {"snapshotName": "a", "requestID": "1"}}, {"shutdownPolicy": "Delete"}):
        assert edit(api, "sandbox", "s", {"spec": harmless}) is None


def test_the_source_of_a_snapshot_is_immutable_and_its_policy_is_not(api: Kubectl) -> None:
    assert refusal(api, snapshot(), really=True) is None
    kind = "snapshots.agentsandbox.dev"
    assert "source is immutable, a Snapshot is of one moment" in (edit(api, kind, "s", {"spec": {"source": {"sandboxName": "other"}}}) or "taken")
    assert edit(api, kind, "s", {"spec": {"deletionPolicy": "Retain", "displayName": "x"}}) is None


@pytest.mark.behaviour("B20")
def test_a_name_becomes_a_sandbox_or_is_refused_with_words_about_the_name(judge: Kubectl) -> None:
    for name in ("1abc", "a", "a" * 50, "0"):
        assert refusal(judge, sandbox(name)) is None, name
        assert refusal(judge, snapshot(name)) is None, name
    for name in ("a.b.c", "a" * 51, "a" * 63, "a" * 64, "a" * 253):
        assert "the name of a Sandbox has at most 50 characters" in (refusal(judge, sandbox(name)) or "taken"), name
        assert "the name of a Snapshot has at most 50 characters" in (refusal(judge, snapshot(name)) or "taken"), name
