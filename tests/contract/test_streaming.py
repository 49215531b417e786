"""exec/stream: lines as output comes, one exit line last, whole output or an end without exit line, true cancellation."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.client import Api, expect, parse_line, refused
from tests.support.lifecycle import assert_flat, assert_no_strays
from tests.support.server import Facade
from tests.support.waiting import throughout


@pytest.mark.behaviour("STREAM-001")
def test_a_stream_has_output_lines_and_one_exit_line_last(api: Api, room: str) -> None:
    stream = api.stream(room, "echo one; sleep 0.2; echo two >&2; sleep 0.2; exit 4")
    assert stream.text("stdout") == "one\n" and stream.text("stderr") == "two\n"
    assert [event["type"] for event in stream.events] == ["stdout", "stderr", "exit"]
    assert stream.finished["exit_code"] == 4 and stream.finished["timed_out"] is False
    assert 300 <= stream.finished["duration_ms"] < 10_000


@pytest.mark.behaviour("STREAM-002")
def test_output_comes_while_the_command_runs(api: Api, room: str) -> None:
    with api.streaming(room, "echo first; sleep 30", timeout_seconds=60) as answer:
        begun = time.monotonic()
        line = parse_line(next(answer.iter_lines()))
        assert line == {"type": "stdout", "data": "first\n"} and time.monotonic() - begun < 5


@pytest.mark.behaviour("STREAM-003")
def test_a_quiet_command_gets_no_made_up_lines(api: Api, room: str) -> None:
    stream = api.stream(room, "sleep 1.5")
    assert [event["type"] for event in stream.events] == ["exit"] and stream.finished["exit_code"] == 0


@pytest.mark.behaviour("STREAM-004", "B02")
def test_a_slow_reader_gets_the_whole_output_in_order(api: Api, room: str) -> None:
    whole = "".join(f"{n}\n" for n in range(1, 1_000_001))
    assert len(whole) == 6_888_896

    def read(slowly: bool) -> None:
        pieces, last = [], None
        with api.streaming(room, "seq 1 1000000", timeout_seconds=120) as answer:
            tail, begun, got = b"", time.monotonic(), 0
            for chunk in answer.iter_raw(65536):
                got += len(chunk)
                # 2 MB/s, as `curl --limit-rate 2M`: the pace is the input of this test, not a wait for something.
                while slowly and got > 4_000_000 * (time.monotonic() - begun) + 65536:
                    time.sleep(0.005)
                *lines, tail = (tail + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        assert last is None, "nothing follows the exit line"
                        event = parse_line(line.decode())
                        if event["type"] == "exit":
                            last = event
                        else:
                            pieces.append(event["data"])
        assert last is not None and last["exit_code"] == 0
        assert "".join(pieces) == whole

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, [True] * 4 + [False] * 4))


@pytest.mark.behaviour("STREAM-005")
def test_refusals_of_a_stream_are_ordinary_errors(api: Api, room: str) -> None:
    refused(api.call("POST", f"/sandboxes/{room}/exec/stream", json={"command": "true", "workdir": "/no/such"}), 400)


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STREAM-006", "B06")
def test_a_client_that_leaves_a_stream_cancels_its_command(api: Api, box: str) -> None:
    loop = "i=0;while :;do i=$((i+1));echo $i|tee /workspace/tick;sleep 0.1;done"
    with api.streaming(box, loop, timeout_seconds=600) as answer:
        next(answer.iter_lines())
    stopped_ticking(api, box)


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STREAM-007", "B06")
def test_a_client_that_leaves_an_exec_cancels_its_command(api: Api, box: str) -> None:
    loop = "i=0;while :;do i=$((i+1));echo $i|tee /workspace/tick;sleep 0.1;done"
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{api.url}/v1/sandboxes/{box}/exec",
            json={"command": loop, "timeout_seconds": 600},
            headers={"Authorization": f"Bearer {api.key}"},
            timeout=httpx.Timeout(30, read=1.5),
        )
    stopped_ticking(api, box)


def stopped_ticking(api: Api, box: str) -> None:
    """The loop of this sandbox is dead, whole."""
    assert_no_strays(api, box, within=10)
    tick = api.read(box, "tick")
    throughout(lambda: api.read(box, "tick") == tick, seconds=1, why="tick stays as it is")


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STREAM-008", "B06")
@pytest.mark.slow
def test_fifty_aborted_calls_leave_no_process_thread_or_file(api: Api, box: str, facade: Facade) -> None:
    api.run(box, "true")
    before = facade.figures()

    def abort(number: int) -> None:
        with httpx.Client(base_url=api.url, headers={"Authorization": f"Bearer {api.key}"}, timeout=30) as client:
            if number % 2:
                with client.stream("POST", f"/v1/sandboxes/{box}/exec/stream", json={"command": "echo; sleep 304", "timeout_seconds": 600}) as answer:
                    next(answer.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(
                        f"/v1/sandboxes/{box}/exec",
                        json={"command": "echo; sleep 304", "timeout_seconds": 600},
                        timeout=httpx.Timeout(30, read=0.5),
                    )

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(abort, range(50)))
    assert_no_strays(api, box, within=15)
    assert api.run(box, "echo still")["stdout"] == "still\n"
    assert_flat(facade, before, within=15)


@pytest.mark.needs("processes")
@pytest.mark.behaviour("STREAM-009")
def test_one_stream_can_be_left_while_others_go_on(api: Api, room: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(api.stream, room, f"for i in 1 2 3 4 5; do echo {n}.$i; sleep 0.2; done") for n in range(8)]
        for _ in range(5):
            with api.streaming(room, "echo x; sleep 60") as answer:
                next(answer.iter_lines())
        for number, other in enumerate(others):
            stream = other.result(60)
            assert stream.text("stdout") == "".join(f"{number}.{i}\n" for i in range(1, 6)) and stream.finished["exit_code"] == 0


@pytest.mark.behaviour("STREAM-010")
def test_a_reader_that_stalls_holds_up_nobody_else(api: Api, box: str) -> None:
    with api.streaming(box, "seq 1 3000000", timeout_seconds=120) as stalled:
        lines = stalled.iter_lines()
        next(lines)
        begun = time.monotonic()
        assert api.run(box, "echo hi")["stdout"] == "hi\n"
        assert api.stream(box, "seq 1 100000").text("stdout").endswith("100000\n")
        api.write(box, "f", b"x" * 2_000_000)
        assert len(api.read(box, "f")) == 2_000_000
        assert time.monotonic() - begun < 15
        events = [parse_line(line) for line in lines if line.strip()]
        assert events[-1]["type"] == "exit" and events[-1]["exit_code"] == 0 and events[-2]["data"].endswith("3000000\n")


@pytest.mark.behaviour("STREAM-011")
def test_deleting_the_sandbox_ends_its_streams_without_a_false_exit(api: Api) -> None:
    sandbox = api.new()["id"]
    with api.streaming(sandbox, "echo started; sleep 305", timeout_seconds=600) as answer:
        lines = answer.iter_lines()
        next(lines)
        api.delete(sandbox)
        try:
            rest = [parse_line(line) for line in lines if line.strip()]
        except httpx.RemoteProtocolError:
            rest = []
    assert all(event["type"] != "exit" or event["exit_code"] != 0 for event in rest), rest
    expect(api.call("GET", f"/sandboxes/{sandbox}"), 404)
