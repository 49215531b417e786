"""Background children (B03) and time-outs (B04): a result comes with the command's exit, and a time-out kills all that it started."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.client import Api
from tests.support.lifecycle import assert_no_strays, strays
from tests.support.waiting import eventually, throughout

pytestmark = pytest.mark.needs("processes")

TREE = "echo before; (setsid sh -c 'sleep 8; echo late > /workspace/late') & sh -c 'trap \"\" TERM; sleep 303' | cat; wait"
COMMANDS, WORKERS = 20_000, 64
DOUBLE_FORK = "import os\nif os.fork()==0:\n  os.setsid()\n  if os.fork()==0: os.execv('/bin/sleep',['sleep','310'])\n"
NON_DUMPABLE = "import ctypes,os,time\nif os.fork()==0:\n  os.setsid(); ctypes.CDLL(None).prctl(4,0); time.sleep(310)\n"
SPAWNER = "import os\nwhile True:\n  try:\n    if os.fork()==0:\n      os.setsid()\n      os.fork()\n  except OSError: pass\n"


def count(api: Api, sandbox: str, seconds: int) -> int:
    """How many processes `sleep N` there are."""
    return strays(api, sandbox).count(f"sleep {seconds}")


@pytest.mark.behaviour("PROC-001", "B03")
@pytest.mark.parametrize(
    "command",
    [
        "sleep 301 & echo started",
        "nohup sleep 301 >/dev/null & echo started",
        "setsid sleep 301 & echo started",
        "(sleep 301 >&2) & echo started",
        "sleep 301 </dev/null >/dev/null 2>&1 & echo started",
    ],
)
@pytest.mark.parametrize("endpoint", ["exec", "stream"])
def test_a_background_child_holds_nothing_up_and_lives_on(api: Api, module_room: str, command: str, endpoint: str) -> None:
    box = module_room
    clean = api.snap(box)["id"]
    begun = time.monotonic()
    if endpoint == "exec":
        result = api.run(box, command, timeout_seconds=20)
        assert (result["stdout"], result["exit_code"], result["timed_out"]) == ("started\n", 0, False)
    else:
        stream = api.stream(box, command, timeout_seconds=20)
        assert stream.text("stdout") == "started\n" and stream.finished["exit_code"] == 0 and not stream.finished["timed_out"]
    assert time.monotonic() - begun < 5
    assert api.sh(box, "echo next") == "next\n"
    eventually(lambda: count(api, box, 301) == 1, within=2, why="the background child lives on")
    api.rollback(box, clean)
    assert count(api, box, 301) == 0


@pytest.mark.behaviour("PROC-002")
def test_output_of_a_background_child_after_the_exit_breaks_nothing(api: Api, room: str) -> None:
    result = api.run(room, "(i=0; while [ $i -lt 2000 ]; do i=$((i+1)); echo noise; done; echo finished > done) & echo first")
    assert "first\n" in result["stdout"] and set(result["stdout"].split()) <= {"first", "noise"}
    eventually(lambda: api.get(room, "done").status_code == 200, why="the writer was not ended by a closed pipe")


@pytest.mark.behaviour("PROC-003", "B04")
def test_a_timeout_kills_the_whole_tree_and_keeps_the_output(api: Api) -> None:
    def check(endpoint: str) -> None:
        box = api.new()["id"]
        begun = time.monotonic()
        if endpoint == "exec":
            result = api.run(box, TREE, timeout_seconds=2)
            out, last = result["stdout"], result
        else:
            stream = api.stream(box, TREE, timeout_seconds=2)
            out, last = stream.text("stdout"), stream.finished
        assert 2 <= time.monotonic() - begun <= 5
        assert out == "before\n" and last["timed_out"] is True and last["exit_code"] != 0
        assert strays(api, box) == []
        throughout(lambda: "late" not in api.names(box), seconds=7, every=0.5, why="nothing of the killed tree writes on")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(check, ("exec", "stream")))


@pytest.mark.behaviour("PROC-004", "B04")
def test_ten_timeouts_leave_no_process_behind(api: Api) -> None:
    box = api.new(pids_limit=64)["id"]
    for _ in range(10):
        assert api.run(box, TREE, timeout_seconds=0.3)["timed_out"] is True
        assert strays(api, box) == []
    with ThreadPoolExecutor(6) as pool:
        assert all(result["timed_out"] for result in pool.map(lambda _: api.run(box, TREE, timeout_seconds=1), range(6)))
    assert strays(api, box) == []


@pytest.mark.behaviour("PROC-005")
@pytest.mark.parametrize(
    "escape",
    [
        ["env", "-i", "setsid", "sleep", "310"],
        ["setsid", "sh", "-c", "setsid sleep 310 & exec true"],
        ["python3", "-c", DOUBLE_FORK],
        ["python3", "-c", NON_DUMPABLE],
        ["nohup", "sleep", "310"],
        ["sh", "-c", "kill -STOP $$"],
    ],
    ids=["env -i setsid", "double setsid", "double fork", "non-dumpable", "nohup", "stopped"],
)
def test_nothing_escapes_a_timeout_when_it_is_the_only_command(api: Api, room: str, escape: list[str]) -> None:
    result = api.run(room, ["sh", "-c", '"$@" >/dev/null 2>&1 & sleep 311', "sh", *escape], timeout_seconds=1)
    assert result["timed_out"] is True
    assert_no_strays(api, room, within=5)


@pytest.mark.behaviour("PROC-006")
def test_a_command_that_forks_while_it_is_killed_dies_whole(api: Api) -> None:
    box = api.new(pids_limit=128)["id"]
    assert api.run(box, ["python3", "-c", SPAWNER], timeout_seconds=1)["timed_out"] is True
    assert_no_strays(api, box, within=10)


@pytest.mark.behaviour("PROC-007")
def test_orphans_are_reaped(api: Api, room: str) -> None:
    api.sh(room, "for i in $(seq 1 60); do (sh -c 'sh -c \"sleep 0.1\" & exit' &) ; done; true")
    zombies = "cat /proc/[0-9]*/stat 2>/dev/null | awk '$3==\"Z\"' | wc -l"
    eventually(lambda: api.sh(room, zombies).strip() == "0", within=10, why="no zombie is left")


@pytest.mark.behaviour("PROC-008")
@pytest.mark.slow
def test_twenty_thousand_short_commands_lose_no_status(api: Api, room: str) -> None:
    """64 at a time; every fourth leaves an orphan that init must reap beside the command's own status."""

    def worker(first: int) -> list[str]:
        # http.client: httpx would cost more than the commands.
        connection = http.client.HTTPConnection("127.0.0.1", int(api.url.rsplit(":", 1)[1]), timeout=60)
        wrong = []
        for number in range(first, COMMANDS, WORKERS):
            code = number % 200
            orphan = "sleep 0 & " if number % 16 == 0 else ": & " if number % 4 == 0 else ""
            body = json.dumps({"command": f"{orphan}echo {number}; exit {code}"})
            connection.request("POST", f"/v1/sandboxes/{room}/exec", body, {"Authorization": f"Bearer {api.key}", "Content-Type": "application/json"})
            answer = connection.getresponse().read()
            result = json.loads(answer)
            if (result.get("stdout"), result.get("exit_code")) != (f"{number}\n", code):
                wrong.append(f"{number}: {result}")
        connection.close()
        return wrong

    with ThreadPoolExecutor(WORKERS) as pool:
        assert [line for lines in pool.map(worker, range(WORKERS)) for line in lines] == []


@pytest.mark.behaviour("B05")
@pytest.mark.slow
def test_a_long_quiet_command_ends_with_its_own_code(api: Api, room: str) -> None:
    """The kind of B05 within a test's time: quiet for longer than any poll or heartbeat of ours."""
    result = api.run(room, "sleep 16; echo done; exit 3", timeout_seconds=60)
    assert (result["stdout"], result["exit_code"], result["timed_out"]) == ("done\n", 3, False)
