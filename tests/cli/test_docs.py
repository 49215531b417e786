"""docs/cli.md: its examples work as they stand there."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from .conftest import ENTRY, SECONDS, Sandboxctl

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def test_the_examples_of_the_page_work(ctl: Sandboxctl) -> None:
    (script,) = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    program = f'set -eu\nsandboxctl() {{ {shlex.join(ENTRY)} "$@"; }}\n{script}'
    done = subprocess.run(
        ["/bin/bash", "-c", program], env=ctl.environment, cwd=ctl.folder, capture_output=True, text=True, timeout=5 * SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "hello\none\n" in done.stdout
    assert re.findall("^one$", done.stdout, re.MULTILINE) == ["one"] * 2, "the rollback brought it back"
