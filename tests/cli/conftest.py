"""The command line as users run it: a process, against a real facade."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import Facade, clean_environment

SECONDS = 120.0
ENTRY = (sys.executable, "-c", "from agent_sandbox_client.cli import main; main()")
PLUGIN = (sys.executable, "-c", "from agent_sandbox_client.cli import kubectl_main; kubectl_main()")


@dataclass(frozen=True)
class Sandboxctl:
    """sandboxctl with the settings of a facade in its environment."""

    environment: dict[str, str]
    folder: Path
    entry: tuple[str, ...] = field(default=ENTRY)

    def run(self, *words: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
        """The outcome of one command."""
        return subprocess.run(
            [*self.entry, *words], input=stdin, capture_output=True, env=self.environment | environment, cwd=self.folder, timeout=SECONDS, check=False
        )

    def say(self, *words: str, stdin: bytes = b"") -> str:
        """What a command that works prints."""
        done = self.run(*words, stdin=stdin)
        assert done.returncode == 0, f"{words} ended with {done.returncode}: {done.stderr.decode()[-2000:]}"
        return done.stdout.decode()

    def json(self, *words: str, stdin: bytes = b"") -> Any:
        """What a command that works prints with --json."""
        return json.loads(self.say(words[0], *words[1:], "--json", stdin=stdin))

    def fail(self, *words: str, code: int = 1) -> str:
        """What a command that fails says on standard error."""
        done = self.run(*words)
        assert done.returncode == code, f"{words} ended with {done.returncode}: {done.stdout.decode()[-2000:]}{done.stderr.decode()[-2000:]}"
        return done.stderr.decode()

    def popen(self, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """A command that goes on. Ctrl-C reaches it also where the suite was started in the background, which makes its children deaf to it."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return subprocess.Popen([*self.entry, *words], env=self.environment, cwd=self.folder, **options)
        finally:
            signal.signal(signal.SIGINT, before)


@pytest.fixture
def ctl(facade: Facade, tmp_path: Path) -> Iterator[Sandboxctl]:
    """sandboxctl for the shared facade, in a folder of its own; what it made there is deleted afterwards."""
    api = facade.api
    before = {row["id"] for row in (*api.sandboxes(), *api.snapshots())}
    # A terminal's width must not matter.
    environment = clean_environment({"URL": facade.url, "API_KEY": facade.key}) | {"COLUMNS": "200", "HOME": str(tmp_path)}
    yield Sandboxctl(environment, tmp_path)
    for path, rows in (("sandboxes", api.sandboxes()), ("snapshots", api.snapshots())):
        for row in rows:
            if row["id"] not in before:
                assert api.call("DELETE", f"/{path}/{row['id']}").status_code in (204, 404)


@pytest.fixture
def alone(tmp_path: Path) -> Sandboxctl:
    """sandboxctl that knows no server."""
    environment = {name: value for name, value in clean_environment({}).items() if name not in {"KUBECONFIG", "DOCKER_HOST"}}
    return Sandboxctl(environment | {"HOME": str(tmp_path), "COLUMNS": "200", "XDG_DATA_HOME": str(tmp_path / "share")}, tmp_path)


@pytest.fixture
def box(ctl: Sandboxctl) -> str:
    """A sandbox."""
    return ctl.say("create").strip()


def wait_for_line(process: subprocess.Popen[bytes]) -> bytes:
    """The next line that a process writes; its own timeout bounds the wait."""
    assert process.stdout is not None
    return process.stdout.readline()
