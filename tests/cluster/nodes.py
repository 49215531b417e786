"""Starting and ending nodes: control groups, the supervisor in its namespaces, links between machine and nodes. Each step may be repeated."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.cluster import components, machine, pki, processes
from tests.cluster.console import ClusterError, run, say, tail, wait_for, write_if_changed
from tests.cluster.layout import CGROUP_ROOT, MARK, Layout, Node

SUPERVISOR = Path(__file__).resolve().parent / "supervisor.py"
SYSCTLS = {
    "net.ipv4.ip_forward": "1",
    "net.ipv4.conf.all.rp_filter": "0",
    "net.ipv4.conf.default.rp_filter": "0",
    "net.bridge.bridge-nf-call-iptables": "1",
}
SUPERVISOR_SECONDS = 20.0
DISK_BYTES = 64 << 30
CGROUP_SECONDS = 10.0


def prepare_files(layout: Layout, node: Node, binaries: Path) -> None:
    """Certificates, configurations and the supervisor's orders."""
    for folder in (layout.folder, node.folder, node.folder / "containerd"):
        folder.mkdir(parents=True, exist_ok=True)
        # Pods with a user namespace reach their files through these as somebody else.
        folder.chmod(0o755)
    make_disk(node.folder / "disk.ext4")
    pki.ensure_cluster(layout)
    pki.ensure_node(layout, node)
    certificates = {name: layout.folder / "pki" / f"{name}.crt" for name in ("admin", "controller-manager", "scheduler", "proxy")}
    certificates["kubelet"] = node.folder / "pki" / "kubelet.crt"
    for name, certificate in certificates.items():
        write_if_changed(node.folder / "kubeconfigs" / name, pki.kubeconfig(layout, certificate), 0o600)
    write_if_changed(layout.kubeconfig, pki.kubeconfig(layout, certificates["admin"]), 0o600)
    for path, text in components.node_files(layout, node, machine.cni_folder()).items():
        write_if_changed(path, text)
    write_if_changed(node.folder / "spec.json", json.dumps(supervisor_spec(layout, node, binaries), indent=1))


def make_disk(path: Path) -> None:
    """A sparse file with a file system for containerd: it needs no flushes, its thousands of files go with one, and overlays work on it anywhere."""
    if path.exists():
        return
    unfinished = path.with_suffix(".new")
    with unfinished.open("wb") as file:
        file.truncate(DISK_BYTES)
    run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1", "-i", "32768", unfinished)
    unfinished.replace(path)


def supervisor_spec(layout: Layout, node: Node, binaries: Path) -> dict[str, Any]:
    """What the supervisor is told."""
    return {
        "hostname": node.name,
        "disk": str(node.folder / "disk.ext4"),
        "disk_at": str(node.folder / "containerd"),
        "status": str(node.folder / "status.json"),
        "control": str(node.control_socket),
        "cgroups": [str(root / node.cgroup / "system") for root in machine.control_groups()],
        "sysctls": SYSCTLS,
        "components": components.node_components(layout, node, binaries),
    }


def ensure_cgroups(node: Node) -> None:
    """The node's parent in every hierarchy, and beside its pods a leaf for its own processes."""
    for root in machine.control_groups():
        parts = [*node.cgroup.split("/"), "system"]
        for depth in range(1, len(parts) + 1):
            folder = root.joinpath(*parts[:depth])
            folder.mkdir(exist_ok=True)
            if (folder / "cpuset.cpus").exists() and not (folder / "cgroup.controllers").exists():
                # Version 1 lets nobody into a set without processors and memory.
                for name in ("cpuset.cpus", "cpuset.mems"):
                    if not (folder / name).read_text().strip():
                        (folder / name).write_text((folder.parent / name).read_text())
            if (folder.parent / "cgroup.subtree_control").exists():
                offered = (folder.parent / "cgroup.controllers").read_text().split()
                (folder.parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in offered))


def remove_cgroups(cluster: str, node: str | None = None) -> None:
    """Removes the groups of a cluster or a node from the leaves up; the kernel may need a moment after the last process."""
    deadline = time.monotonic() + CGROUP_SECONDS
    for root in machine.all_hierarchies():
        top = root / CGROUP_ROOT / cluster if node is None else root / CGROUP_ROOT / cluster / node
        for folder in sorted((path for path in [top, *top.rglob("*")] if path.is_dir()), key=lambda path: len(path.parts), reverse=True):
            while True:
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError as error:
                    if error.errno != errno.EBUSY or time.monotonic() > deadline:
                        raise ClusterError(f"control group {folder} cannot be removed: {error}") from error
                    time.sleep(0.05)
        if node is None:
            try:
                (root / CGROUP_ROOT).rmdir()
            except OSError:
                # Another cluster's, or never made.
                continue


def ensure_supervisor(node: Node) -> int:
    """Starts the node's process 1 unless it runs; returns its number."""
    running = processes.supervisors(node.cluster).get(node.name)
    if running is not None:
        return running
    # Parts of an earlier one, if any: a launcher that was killed at a bad moment.
    processes.kill(node.cluster, node.name)
    ensure_cgroups(node)
    (node.folder / "status.json").unlink(missing_ok=True)
    log = node.log("supervisor")
    log.parent.mkdir(exist_ok=True)
    # A child of the machine's process 1, not of ours: it outlives this command.
    launch = ["setsid", "--fork", "unshare", "--mount", "--net", "--pid", "--fork", "--uts", "--propagation", "slave"]
    with log.open("ab") as sink:
        subprocess.run(
            [*launch, sys.executable, "-I", str(SUPERVISOR), str(node.folder / "spec.json")],
            env={"PATH": os.environ.get("PATH", os.defpath), MARK: node.mark},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            cwd="/",
            check=True,
            timeout=SUPERVISOR_SECONDS,
        )

    def started() -> int | None:
        pid = processes.supervisors(node.cluster).get(node.name)
        return pid if pid is not None and (node.folder / "status.json").exists() else None

    pid = wait_for(f"start of {node.name}", started, seconds=SUPERVISOR_SECONDS, every=0.05, explain=lambda: f"; the end of {log}:\n{tail(log)}")
    assert pid is not None
    return pid


