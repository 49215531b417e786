"""The backends that a suite runs over, and what each can do. A test says what it needs; what cannot be is deselected at collection, never skipped."""

from __future__ import annotations

import os
from dataclasses import dataclass

CAPABILITIES = {
    "processes": "commands are real processes of a real shell: signals, trees, time limits, pipes",
    "kernel": "the sandbox has a kernel view of its own: uids, mounts, cgroups, capabilities",
    "engine": "a Docker engine can be asked what it has",
    "durable": "sandboxes and snapshots outlive the facade's process",
    "images": "an image that does not exist is noticed",
    "cpus": "the engine says how many CPUs it has",
}


@dataclass(frozen=True)
class Target:
    """One backend under test."""

    name: str
    can: frozenset[str]

    @property
    def settings(self) -> dict[str, str]:
        """What every facade over this backend is started with, names without their prefix."""
        return {"DEFAULT_IMAGE": test_image(), "MAX_SANDBOXES": "64"}


def test_image() -> str:
    """The sandbox image of the suites: has Python 3 and a shell."""
    return os.environ.get("AGENT_SANDBOX_TEST_IMAGE") or "localhost/agent-sandbox-python:1"


TARGETS = {
    "memory": Target("memory", frozenset()),
    "docker": Target("docker", frozenset({"processes", "kernel", "engine", "durable", "images", "cpus"})),
}
