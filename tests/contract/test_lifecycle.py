"""Dying and coming back, out of memory (B14), restarts of the facade, and several installations on one engine."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.client import Api, Json, parse_line, refused
from tests.support.docker import Docker
from tests.support.lifecycle import assert_moves, assert_no_strays, strays
from tests.support.server import Facade
from tests.support.waiting import eventually

pytestmark = pytest.mark.needs("processes", "engine", "durable")

ALLOCATE = "b=bytearray(400*1024*1024);print(1)"


def kill(docker: Docker, sandbox: str) -> None:
    """Ends the sandbox's container from outside."""
    docker.container(sandbox).kill()


def back(api: Api, sandbox: str, incarnation: int, within: float = 30) -> Json:
    """Waits until the sandbox runs again, started this many times."""

    def runs() -> Json | None:
        row = api.sandbox(sandbox)
        return row if row["status"] == "running" and row["incarnation"] >= incarnation else None

    row: Json | None = eventually(runs, within=within, why=f"{sandbox} is back: {api.sandbox(sandbox)}")
    assert row is not None
    return row


def stopped(api: Api, sandbox: str) -> Json:
    """Waits until the sandbox stays stopped, with a reason."""

    def told() -> Json | None:
        row = api.sandbox(sandbox)
        return row if row["status"] == "stopped" and row["reason"] == "CrashLoop" else None

    row: Json | None = eventually(told, within=20, why=f"{sandbox} stays stopped: {api.sandbox(sandbox)}")
    assert row is not None
    return row


@pytest.mark.behaviour("LIFE-001")
def test_a_sandbox_that_died_comes_back_on_its_workspace_and_says_why(api: Api, box: str, docker: Docker) -> None:
    row = api.sandbox(box)
    api.sh(box, "echo kept > f; echo lost > /tmp/f; setsid sleep 314 >/dev/null 2>&1 &")
    kill(docker, box)
    now = back(api, box, 2)
    assert {key: now[key] for key in ("id", "created_at", "expires_at", "image")} == {
        key: row[key] for key in ("id", "created_at", "expires_at", "image")
    }
    assert now["last_termination"]["reason"] and now["last_termination"]["message"]
    assert api.sh(box, "cat f; ls -A /tmp") == "kept\n" and strays(api, box) == []


@pytest.mark.behaviour("LIFE-002")
def test_a_command_whose_sandbox_dies_is_an_error_never_a_success(api: Api, box: str, docker: Docker) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(api.exec, box, "sleep 315; echo done", timeout_seconds=600)
        streaming = pool.submit(api.stream, box, "sleep 315; echo done", timeout_seconds=600)
        eventually(lambda: strays(api, box).count("sleep 315") == 2, why="both run")
        kill(docker, box)
        answer, stream = running.result(40), streaming.result(40)
    refused(answer, 502)
    assert stream.exit is None
    back(api, box, 2)


@pytest.mark.behaviour("LIFE-003")
def test_a_crash_loop_stays_stopped_says_so_and_rollback_revives_it(api: Api, docker: Docker) -> None:
    box = api.new()["id"]
    api.write(box, "f", b"1")
    snapshot = api.snap(box)["id"]
    api.write(box, "f", b"2")
    for incarnation in range(2, 7):
        kill(docker, box)
        back(api, box, incarnation)
    kill(docker, box)
    row = stopped(api, box)
    assert row["message"]
    message = refused(api.exec(box, "true"), 400)
    assert "stopped" in message
    refused(api.call("POST", f"/sandboxes/{box}/exec/stream", json={"command": "true"}), 400)
    refused(api.get(box, "f"), 400)
    assert box in [row["id"] for row in api.sandboxes()]
    revived = api.rollback(box, snapshot)
    assert revived["status"] == "running" and (revived["created_at"], revived["expires_at"]) == (row["created_at"], row["expires_at"])
    assert api.read(box, "f") == b"1" and api.sh(box, "echo works") == "works\n"
    api.delete(box)


@pytest.mark.behaviour("LIFE-004")
def test_a_container_removed_by_hand_is_told_and_can_be_deleted(api: Api, docker: Docker) -> None:
    box = api.new()["id"]
    snapshot = api.snap(box)["id"]
    docker.container(box).remove(force=True)

    def told() -> bool:
        answer = api.call("GET", f"/sandboxes/{box}")
        return answer.status_code == 404 or (answer.json()["status"] == "stopped" and bool(answer.json()["reason"]))

    eventually(told, within=20, why="the loss is noticed")
    answer = api.exec(box, "true")
    assert answer.status_code in (400, 404, 502), answer.text
    assert api.call("DELETE", f"/sandboxes/{box}").status_code in (204, 404)
    eventually(lambda: not docker.of_sandboxes([box]), why="its volume is gone as well")
    assert api.fork(snapshot)["status"] == "running"


