"""Snapshots, rollbacks and forks as a person with kubectl makes them, and a mover of its own."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.cluster.console import tail, wait_for
from tests.cluster.e2e.installation import Installation, condition, free_port
from tests.cluster.e2e.life import edit, shell
from tests.cluster.kubectl import Kubectl, Object

READY_SECONDS = 90.0
"""For a pod on a machine where much else runs."""
FINAL = {"Succeeded", "Failed", "Superseded"}
LOOK = "find . -mindepth 1 -printf '%P|%y|%m|%T@|%l\\n' | LC_ALL=C sort; find . -type f -exec sha256sum {} + | LC_ALL=C sort -k2"


def snapshot(name: str, sandbox: str | None = None, **spec: object) -> Object:
    """A Snapshot of a Sandbox, or with `source` given of something else."""
    source = {} if sandbox is None else {"source": {"sandboxName": sandbox}}
    return {"apiVersion": "agentsandbox.dev/v1alpha1", "kind": "Snapshot", "metadata": {"name": name}, "spec": {**source, **spec}}


def imported(name: str, location: str, digest: str) -> Object:
    """A Snapshot from a file in the store."""
    return snapshot(name, source={"archive": {"location": location, "digest": digest}})


def until_kept(kubectl: Kubectl, name: str, *, seconds: float = 60) -> Object:
    """The Snapshot, once it is Ready."""
    found = until_ended(kubectl, name, seconds=seconds)
    assert condition(found).get("status") == "True", found["status"]
    return found


def until_ended(kubectl: Kubectl, name: str, *, seconds: float = 60) -> Object:
    """The Snapshot, once it is Ready or Failed."""
    return kubectl.until(
        f"snapshot {name} has ended", "snapshot", name, lambda found: found.get("status", {}).get("phase") in {"Ready", "Failed"}, seconds=seconds
    )


def until_snapshot_reason(kubectl: Kubectl, name: str, reason: str, *, seconds: float = 60) -> Object:
    """The Snapshot, once it has that reason."""
    return kubectl.until(f"snapshot {name} is {reason}", "snapshot", name, lambda found: condition(found).get("reason") == reason, seconds=seconds)


def take(kubectl: Kubectl, name: str, sandbox: str, **spec: object) -> Object:
    """Makes a Snapshot and waits until it is Ready."""
    kubectl.apply(snapshot(name, sandbox, **spec))
    return until_kept(kubectl, name)


def ask_back(kubectl: Kubectl, sandbox: str, name: str, request: str) -> None:
    """Asks for a rollback."""
    edit(kubectl, sandbox, restore={"snapshotName": name, "requestID": request})


def last_restore(found: Object) -> Object:
    """What its status says about the newest restore."""
    last: Object = found.get("status", {}).get("lastRestore") or {}
    return last


def until_restored(kubectl: Kubectl, sandbox: str, request: str, *phases: str, seconds: float = 90) -> Object:
    """The Sandbox, once that request has ended in one of the phases (Succeeded) and it is Ready again."""
    wanted = set(phases or ("Succeeded",))
    found = kubectl.until(
        f"restore {request} of {sandbox} has ended and it is Ready",
        "sandbox",
        sandbox,
        lambda seen: (
            last_restore(seen).get("requestID") == request and last_restore(seen).get("phase") in FINAL and condition(seen).get("status") == "True"
        ),
        seconds=seconds,
    )
    assert last_restore(found)["phase"] in wanted, found["status"]
    return found


def until_restoring(kubectl: Kubectl, sandbox: str, request: str, *, seconds: float = 60) -> Object:
    """The Sandbox, once that request is being carried out."""
    return kubectl.until(
        f"restore {request} of {sandbox} runs",
        "sandbox",
        sandbox,
        lambda seen: last_restore(seen).get("requestID") == request and last_restore(seen).get("phase") == "Running",
        seconds=seconds,
    )


def roll_back(kubectl: Kubectl, sandbox: str, name: str, request: str) -> Object:
    """Rolls back and waits until it is done."""
    ask_back(kubectl, sandbox, name, request)
    return until_restored(kubectl, sandbox, request)


def tree(kubectl: Kubectl, sandbox: str) -> str:
    """All files of the workspace: kinds, modes, times, links and contents."""
    return shell(kubectl, sandbox, f"cd /workspace && {LOOK}")


def blob_of(installation: Installation, found: Object) -> Path:
    """Its archive in a directory store."""
    return installation.store / str(found["status"]["location"])


def digest_of(path: Path) -> str:
    """Of a file."""
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


class Mover:
    """`sandboxctl mover` as a process of its own, with the settings of an installation that has none."""

    def __init__(self, installation: Installation, settings: dict[str, str] | None = None) -> None:
        self.installation = installation
        self.settings = settings or {}
        self.log = installation.folder / "mover.log"
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> None:
        """Starts it; returns when it works."""
        environment = {
            **self.installation.environment(),
            "AGENT_SANDBOX_MOVER_HEALTH_HOST": "127.0.0.1",
            "AGENT_SANDBOX_MOVER_HEALTH_PORT": str(self.port),
            "AGENT_SANDBOX_MOVER_LOG_LEVEL": "debug",
            **self.settings,
        }
        command = [sys.executable, "-m", "agent_sandbox_client", "mover"]
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                command, cwd=self.installation.folder, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
            )
        if wait:
            wait_for("the mover works", self.is_ready, seconds=60, every=0.05, explain=lambda: f"\n{tail(self.log)}")

    def is_ready(self) -> bool:
        """Whether it says so; an AssertionError when it has ended."""
        assert self.process is not None and self.process.poll() is None, f"the mover has ended:\n{tail(self.log)}"
        where = Installation(self.installation.cluster, self.installation.namespaces, self.installation.folder, port=self.port)
        return "works" in where.ask("readyz") or where.ask("readyz") == "ok\n"

    def kill(self) -> None:
        """kill -9, in the middle of whatever it does."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Ends it in order; it must end with 0."""
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        code = process.wait(30)
        assert code == 0, f"the mover ended with {code}:\n{tail(self.log)}"
        faults = [line for line in self.log.read_text(errors="replace").splitlines() if "Traceback" in line or " error " in line]
        assert not faults, "\n".join(faults[:20])


def events_about(kubectl: Kubectl, name: str) -> list[str]:
    """Reasons of the events about an object."""
    return [
        event["reason"] for event in json.loads(kubectl.say("get", "events", "--output", "json"))["items"] if event["involvedObject"]["name"] == name
    ]
