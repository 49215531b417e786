"""The program itself: help, speed, completion, servers that are not there, backends without a server."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import pytest
from agent_sandbox_client.cli.app import COMMANDS, root
from agent_sandbox_core.version import __version__
from typer.main import get_command

from tests.support.server import clean_environment

from .conftest import ENTRY, PLUGIN, Sandboxctl

HELP_SECONDS = 0.15


def test_help_names_every_command(alone: Sandboxctl) -> None:
    for said in (alone.say("--help"), alone.say("-h")):
        assert all(f"\n  {name} " in said for name in COMMANDS)


def test_summaries_are_those_of_the_commands() -> None:
    group: Any = get_command(root)
    for name, entry in COMMANDS.items():
        assert group.commands[name].get_short_help_str(500).startswith(entry.summary.rstrip(".").split(" Settings")[0]), name


def test_every_command_explains_itself_and_has_json(alone: Sandboxctl) -> None:
    for name in set(COMMANDS) - {"snapshot", "serve", "operator", "mover", "openapi", "version", "mcp"}:
        said = alone.say(name, "--help")
        assert "--json" in said, name


def cpu_seconds(*words: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=clean_environment({}))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_loads_no_http_client_no_server_and_no_kubernetes() -> None:
    heavy = ("httpx", "fastapi", "kubernetes", "docker", "websockets", "pydantic", "rich.console")
    code = f"import sys\nfrom agent_sandbox_client.cli import main\ntry:\n    main()\nfinally:\n    print([one for one in {heavy!r} if one in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_help_is_quick() -> None:
    # CPU time, against that of Python itself on this machine now: other work on it must not matter.
    ours = min(cpu_seconds(*ENTRY, "--help") for _ in range(5))
    slowness = max(1.0, min(cpu_seconds(sys.executable, "-c", "pass") for _ in range(5)) / 0.012)
    assert ours < HELP_SECONDS * slowness, f"{ours * 1000:.0f} ms of CPU on a machine {slowness:.1f} times as slow as it should be"


def test_version_is_printed(alone: Sandboxctl) -> None:
    assert alone.say("version") == f"{__version__}\n"


def test_a_typing_error_gets_a_proposal(alone: Sandboxctl) -> None:
    assert "Did you mean 'list'" in alone.fail("lst", code=2)


def test_no_server_says_how_to_get_one(alone: Sandboxctl) -> None:
    said = alone.fail("list", "--url", "http://127.0.0.1:9")
    assert "nothing answers at http://127.0.0.1:9" in said
    assert "--backend docker" in said


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://x", "http://[::1", ""])
def test_an_address_that_is_none_is_told(alone: Sandboxctl, url: str) -> None:
    done = alone.run("list", "--url", url)
    assert done.returncode in (1, 2)
    assert b"http://127.0.0.1:8080" in done.stderr
    assert b"Traceback" not in done.stderr


def test_memory_works_without_a_server(alone: Sandboxctl) -> None:
    assert alone.json("create", "--backend", "memory")["status"] == "running"
    assert alone.say("list", "-q", "--backend", "memory") == "", "it ends with the command"


def test_a_backend_that_is_none_and_a_server_with_a_backend_are_refused(alone: Sandboxctl) -> None:
    assert "docker, kubernetes, memory" in alone.fail("list", "--backend", "podman", code=2)
    assert "give one of them" in alone.fail("list", "--backend", "memory", "--url", "http://127.0.0.1:9", code=2)


def test_a_cluster_that_is_not_there_is_told_in_one_line(alone: Sandboxctl) -> None:
    missing = str(alone.folder / "absent")
    plugin = Sandboxctl(alone.environment | {"KUBECONFIG": missing}, alone.folder, PLUGIN)
    for said in (alone.run("list", "--backend", "kubernetes", KUBECONFIG=missing).stderr, plugin.run("list").stderr):
        assert missing.encode() in said
        assert said.count(b"\n") == 1


def test_the_plugin_calls_itself_by_its_name(alone: Sandboxctl) -> None:
    assert "Usage: kubectl sandbox [OPTIONS] COMMAND" in Sandboxctl(alone.environment, alone.folder, PLUGIN).say("--help")


def test_shells_complete_commands_options_and_ids(ctl: Sandboxctl, box: str) -> None:
    def complete(line: str) -> str:
        words = {"_SANDBOXCTL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - (0 if line.endswith(" ") else 1))}
        return ctl.run(**words).stdout.decode()

    assert complete("sandboxctl sn").split() == ["snapshot"]
    assert "--memory" in complete("sandboxctl create --mem").split()
    assert box in complete("sandboxctl exec ").split()
    assert complete(f"sandboxctl get {box[:-2]}").split()[-1:] == [box]


def test_completion_scripts_are_printed(ctl: Sandboxctl) -> None:
    assert (
        "_SANDBOXCTL_COMPLETE"
        in ctl.run("--show-completion", "bash", SHELL="/bin/bash").stdout.decode() + ctl.run(_SANDBOXCTL_COMPLETE="source_bash").stdout.decode()
    )


def test_the_schema_is_printed(alone: Sandboxctl) -> None:
    assert "/v1/sandboxes" in json.loads(alone.say("openapi"))["paths"]
