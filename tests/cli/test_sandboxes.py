"""create, list, get, timeout, delete, snapshot, rollback, fork."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

import pytest

from .conftest import Sandboxctl

ID = re.compile(r"sb_[0-9a-f]{16}\n\Z")


def test_create_prints_an_id_that_scripts_can_use(ctl: Sandboxctl) -> None:
    assert ID.match(ctl.say("create"))


def test_create_passes_every_option_on(ctl: Sandboxctl) -> None:
    made = ctl.json("create", "--cpus", "0.5", "--memory", "256Mi", "--pids", "64", "--writable", "--timeout", "1h30m", "--env", "A=1=2")
    assert (made["cpus"], made["memory_mb"], made["pids_limit"], made["read_only_rootfs"]) == (0.5, 256, 64, False)
    left = datetime.fromisoformat(made["expires_at"]) - datetime.now(UTC)
    assert 5300 < left.total_seconds() <= 5400
    assert ctl.say("exec", made["id"], "--", "env").count("A=1=2\n") == 1


def test_the_value_of_a_variable_can_come_from_the_environment(ctl: Sandboxctl) -> None:
    done = ctl.run("create", "-e", "SECRET", SECRET="hush")
    assert done.returncode == 0
    assert "SECRET=hush" in ctl.say("exec", done.stdout.decode().strip(), "env")
    assert "ABSENT is not set here" in ctl.fail("create", "-e", "ABSENT", code=2)


def test_list_shows_what_is_there_to_people_and_to_programs(ctl: Sandboxctl, box: str) -> None:
    head, *lines = ctl.say("list").splitlines()
    assert head.split() == ["ID", "STATUS", "REASON", "IMAGE", "CREATED", "EXPIRES"]
    assert any(line.split()[:2] == [box, "running"] for line in lines)
    assert box in ctl.say("list", "--quiet").split()
    assert box in [one["id"] for one in ctl.json("list")["sandboxes"]]


def test_get_tells_the_facts_of_a_sandbox(ctl: Sandboxctl, box: str) -> None:
    facts = dict(line.split("  ", 1) for line in ctl.say("get", box).splitlines())
    assert facts["id"].strip() == box
    assert re.search(r"in 1[345]m\)", ctl.say("get", box))
    assert ctl.json("get", box)["status"] == "running"


def test_timeout_moves_the_end(ctl: Sandboxctl, box: str) -> None:
    assert re.search(r"expires .*\(in (2h|119m)\)", ctl.say("timeout", box, "2h"))
    assert "is no duration" in ctl.fail("timeout", box, "soon", code=2)


def test_delete_takes_many_and_tells_each_that_it_could_not(ctl: Sandboxctl, box: str) -> None:
    other = ctl.say("create").strip()
    done = ctl.run("delete", box, "sb_0000000000000000", other)
    assert (done.returncode, done.stdout.decode()) == (1, f"deleted {box}\ndeleted {other}\n")
    assert done.stderr.decode() == "sandboxctl: sandbox sb_0000000000000000 not found\n"
    assert ctl.say("delete", "--missing-ok", box) == ""


def test_a_snapshot_brings_files_back_and_starts_new_sandboxes(ctl: Sandboxctl, box: str) -> None:
    ctl.say("exec", box, "-c", "echo one > f")
    snapshot = ctl.say("snapshot", "create", box, "--name", "first one").strip()
    ctl.say("exec", box, "-c", "echo two > f")
    assert ctl.say("rollback", box, snapshot) == f"{box} is as in {snapshot}\n"
    assert ctl.say("exec", box, "cat", "f") == "one\n"
    forks = ctl.say("fork", snapshot, "--count", "2", "--timeout", "5m").split()
    assert len(forks) == 2
    assert [ctl.say("exec", one, "cat", "f") for one in forks] == ["one\n", "one\n"]
    assert ctl.json("fork", snapshot)["source_snapshot_id"] == snapshot


def test_snapshots_are_listed_shown_and_deleted(ctl: Sandboxctl, box: str) -> None:
    first, second = (ctl.json("snapshot", "create", box, "--name", name) for name in ("a b", "c"))
    assert ctl.say("snapshot", "list", "--sandbox", box, "--quiet").split() == [first["id"], second["id"]]
    head, line, _ = ctl.say("snapshot", "list", "-s", box).splitlines()
    assert head.split() == ["ID", "NAME", "SANDBOX", "SIZE", "FILES", "TAKEN"]
    assert line.startswith(f"{first['id']}  a b ")
    assert f"digest   {first['digest']}" in ctl.say("snapshot", "get", first["id"])
    assert ctl.say("snapshot", "delete", first["id"], second["id"]) == f"deleted {first['id']}\ndeleted {second['id']}\n"
    assert ctl.json("snapshot", "list", "--sandbox", box) == {"snapshots": []}


def test_a_refusal_is_one_line_and_exit_code_1(ctl: Sandboxctl) -> None:
    assert ctl.fail("get", "sb_0000000000000000") == "sandboxctl: sandbox sb_0000000000000000 not found\n"


def test_a_refusal_is_json_when_json_was_asked_for(ctl: Sandboxctl) -> None:
    error = json.loads(ctl.fail("rollback", "sb_0000000000000000", "snap_0000000000000000", "--json"))["error"]
    assert error == {"code": "not_found", "message": "snapshot snap_0000000000000000 not found", "status": 404}


@pytest.mark.parametrize("size", ["1", "9999Gi"])
def test_what_the_server_does_not_take_is_told_in_its_words(ctl: Sandboxctl, size: str) -> None:
    assert "memory_mb" in ctl.fail("create", "--memory", size)


def test_a_wrong_key_says_where_keys_come_from(ctl: Sandboxctl) -> None:
    assert "set AGENT_SANDBOX_API_KEY" in ctl.fail("list", "--api-key", "wrong-key-0123456789")


def test_options_may_stand_before_the_command(ctl: Sandboxctl, alone: Sandboxctl) -> None:
    url, key = ctl.environment["AGENT_SANDBOX_URL"], ctl.environment["AGENT_SANDBOX_API_KEY"]
    assert alone.say("--url", url, "--api-key", key, "list", "-q") == alone.say("list", "-q", "--url", f"{url}/", "--api-key", key)
