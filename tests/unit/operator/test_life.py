"""Counting starts and deaths from what is seen, and the status that comes of it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from agent_sandbox_core.v1alpha1 import SandboxObject
from agent_sandbox_operator.decide import decide
from agent_sandbox_operator.life import Life, read_life
from agent_sandbox_operator.seen import Probe, Seen
from agent_sandbox_operator.specs import Birth
from agent_sandbox_operator.status import build_status, is_news, status_patch
from agent_sandbox_operator.views import PodView

from .worlds import NOW, RUNNING, ago, ended, pod, pvc, sandbox, seen, waiting


def life(of: SandboxObject, the_pod: PodView | None, *, released: bool = False, on_purpose: bool = False) -> Life:
    return read_life(of, the_pod, NOW, released=released, leaving_on_purpose=on_purpose)


def lived(incarnation: int, **status: Any) -> SandboxObject:
    return sandbox({"incarnation": incarnation, **status})


def test_a_first_start_is_no_return() -> None:
    found = life(sandbox(), pod(sandbox(), RUNNING))
    assert (found.incarnation, found.recent) == (1, ())


def test_a_restart_of_the_container_is_one_and_is_counted_once() -> None:
    of = lived(1)
    the_pod = pod(of, RUNNING, last=ended(), restarts=1)
    found = life(of, the_pod)
    assert (found.incarnation, len(found.recent)) == (2, 1)
    again = life(lived(2, recentStarts=[ago(30)]), the_pod)
    assert (again.incarnation, len(again.recent)) == (2, 1)


def test_a_pod_that_returned_counts_and_one_that_replaced_does_not() -> None:
    of = lived(1)
    assert len(life(of, pod(of, RUNNING, birth=Birth("return", 1))).recent) == 1
    assert len(life(of, pod(of, RUNNING, birth=Birth("replace", 1))).recent) == 0


def test_a_count_that_was_not_written_down_is_made_up_from_the_pod() -> None:
    of = sandbox()
    found = life(of, pod(of, RUNNING, last=ended(), restarts=3))
    assert (found.incarnation, len(found.recent)) == (4, 3)


def test_an_orderly_end_is_neither_a_death_nor_a_return() -> None:
    of = lived(1)
    found = life(of, pod(of, RUNNING, last=ended("Completed", 0), restarts=1))
    assert (found.incarnation, found.recent, found.last_termination) == (2, (), None)


def test_a_pod_that_was_deleted_before_it_started_never_lived() -> None:
    of = sandbox()
    never = {"terminated": {"reason": "ContainerStatusUnknown", "exitCode": 137, "startedAt": None, "finishedAt": None}}
    refused = {"terminated": {"reason": "StartError", "exitCode": 128, "startedAt": "1970-01-01T00:00:00Z", "finishedAt": ago(1)}}
    for state in (never, refused):
        assert life(of, pod(of, state, deleted=0)).incarnation == 0


def test_old_returns_are_forgotten_and_a_release_forgets_all() -> None:
    old = lived(3, recentStarts=[ago(601), ago(30)])
    assert len(life(old, None).recent) == 1
    assert life(old, None, released=True).recent == ()


@pytest.mark.parametrize(
    ("state", "more", "reason", "code"),
    [
        (ended("OOMKilled", 137), {}, "OOMKilled", 137),
        (ended("Error", 2), {}, "Error", 2),
        (ended("Error", 137, seconds=0), {"deleted": 0}, "Deleted", None),
        (ended("OOMKilled", 137, seconds=50), {"deleted": 0}, "OOMKilled", 137),
        (RUNNING, {"deleted": 0, "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]}, "Evicted", None),
        (ended(), {"status": {"phase": "Failed", "reason": "Evicted", "message": "low on disk"}}, "Evicted", None),
    ],
)
def test_how_it_ended(state: dict[str, Any], more: dict[str, Any], reason: str, code: int | None) -> None:
    of = lived(1)
    last = life(of, pod(of, state, **more)).last_termination
    assert last is not None
    assert (last.reason, last.exit_code) == (reason, code)
    assert last.message


def test_what_goes_on_purpose_has_not_died() -> None:
    of = lived(1)
    assert life(of, pod(of, ended("Error", 137), deleted=0), on_purpose=True).last_termination is None


def status_of(world: Seen) -> dict[str, Any]:
    return build_status(world, decide(world).verdict)


def test_the_whole_status_of_a_ready_sandbox() -> None:
    of = sandbox(timeoutSeconds=600)
    world = seen(of, pod(of, RUNNING), pvc(of), probe=Probe("answered", version="1.2", pids_limit=1000))
    status = status_of(world)
    conditions = {one["type"]: (one["status"], one["reason"]) for one in status.pop("conditions")}
    assert conditions == {
        "Ready": ("True", "Ready"),
        "WorkspaceReady": ("True", "Bound"),
        "NetworkEnforced": ("Unknown", "NotVerified"),
        "Isolation": ("True", "UserNamespace"),
        "PidsLimitEnforced": ("False", "NodeLimit"),
    }
    assert status.pop("expiresAt") == "2030-01-02T03:13:05Z"
    assert status == {
        "phase": "Running",
        "reason": "Ready",
        "message": "it takes commands",
        "observedGeneration": 1,
        "podName": "one-0123abcd",
        "pvcName": "one-0123abcd",
        "nodeName": "node1",
        "image": "python:3",
        "podTemplateHash": world.hash,
        "incarnation": 1,
        "recentStarts": [],
        "initVersion": "1.2",
    }


def test_a_status_that_was_written_is_not_written_again() -> None:
    of = sandbox()
    world = seen(of, pod(of, RUNNING), pvc(of), probe=Probe("answered", version="1.2"))
    written = status_of(world)
    again = seen(sandbox(written), pod(of, RUNNING), pvc(of), probe=Probe("answered", version="1.2"), now=NOW + timedelta(seconds=60))
    assert status_patch(written, status_of(again)) == {}


def test_the_movers_field_is_never_touched() -> None:
    last = {"requestID": "r", "snapshotName": "s", "phase": "Succeeded"}
    of = sandbox({"lastRestore": last})
    world = seen(of, pod(of, RUNNING), pvc(of), probe=Probe("answered"))
    assert "lastRestore" not in status_patch({"lastRestore": last}, status_of(world))


def test_what_is_gone_is_removed_and_parts_of_objects_too() -> None:
    assert status_patch({"podName": "p", "a": 1}, {"a": 1}) == {"podName": None}
    assert status_patch({"lastTermination": {"reason": "Error", "exitCode": 2}}, {"lastTermination": {"reason": "Deleted"}}) == {
        "lastTermination": {"reason": "Deleted", "exitCode": None}
    }


def test_small_steps_on_the_way_wait_for_the_next_write_that_matters() -> None:
    of = sandbox()
    first = status_of(seen(of, None, pvc(of, phase="Pending")))
    step = seen(sandbox(first), pod(of, waiting("ContainerCreating"), age=1), pvc(of))
    patch = status_patch(first, status_of(step))
    assert patch
    assert not is_news(patch, first, decide(step).verdict)
    ready = seen(sandbox(first), pod(of, RUNNING), pvc(of), probe=Probe("answered"))
    assert is_news(status_patch(first, status_of(ready)), first, decide(ready).verdict)
    trouble = seen(sandbox(first), pod(of, waiting("ErrImagePull", "no")), pvc(of))
    assert is_news(status_patch(first, status_of(trouble)), first, decide(trouble).verdict)
