"""Waiting for Sandboxes, and looking into them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from tests.cluster.e2e.installation import condition, reason_of
from tests.cluster.kubectl import Kubectl, Object

FAST: Object = {"size": "32Mi", "storageClassName": "fast"}


def until_ready(kubectl: Kubectl, name: str, *, seconds: float = 30) -> Object:
    """The Sandbox, once it is Ready."""
    return kubectl.until(f"{name} is Ready", "sandbox", name, lambda found: condition(found).get("status") == "True", seconds=seconds)


def until_reason(kubectl: Kubectl, name: str, *reasons: str, seconds: float = 30) -> Object:
    """The Sandbox, once its condition Ready has one of these reasons."""
    return kubectl.until(f"{name} is {' or '.join(reasons)}", "sandbox", name, lambda found: reason_of(found) in reasons, seconds=seconds)


def until_incarnation(kubectl: Kubectl, name: str, number: int, *, seconds: float = 40) -> Object:
    """The Sandbox, once it is Ready in that incarnation or a later one."""
    return kubectl.until(
        f"{name} is Ready in incarnation {number}",
        "sandbox",
        name,
        lambda found: condition(found).get("status") == "True" and found["status"]["incarnation"] >= number,
        seconds=seconds,
    )


def pods_of(kubectl: Kubectl, name: str) -> list[Object]:
    """Its pods."""
    return kubectl.list("pods", selector=f"agentsandbox.dev/sandbox={name}")


def shell(kubectl: Kubectl, name: str, script: str) -> str:
    """What a script in the sandbox prints."""
    done = kubectl.execute(kubectl.get("sandbox", name)["status"]["podName"], "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    return done.stdout


def edit(kubectl: Kubectl, name: str, **spec: object) -> None:
    """Merges fields into its spec."""
    kubectl.run("patch", "sandbox", name, "--type=merge", "--patch", json.dumps({"spec": spec}))


def in_seconds(seconds: float) -> str:
    """That moment, as a timestamp."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
