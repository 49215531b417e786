"""The layout's traps: `operator/` must never shadow the standard library, and files stay small enough to hold in the head."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LONGEST = 640


def tracked_sources() -> list[Path]:
    """Our own Python and Go files, without what is vendored."""
    found = [
        path
        for folder in ("api", "operator", "init", "tests", "tools", "demo")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".go"}
    ]
    return [path for path in found if "vendor" not in path.parts]


def test_operator_is_the_standard_library_from_the_root_of_the_checkout() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists(), "operator/__init__.py would shadow the standard library's operator"
    command = [sys.executable, "-S", "-c", "import operator; print(operator.__file__)"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert not Path(done.stdout.strip()).is_relative_to(ROOT)


def test_no_source_file_is_too_long_to_hold_in_the_head() -> None:
    sources = tracked_sources()
    assert len(sources) > 20
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources}
    assert {name: count for name, count in lengths.items() if count > LONGEST} == {}
