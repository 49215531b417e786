"""Decisions, as a table: what is seen, and what comes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from agent_sandbox_core.v1alpha1 import SandboxObject, source_marker
from agent_sandbox_operator.decide import decide
from agent_sandbox_operator.seen import (
    CreatePod,
    CreateWorkspace,
    DeletePod,
    DeleteSandbox,
    GrowWorkspace,
    NetworkView,
    Probe,
    Seen,
    StartProbe,
    Trouble,
    Verdict,
)
from agent_sandbox_operator.specs import Birth, template_hash

from .worlds import CHILD, NOW, RUNNING, UID, ago, ended, pod, pvc, sandbox, seen, waiting

ANSWERED = Probe("answered", version="1.0")
WAS_READY: dict[str, Any] = {"phase": "Running", "reason": "Ready", "incarnation": 1, "podName": CHILD, "pvcName": CHILD}
BARE = sandbox()
HASH = template_hash(BARE.spec)
USED = sandbox({**WAS_READY, "podTemplateHash": HASH})
EPHEMERAL: dict[str, Any] = {"workspace": {"ephemeral": True}}
UNSCHEDULED = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes are available: 2 Insufficient cpu."}]
UNBOUND = [{**UNSCHEDULED[0], "message": "pod has unbound immediate PersistentVolumeClaims."}]
EVICTED = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]


def returns(count: int) -> dict[str, Any]:
    """A status that has seen so many returns in the last minutes."""
    return {**WAS_READY, "incarnation": count + 1, "podTemplateHash": HASH, "recentStarts": [ago(500 - 10 * number) for number in range(count)]}


def with_restore(status: dict[str, Any] | None = None, **spec: Any) -> SandboxObject:
    return sandbox({**WAS_READY, **(status or {})}, restore={"snapshotName": "s", "requestID": "r2"}, **spec)


def last_restore(phase: str, request: str = "r2", message: str = "") -> dict[str, Any]:
    return {"lastRestore": {"requestID": request, "snapshotName": "s", "phase": phase, "message": message}}


def running(of: SandboxObject, **more: Any) -> Seen:
    """Everything as it should be."""
    given = {"the_pod": pod(of, RUNNING), "the_pvc": None if of.spec.workspace.ephemeral else pvc(of), "probe": ANSWERED}
    return seen(of, **{**given, **more})


TABLE: dict[str, tuple[Seen, str, str, Any]] = {
    # a life
    "a new Sandbox gets its workspace first": (seen(BARE), "Pending", "Creating", CreateWorkspace()),
    "then its pod, for the first time": (seen(BARE, None, pvc(BARE, phase="Pending")), "Pending", "Creating", CreatePod("create")),
    "an ephemeral one gets its pod at once": (seen(sandbox(**EPHEMERAL)), "Pending", "Creating", CreatePod("create")),
    "a pod on its way is waited for": (seen(BARE, pod(BARE, age=1), pvc(BARE)), "Pending", "Creating", None),
    "a pod that runs is asked": (seen(BARE, pod(BARE, RUNNING), pvc(BARE)), "Pending", "Creating", StartProbe()),
    "one that is being asked is not Ready": (running(BARE, probe=Probe("asking")), "Pending", "Creating", None),
    "a first silence is no news": (running(BARE, probe=Probe("failed", failures=2, message="x")), "Pending", "Creating", None),
    "a long one is": (running(BARE, probe=Probe("failed", failures=9, message="no room")), "Pending", "Starting", None),
    "one that answers is Ready": (running(BARE), "Running", "Ready", None),
    "one that is being deleted is left alone": (seen(sandbox(deleting=True)), "Deleting", "Deleting", None),
    # its end
    "its time over, it goes": (running(sandbox(timeoutSeconds=30, shutdownPolicy="Delete")), "Expired", "Expired", DeleteSandbox()),
    "or its pod alone": (running(sandbox(timeoutSeconds=30)), "Expired", "Expired", DeletePod("pod-uid", "its time is over")),
    "and then nothing more": (seen(sandbox(timeoutSeconds=30), None, pvc(BARE)), "Expired", "Expired", None),
    "expiresAt wins over timeoutSeconds": (running(sandbox(timeoutSeconds=30, expiresAt="2031-01-01T00:00:00Z")), "Running", "Ready", None),
    "a longer life gives a new pod": (
        seen(sandbox({**WAS_READY, "phase": "Expired", "podName": None}), None, pvc(BARE)),
        "Replacing",
        "Replacing",
        CreatePod("replace"),
    ),
    # names
    "a stranger's PVC is not touched": (seen(BARE, None, pvc(BARE, owner="other")), "Failed", "NameConflict", None),
    "a stranger's pod is not touched": (seen(BARE, pod(BARE, RUNNING, owner="other"), pvc(BARE)), "Failed", "NameConflict", None),
    # workspaces
    "a workspace that was there is never made again": (seen(USED, None, None), "Failed", "WorkspaceLost", None),
    "nor one whose volume is gone": (seen(BARE, None, pvc(BARE, phase="Lost")), "Failed", "WorkspaceLost", None),
    "a dying PVC is never mounted": (seen(USED, None, pvc(BARE, deleted=True)), "Stopped", "WaitingForDeletion", None),
    "a larger size is asked for": (
        running(sandbox(workspace={"size": "2Gi"}), the_pvc=pvc(BARE, size="1Gi")),
        "Pending",
        "Creating",
        GrowWorkspace("2Gi"),
    ),
    "once": (running(sandbox(workspace={"size": "2Gi"}), the_pvc=pvc(BARE, size="1Gi"), grow_refusal="no"), "Running", "Ready", None),
    "the same size in other words is no larger one": (
        running(sandbox(workspace={"size": "1024Mi"}), the_pvc=pvc(BARE, size="1Gi")),
        "Running",
        "Ready",
        None,
    ),
    "an ephemeral workspace goes with its pod": (seen(sandbox({**WAS_READY}, **EPHEMERAL)), "Failed", "WorkspaceLost", None),
    "an evicted one too": (
        running(sandbox(WAS_READY, **EPHEMERAL), the_pod=pod(sandbox(**EPHEMERAL), ended(), status={"phase": "Failed", "reason": "Evicted"})),
        "Failed",
        "WorkspaceLost",
        DeletePod("pod-uid", "its workspace is lost"),
    ),
    "but not with its container": (
        running(sandbox(WAS_READY, **EPHEMERAL), the_pod=pod(sandbox(**EPHEMERAL), ended("OOMKilled", 137))),
        "Stopped",
        "OOMKilled",
        None,
    ),
    # causes
    "no node": (running(BARE, the_pod=pod(BARE, node="", conditions=UNSCHEDULED)), "Pending", "Unschedulable", None),
    "no node yet": (running(BARE, the_pod=pod(BARE, node="", age=1, conditions=UNSCHEDULED)), "Pending", "Creating", None),
    "no volume": (running(BARE, the_pod=pod(BARE, node="", conditions=UNBOUND)), "Pending", "WorkspaceUnbound", None),
    "a volume that does not come": (
        running(BARE, the_pod=pod(BARE), trouble=Trouble("Pod", "FailedMount", "timed out")),
        "Pending",
        "WorkspaceUnbound",
        None,
    ),
    "another thing that holds it up": (
        running(BARE, the_pod=pod(BARE), trouble=Trouble("Pod", "FailedCreatePodSandBox", "no network")),
        "Pending",
        "Starting",
        None,
    ),
    "an image that is not there": (running(BARE, the_pod=pod(BARE, waiting("ErrImagePull", "not found"))), "Pending", "ImagePullFailed", None),
    "an image that stays away": (running(BARE, the_pod=pod(BARE, waiting("ImagePullBackOff"))), "Pending", "ImagePullFailed", None),
    "an image that is no image": (running(BARE, the_pod=pod(BARE, waiting("InvalidImageName"))), "Pending", "InvalidImage", None),
    "a Secret that went": (
        running(BARE, the_pod=pod(BARE, waiting("CreateContainerConfigError", 'secret "env" not found'))),
        "Pending",
        "EnvSecretMissing",
        None,
    ),
    "a container that cannot be made": (running(BARE, the_pod=pod(BARE, waiting("CreateContainerError", "no"))), "Pending", "Crashed", None),
    "what the API server refuses": (
        seen(BARE, None, pvc(BARE), refusal=Verdict("Pending", "QuotaExceeded", "full")),
        "Pending",
        "QuotaExceeded",
        None,
    ),
    "a node that is silent": (running(USED, node_lost=True), "Stopped", "NodeLost", None),
    # what a cluster lacks
    "no user namespaces": (
        running(BARE, the_pod=pod(BARE), trouble=Trouble("Pod", "FailedCreatePodSandBox", "the handler does not support user namespaces")),
        "Pending",
        "Creating",
        DeletePod("pod-uid", "it does not start with user-namespace", "user-namespace"),
    ),
    "a runtime that cannot join one": (
        running(
            BARE, the_pod=pod(BARE), trouble=Trouble("Pod", "FailedCreatePodSandBox", "gofer: error setting namespace of type user: invalid argument")
        ),
        "Pending",
        "Creating",
        DeletePod("pod-uid", "it does not start with user-namespace", "user-namespace"),
    ),
    "image volumes without exec": (
        running(BARE, the_pod=pod(BARE, ended("StartError", 128, message='exec: "/opt/agent-sandbox/sandbox-init": permission denied'))),
        "Pending",
        "Creating",
        DeletePod("pod-uid", "it does not start with image-volume", "image-volume"),
    ),
    "what was asked for is not given up": (
        running(BARE, the_pod=pod(BARE), trouble=Trouble("Pod", "FailedCreatePodSandBox", "user namespaces"), features=frozenset()),
        "Pending",
        "Starting",
        None,
    ),
    # deaths
    "out of memory": (running(USED, the_pod=pod(USED, ended("OOMKilled", 137))), "Stopped", "OOMKilled", None),
    "a crash": (running(USED, the_pod=pod(USED, waiting("CrashLoopBackOff"), last=ended("Error", 2))), "Stopped", "Crashed", None),
    "a crash, and up again": (
        running(USED, the_pod=pod(USED, RUNNING, last=ended("Error", 2), restarts=1), probe=None),
        "Stopped",
        "Crashed",
        StartProbe(),
    ),
    "and Ready again": (running(USED, the_pod=pod(USED, RUNNING, last=ended("Error", 2), restarts=1)), "Running", "Ready", None),
    "an orderly end is no death": (running(USED, the_pod=pod(USED, ended("Completed", 0))), "Replacing", "Replacing", None),
    "an evicted pod makes room": (
        running(USED, the_pod=pod(USED, ended(), status={"phase": "Failed", "reason": "Evicted", "message": "low on memory"})),
        "Stopped",
        "Evicted",
        DeletePod("pod-uid", "it ended"),
    ),
    "a drained one is waited for": (running(USED, the_pod=pod(USED, RUNNING, deleted=1, conditions=EVICTED)), "Stopped", "Evicted", None),
    "so is one that somebody deleted": (running(USED, the_pod=pod(USED, RUNNING, deleted=1)), "Stopped", "WaitingForDeletion", None),
    "it returns": (seen(USED, None, pvc(USED)), "Stopped", "Starting", CreatePod("return")),
    "the sixth death is the last": (
        running(sandbox(returns(5)), the_pod=pod(USED, ended("Error", 2), birth=Birth("return", 5))),
        "Stopped",
        "CrashLoop",
        DeletePod("pod-uid", "it died too often"),
    ),
    "the fifth is not": (running(sandbox(returns(4)), the_pod=pod(USED, ended("Error", 2), birth=Birth("return", 4))), "Stopped", "Crashed", None),
    "it stays stopped": (seen(sandbox({**returns(5), "reason": "CrashLoop"}), None, pvc(USED)), "Stopped", "CrashLoop", None),
    "until it is edited": (
        seen(sandbox({**returns(5), "reason": "CrashLoop"}, image="other:1"), None, pvc(USED)),
        "Replacing",
        "Replacing",
        CreatePod("replace"),
    ),
    "or rolled back": (
        seen(with_restore({**returns(5), "reason": "CrashLoop"}), None, pvc(USED, marker="r1")),
        "Replacing",
        "Replacing",
        CreatePod("replace"),
    ),
    # edits
    "an edit that takes a new pod": (
        running(sandbox(WAS_READY, image="other:1"), the_pod=pod(USED, RUNNING)),
        "Replacing",
        "Replacing",
        DeletePod("pod-uid", "the spec was edited"),
    ),
    "its pod goes": (running(sandbox(WAS_READY, image="other:1"), the_pod=pod(USED, RUNNING, deleted=0)), "Replacing", "Replacing", None),
    "the next one comes": (
        seen(sandbox({**WAS_READY, "podTemplateHash": HASH}, image="other:1"), None, pvc(USED)),
        "Replacing",
        "Replacing",
        CreatePod("replace"),
    ),
    "an ephemeral workspace in use keeps its pod": (
        running(sandbox(WAS_READY, image="other:1", **EPHEMERAL), the_pod=pod(sandbox(**EPHEMERAL), RUNNING)),
        "Running",
        "Ready",
        None,
    ),
    # files
    "a fork waits for its files": (
        running(sandbox(source={"snapshotName": "s"}), the_pvc=pvc(sandbox(source={"snapshotName": "s"}))),
        "Restoring",
        "Filling",
        None,
    ),
    "and is told that there are none": (
        running(sandbox(last_restore("Pending", source_marker(UID), "no Snapshot s"), source={"snapshotName": "s"}), the_pvc=pvc(BARE, marker="")),
        "Restoring",
        "SnapshotMissing",
        None,
    ),
    "or that they cannot be had": (
        running(sandbox(last_restore("Failed", source_marker(UID), "damaged"), source={"snapshotName": "s"}), the_pvc=pvc(BARE, marker="")),
        "Failed",
        "SnapshotFailed",
        None,
    ),
    "with its files it is Ready": (
        running(sandbox(source={"snapshotName": "s"}), the_pvc=pvc(BARE, marker=source_marker(UID))),
        "Running",
        "Ready",
        None,
    ),
    "a rollback is waited for": (running(with_restore(), the_pvc=pvc(BARE, marker="r1")), "Restoring", "Restoring", None),
    "to its very end": (running(with_restore(last_restore("Running")), the_pvc=pvc(BARE, marker="r2")), "Restoring", "Restoring", None),
    "then it is Ready": (running(with_restore(last_restore("Succeeded")), the_pvc=pvc(BARE, marker="r2")), "Running", "Ready", None),
    "one that failed is final": (running(with_restore(last_restore("Failed")), the_pvc=pvc(BARE, marker="r1")), "Running", "Ready", None),
    "one that the workspace knows is done": (running(with_restore(), the_pvc=pvc(BARE, marker="r2")), "Running", "Ready", None),
    "an ephemeral workspace knows by its pod": (
        running(with_restore(**EPHEMERAL), the_pod=pod(sandbox(**EPHEMERAL), RUNNING, marker="r1")),
        "Restoring",
        "Restoring",
        None,
    ),
    # network
    "where it is asked for an open network is not Ready": (
        running(BARE, network=NetworkView("False", "NotEnforced", "10.0.0.1 answered", required=True)),
        "Pending",
        "NetworkNotEnforced",
        None,
    ),
    "elsewhere it only is said": (running(BARE, network=NetworkView("False", "NotEnforced", "10.0.0.1 answered")), "Running", "Ready", None),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_first_check_that_has_something_to_say_decides(case: str) -> None:
    world, phase, reason, action = TABLE[case]
    decision = decide(world)
    assert (decision.verdict.phase, decision.verdict.reason, decision.action) == (phase, reason, action), decision.verdict.message
    assert (decision.verdict.ready == "True") == (reason == "Ready")
    assert decision.verdict.message


@pytest.mark.parametrize(
    "case",
    [name for name, row in TABLE.items() if row[2] not in {"Ready", "Creating", "Replacing", "Deleting", "QuotaExceeded", "NetworkNotEnforced"}],
)
def test_what_is_not_ready_says_more_than_its_reason(case: str) -> None:
    message = decide(TABLE[case][0]).verdict.message
    assert len(message.split()) > 2


def test_a_pod_that_should_be_gone_makes_somebody_look_at_its_node() -> None:
    world = running(USED, the_pod=pod(USED, RUNNING, deleted=30))
    verdict = decide(world).verdict
    assert verdict.reason == "WaitingForDeletion"
    assert "node1" in verdict.message
    lost = decide(replace(world, node_lost=True)).verdict
    assert lost.reason == "NodeLost"
    assert "out-of-service" in lost.message


def test_out_of_memory_names_the_limit() -> None:
    of = sandbox(WAS_READY, resources={"memory": "128Mi"})
    assert "128Mi" in decide(running(of, the_pod=pod(of, ended("OOMKilled", 137)))).verdict.message


def test_a_deadline_is_computed_from_the_creation() -> None:
    assert decide(running(sandbox(age=10, timeoutSeconds=11))).verdict.reason == "Ready"
    assert decide(running(sandbox(age=12, timeoutSeconds=11))).verdict.reason == "Expired"
    assert NOW.tzinfo is not None