@pytest.mark.behaviour("LIFE-005", "B14")
def test_a_command_over_the_memory_limit_is_137_and_the_files_are_safe(api: Api) -> None:
    box = api.new(memory_mb=128)["id"]
    api.write(box, "keep.txt", b"precious")
    begun = time.monotonic()
    result = api.run(box, ["python3", "-c", ALLOCATE], timeout_seconds=60)
    assert time.monotonic() - begun < 10
    assert (result["exit_code"], result["stdout"], result["timed_out"]) == (137, "", False)
    eventually(lambda: api.exec(box, "true").status_code == 200, within=30, why="the next command works")
    assert api.read(box, "keep.txt") == b"precious"
    api.run(box, f"setsid python3 -c '{ALLOCATE}; import time; time.sleep(60)' >/dev/null 2>&1 &")
    other = api.exec(box, "sleep 2; echo whole", timeout_seconds=30)
    if other.status_code == 200:
        assert (other.json()["stdout"], other.json()["exit_code"]) in (("whole\n", 0), ("", 137))
    else:
        refused(other, 502)
    eventually(lambda: api.exec(box, "true").status_code == 200, within=30, why="commands work")
    assert api.read(box, "keep.txt") == b"precious"
    row = api.sandbox(box)
    assert row["incarnation"] == 1 or "memory" in row["last_termination"]["message"].lower() or "oom" in row["last_termination"]["reason"].lower()


@pytest.mark.behaviour("LIFE-006")
def test_live_sandboxes_and_snapshots_are_picked_up_by_the_next_start(start_facade: Callable[..., Facade]) -> None:
    facade = start_facade()
    api = facade.api
    box = api.new(env={"A": "kept"}, timeout_seconds=500)["id"]
    api.sh(box, "echo f > f; (while :; do date +%s%N > tick; sleep 0.05; done) >/dev/null 2>&1 & echo ok")
    snapshot = api.snap(box, "named")
    api.expire(box, 4000)
    fork = api.fork(snapshot["id"])
    before = {row["id"]: row for row in api.sandboxes()}
    assert facade.stop() == 0
    facade.start()
    assert {row["id"]: row for row in api.sandboxes()} == before
    assert api.snapshots() == [snapshot]
    assert api.sh(box, "cat f; echo $A") == "f\nkept\n"
    assert_moves(api, box, "tick")
    assert api.read(fork["id"], "f") == b"f\n"
    api.rollback(box, snapshot["id"])
    assert api.names(box) in (["f"], ["f", "tick"])
    # As hard as it gets.
    facade.kill()
    facade.start()
    assert {row["id"] for row in api.sandboxes()} == set(before) and api.sh(box, "cat f") == "f\n"


@pytest.mark.behaviour("LIFE-007", "B25")
def test_what_expired_while_the_facade_was_down_goes_at_the_next_start(start_facade: Callable[..., Facade], docker: Docker) -> None:
    facade = start_facade()
    short, long = facade.api.new(timeout_seconds=3)["id"], facade.api.new()["id"]
    facade.kill()
    begun = time.monotonic()
    eventually(lambda: time.monotonic() - begun > 3, within=5, why="the time to live has passed")
    facade.start()
    eventually(lambda: [row["id"] for row in facade.api.sandboxes()] == [long], within=15, why="the expired one is gone")
    eventually(lambda: not docker.of_sandboxes([short]), why="and gone from the engine")


@pytest.mark.behaviour("LIFE-008")
def test_two_installations_on_one_engine_leave_each_other_alone(start_facade: Callable[..., Facade]) -> None:
    one, two = start_facade(REAP_INTERVAL_SECONDS="1"), start_facade(REAP_INTERVAL_SECONDS="1")
    mine, theirs = one.api.new()["id"], two.api.new()["id"]
    snapshot = one.api.snap(mine)["id"]
    assert [row["id"] for row in one.api.sandboxes()] == [mine] and [row["id"] for row in two.api.sandboxes()] == [theirs]
    refused(two.api.call("GET", f"/sandboxes/{mine}"), 404)
    refused(two.api.exec(mine, "true"), 404)
    refused(two.api.call("DELETE", f"/sandboxes/{mine}"), 404)
    refused(two.api.branch(snapshot), 404)
    two.restart()
    one.kill()
    one.start()
    assert one.api.sh(mine, "echo a") == "a\n" and two.api.sh(theirs, "echo b") == "b\n"


@pytest.mark.behaviour("LIFE-009")
def test_a_graceful_stop_ends_streams_without_a_false_exit_and_sandboxes_live_on(start_facade: Callable[..., Facade]) -> None:
    facade = start_facade()
    api = facade.api
    box = api.new()["id"]
    with api.streaming(box, "echo up; sleep 316", timeout_seconds=600) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert facade.process is not None
        facade.process.send_signal(signal.SIGTERM)
        try:
            rest = [parse_line(line) for line in lines if line.strip()]
        except (httpx.RemoteProtocolError, httpx.ReadError):
            rest = []
    assert all(event["type"] != "exit" or event["exit_code"] != 0 for event in rest)
    assert facade.stop() == 0
    facade.api.forget_connections()
    facade.start()
    assert api.sandbox(box)["status"] == "running"
    assert_no_strays(api, box, within=40)
