"""Snapshots, forks and rollback through the API: answers, listing, rules. The trees themselves are in test_state.py."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.client import SANDBOX_KEYS, SNAPSHOT_KEYS, Api, expect, lifetime, moment, refused
from tests.support.target import Target, sandbox_image
from tests.support.waiting import eventually


@pytest.mark.behaviour("SNAP-001")
def test_a_snapshot_answers_with_its_facts(api: Api, box: str) -> None:
    api.write(box, "f", b"1" * 1000)
    row = api.snap(box, "before the change")
    assert set(row) >= SNAPSHOT_KEYS
    assert re.fullmatch(r"snap_[0-9a-f]{16}", row["id"]) and row["sandbox_id"] == box
    assert row["name"] == "before the change" and row["image"] == sandbox_image()
    assert isinstance(row["size_bytes"], int) and row["size_bytes"] > 0
    moment(row["created_at"])
    assert expect(api.call("GET", f"/snapshots/{row['id']}"), 200) == row


@pytest.mark.behaviour("SNAP-002")
@pytest.mark.parametrize("options", [{}, {"json": {}}, {"json": {"name": None}}], ids=["no body", "empty", "null"])
def test_the_body_of_a_snapshot_may_be_absent(api: Api, box: str, options: dict[str, Any]) -> None:
    assert expect(api.take(box, **options), 201)["name"] is None


@pytest.mark.behaviour("SNAP-003", "B20")
@pytest.mark.parametrize("name", ["n" * 128, "with space", "émoji 🙂", "../x", "two\nlines", "", "%41 $(id) \"'", "漢" * 128], ids=repr)
def test_snapshot_names_come_back_letter_for_letter(api: Api, room: str, name: str) -> None:
    row = api.snap(room, name)
    assert row["name"] == name
    assert expect(api.call("GET", f"/snapshots/{row['id']}"), 200)["name"] == name


@pytest.mark.behaviour("SNAP-004")
def test_snapshots_are_listed_oldest_first_and_by_sandbox(api: Api) -> None:
    one, two = api.new()["id"], api.new()["id"]
    rows = [api.snap(one, "1"), api.snap(two, "2"), api.snap(one, "3")]
    everything = api.snapshots()
    assert [row for row in everything if row in rows] == rows
    assert [moment(row["created_at"]) for row in everything] == sorted(moment(row["created_at"]) for row in everything)
    assert api.snapshots(one) == [rows[0], rows[2]] and api.snapshots(two) == [rows[1]]
    assert api.snapshots("sb_0000000000000000") == [] == api.snapshots("nonsense")


@pytest.mark.behaviour("SNAP-005")
def test_a_deleted_snapshot_is_gone(api: Api, box: str) -> None:
    snapshot = api.snap(box)["id"]
    fork = api.fork(snapshot)["id"]
    api.drop(snapshot)
    assert refused(api.call("GET", f"/snapshots/{snapshot}"), 404) == f"snapshot {snapshot} not found"
    refused(api.call("DELETE", f"/snapshots/{snapshot}"), 404)
    refused(api.branch(snapshot), 404)
    refused(api.roll(box, snapshot), 404)
    assert api.snapshots(box) == []
    assert api.sandbox(fork)["source_snapshot_id"] == snapshot


@pytest.mark.behaviour("SNAP-006")
def test_a_fork_takes_the_sources_spec_with_the_given_changes(api: Api, target: Target) -> None:
    source = api.new(cpus=0.5, memory_mb=64, pids_limit=32, read_only_rootfs=False, env={"A": "from the source"}, timeout_seconds=5000)
    snapshot = api.snap(source["id"])["id"]
    same = expect(api.branch(snapshot), 201)
    assert set(same) >= SANDBOX_KEYS and same["id"] != source["id"] and same["status"] == "running"
    assert same["source_snapshot_id"] == snapshot
    for key in ("image", "cpus", "memory_mb", "pids_limit", "network", "read_only_rootfs"):
        assert same[key] == source[key], key
    assert abs(lifetime(same) - 900) < 5, "a fork's TTL is the server's default unless given"
    other = api.fork(snapshot, cpus=0.25, memory_mb=128, timeout_seconds=60)
    assert (other["cpus"], other["memory_mb"], other["pids_limit"]) == (0.25, 128, 32) and abs(lifetime(other) - 60) < 5
    assert api.fork(snapshot, cpus=None, memory_mb=None, network=None, timeout_seconds=None)["memory_mb"] == 64
    if "processes" in target.can:
        assert api.sh(same["id"], "echo $A") == "from the source\n"


@pytest.mark.behaviour("SNAP-007")
@pytest.mark.parametrize("body", [{"cpus": 4.5}, {"memory_mb": 4097}, {"timeout_seconds": 86401}], ids=str)
def test_a_fork_over_a_maximum_is_400(api: Api, room: str, body: dict[str, Any]) -> None:
    refused(api.branch(api.snap(room)["id"], json=body), 400)


@pytest.mark.behaviour("SNAP-008")
def test_a_fork_of_a_fork_keeps_its_source_and_files(api: Api, box: str) -> None:
    api.write(box, "gen", b"1")
    first = api.fork(api.snap(box)["id"])["id"]
    api.write(first, "gen", b"2")
    second_snapshot = api.snap(first)["id"]
    second = api.fork(second_snapshot)
    assert second["source_snapshot_id"] == second_snapshot
    assert api.read(second["id"], "gen") == b"2" and api.read(box, "gen") == b"1"


@pytest.mark.behaviour("SNAP-009")
def test_rollback_keeps_id_times_and_ttl(api: Api, box: str) -> None:
    row = api.expire(box, 4000)
    api.write(box, "f", b"old")
    snapshot = api.snap(box)["id"]
    api.write(box, "f", b"new")
    api.write(box, "g", b"new")
    after = api.rollback(box, snapshot)
    assert {key: after[key] for key in SANDBOX_KEYS} == {key: row[key] for key in SANDBOX_KEYS}
    assert after["status"] == "running"
    assert api.names(box) == ["f"] and api.read(box, "f") == b"old"
    assert api.rollback(box, snapshot)["id"] == box


@pytest.mark.behaviour("SNAP-010")
def test_rollback_to_a_snapshot_of_another_sandbox_is_allowed(api: Api) -> None:
    one, two = api.new()["id"], api.new(memory_mb=64)["id"]
    api.write(one, "of-one", b"1")
    snapshot = api.snap(one)["id"]
    api.write(two, "of-two", b"2")
    assert api.rollback(two, snapshot)["memory_mb"] == 64
    assert api.names(two) == ["of-one"]
    assert api.names(one) == ["of-one"]


@pytest.mark.needs("bounds")
@pytest.mark.behaviour("SNAP-011")
def test_a_snapshot_over_the_limit_is_413_and_leaves_none(small: Api) -> None:
    sandbox = small.new()["id"]
    for number in range(20):
        small.write(sandbox, f"f{number}", bytes(range(256)) * 1000)
    refused(small.take(sandbox), 413, says="4000000")
    assert small.snapshots(sandbox) == []
    for number in range(20):
        small.write(sandbox, f"f{number}", b"small")
    assert small.snap(sandbox)["size_bytes"] > 0


@pytest.mark.behaviour("SNAP-012")
def test_quota_image_and_network_rules_apply_to_forks(small: Api, tight: Api) -> None:
    snapshot = small.snap(small.new()["id"])["id"]
    refused(small.branch(snapshot, json={"network": True}), 403, says="network")
    boxes = [tight.new()["id"] for _ in range(5)]
    snapshot = tight.snap(boxes[0])["id"]
    refused(tight.branch(snapshot), 429)
    tight.delete(boxes[4])
    assert tight.fork(snapshot)["source_snapshot_id"] == snapshot
    refused(tight.branch(snapshot), 429)


@pytest.mark.behaviour("SNAP-013")
def test_an_expired_sandbox_leaves_its_snapshots(fast_reaper: Api) -> None:
    sandbox = fast_reaper.new()["id"]
    fast_reaper.write(sandbox, "f", b"kept")
    snapshot = fast_reaper.snap(sandbox)
    fast_reaper.expire(sandbox, 1)
    eventually(lambda: fast_reaper.call("GET", f"/sandboxes/{sandbox}").status_code == 404, within=15, why="the sandbox expired")
    assert fast_reaper.snapshots(sandbox) == [snapshot]
    assert fast_reaper.read(fast_reaper.fork(snapshot["id"])["id"], "f") == b"kept"
