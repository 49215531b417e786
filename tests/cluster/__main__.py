"""`python3 -m tests.cluster COMMAND`: the test cluster's commands. See README.md beside this file."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

from tests.cluster import build, images, machine, nodes, own, processes, providers, versions
from tests.cluster.console import TAIL_LINES, ClusterError, say, tail
from tests.cluster.layout import MOST_NODES, Node


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python3 -m tests.cluster", description="A real Kubernetes to test on.")
    top.add_argument("--name", default=os.environ.get("NAME") or "main", help="which cluster (NAME, default main)")
    top.add_argument(
        "--provider", default=os.environ.get("PROVIDER") or "own", choices=providers.NAMES, help="where it comes from (PROVIDER, default own)"
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser
    up = add("up", help="start it, or heal it; does nothing when it works")
    up.add_argument(
        "--nodes", type=int, default=int(os.environ.get("NODES") or 1), choices=range(1, MOST_NODES + 1), help="how many (NODES, default 1)"
    )
    up.add_argument("--few-images", action="store_true", help="without the Python image: quicker, for tests of the cluster itself")
    add("down", help="end and remove everything of it")
    add("status", help="what runs and what is missing")
    logs = add("logs", help="the last lines of every component's log, or of one")
    logs.add_argument("component", nargs="?", help="only this one, whole")
    load = add("load", help="put an image into every node")
    load.add_argument("image", help="an archive file, or a name that buildah or docker knows")
    add("kubeconfig", help="print the path of its kubeconfig")
    add("env", help="print shell lines that set KUBECONFIG and PATH")
    run = add("run", help="run a command with KUBECONFIG and PATH set")
    run.add_argument("argv", nargs=argparse.REMAINDER)
    node = add("node", help="act on one node, or on one of its components")
    node.add_argument("what", choices=("off", "on", "cut", "join", "stop", "start", "kill", "enter"))
    node.add_argument("node", help="node1, node2 …")
    node.add_argument("argv", nargs=argparse.REMAINDER, help="a component for stop, start, kill; a command for enter")
    add("build", help="build programs and test images, nothing else")
    add("check", help="say what this machine lacks")
    add("lock", help="write programs/go.mod and go.sum from versions.toml")
    add("list", help="names of the clusters that are up")
    return top


def do_up(options: argparse.Namespace) -> int:
    if options.few_images and options.provider == "own":
        own.up(options.name, options.nodes, few_images=True)
    else:
        providers.choose(options.provider).up(options.name, options.nodes)
    return 0


def do_down(options: argparse.Namespace) -> int:
    providers.choose(options.provider).down(options.name)
    return 0


def do_status(options: argparse.Namespace) -> int:
    lines = providers.choose(options.provider).status(options.name)
    print("\n".join(lines))
    return 0 if lines and lines[-1].strip() == "everything works" else 1


def do_load(options: argparse.Namespace) -> int:
    providers.choose(options.provider).load(options.name, options.image)
    return 0


def do_kubeconfig(options: argparse.Namespace) -> int:
    print(providers.choose(options.provider).access(options.name).kubeconfig)
    return 0


def do_env(options: argparse.Namespace) -> int:
    print("\n".join(f"export {name}='{value}'" for name, value in environment(options).items()))
    return 0


def do_run(options: argparse.Namespace) -> int:
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    if not argv:
        raise ClusterError("nothing to run: python3 -m tests.cluster run -- COMMAND …")
    return subprocess.run(argv, env=os.environ | environment(options), check=False).returncode


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Variables that make kubectl and helm use the cluster."""
    access = providers.choose(options.provider).access(options.name)
    path = os.environ.get("PATH", os.defpath)
    return {"KUBECONFIG": str(access.kubeconfig), "PATH": f"{build.binaries()}:{path}" if options.provider == "own" else path}


def do_logs(options: argparse.Namespace) -> int:
    members = record_of(options).layout.nodes(record_of(options).count)
    for node in members:
        for log in sorted((node.folder / "logs").glob("*.log")):
            if options.component in {None, log.stem}:
                print(f"=== {log.stem} on {node.name}: {log}\n{tail(log, TAIL_LINES if options.component is None else 1 << 30)}\n")
    return 0


def record_of(options: argparse.Namespace) -> own.Record:
    """The cluster of our own that a command is about."""
    record = own.find(options.name) if options.provider == "own" else None
    if record is None:
        raise ClusterError(f"there is no own cluster called {options.name}: those that are up are {', '.join(own.names()) or '(none)'}")
    return record


def do_node(options: argparse.Namespace) -> int:
    record = record_of(options)
    members: dict[str, Node] = {node.name: node for node in record.layout.nodes(record.count)}
    node = members.get(options.node)
    if node is None:
        raise ClusterError(f"cluster {options.name} has no {options.node}; it has {', '.join(members)}")
    match options.what:
        case "off":
            nodes.power_off(node)
        case "on":
            own.up(options.name, record.count)
        case "cut" | "join":
            nodes.set_links(record.layout, node, {"cut": "down", "join": "up"}[options.what])
        case "enter":
            argv = options.argv or [os.environ.get("SHELL", "/bin/sh")]
            return subprocess.run(nodes.entering(node, *argv), check=False).returncode
        case order:
            if len(options.argv) != 1:
                raise ClusterError(f"{order} needs one component: {', '.join(nodes.states(node))}")
            nodes.order(node, order, options.argv[0])
    return 0


def do_build(options: argparse.Namespace) -> int:
    machine.require_root()
    build.ensure()
    machine.ensure_packages()
    images.ensure()
    say(f"built: {build.folder()}")
    return 0


def do_check(options: argparse.Namespace) -> int:
    machine.require_root()
    missing = machine.missing_packages()
    if missing:
        print(f"missing (apt-get install): {' '.join(missing)}")
    print(f"go: {machine.find_go()}")
    print(f"control groups: {', '.join(map(str, machine.control_groups()))}")
    print(f"to build: {', '.join(program.title for program in build.unbuilt()) or '(nothing)'}")
    return 1 if missing else 0


def do_lock(options: argparse.Namespace) -> int:
    versions.lock(machine.find_go())
    return 0


def do_list(options: argparse.Namespace) -> int:
    for name in own.names():
        print(f"{name}: {len(processes.supervisors(name))} nodes, {own.memory(name) / 1e6:.0f} MB resident")
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "up": do_up, "down": do_down, "status": do_status, "logs": do_logs, "load": do_load, "kubeconfig": do_kubeconfig, "env": do_env, "run": do_run,
    "node": do_node, "build": do_build, "check": do_check, "lock": do_lock, "list": do_list,
}  # fmt: skip


def main() -> int:
    """Runs a command; what cannot be done is one message and status 1."""
    options = parser().parse_args()
    try:
        return COMMANDS[options.command](options)
    except (ClusterError, ValueError) as error:
        print(f"[cluster] {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[cluster] interrupted; `up` goes on from here, `down` removes it", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
