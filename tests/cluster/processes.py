"""Which processes belong to a cluster, from what the kernel says: no file can be stale, and nothing that lost its file is overlooked."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.console import ClusterError
from tests.cluster.layout import CGROUP_ROOT, MARK

KILL_SECONDS = 30.0


@dataclass(frozen=True)
class Process:
    """One process, as the machine numbers it."""

    pid: int
    mark: str
    depth: int
    inner: int

    @property
    def first(self) -> bool:
        """Whether it is process 1 of a node: of a process namespace directly below ours."""
        return self.inner == 1 and self.depth == own_depth() + 1


def namespace_pids(pid: int | str) -> list[int]:
    """The process's numbers, from the outermost namespace that we see to its own."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return [int(number) for number in line.split()[1:]]
    return [int(pid)]


def own_depth() -> int:
    """How many numbers a process of our own namespace has."""
    return len(namespace_pids("self"))


def marked(cluster: str) -> list[Process]:
    """Processes with the cluster's mark in their environment: launchers, supervisors and components, not what runs in pods."""
    prefix = f"{MARK}={cluster}/".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            mark = next((v for v in variables if v.startswith(prefix)), None)
            if mark is not None:
                pids = namespace_pids(entry.name)
                found.append(Process(int(entry.name), mark.split(b"=", 1)[1].decode(), len(pids), pids[-1]))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def grouped(cluster: str) -> list[int]:
    """Processes in the cluster's control groups: everything, pods included."""
    marker = f"/{CGROUP_ROOT}/{cluster}/"
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if marker in (entry / "cgroup").read_text():
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def supervisors(cluster: str) -> dict[str, int]:
    """Process 1 of each running node, by the node's name."""
    return {process.mark.split("/", 1)[1]: process.pid for process in marked(cluster) if process.first}


def everything(cluster: str, node: str | None = None) -> set[int]:
    """All processes of a cluster, or of one of its nodes."""
    scope = cluster if node is None else f"{cluster}/{node}"
    if node is None:
        return {process.pid for process in marked(cluster)} | set(grouped(cluster))
    named = {process.pid for process in marked(cluster) if process.mark == scope}
    return named | set(grouped(scope))


def kill(cluster: str, node: str | None = None) -> int:
    """Kills all of them and waits until they are gone; returns how many there were. The supervisors' deaths take most with them."""
    seen: set[int] = set()
    deadline = time.monotonic() + KILL_SECONDS
    while left := everything(cluster, node) - {os.getpid()}:
        seen |= left
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            told = ", ".join(f"{pid} ({name_of(pid)})" for pid in sorted(left))
            raise ClusterError(f"processes do not end after SIGKILL for {KILL_SECONDS:.0f} s: {told}; the kernel's log may say why (dmesg)")
        time.sleep(0.05)
    return len(seen)


def name_of(pid: int) -> str:
    """What a process calls itself."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return "gone"
