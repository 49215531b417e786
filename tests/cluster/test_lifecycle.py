"""up and down of clusters of their own, beside the one that all tests share: nothing is left behind, whatever was killed when."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import components, nodes, own, processes
from tests.cluster.fixtures import Cluster
from tests.cluster.layout import CGROUP_ROOT, Layout, state_root
from tests.cluster.objects import FOREVER, claim, pod
from tests.support.waiting import eventually

SIDE = "side"
ROOT = Path(__file__).resolve().parents[2]
KINDS = ("net", "mnt", "pid", "uts", "ipc", "user", "cgroup")


def command(*words: str) -> subprocess.Popen[str]:
    """Our own command line, running."""
    environment = os.environ | {"PROVIDER": "own", "NAME": SIDE, "NODES": "1"}
    return subprocess.Popen([sys.executable, "-m", "tests.cluster", *words], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], seconds: float = 120) -> str:
    """Waits for a command that must succeed; returns what it said."""
    _, said = process.communicate(timeout=seconds)
    assert process.returncode == 0, said
    return said


def up() -> str:
    return finish(command("up", "--few-images"))


def namespaces_of(pids: set[int]) -> set[str]:
    """Namespaces of these processes that are not ours, as `net:[number]`."""
    ours = {str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in KINDS}
    found = set()
    for pid in pids:
        for kind in KINDS:
            try:
                found.add(str(Path(f"/proc/{pid}/ns/{kind}").readlink()))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found - ours


def alive(namespaces: set[str]) -> set[str]:
    """Those of them that a process or a mount still holds."""
    everybody = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    mounted = Path("/proc/self/mountinfo").read_text()
    return namespaces & namespaces_of(everybody) | {name for name in namespaces if name in mounted}


@dataclass
class Traces:
    """What a cluster put on this machine, looked up while it runs, to be looked for when it is gone."""

    name: str
    namespaces: set[str]
    layout: Layout | None

    def left(self) -> list[str]:
        """What of it is still there."""
        found = [f"process {pid} ({processes.name_of(pid)})" for pid in processes.everything(self.name)]
        found += [f"mount {line.split()[1]}" for line in Path("/proc/mounts").read_text().splitlines() if f"/{self.name}/" in line.split()[1]]
        # os.walk: others' groups come and go meanwhile, which a glob does not bear.
        found += [f"control group {path}" for path, _, _ in os.walk("/sys/fs/cgroup") if path.endswith(f"/{CGROUP_ROOT}/{self.name}")]
        found += [f"loop device {line}" for line in output("losetup", "--list", "--noheadings").splitlines() if f"/{self.name}/" in line]
        found += [f"namespace {name}" for name in alive(self.namespaces)]
        found += [f"file {path}" for path in (state_root() / self.name, state_root() / f".{self.name}.gone") if path.exists()]
        if self.layout is not None:
            found += [f"link {node.link}" for node in self.layout.nodes(4) if node.link in nodes.links(None)]
            prefixes = [text.rsplit(".", 1)[0] + "." for text in (self.layout.nodes_range, self.layout.services_range, self.layout.node(1).pods)]
            found += [
                f"route {line}" for line in output("ip", "route", "show", "table", "all").splitlines() if any(prefix in line for prefix in prefixes)
            ]
            found += [f"rule {line}" for line in output("iptables-save").splitlines() if any(prefix in line for prefix in prefixes)]
        return found


def output(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout


def machine_rules() -> list[str]:
    """The machine's firewall without its counters."""
    return [re.sub(r"\[\d+:\d+\]", "", line) for line in output("iptables-save").splitlines() if not line.startswith("#") and "DOCKER" not in line]


def traces() -> Traces:
    record = own.find(SIDE)
    return Traces(SIDE, namespaces_of(processes.everything(SIDE)), record.layout if record else None)


@pytest.fixture
def side(cluster: Cluster) -> Iterator[None]:
    """Room for a cluster called `side`, empty before and after."""
    cluster.needs_own()
    own.down(SIDE)
    yield
    own.down(SIDE)


def supervisors() -> dict[str, int]:
    return processes.supervisors(SIDE)


def test_two_clusters_stand_side_by_side_and_down_leaves_nothing_of_one_and_everything_of_the_other(cluster: Cluster, side: None) -> None:
    rules = machine_rules()
    neighbours = processes.supervisors(cluster.name)
    # Two at once: the second waits for the first and finds everything done.
    first, second = command("up", "--few-images"), command("up", "--few-images")
    finish(first)
    finish(second)
    assert set(supervisors()) == {"node1"}
    record = own.find(SIDE)
    assert record is not None
    assert record.layout.slot != cluster.record.layout.slot
    control = own.kubectl(record.layout).within("default")
    control.apply(*(claim(name, name, "32Mi") for name in ("fast", "disk")))
    control.apply(*(pod(name, "localhost/busybox:1", *FOREVER, claim=name) for name in ("fast", "disk")))
    control.wait("condition=Ready", "pod/fast", "pod/disk", seconds=60)
    assert cluster.kubectl.run("get", "pod", "fast", "--namespace=default", check=False).returncode != 0

    before = traces()
    assert len(before.namespaces) > 5
    finish(command("down"))
    eventually(lambda: not before.left(), within=10, why=f"nothing is left: {before.left()}")
    assert machine_rules() == rules
    assert processes.supervisors(cluster.name) == neighbours
    assert own.works(cluster.record)


def known() -> bool:
    return own.find(SIDE) is not None


def linked() -> bool:
    record = own.find(SIDE)
    return record is not None and record.layout.node(1).link in nodes.links(None)


def manifests_applied() -> bool:
    record = own.find(SIDE)
    return record is not None and components.applied(record.layout).exists()


@pytest.mark.parametrize("point", [known, lambda: bool(supervisors()), linked, manifests_applied], ids=["recorded", "started", "linked", "applied"])
def test_after_kill_9_of_up_at_any_point_down_leaves_nothing(side: None, point: Callable[[], bool]) -> None:
    starting = command("up", "--few-images")
    eventually(point, within=60, every=0.01)
    starting.send_signal(signal.SIGKILL)
    starting.communicate(timeout=10)
    before = traces()
    finish(command("down"))
    eventually(lambda: not before.left(), within=10, why=f"nothing is left: {before.left()}")


def test_up_heals_what_was_killed_and_does_nothing_where_nothing_is_missing(side: None) -> None:
    starting = command("up", "--few-images")
    eventually(linked, within=60, every=0.01)
    starting.send_signal(signal.SIGKILL)
    starting.communicate(timeout=10)
    up()
    record = own.find(SIDE)
    assert record is not None
    control = own.kubectl(record.layout)
    control.run("create", "namespace", "kept")

    def pids() -> dict[str, int | None]:
        return {name: state["pid"] for name, state in nodes.states(record.layout.node(1)).items()}

    running = supervisors(), pids()
    began = time.monotonic()
    up()
    assert time.monotonic() - began < 10
    assert (supervisors(), pids()) == running

    for component in ("etcd", "kube-apiserver", "containerd", "kubelet"):
        nodes.order(record.layout.node(1), "kill", component)
    up()
    assert control.find("namespace", "kept") is not None

    os.kill(supervisors()["node1"], signal.SIGKILL)
    eventually(lambda: not supervisors(), within=10)
    up()
    assert control.find("namespace", "kept") is not None
    control.within("default").apply(pod("after", "localhost/busybox:1", *FOREVER))
    control.within("default").wait("condition=Ready", "pod/after", seconds=60)
