"""`make bench`: measures Docker mode and writes docs/figures.md and the table in README.md. `--quick` runs a tenth; `--only exec,create` some."""

from __future__ import annotations

import argparse
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker

from tests.support.server import Facade

from . import docker_mode
from .docker_mode import Bench, Row

ROOT = Path(__file__).resolve().parents[2]
MARKS = ("<!-- figures: begin (make bench) -->", "<!-- figures: end -->")


def describe_machine(engine: docker.DockerClient) -> str:
    """The machine the figures were taken on, in one line."""
    info = engine.info()
    model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    cpu = model[1] if model else platform.machine()
    version = f"Docker {info['ServerVersion']}, cgroup v{info.get('CgroupVersion', '1')}, {info['Driver']}, runc"
    return f"{info['NCPU']} cores ({cpu}), {info['MemTotal'] / 2**30:.0f} GiB, Linux {platform.release().split('-')[0]}, {version}"


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| what (median / p99) | agent-sandbox | beside it | ratio |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| {row.what} | {row.ours} | {row.beside} | {row.ratio} |" for row in rows])


def write_report(machine: str, rows: list[Row]) -> None:
    """Writes the figures to their file and between the marks of the README."""
    text = f"Taken on {time.strftime('%Y-%m-%d')} on {machine}.\n\n{table(rows)}\n"
    (ROOT / "docs" / "figures.md").write_text(f"# Figures\n\nWritten by `make bench`, everything in one run.\n\n{text}")
    readme = ROOT / "README.md"
    content = readme.read_text()
    if all(mark in content for mark in MARKS):
        head, rest = content.split(MARKS[0], 1)
        readme.write_text(f"{head}{MARKS[0]}\n{text}{MARKS[1]}{rest.split(MARKS[1], 1)[1]}")


def main() -> None:
    """Runs the sections, prints rows as they come, and writes the report when all of them ran at full size."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls; writes no report")
    parser.add_argument("--only", default="", help="sections, comma-separated: exec, create, files, snapshots, guest, memory; writes no report")
    options = parser.parse_args()
    scale = 0.1 if options.quick else 1.0
    image = os.environ.get("AGENT_SANDBOX_TEST_IMAGE", "python:3.12-slim")
    engine = docker.from_env()
    binary = ROOT / "api" / "agent_sandbox_core" / "_guest" / "sandbox-init-linux-amd64"
    sections: dict[str, Callable[[Bench], Iterator[Row]]] = {
        "guest": lambda bench: docker_mode.measure_guest(bench, binary),
        "exec": lambda bench: docker_mode.measure_exec(bench, scale),
        "create": lambda bench: docker_mode.measure_create(bench, scale),
        "files": lambda bench: docker_mode.measure_files(bench, scale),
        "snapshots": lambda bench: docker_mode.measure_snapshots(bench, scale),
        "memory": lambda bench: docker_mode.measure_memory(bench, scale),
    }
    chosen = [name for name in sections if not options.only or name in options.only.split(",")]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="agent-sandbox-bench-") as data:
        settings = {"DEFAULT_IMAGE": image, "LOG_LEVEL": "warning", "MAX_SNAPSHOT_BYTES": str(4 << 30), "MAX_SANDBOXES": "50"}
        facade = Facade("docker", Path(data) / "data", settings).start()
        try:
            for name in chosen:
                for row in sections[name](Bench(facade, engine, image)):
                    print(f"{row.what:45} {row.ours:40} {row.beside:50} {row.ratio}", flush=True)
                    rows.append(row)
        finally:
            facade.stop()
    if not options.quick and not options.only:
        write_report(describe_machine(engine), rows)


if __name__ == "__main__":
    main()
