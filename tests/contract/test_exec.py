"""Commands: answers, outcomes kept apart, output limits, refusals."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.client import Api, refused
from tests.support.waiting import eventually

REAL = pytest.mark.needs("processes")
HOG = """
import os,time
told=False
while True:
    try:
        if os.fork()==0: time.sleep(60); os._exit(0)
    except BlockingIOError:
        if not told: print('full',flush=True)
        told=True
        time.sleep(0.001)
"""


@pytest.mark.behaviour("EXEC-001")
def test_a_command_answers_with_exactly_the_six_keys(api: Api, room: str) -> None:
    result = api.run(room, "echo out; echo err >&2; exit 3")
    assert {**result, "duration_ms": 0} == {
        "stdout": "out\n",
        "stderr": "err\n",
        "exit_code": 3,
        "timed_out": False,
        "truncated": False,
        "duration_ms": 0,
    }
    assert isinstance(result["duration_ms"], int) and 0 <= result["duration_ms"] < 10_000


@pytest.mark.behaviour("EXEC-002")
def test_an_argv_list_goes_through_no_shell(api: Api, room: str) -> None:
    assert api.sh(room, ["printf", "%s|", "a b", "$HOME", "*", "", "x;y"]) == "a b|$HOME|*||x;y|"


@pytest.mark.needs("processes")
@pytest.mark.behaviour("EXEC-003")
def test_a_string_goes_through_the_shell(api: Api, room: str) -> None:
    assert api.sh(room, "x=5; echo $((x+1)) | cat; test -t 0 || echo no-tty") == "6\nno-tty\n"
    assert api.sh(room, "cat; echo end") == "end\n"


@pytest.mark.behaviour("EXEC-004")
def test_the_command_starts_in_the_workspace_or_where_it_is_told(api: Api, room: str) -> None:
    assert api.sh(room, "pwd") == "/workspace\n"
    api.sh(room, "mkdir -p sub/dir")
    assert api.sh(room, "pwd", workdir="/tmp") == "/tmp\n"
    assert api.sh(room, "pwd", workdir="/workspace/sub/dir") == "/workspace/sub/dir\n"
    assert api.sh(room, "pwd", workdir="sub") == "/workspace/sub\n"
    assert api.sh(room, "pwd", workdir=None) == "/workspace\n"


@pytest.mark.needs("processes")
@pytest.mark.behaviour("EXEC-005")
@pytest.mark.parametrize("workdir", ["/no/such", "nope", "/etc/hostname", "/root-only", ""])
def test_an_unusable_workdir_is_400_and_named(api: Api, room: str, workdir: str) -> None:
    api.sh(room, "mkdir -p /workspace/shut && chmod 0 /workspace/shut")
    sent = "/workspace/shut" if workdir == "/root-only" else workdir
    for answer in (
        api.exec(room, "true", workdir=sent),
        api.call("POST", f"/sandboxes/{room}/exec/stream", json={"command": "true", "workdir": sent}),
    ):
        refused(answer, 400, says=sent or "workdir")


@pytest.mark.needs("processes")
@pytest.mark.behaviour("EXEC-006")
def test_env_of_the_call_is_added_to_env_of_the_sandbox(api: Api) -> None:
    sandbox = api.new(env={"A": "box", "B": "box", "EMPTY": ""})["id"]
    script = 'echo "$A $B $C [$EMPTY]"; echo "$HOME $(id -u)"'
    assert api.sh(sandbox, script, env={"B": "call", "C": "漢 x=y\n2"}) == "box call 漢 x=y\n2 []\n/workspace 1000\n"
    assert api.sh(sandbox, script) == "box box  []\n/workspace 1000\n"


@pytest.mark.behaviour("EXEC-007", "B05")
@pytest.mark.parametrize(
    ("command", "code", "names"),
    [
        (["no-such-binary"], 127, "no-such-binary"),
        (["/no/such/path"], 127, "/no/such/path"),
        ("no-such-binary", 127, "no-such-binary"),
        pytest.param(["/etc/passwd"], 126, "/etc/passwd", marks=REAL),
        pytest.param(["/tmp"], 126, "/tmp", marks=REAL),
        ("exit 255", 255, ""),
        ("exit 0", 0, ""),
        pytest.param("kill -9 $$", 137, "", marks=REAL),
        pytest.param("kill -TERM $$", 143, "", marks=REAL),
        pytest.param("kill -INT $$", 130, "", marks=REAL),
        pytest.param("kill -SEGV $$", 139, "", marks=REAL),
        pytest.param(["sh", "-c", "kill -USR1 $$"], 138, "", marks=REAL),
        (["false"], 1, ""),
    ],
    ids=lambda value: str(value)[:30],
)
def test_outcomes_are_kept_apart_on_both_endpoints(api: Api, room: str, command: Any, code: int, names: str) -> None:
    result = api.run(room, command)
    assert result["exit_code"] == code and not result["timed_out"], result
    assert names in result["stderr"]
    stream = api.stream(room, command)
    assert stream.finished["exit_code"] == code
    assert names in stream.text("stderr")


@pytest.mark.needs("processes")
@pytest.mark.behaviour("EXEC-008")
def test_a_script_with_a_missing_interpreter_is_127_and_names_it(api: Api, room: str) -> None:
    api.write(room, "script", "#!/no/such/interpreter\n", mode="755")
    result = api.run(room, ["./script"])
    assert result["exit_code"] == 127 and "script" in result["stderr"] and "interpreter" in result["stderr"]


@pytest.mark.needs("processes")
@pytest.mark.behaviour("EXEC-009")
def test_the_program_is_looked_up_in_the_commands_own_path(api: Api, room: str) -> None:
    api.write(room, "bin/mine", "#!/bin/sh\necho mine\n", mode="755")
    assert api.sh(room, ["mine"], env={"PATH": "/workspace/bin:/bin:/usr/bin"}) == "mine\n"
    assert api.run(room, ["mine"])["exit_code"] == 127
    assert api.run(room, ["ls"], env={"PATH": "/nowhere"})["exit_code"] == 127


@pytest.mark.behaviour("EXEC-010")
@pytest.mark.parametrize("command", ["", [], [""]], ids=repr)
def test_an_empty_command_is_400(api: Api, room: str, command: Any) -> None:
    refused(api.exec(room, command), 400, says="command")
    refused(api.call("POST", f"/sandboxes/{room}/exec/stream", json={"command": command}), 400, says="command")


@pytest.mark.behaviour("EXEC-011")
@pytest.mark.parametrize(
    "body",
    [
        {"command": "echo a\0b"},
        {"command": ["echo", "a\0b"]},
        {"command": "true", "workdir": "/tmp\0x"},
        {"command": "true", "env": {"TOKEN": "s3cr3t\0x"}},
        {"command": "true", "env": {"BAD NAME": "s3cr3t"}},
        {"command": "true", "env": {"": "s3cr3t"}},
        {"command": "true", "env": {"A=B": "s3cr3t"}},
    ],
    ids=json.dumps,
)
def test_a_nul_or_a_bad_name_is_400_without_values(api: Api, room: str, body: dict[str, Any]) -> None:
    for path in ("exec", "exec/stream"):
        assert "s3cr3t" not in refused(api.call("POST", f"/sandboxes/{room}/{path}", json=body), 400)


@pytest.mark.needs("processes")
@pytest.mark.behaviour("EXEC-012")
def test_arguments_go_up_to_the_kernels_limit_and_over_it_is_400(api: Api, room: str) -> None:
    assert api.sh(room, ["printf", "%s", "x" * 131_071]) == "x" * 131_071
    refused(api.exec(room, ["printf", "%s", "x" * 131_072]), 400, says="131")
    refused(api.exec(room, ["true", *["y" * 100_000] * 40]), 400)
    refused(api.exec(room, "true", env={f"V{n}": "y" * 100_000 for n in range(40)}), 400)
    assert api.sh(room, "wc -c <<E\n" + "z" * 100_000 + "\nE").strip() == "100001"


@pytest.mark.needs("processes")
@pytest.mark.behaviour("EXEC-013", "B01")
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_utf8_survives_every_chunk_boundary(api: Api, room: str, k: int) -> None:
    program = "import sys;sys.stdout.buffer.write(b'a'*K+('漢'*400000).encode());sys.stderr.buffer.write(b'b'*K+('🙂'*200000).encode())"
    command = ["python3", "-c", program.replace("K", str(k))]
    out, err = "a" * k + "漢" * 400_000, "b" * k + "🙂" * 200_000
    result = api.run(room, command, timeout_seconds=60)
    assert result["exit_code"] == 0 and result["stdout"] == out and result["stderr"] == err and result["truncated"] is False
    stream = api.stream(room, command, timeout_seconds=60)
    assert stream.finished["exit_code"] == 0 and stream.text("stdout") == out and stream.text("stderr") == err


@pytest.mark.needs("processes")
@pytest.mark.behaviour("EXEC-014")
def test_bytes_that_are_not_utf8_become_replacement_characters(api: Api, room: str) -> None:
    raw = b"ok \xff\xfe \xe6\xbc\xa2 \xed\xa0\x80 \xf0\x9f\x99 end\xc3"
    api.write(room, "raw", raw)
    wanted = raw.decode("utf-8", "replace")
    assert api.sh(room, ["cat", "raw"]) == wanted
    assert api.stream(room, ["cat", "raw"]).text("stdout") == wanted
    assert api.stream(room, r"printf '\346'; sleep 0.3; printf '\274'; sleep 0.3; printf '\242!'").text("stdout") == "漢!"


@pytest.mark.needs("processes")
@pytest.mark.behaviour("EXEC-015", "B01")
def test_output_over_the_limit_is_cut_and_flagged_and_the_command_still_ends(small: Api) -> None:
    sandbox = small.new()["id"]
    program = "import sys;sys.stdout.buffer.write(('漢'*400000).encode());open('/workspace/done','w').close()"
    result = small.run(sandbox, ["python3", "-c", program], timeout_seconds=7)
    assert result["truncated"] is True and result["exit_code"] == 0
    text = result["stdout"]
    assert text.rstrip("�") == "漢" * len(text.rstrip("�")) and len(text) - len(text.rstrip("�")) <= 1
    assert 333_332 <= len(text.rstrip("�")) <= 333_334
    assert small.read(sandbox, "done") == b""


@pytest.mark.needs("processes")
@pytest.mark.behaviour("EXEC-016")
def test_the_output_limit_counts_both_streams_together(small: Api) -> None:
    sandbox = small.new()["id"]
    result = small.run(sandbox, "head -c 700000 /dev/zero | tr '\\0' o; head -c 700000 /dev/zero | tr '\\0' e >&2", timeout_seconds=7)
    assert result["truncated"] is True
    assert len(result["stdout"]) + len(result["stderr"]) == 1_000_001
    assert set(result["stdout"]) <= {"o"} and set(result["stderr"]) <= {"e"}
    exact = small.run(sandbox, "head -c 1000001 /dev/zero | tr '\\0' o", timeout_seconds=7)
    assert len(exact["stdout"]) == 1_000_001 and exact["truncated"] is False
    streamed = small.stream(sandbox, "head -c 3000000 /dev/zero | tr '\\0' o", timeout_seconds=7)
    assert len(streamed.text("stdout")) == 3_000_000 and streamed.finished["exit_code"] == 0


@pytest.mark.behaviour("EXEC-017", "B02")
def test_the_capped_output_is_a_true_prefix(api: Api, room: str) -> None:
    whole = "".join(f"{n}\n" for n in range(1, 2_000_001))
    assert len(whole) == 14_888_896
    result = api.run(room, "seq 1 2000000", timeout_seconds=120)
    assert result["exit_code"] == 0 and result["truncated"] is True
    assert result["stdout"] == whole[:10_485_760]


@pytest.mark.behaviour("EXEC-018", "B02")
def test_a_thousand_short_commands_lose_nothing(api: Api, room: str) -> None:
    def one(number: int) -> tuple[str, int]:
        if number % 2:
            result = api.run(room, "echo hello")
            assert result["truncated"] is False
            return result["stdout"], result["exit_code"]
        stream = api.stream(room, "echo hello")
        return stream.text("stdout"), stream.finished["exit_code"]

    with ThreadPoolExecutor(20) as pool:
        results = list(pool.map(one, range(1000)))
    assert results == [("hello\n", 0)] * 1000


@pytest.mark.needs("processes")
@pytest.mark.behaviour("EXEC-019")
def test_a_command_over_the_process_limit_is_126_and_says_so(api: Api) -> None:
    sandbox = api.new(pids_limit=16)["id"]
    api.write(sandbox, "hog.py", HOG.encode())
    api.run(sandbox, "setsid python3 hog.py >full 2>&1 &")
    eventually(lambda: api.read(sandbox, "full") == b"full\n", within=60, why="the process table is full")

    def meets_a_full_table() -> bool:
        # A place that a bridge or the last command gives back goes to whoever is quicker, so not each try does.
        result = api.run(sandbox, ["true"])
        assert result["exit_code"] in (0, 126), result
        assert result["exit_code"] == 0 or "process" in result["stderr"].lower(), result
        return bool(result["exit_code"] == 126)

    eventually(meets_a_full_table, within=60, every=0.01, why="a command meets the process limit")


@pytest.mark.behaviour("EXEC-020")
def test_the_exec_timeout_has_a_default_and_a_maximum(small: Api) -> None:
    sandbox = small.new()["id"]
    result = small.run(sandbox, "sleep 30")
    assert result["timed_out"] is True and 1900 <= result["duration_ms"] <= 5000
    refused(small.exec(sandbox, "true", timeout_seconds=7.5), 400, says="7")
    refused(small.call("POST", f"/sandboxes/{sandbox}/exec/stream", json={"command": "true", "timeout_seconds": 7.5}), 400, says="7")
    assert small.run(sandbox, "true", timeout_seconds=7)["exit_code"] == 0
    assert small.run(sandbox, "true", timeout_seconds="1.5")["exit_code"] == 0


@pytest.mark.behaviour("EXEC-021")
def test_parallel_commands_do_not_wait_for_each_other(api: Api, room: str) -> None:
    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(lambda n: api.run(room, f"sleep 1; echo {n}"), range(32)))
    assert [result["stdout"] for result in results] == [f"{n}\n" for n in range(32)]
    assert max(result["duration_ms"] for result in results) < 8000


@pytest.mark.behaviour("EXEC-022")
def test_files_written_by_a_command_are_seen_by_the_file_calls_at_once(api: Api, room: str) -> None:
    for number in range(20):
        api.sh(room, f"echo {number} > seen")
        assert api.read(room, "seen") == f"{number}\n".encode()


@pytest.mark.behaviour("EXEC-023")
def test_what_cannot_be_sent_as_text_in_a_body_is_refused_not_a_fault(api: Api, room: str) -> None:
    answer = api.call("POST", f"/sandboxes/{room}/exec", content=b'{"command": "echo \\ud800"}', headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422), answer.text
    answer = api.call(
        "POST",
        f"/sandboxes/{room}/exec",
        content=b'{"command": "true", "env": {"A": "\\udfff"}}',
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code in (400, 422), answer.text
