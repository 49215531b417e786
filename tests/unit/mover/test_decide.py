"""What has to be done, from what was seen."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from agent_sandbox_core.v1alpha1 import source_marker
from agent_sandbox_operator.mover.decide import Fail, Go, Outcome, Wait, Wanted, decide_restore, decide_take, needs_look
from agent_sandbox_operator.mover.marks import MAX_DONE, Marks, Origin

from .objects import NOW, UID, last, sandbox, snapshot

RESTORE = {"restore": {"snapshotName": "nightly", "requestID": "r1"}}
SOURCE = {"source": {"snapshotName": "base"}}
NOTHING_DONE = Marks("none")


def test_a_new_request_is_carried_out() -> None:
    assert decide_restore(sandbox(spec=RESTORE), NOTHING_DONE) == Wanted("r1", "nightly", first_fill=False)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed", "Superseded"])
def test_a_request_that_has_ended_is_never_done_again(phase: str) -> None:
    assert decide_restore(sandbox(spec=RESTORE, status={"lastRestore": last("r1", phase)}), NOTHING_DONE) is None


@pytest.mark.parametrize("marks", [Marks("r1"), Marks(source_marker(UID), at_creation="r1")], ids=["on the workspace", "at the creation"])
def test_a_request_that_the_workspace_remembers_is_done_although_the_status_is_lost(marks: Marks) -> None:
    assert decide_restore(sandbox(spec=RESTORE), marks) is None


def test_an_older_request_that_is_applied_again_ends_as_superseded_with_nothing_touched() -> None:
    found = decide_restore(sandbox(spec=RESTORE, status={"lastRestore": last("r2", "Succeeded")}), Marks("r2", done=("r0", "r1")))
    assert isinstance(found, Outcome)
    assert (found.request_id, found.phase) == ("r1", "Superseded")
    assert "new requestID" in found.message


def test_a_request_cut_after_its_files_came_is_ended_without_bringing_them_again() -> None:
    found = decide_restore(sandbox(spec=RESTORE, status={"lastRestore": last("r1", "Running")}), Marks("r1"))
    assert isinstance(found, Outcome)
    assert found.phase == "Succeeded"


def test_a_request_cut_before_its_files_came_is_carried_out_again() -> None:
    assert decide_restore(sandbox(spec=RESTORE, status={"lastRestore": last("r1", "Running")}), NOTHING_DONE) == Wanted(
        "r1", "nightly", first_fill=False
    )


def test_a_replaced_request_is_told_as_superseded_before_the_next_begins() -> None:
    found = decide_restore(sandbox(spec=RESTORE, status={"lastRestore": last("r0", "Running")}), NOTHING_DONE)
    assert isinstance(found, Outcome)
    assert (found.request_id, found.phase) == ("r0", "Superseded")


def test_a_withdrawn_request_is_told_as_superseded() -> None:
    found = decide_restore(sandbox(status={"lastRestore": last("r0", "Running")}), NOTHING_DONE)
    assert isinstance(found, Outcome)
    assert (found.request_id, found.phase) == ("r0", "Superseded")


def test_an_unfilled_workspace_is_filled_before_any_rollback() -> None:
    assert decide_restore(sandbox(spec=SOURCE | RESTORE), Marks("")) == Wanted(source_marker(UID), "base", first_fill=True)


def test_a_filled_workspace_is_not_filled_again() -> None:
    assert decide_restore(sandbox(spec=SOURCE), Marks(source_marker(UID))) is None
    assert decide_restore(sandbox(spec=SOURCE), Marks("r5")) is None


def test_a_workspace_that_nobody_marked_is_not_filled() -> None:
    assert decide_restore(sandbox(spec=SOURCE), Marks(None)) is None


def test_a_failed_fill_is_final() -> None:
    assert decide_restore(sandbox(spec=SOURCE, status={"lastRestore": last(source_marker(UID), "Failed")}), Marks("")) is None


def test_a_sandbox_that_goes_is_left_alone() -> None:
    gone = sandbox(spec=RESTORE, status={"phase": "Restoring"}, deletionTimestamp="2026-12-01T12:00:00Z")
    assert decide_restore(gone, NOTHING_DONE) is None
    assert not needs_look(gone)


@pytest.mark.parametrize(
    ("status", "looked_at"),
    [({"phase": "Running"}, False), ({"phase": "Restoring"}, True), ({"phase": "Running", "lastRestore": last("r1", "Running")}, True)],
)
def test_only_a_sandbox_that_waits_for_files_costs_a_look(status: dict[str, Any], looked_at: bool) -> None:
    assert needs_look(sandbox(spec=RESTORE, status=status)) is looked_at


def test_what_was_done_is_remembered_in_order_and_bounded() -> None:
    annotations: dict[str, str] = {"agentsandbox.dev/restored": "source:u", "agentsandbox.dev/restore-at-creation": "r-first"}
    for number in range(200):
        annotations |= Marks.read(annotations).after(f"r{number}", Origin("nightly", "snap_1"))
    marks = Marks.read(annotations)
    assert marks.restored == "r199"
    assert marks.done[-2:] == ("r197", "r198")
    assert len(marks.done) == MAX_DONE
    assert marks.origin == Origin("nightly", "snap_1")
    assert marks.carried_out("r199") and marks.carried_out("r-first")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"done":3}', '{"from":{}}', '{"done":[1,null],"from":null}'])
def test_a_damaged_history_is_none(text: str) -> None:
    marks = Marks.read({"agentsandbox.dev/restored": "r1", "agentsandbox.dev/restore-history": text})
    assert marks.restored == "r1"
    assert marks.done == ()


def test_a_running_sandbox_is_taken() -> None:
    assert decide_take(snapshot(), sandbox(), NOW) == Go()


def test_a_missing_sandbox_is_waited_for_and_then_not_any_more() -> None:
    assert isinstance(decide_take(snapshot(), None, NOW), Wait)
    late = decide_take(snapshot(), None, NOW + timedelta(minutes=2))
    assert isinstance(late, Fail)
    assert late.reason == "SandboxNotFound"


@pytest.mark.parametrize("phase", ["Pending", "Restoring", "Stopped", "Replacing"])
def test_a_sandbox_that_may_still_run_is_waited_for_and_then_not_any_more(phase: str) -> None:
    box = sandbox(status={"phase": phase, "reason": "Starting"})
    found = decide_take(snapshot(), box, NOW)
    assert isinstance(found, Wait)
    assert phase in found.message and "Starting" in found.message
    assert isinstance(decide_take(snapshot(), box, NOW + timedelta(minutes=11)), Fail)


@pytest.mark.parametrize("phase", ["Failed", "Expired", "Deleting"])
def test_a_sandbox_that_has_ended_fails_its_snapshot_at_once(phase: str) -> None:
    found = decide_take(snapshot(), sandbox(status={"phase": phase}), NOW)
    assert isinstance(found, Fail)
    assert found.reason == "SandboxNotRunning"


def test_an_interrupted_snapshot_is_taken_again_while_it_is_young() -> None:
    begun = snapshot(status={"phase": "Running", "sandboxUid": UID, "claimedBy": "gone"})
    assert decide_take(begun, sandbox(), NOW) == Go()
    late = decide_take(begun, sandbox(), NOW + timedelta(minutes=11))
    assert isinstance(late, Fail)
    assert late.reason == "Interrupted"


def test_an_interrupted_snapshot_is_not_taken_of_another_sandbox_of_that_name() -> None:
    found = decide_take(snapshot(status={"phase": "Running", "sandboxUid": "another"}), sandbox(), NOW)
    assert isinstance(found, Fail)
    assert found.reason == "Interrupted"
