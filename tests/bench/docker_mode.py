"""The figures of Docker mode. Each function returns rows: what, ours, beside it, the ratio."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker

from tests.support.server import Facade

from .measure import Line, Sample, time_calls, time_parallel

SMALL_FILES = "import os\nfor i in range(1000):\n d=f'd{i%20}'; os.makedirs(d,exist_ok=True); open(f'{d}/{i}','wb').write(os.urandom(10486))"
MANY_FILES = "import os\nfor i in range(20000):\n d=f'd{i%200}'; os.makedirs(d,exist_ok=True); open(f'{d}/{i}','wb').write(b'%d'%i*20)"
ONE_GIB = "import os\nwith open('big','wb') as f:\n for i in range(1024): f.write(os.urandom(1<<19)+bytes(1<<19))"


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    what: str
    ours: str
    beside: str = ""
    ratio: str = ""


@dataclass(frozen=True)
class Bench:
    """A running facade, a line to it and the engine beside it."""

    facade: Facade
    engine: docker.DockerClient
    image: str

    def line(self) -> Line:
        """A fresh connection to the facade."""
        return Line(self.facade.port, self.facade.key)

    @contextlib.contextmanager
    def sandbox(self, **body: Any) -> Iterator[str]:
        """A sandbox for the time of the block."""
        line = self.line()
        made = str(line.call("POST", "/sandboxes", body)["id"])
        try:
            yield made
        finally:
            line.call("DELETE", f"/sandboxes/{made}")

    @contextlib.contextmanager
    def plain(self) -> Iterator[Any]:
        """A plain hardened container of the same image, as `docker run -d` makes it."""
        container = self.run_plain()
        try:
            yield container
        finally:
            container.remove(force=True)

    def run_plain(self) -> Any:
        """Creates and starts it."""
        return self.engine.containers.run(
            self.image, ["sleep", "600"], detach=True, user="1000:1000", read_only=True, cap_drop=["ALL"], security_opt=["no-new-privileges"],
            network_mode="none", mem_limit="512m", memswap_limit="512m", nano_cpus=10**9, pids_limit=256, tmpfs={"/tmp": "size=64m"},
            labels={"agent-sandbox-bench": "plain"},
        )  # fmt: skip


def measure_exec(bench: Bench, scale: float) -> Iterator[Row]:
    """Commands: one after another, 32 at once on one sandbox, and over eight."""
    with bench.sandbox() as sandbox, bench.plain() as plain:
        line = bench.line()
        ours = time_calls(lambda: line.exec(sandbox, ["true"]), int(1000 * scale), warm=20)
        fresh = time_calls(lambda: plain.exec_run(["true"]), int(100 * scale), warm=2)
        yield Row("exec of `true`, warm, p50 / p99", str(ours), f"docker exec by its API: {fresh}", f"1/{fresh.p50 / ours.p50:.0f}")
        shell = time_calls(lambda: line.exec(sandbox, "echo hello"), int(500 * scale), warm=5)
        yield Row("exec of `echo hello` by sh", str(shell))

        def engine_exec() -> Callable[[], object]:
            client = docker.from_env().containers.get(plain.id)
            return lambda: client.exec_run(["true"])

        many, rate = time_parallel([lambda: call_exec(bench, sandbox)] * 32, max(1, int(40 * scale)))
        beside, slow_rate = time_parallel([engine_exec] * 32, max(1, int(4 * scale)))
        yield Row("32 callers at once, one sandbox", f"{rate:.0f}/s, {many}", f"{slow_rate:.0f}/s, {beside}", f"{rate / slow_rate:.0f} ×")
    with contextlib.ExitStack() as stack:
        sandboxes = [stack.enter_context(bench.sandbox()) for _ in range(8)]
        makers = [lambda s=sandboxes[i % 8]: call_exec(bench, s) for i in range(32)]
        spread, rate = time_parallel(makers, max(1, int(40 * scale)))
        yield Row("32 callers at once, eight sandboxes", f"{rate:.0f}/s, {spread}")


def call_exec(bench: Bench, sandbox: str) -> Callable[[], object]:
    """A caller with a connection of its own."""
    line = bench.line()
    return lambda: line.exec(sandbox, ["true"])


def measure_create(bench: Bench, scale: float) -> Iterator[Row]:
    """Creates and deletes, alternating with plain containers so that both see the same machine."""
    ours: list[float] = []
    theirs: list[float] = []
    deletes: list[float] = []
    line = bench.line()
    for _ in range(max(3, int(20 * scale))):
        begun = time.perf_counter()
        made = line.call("POST", "/sandboxes", {})["id"]
        ours.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        container = bench.run_plain()
        theirs.append(time.perf_counter() - begun)
        container.remove(force=True)
        begun = time.perf_counter()
        line.call("DELETE", f"/sandboxes/{made}")
        deletes.append(time.perf_counter() - begun)
    create, plain = Sample(ours), Sample(theirs)
    yield Row("create, until a command can run", str(create), f"plain hardened docker run -d: {plain}", f"{create.p50 / plain.p50:.2f} ×")
    yield Row("delete", str(Sample(deletes)))


def measure_files(bench: Bench, scale: float) -> Iterator[Row]:
    """A listing of 1,000 entries, small reads and writes."""
    with bench.sandbox() as sandbox:
        line = bench.line()
        line.exec(sandbox, ["python3", "-c", "for i in range(1000): open(f'f{i:04}','w').write('x')"])
        yield Row("list of 1,000 entries", str(time_calls(lambda: line.call("GET", f"/sandboxes/{sandbox}/files/list"), int(50 * scale), warm=2)))
        put = time_calls(lambda: line.call("PUT", f"/sandboxes/{sandbox}/files?path=small.txt", "x" * 1000), int(200 * scale), warm=5)
        yield Row("write of a 1 kB file", str(put))


def measure_snapshots(bench: Bench, scale: float) -> Iterator[Row]:
    """Snapshot, rollback and fork of three workspaces."""
    line = bench.line()
    create = time_calls(lambda: line.call("DELETE", f"/sandboxes/{line.call('POST', '/sandboxes', {})['id']}"), max(2, int(5 * scale)))
    yield Row("create and delete, for scale", str(create))
    for name, script, megabytes, rounds in (
        ("1,000 files, 10 MB", SMALL_FILES, 10, max(2, int(10 * scale))),
        ("20,000 small files", MANY_FILES, 0, max(1, int(3 * scale))),
        ("1 GiB in one file", ONE_GIB, 1074, 1),
    ):
        taken, back, forked = time_state(bench, script, rounds)
        for what, sample in (("snapshot", taken), ("rollback", back), ("fork", forked)):
            speed = f", {megabytes / (sample.p50 / 1000):.0f} MB/s" if megabytes > 100 else ""
            yield Row(f"{what} of {name}", f"{sample}{speed}")


def time_state(bench: Bench, script: str, rounds: int) -> tuple[Sample, Sample, Sample]:
    """Snapshots, rollbacks and forks of the workspace that the script makes."""
    line = bench.line()
    snapshots: list[str] = []
    forks: list[str] = []
    with bench.sandbox(memory_mb=1024) as sandbox:
        line.exec(sandbox, ["python3", "-c", script])
        taken = time_calls(lambda: snapshots.append(line.call("POST", f"/sandboxes/{sandbox}/snapshots", {})["id"]), rounds)
        back = time_calls(lambda: line.call("POST", f"/sandboxes/{sandbox}/rollback", {"snapshot_id": snapshots[0]}), rounds)
        forked = time_calls(lambda: forks.append(line.call("POST", f"/snapshots/{snapshots[0]}/fork", {})["id"]), rounds)
    for fork in forks:
        line.call("DELETE", f"/sandboxes/{fork}")
    for snapshot in snapshots:
        line.call("DELETE", f"/snapshots/{snapshot}")
    return taken, back, forked


def measure_guest(bench: Bench, binary: Path) -> Iterator[Row]:
    """sandbox-init itself: the binary, and its memory when idle."""
    yield Row("sandbox-init, binary (amd64)", f"{binary.stat().st_size / 1e6:.1f} MB")
    with bench.sandbox() as sandbox:
        pid = bench.engine.containers.get(f"agent-sandbox-{sandbox}").attrs["State"]["Pid"]
        status = Path(f"/proc/{pid}/status")
        rss = next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmRSS")) if status.exists() else "0"
        yield Row("sandbox-init, resident memory when idle", f"{int(rss) / 1024:.1f} MB" if status.exists() else "unknown: the engine is remote")


def measure_memory(bench: Bench, scale: float) -> Iterator[Row]:
    """The facade's memory while 1 GiB streams out and in, and after many execs."""
    with bench.sandbox() as sandbox:
        line = bench.line()
        for _ in range(200):
            line.exec(sandbox, ["true"])
        before = bench.facade.figures().rss
        bench.facade.reset_peak()
        total = stream_out(bench, sandbox, int(1024 * scale) << 20)
        yield Row(
            f"facade memory while {total >> 20} MiB stream out", f"+{(bench.facade.figures().peak - before) / 1e6:.1f} MB over {before / 1e6:.0f} MB"
        )
        bench.facade.reset_peak()
        body = b"x" * (32 << 20)
        for _ in range(max(1, int(32 * scale))):
            line.connection.request(
                "PUT", f"/v1/sandboxes/{sandbox}/files?path=in.bin", body, line.headers | {"Content-Type": "application/octet-stream"}
            )
            answer = line.connection.getresponse()
            answer.read()
            if answer.status != 200:
                raise SystemExit(f"upload failed with {answer.status}")
        yield Row(f"facade memory while {int(32 * scale) * 32} MiB stream in", f"+{(bench.facade.figures().peak - before) / 1e6:.1f} MB")
        count = int(10_000 * scale)
        time_parallel([lambda: call_exec(bench, sandbox)] * 8, count // 8)
        yield Row(f"facade memory after {count} execs", f"{(bench.facade.figures().rss - before) / 1e6:+.1f} MB")


def stream_out(bench: Bench, sandbox: str, size: int) -> int:
    """Streams `size` bytes of output through exec/stream and returns the bytes of text that arrived."""
    line = bench.line()
    body = f'{{"command":"head -c {size} /dev/zero | tr \\"\\\\0\\" x","timeout_seconds":600}}'
    line.connection.request("POST", f"/v1/sandboxes/{sandbox}/exec/stream", body, line.headers)
    answer = line.connection.getresponse()
    got = 0
    last = b""
    while chunk := answer.read1(1 << 18):
        got += chunk.count(b"x")
        last = (last + chunk)[-200:]
    if b'"exit_code":0' not in last.replace(b" ", b"") or answer.status != http.client.OK or got < size:
        raise SystemExit(f"the stream of {size} bytes ended with {got} and {last!r}")
    return size
