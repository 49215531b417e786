"""exec: output as it comes, the command's exit code, nothing left behind."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests.support.lifecycle import assert_no_strays
from tests.support.server import Facade

from .conftest import Sandboxctl, wait_for_line


def test_output_and_exit_code_are_those_of_the_command(ctl: Sandboxctl, box: str) -> None:
    done = ctl.run("exec", box, "-c", "echo out; echo err >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"err\n")


def test_words_after_the_sandbox_are_the_commands(ctl: Sandboxctl, box: str) -> None:
    assert ctl.say("exec", box, "-w", "/tmp", "echo", "--json", "-c", "a b") == "--json -c a b\n"
    assert ctl.say("exec", box, "--", "echo", "--", "x") == "-- x\n"


def test_json_gives_the_whole_result_and_the_exit_code(ctl: Sandboxctl, box: str) -> None:
    done = ctl.run("exec", "--json", box, "-c", "echo out; exit 4")
    assert done.returncode == 4
    assert b'"stdout": "out\\n"' in done.stdout


def test_environment_and_folder_reach_the_command(ctl: Sandboxctl, box: str) -> None:
    ctl.say("exec", box, "mkdir", "/workspace/d")
    assert ctl.say("exec", "-w", "/workspace/d", "-e", "A=b", box, "-c", "pwd; echo $A") == "/workspace/d\nb\n"


def test_a_timeout_is_told_beside_the_output_so_far(ctl: Sandboxctl, box: str) -> None:
    done = ctl.run("exec", "--timeout", "1s", box, "-c", "echo begun; sleep 30")
    assert done.returncode != 0
    assert done.stdout == b"begun\n"
    assert b"killed at its timeout" in done.stderr


def test_output_comes_while_the_command_runs(ctl: Sandboxctl, box: str) -> None:
    with ctl.popen("exec", box, "-c", "echo first; sleep 60", stdout=subprocess.PIPE) as process:
        assert wait_for_line(process) == b"first\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


@pytest.mark.needs("processes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_command_ends_with_its_caller(ctl: Sandboxctl, facade: Facade, box: str, number: signal.Signals) -> None:
    with ctl.popen("exec", box, "-c", "echo first; sleep 600 & sleep 600", stdout=subprocess.PIPE) as process:
        assert wait_for_line(process) == b"first\n"
        process.send_signal(number)
        process.wait(20)
    assert_no_strays(facade.api, box)


@pytest.mark.needs("processes")
def test_a_closed_pipe_is_no_error(ctl: Sandboxctl, box: str) -> None:
    with ctl.popen("exec", box, "-c", "yes", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert wait_for_line(process) == b"y\n"
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
        process.wait(20)
    assert b"Traceback" not in said


def test_a_failure_of_ours_is_no_exit_code_of_the_command(ctl: Sandboxctl, box: str) -> None:
    assert ctl.fail("exec", "sb_0000000000000000", "true", code=125) == "sandboxctl: sandbox sb_0000000000000000 not found\n"
    assert "/absent" in ctl.fail("exec", "-w", "/absent", box, "true", code=125)


def test_a_command_line_that_cannot_be_meant_is_refused(ctl: Sandboxctl, box: str) -> None:
    assert "give a command" in ctl.fail("exec", box, code=2)
    assert "give a command" in ctl.fail("exec", "-c", "true", box, "true", code=2)
