"""kubectl as a Python object: every call bounded, every failure with what it said and about what."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.cluster.console import ClusterError, run, wait_for

Object = dict[str, Any]


@dataclass(frozen=True)
class Kubectl:
    """One kubeconfig, and the namespace that calls are about."""

    binary: str
    kubeconfig: Path
    namespace: str | None = None
    context: str | None = None

    def within(self, namespace: str) -> Kubectl:
        """The same for another namespace."""
        return replace(self, namespace=namespace)

    def argv(self, *words: str) -> list[str]:
        """The whole command line."""
        where = ["--namespace", self.namespace] if self.namespace else []
        context = ["--context", self.context] if self.context else []
        return [self.binary, "--kubeconfig", str(self.kubeconfig), *context, *where, *words]

    def run(self, *words: str, seconds: float = 60, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs kubectl; a failure is a ClusterError unless `check` is off."""
        return run(*self.argv(*words), seconds=seconds, stdin=stdin, check=check)

    def say(self, *words: str, seconds: float = 60) -> str:
        """What kubectl prints."""
        return self.run(*words, seconds=seconds).stdout

    def apply(self, *objects: Object) -> None:
        """Applies objects."""
        self.run("apply", "-f", "-", stdin=listed(objects))

    def create(self, *objects: Object) -> subprocess.CompletedProcess[str]:
        """Creates objects; the outcome is the caller's to judge, since refusals are what many tests want."""
        return self.run("create", "-f", "-", stdin=listed(objects), check=False)

    def get(self, kind: str, name: str) -> Object:
        """One object."""
        found: Object = json.loads(self.say("get", kind, name, "--output", "json"))
        return found

    def find(self, kind: str, name: str) -> Object | None:
        """One object, or None when there is none."""
        text = self.say("get", kind, name, "--output", "json", "--ignore-not-found")
        found: Object | None = json.loads(text) if text.strip() else None
        return found

    def list(self, kind: str, *, selector: str = "", everywhere: bool = False) -> list[Object]:
        """Objects of a kind, in the namespace or in all."""
        words = [*(["--selector", selector] if selector else []), *(["--all-namespaces"] if everywhere else [])]
        items: list[Object] = json.loads(self.say("get", kind, "--output", "json", *words))["items"]
        return items

    def delete(self, kind: str, *names: str, wait: bool = True, seconds: float = 60, now: bool = False) -> None:
        """Deletes objects; those that are gone already are fine."""
        hurry = ["--grace-period=0", "--force"] if now else []
        self.run(
            "delete", kind, *names, "--ignore-not-found", f"--wait={str(wait).lower()}", f"--timeout={seconds:.0f}s", *hurry, seconds=seconds + 10
        )

    def wait(self, condition: str, *what: str, seconds: float = 60) -> None:
        """`kubectl wait --for=…`; lateness tells what the objects look like."""
        done = self.run("wait", f"--for={condition}", *what, f"--timeout={seconds:.0f}s", seconds=seconds + 10, check=False)
        if done.returncode != 0:
            seen = self.run("describe", *what, check=False).stdout[-3000:]
            raise ClusterError(f"{' '.join(what)} did not get {condition} within {seconds:.0f} s: {done.stderr.strip()}\n{seen}")

    def until(self, what: str, kind: str, name: str, condition: Callable[[Object], object], *, seconds: float = 60) -> Object:
        """Waits until an object looks as wanted, and returns it."""
        last: list[Object | None] = [None]

        def looks() -> Object | None:
            last[0] = self.find(kind, name)
            return last[0] if last[0] is not None and condition(last[0]) else None

        found = wait_for(what, looks, seconds=seconds, every=0.2, explain=lambda: f"; {kind} {name} is {json.dumps(last[0])[:3000]}")
        assert found is not None
        return found

    def logs(self, pod: str, *, container: str | None = None) -> str:
        """What a pod has written so far."""
        return self.say("logs", pod, *(["--container", container] if container else []))

    def execute(self, pod: str, *argv: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """Runs a command in a pod through kubectl."""
        return self.run("exec", pod, "--", *argv, seconds=seconds, check=False)


def listed(objects: Iterable[Object] | Sequence[Object]) -> str:
    """Objects as one List, in JSON."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