def inside(pid: int, *argv: str, check: bool = True, seconds: float = 20) -> subprocess.CompletedProcess[str]:
    """Runs a command in the network of the node whose process 1 that is."""
    return run("nsenter", f"--net=/proc/{pid}/ns/net", *argv, check=check, seconds=seconds)


def first_process(node: Node) -> int:
    """Process 1 of a node that must run."""
    pid = processes.supervisors(node.cluster).get(node.name)
    if pid is None:
        raise ClusterError(f"{node.name} of cluster {node.cluster} does not run: `up` starts it")
    return pid


def entering(node: Node, *argv: str) -> list[str]:
    """The command line that runs a command in all of a node's namespaces, as somebody logged in to it would."""
    return ["nsenter", f"--target={first_process(node)}", "--mount", "--net", "--pid", "--uts", "--", *argv]


def enter(node: Node, *argv: str, check: bool = True, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs a command in a node."""
    return run(*entering(node, *argv), check=check, seconds=seconds)


def links(pid: int | None) -> set[str]:
    """Names of network links, of the machine or of a node."""
    listed = run("ip", "-json", "link") if pid is None else inside(pid, "ip", "-json", "link")
    return {entry["ifname"] for entry in json.loads(listed.stdout or "[]")}


def connect(layout: Layout, pids: dict[str, int]) -> None:
    """Links every node with the machine and with every other node, point to point: no bridge, so no rule of the machine's firewall is met."""
    nodes = [layout.node(int(name.removeprefix("node"))) for name in sorted(pids)]
    for node in nodes:
        pid = pids[node.name]
        if "eth0" not in links(pid):
            if node.link in links(None):
                run("ip", "link", "delete", node.link)
            run("ip", "link", "add", node.link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        run("ip", "address", "replace", layout.host, "peer", node.address, "dev", node.link)
        run("ip", "link", "set", node.link, "up")
        inside(pid, "ip", "address", "replace", node.address, "peer", layout.host, "dev", "eth0")
        inside(pid, "ip", "link", "set", "eth0", "up")
        inside(pid, "ip", "route", "replace", "default", "via", layout.host, "dev", "eth0", "src", node.address)
        run("ip", "route", "replace", node.pods, "via", node.address, "dev", node.link)
    first = nodes[0]
    run("ip", "route", "replace", layout.services_range, "via", first.address, "dev", first.link)
    for a in nodes:
        for b in nodes:
            if a.index >= b.index:
                continue
            if b.name not in links(pids[a.name]):
                inside(pids[a.name], "ip", "link", "add", b.name, "type", "veth", "peer", "name", a.name, "netns", str(pids[b.name]))
            for own, other in ((a, b), (b, a)):
                inside(pids[own.name], "ip", "address", "replace", own.address, "peer", other.address, "dev", other.name)
                inside(pids[own.name], "ip", "link", "set", other.name, "up")
                inside(pids[own.name], "ip", "route", "replace", other.pods, "via", other.address, "dev", other.name)


def set_links(layout: Layout, node: Node, state: str) -> None:
    """Takes a node off the network ("down"), or puts it back ("up"): its processes and pods go on."""
    pid = first_process(node)
    for link in sorted(links(pid)):
        if link == "eth0" or link in {other.name for other in layout.nodes(4)}:
            inside(pid, "ip", "link", "set", link, state)
    if state == "up":
        # Routes over a link go when it goes down.
        connect(layout, processes.supervisors(node.cluster))


def order(node: Node, what: str, component: str) -> None:
    """Has the supervisor start, stop or kill one component; returns when that is done."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
        control.settimeout(30)
        try:
            control.connect(str(node.control_socket))
            control.sendall(json.dumps({"do": what, "component": component}).encode())
            answer = json.loads(control.recv(65536))
        except (OSError, ValueError) as error:
            raise ClusterError(
                f"the supervisor of {node.name} does not answer ({error}); the end of its log:\n{tail(node.log('supervisor'))}"
            ) from error
    if answer["problem"]:
        raise ClusterError(answer["problem"])


def states(node: Node) -> dict[str, dict[str, Any]]:
    """What the supervisor told last about its components."""
    try:
        told: dict[str, dict[str, Any]] = json.loads((node.folder / "status.json").read_text())
    except FileNotFoundError:
        return {}
    return told


def remove_folder(folder: Path) -> None:
    """Removes a folder of ours, never through a mount."""
    below = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if line.split()[1].startswith(f"{folder}/")]
    for mount in sorted(below, reverse=True):
        run("umount", "--lazy", mount)
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return


def power_off(node: Node) -> None:
    """Ends a node as a power cut does; what it wrote stays."""
    count = processes.kill(node.cluster, node.name)
    remove_cgroups(node.cluster, node.name)
    if node.link in links(None):
        run("ip", "link", "delete", node.link)
    say(f"{node.name}: {count} processes ended")
