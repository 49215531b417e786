"""kill -9 of the facade in the middle of each operation: the next start heals, nothing is lost, nothing is left."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from tests.support.client import Api
from tests.support.docker import Docker
from tests.support.lifecycle import assert_moves, assert_works, running_facade, strays
from tests.support.server import Facade
from tests.support.target import Target
from tests.support.waiting import eventually

pytestmark = [pytest.mark.needs("engine", "durable", "processes"), pytest.mark.slow]

MOMENTS = (0.1, 0.35, 0.6, 0.85)
FILES = "import os\nfor d in range(40):\n  os.mkdir(f'd{d}')\n  for n in range(50): open(f'd{d}/{n}','w').write(str(n)*200)"
LOOK = "find . -type f -not -name tick -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"


@pytest.fixture(scope="module")
def crashing(target: Target, docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facade]:
    """One installation that is killed again and again."""
    with running_facade(target, docker, tmp_path_factory.mktemp("crashing") / "data") as facade:
        yield facade
        facade.api.forget_connections()


@pytest.fixture
def api(crashing: Facade) -> Iterator[Api]:
    """Its client, with nothing there before and after."""
    yield crashing.api
    for row in crashing.api.sandboxes():
        crashing.api.delete(row["id"])
    for row in crashing.api.snapshots():
        crashing.api.drop(row["id"])


def crash(facade: Facade, operation: Callable[[], httpx.Response], after: float) -> httpx.Response | None:
    """Starts the operation, kills the facade that many seconds later, starts it again. The answer when there was one."""
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(operation)
        # The moment of the crash is this test's input; a finished call ends the wait early.
        ended = threading.Event()
        call.add_done_callback(lambda _: ended.set())
        ended.wait(after)
        facade.kill()
        try:
            answer: httpx.Response | None = call.result(30)
        except httpx.TransportError:
            answer = None
    facade.start()
    return answer


def timed(operation: Callable[[], Any]) -> float:
    """Seconds that it takes when nobody disturbs it."""
    begun = time.monotonic()
    operation()
    return time.monotonic() - begun


def consistent(facade: Facade, docker: Docker) -> None:
    """Every listed sandbox works, every listed snapshot forks, and neither engine nor store holds anything else."""
    api = facade.api
    rows = {row["id"] for row in api.sandboxes()}
    for sandbox in rows:
        assert_works(api, sandbox)

    def only_known() -> bool:
        inside = {name for entry in docker.everything_of(facade.data) for name in re.findall(r"sb_[0-9a-f]{16}", entry)}
        assert inside <= rows, f"in the engine but not listed: {inside - rows}"
        stored = {name for file in facade.data.rglob("*") for name in re.findall(r"snap_[0-9a-f]{16}", file.name)}
        known = {row["id"] for row in api.snapshots()}
        assert stored <= known, f"in the store but not listed: {stored - known}"
        return True

    eventually(only_known, within=20, why="nothing is left")
    for row in api.snapshots():
        fork = api.fork(row["id"])["id"]
        assert api.run(fork, "true")["exit_code"] == 0
        api.delete(fork)


@pytest.mark.behaviour("FAULT-001")
def test_killed_in_a_create(crashing: Facade, api: Api, docker: Docker) -> None:
    length = timed(api.new)
    for part in MOMENTS:
        answer = crash(crashing, lambda: api.create({"memory_mb": 64}), part * length)
        if answer is not None and answer.status_code == 201:
            assert answer.json()["id"] in {row["id"] for row in api.sandboxes()}, "a sandbox that was promised is there"
        consistent(crashing, docker)


@pytest.mark.behaviour("FAULT-002")
def test_killed_in_an_exec(crashing: Facade, api: Api, docker: Docker) -> None:
    box = api.new()["id"]
    api.sh(box, "echo kept > f; (while :; do date +%s%N > tick; sleep 0.05; done) >/dev/null 2>&1 & echo ok")
    crash(crashing, lambda: api.exec(box, "echo begun > begun; sleep 317; echo late > late", timeout_seconds=600), 1.0)
    assert api.read(box, "begun") == b"begun\n"
    assert_moves(api, box, "tick")
    eventually(lambda: "sleep 317" not in strays(api, box), within=45, why="the command of the dead facade is dead")
    assert api.names(box) == ["begun", "f", "tick"]
    consistent(crashing, docker)


@pytest.mark.behaviour("FAULT-003")
def test_killed_in_a_snapshot(crashing: Facade, api: Api, docker: Docker) -> None:
    box = api.new()["id"]
    api.sh(box, ["python3", "-c", FILES])
    api.sh(box, "(while :; do date +%s%N > tick; sleep 0.05; done) >/dev/null 2>&1 & echo ok")
    look = api.sh(box, LOOK)
    length = timed(lambda: api.snap(box))
    for part in MOMENTS:
        answer = crash(crashing, lambda: api.take(box), part * length)
        if answer is not None and answer.status_code == 201:
            assert answer.json()["id"] in {row["id"] for row in api.snapshots()}, "a snapshot that was promised is there"
        assert_moves(api, box, "tick")
        assert api.sh(box, LOOK) == look
    consistent(crashing, docker)
    for row in api.snapshots():
        assert api.sh(api.fork(row["id"])["id"], LOOK) == look


@pytest.mark.behaviour("FAULT-004")
def test_killed_in_a_rollback(crashing: Facade, api: Api, docker: Docker) -> None:
    box = api.new()["id"]
    api.sh(box, ["python3", "-c", FILES])
    old = api.sh(box, LOOK)
    snapshot = api.snap(box)["id"]
    api.sh(box, "for d in d*; do echo changed > $d/1; rm $d/2; done; echo new > new")
    new = api.sh(box, LOOK)
    after = api.snap(box)["id"]
    length = timed(lambda: api.rollback(box, snapshot))
    for part in MOMENTS:
        api.rollback(box, after)
        assert api.sh(box, LOOK) == new
        answer = crash(crashing, lambda: api.roll(box, snapshot), part * length)
        eventually(lambda: api.exec(box, "true").status_code == 200, within=30, why="the sandbox is usable again")
        seen = api.sh(box, LOOK)
        assert seen in (old, new), "a workspace is as before or as in the snapshot, never a mixture"
        if answer is not None and answer.status_code == 200:
            assert seen == old
        assert ".sandbox-init" not in api.sh(box, "ls -A")
    consistent(crashing, docker)


@pytest.mark.behaviour("FAULT-005")
def test_killed_in_a_fork(crashing: Facade, api: Api, docker: Docker) -> None:
    box = api.new()["id"]
    api.sh(box, ["python3", "-c", FILES])
    look = api.sh(box, LOOK)
    snapshot = api.snap(box)["id"]
    length = timed(lambda: api.fork(snapshot))
    for part in MOMENTS:
        crash(crashing, lambda: api.branch(snapshot), part * length)
        consistent(crashing, docker)
        for row in api.sandboxes():
            assert api.sh(row["id"], LOOK) == look, "no sandbox is shown without its files"


@pytest.mark.behaviour("FAULT-006")
def test_killed_in_a_delete(crashing: Facade, api: Api, docker: Docker) -> None:
    length = timed(lambda: api.delete(api.new()["id"])) / 2
    for part in MOMENTS:
        box = api.new()["id"]
        answer = crash(crashing, partial(api.call, "DELETE", f"/sandboxes/{box}"), part * length)
        if answer is not None and answer.status_code == 204:
            assert box not in {row["id"] for row in api.sandboxes()}
        consistent(crashing, docker)


@pytest.mark.behaviour("FAULT-007")
def test_killed_in_an_upload(crashing: Facade, api: Api, docker: Docker) -> None:
    box = api.new()["id"]
    api.write(box, "f", b"old")

    def slow() -> Iterator[bytes]:
        for _ in range(200):
            yield b"x" * 50_000
            time.sleep(0.02)

    crash(crashing, lambda: api.put(box, "f", slow()), 1.0)
    eventually(lambda: api.names(box) == ["f"] and api.read(box, "f") == b"old", within=20, why="no part of the upload is left")
    assert api.sh(box, "ls -A") == "f\n"
    consistent(crashing, docker)
