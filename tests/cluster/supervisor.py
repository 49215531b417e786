"""Process 1 of a node: sets up its mounts, starts its components, starts again what dies, reaps the rest, takes orders on a socket.

    unshare --mount --net --pid --fork --uts --propagation slave python3 supervisor.py SPEC.json

Run as a file of its own, standard library only, and never imported by what it supervises. When it dies, the kernel ends every process and
every mount of the node with it: that is what makes `down` certain, also after `kill -9` of anything.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MS_REC, MS_SHARED, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x4000, 1 << 20, 2, 4, 8
BACKOFF = (0.3, 0.3, 0.5, 1.0, 2.0, 5.0)
STABLE_SECONDS = 20.0
STOP_SECONDS = 10.0
LOG_BYTES = 64 << 20
POLL_SECONDS = 0.05


@dataclass
class Component:
    """A program to keep running, and what must be there before it is started."""

    name: str
    argv: list[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    after: list[dict[str, Any]] = field(default_factory=list)
    wanted: bool = True
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    restarts: int = 0
    failures: int = 0
    last_exit: int | None = None
    not_before: float = 0.0

    def runnable(self) -> bool:
        """Whether all of its conditions are met, each looked at without waiting."""
        return time.monotonic() >= self.not_before and all(met(condition) for condition in self.after)

    def died(self, code: int) -> None:
        """Notes an end, and when the next start may be: one that keeps dying waits longer."""
        self.process, self.last_exit = None, code
        self.failures = 1 if time.monotonic() - self.started > STABLE_SECONDS else self.failures + 1
        self.not_before = time.monotonic() + BACKOFF[min(self.failures, len(BACKOFF)) - 1]
        self.restarts += self.wanted


def met(condition: dict[str, Any]) -> bool:
    """One condition: an address that is ours, a socket or port that answers, a file that exists."""
    try:
        if "address" in condition:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.bind((condition["address"], 0))
        elif "tcp" in condition:
            host, port = condition["tcp"].rsplit(":", 1)
            socket.create_connection((host, int(port)), 0.5).close()
        elif "unix" in condition:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(0.5)
                probe.connect(condition["unix"])
        else:
            return Path(condition["file"]).exists()
    except OSError:
        return False
    return True


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount of {kind or 'flags'} on {target}: {os.strerror(number)}")


def prepare(spec: dict[str, Any]) -> None:
    """The node's own view of the machine. Its mounts reach the machine never; the machine's unmounts reach it, so nothing is held busy."""
    for path in spec["cgroups"]:
        Path(path, "cgroup.procs").write_text("0")
    mount("none", "/", "", MS_REC | MS_SHARED)
    # Sockets, the xtables lock and network namespaces of pods lie in /run: a private one keeps the machine's clean.
    mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    Path("/run/lock").mkdir()
    attach(Path(spec["disk"]), Path(spec["disk_at"]))
    socket.sethostname(spec["hostname"])
    for name, value in spec["sysctls"].items():
        Path("/proc/sys", name.replace(".", "/")).write_text(value)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=10)


def attach(disk: Path, target: Path) -> None:
    """Mounts the node's own disk, without flushes. Only speed depends on it: where loop devices are missing, the folder itself serves."""
    done = subprocess.run(["mount", "-o", "loop,noatime,nobarrier", str(disk), str(target)], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        print(f"{disk} is not used: {done.stderr.strip()}", flush=True)
    target.chmod(0o711)


class Supervisor:
    """The loop over children's deaths and orders."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.components = {entry["name"]: Component(**{**entry, "log": Path(entry["log"])}) for entry in spec["components"]}
        self.selector = selectors.DefaultSelector()
        self.status = Path(spec["status"])
        wake_read, wake_write = os.pipe()
        for end in (wake_read, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Only SIGKILL from outside ends a node: a stray SIGTERM must not.
        for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)
        self.wake = wake_read
        self.selector.register(wake_read, selectors.EVENT_READ)
        path = Path(spec["control"])
        path.unlink(missing_ok=True)
        self.control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.control.bind(str(path))
        self.control.listen(8)
        self.control.setblocking(False)
        self.selector.register(self.control, selectors.EVENT_READ)

    def run(self) -> None:
        """Never returns."""
        while True:
            changed = self.reap()
            changed |= self.start_due()
            if changed:
                self.report()
            waiting = any(c.wanted and c.process is None for c in self.components.values())
            for key, _ in self.selector.select(POLL_SECONDS if waiting else None):
                if key.fd == self.wake:
                    os.read(self.wake, 4096)
                else:
                    self.answer()

    def start_due(self) -> bool:
        """Starts what is wanted, not running and runnable."""
        started = False
        for component in self.components.values():
            if component.wanted and component.process is None and component.runnable():
                self.start(component)
                started = True
        return started

    def start(self, component: Component) -> None:
        """Starts one component into its log."""
        component.log.parent.mkdir(parents=True, exist_ok=True)
        if component.log.exists() and component.log.stat().st_size > LOG_BYTES:
            component.log.replace(component.log.with_suffix(".log.1"))
        component.started = time.monotonic()
        with component.log.open("ab") as log:
            try:
                component.process = subprocess.Popen(
                    component.argv,
                    env={**os.environ, **component.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=default_signals,  # noqa: PLW1509 - one thread only
                )
            except OSError as error:
                # Process 1 must outlive a program that cannot be run.
                log.write(f"cannot be started: {error}\n".encode())
                component.died(127)

    def reap(self) -> bool:
        """Collects every dead child, ours and those that pods' shims left to process 1."""
        died = False
        while True:
            try:
                pid, raw = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return died
            if pid == 0:
                return died
            for component in self.components.values():
                if component.process is not None and component.process.pid == pid:
                    component.process.returncode = os.waitstatus_to_exitcode(raw)
                    component.died(component.process.returncode)
                    died = True

    def report(self) -> None:
        """Tells the state of all components in a file, written in one step."""
        state = {
            c.name: {"pid": c.process.pid if c.process else None, "wanted": c.wanted, "restarts": c.restarts, "last_exit": c.last_exit}
            for c in self.components.values()
        }
        fresh = self.status.with_suffix(".new")
        fresh.write_text(json.dumps(state))
        fresh.replace(self.status)

    def answer(self) -> None:
        """Takes one order, `{"do": "stop" | "start" | "kill", "component": name}`, and answers when it is done."""
        try:
            connection, _ = self.control.accept()
        except BlockingIOError:
            return
        with connection:
            connection.settimeout(2)
            try:
                order = json.loads(connection.recv(65536))
                problem = self.obey(order)
                connection.sendall(json.dumps({"problem": problem}).encode())
            except (OSError, ValueError) as error:
                print(f"an order could not be taken: {error}", flush=True)

    def obey(self, order: dict[str, str]) -> str | None:
        """Carries one order out; returns what is wrong with it, or nothing."""
        component = self.components.get(order.get("component", ""))
        if component is None:
            return f"no component is called {order.get('component')!r}; there are {', '.join(self.components)}"
        match order.get("do"):
            case "start":
                component.wanted, component.not_before = True, 0.0
            case "stop":
                component.wanted = False
                self.end(component, signal.SIGTERM)
            case "kill":
                self.end(component, signal.SIGKILL)
            case other:
                return f"{other!r} is no order: start, stop or kill"
        self.report()
        return None

    def end(self, component: Component, how: signal.Signals) -> None:
        """Ends a component and waits for that; one that does not end by itself is killed."""
        if component.process is None:
            return
        pid = component.process.pid
        os.kill(pid, how)
        deadline = time.monotonic() + STOP_SECONDS
        while component.process is not None and component.process.pid == pid:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                deadline = time.monotonic() + STOP_SECONDS
            self.reap()
            time.sleep(0.02)


def default_signals() -> None:
    """Children get back what process 1 ignores."""
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_DFL)


def main() -> None:
    """Entry of the node's first process."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    prepare(spec)
    Supervisor(spec).run()


if __name__ == "__main__":
    main()
