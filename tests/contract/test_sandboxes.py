"""Sandboxes: what a create answers, defaults and bounds, listing, the timeout call, deletion."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.client import SANDBOX_KEYS, Api, expect, lifetime, moment, refused
from tests.support.target import Target, sandbox_image
from tests.support.waiting import eventually


@pytest.mark.behaviour("BOX-001", "BOX-002")
def test_an_empty_create_gives_a_running_sandbox_with_the_defaults(api: Api, target: Target) -> None:
    row = api.new()
    assert set(row) >= SANDBOX_KEYS
    assert re.fullmatch(r"sb_[0-9a-f]{16}", row["id"])
    assert row["status"] == "running" and row["image"] == sandbox_image()
    assert (row["cpus"], row["memory_mb"], row["pids_limit"]) == (1, 512, 256)
    assert row["network"] is False and row["read_only_rootfs"] is True and row["source_snapshot_id"] is None
    assert abs((moment(row["created_at"]) - datetime.now(UTC)).total_seconds()) < 60
    assert abs(lifetime(row) - 900) < 5
    if "processes" in target.can:
        assert api.run(row["id"], "echo up")["stdout"] == "up\n"


@pytest.mark.behaviour("BOX-003")
def test_a_create_takes_every_field(api: Api) -> None:
    row = api.new(
        image=sandbox_image(),
        cpus=0.5,
        memory_mb=64,
        pids_limit=32,
        network=False,
        read_only_rootfs=False,
        timeout_seconds=60,
        env={"A": "b"},
    )
    assert (row["cpus"], row["memory_mb"], row["pids_limit"], row["read_only_rootfs"]) == (0.5, 64, 32, False)
    assert abs(lifetime(row) - 60) < 5
    assert "env" not in row


@pytest.mark.behaviour("BOX-004")
def test_an_empty_image_means_the_default_and_null_fields_do_too(api: Api) -> None:
    assert api.new(image="")["image"] == sandbox_image()
    assert api.new(image=None, cpus=None, memory_mb=None, pids_limit=None, timeout_seconds=None)["image"] == sandbox_image()


@pytest.mark.behaviour("BOX-005")
def test_numbers_written_as_strings_are_taken(api: Api) -> None:
    row = api.new(cpus="0.5", memory_mb="128", pids_limit="64", timeout_seconds="60")
    assert (row["cpus"], row["memory_mb"], row["pids_limit"]) == (0.5, 128, 64)
    assert abs(lifetime(api.expire(row["id"], 1000)) - 1000) < 30


@pytest.mark.behaviour("BOX-006")
@pytest.mark.parametrize("body", [{"cpus": 4.5}, {"memory_mb": 4097}, {"pids_limit": 4097}, {"timeout_seconds": 86401}], ids=str)
def test_over_a_maximum_is_400_and_names_it(api: Api, body: dict[str, Any]) -> None:
    before = len(api.sandboxes())
    message = refused(api.create(body), 400)
    assert str(int(next(iter(body.values())))) in message or re.search(r"4096|86400|\b4\b", message), message
    assert len(api.sandboxes()) == before


@pytest.mark.behaviour("BOX-007")
@pytest.mark.parametrize("name", ["", "A B", "A=B", "1A", "A\nB", "Ä", "A-B", "A\0B"])
def test_a_bad_environment_name_is_400(api: Api, name: str) -> None:
    message = refused(api.create({"env": {name: "s3cr3t-9"}}), 400)
    assert "s3cr3t-9" not in message


@pytest.mark.behaviour("BOX-008")
def test_a_nul_in_an_environment_value_is_400_and_not_shown(api: Api) -> None:
    message = refused(api.create({"env": {"TOKEN": "s3cr3t\0s3cr3t"}}), 400, says="TOKEN")
    assert "s3cr3t" not in message


@pytest.mark.behaviour("BOX-009", "B16")
@pytest.mark.parametrize("image", ["UPPER/Case bad", "a b", "-x", "x:", "x@sha256:12", "https://x/y", "a" * 600, "x;rm -rf /", "../x", "x\ny"])
def test_a_bad_image_reference_is_400_at_once(api: Api, image: str) -> None:
    refused(api.create({"image": image}, timeout=5), 400, says="image")


@pytest.mark.behaviour("BOX-010")
def test_sandboxes_are_listed_oldest_first_and_look_the_same_everywhere(api: Api) -> None:
    made = [api.new(timeout_seconds=100 + n) for n in range(3)]
    rows = {row["id"]: row for row in api.sandboxes()}
    assert [name for name in rows if name in {row["id"] for row in made}] == [row["id"] for row in made]
    times = [moment(row["created_at"]) for row in rows.values()]
    assert times == sorted(times)
    for row in made:
        assert {key: rows[row["id"]][key] for key in SANDBOX_KEYS} == {key: row[key] for key in SANDBOX_KEYS}
        assert api.sandbox(row["id"]) == rows[row["id"]]


@pytest.mark.behaviour("BOX-011")
def test_a_deleted_sandbox_is_gone_and_its_snapshots_stay(api: Api, box: str) -> None:
    api.write(box, "f", b"kept")
    snapshot = api.snap(box)
    api.delete(box)
    assert refused(api.call("GET", f"/sandboxes/{box}"), 404) == f"sandbox {box} not found"
    assert box not in [row["id"] for row in api.sandboxes()]
    refused(api.call("DELETE", f"/sandboxes/{box}"), 404)
    refused(api.exec(box, "true"), 404)
    assert api.snapshots(box) == [snapshot]
    assert api.read(api.fork(snapshot["id"])["id"], "f") == b"kept"


@pytest.mark.behaviour("BOX-012")
def test_the_timeout_call_counts_from_now(api: Api, box: str) -> None:
    for seconds in (3600, 120, 86400):
        row = api.expire(box, seconds)
        assert abs(moment(row["expires_at"]) - datetime.now(UTC) - timedelta(seconds=seconds)) < timedelta(seconds=10)
        assert row["status"] == "running" and api.sandbox(box)["expires_at"] == row["expires_at"]
    refused(api.call("POST", f"/sandboxes/{box}/timeout", json={"timeout_seconds": 86401}), 400, says="86400")
    assert api.sandbox(box)["expires_at"] == row["expires_at"]


@pytest.mark.behaviour("BOX-013")
def test_an_expired_sandbox_goes_by_itself(fast_reaper: Api) -> None:
    short, long = fast_reaper.new(timeout_seconds=1)["id"], fast_reaper.new(timeout_seconds=300)["id"]
    eventually(lambda: short not in [row["id"] for row in fast_reaper.sandboxes()], within=15, why="the expired sandbox is gone")
    refused(fast_reaper.call("GET", f"/sandboxes/{short}"), 404)
    assert fast_reaper.sandbox(long)["status"] == "running"
    fast_reaper.expire(long, 1)
    eventually(lambda: fast_reaper.call("GET", f"/sandboxes/{long}").status_code == 404, within=15, why="the shortened sandbox is gone")


@pytest.mark.behaviour("BOX-014")
@pytest.mark.needs("cpus")
def test_more_cpus_than_the_engine_has_is_400(many_cpus: Api) -> None:
    refused(many_cpus.create({"cpus": 500}), 400, says="cpu")


@pytest.mark.behaviour("BOX-015", "B16")
@pytest.mark.needs("images")
def test_a_missing_image_fails_soon_and_leaves_nothing(api: Api) -> None:
    before = len(api.sandboxes())
    answer = api.create({"image": "registry.invalid/none:1"}, timeout=30)
    assert answer.status_code in (400, 502), answer.text
    refused(answer, answer.status_code, says="registry.invalid/none:1")
    assert len(api.sandboxes()) == before


@pytest.mark.behaviour("B20")
@pytest.mark.slow
def test_fifty_ids_make_fifty_valid_sandboxes(api: Api) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: str(api.new(memory_mb=16, pids_limit=8)["id"]), range(50)))
    assert len(set(made)) == 50
    assert set(made) <= {row["id"] for row in api.sandboxes()}
    expect(api.call("GET", f"/sandboxes/{made[25]}"), 200)
