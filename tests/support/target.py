"""The backends that a suite runs over, and what each can do. What a test needs and a backend lacks is deselected, never skipped."""

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
    "bounds": "the facade's own limits hold for snapshots too (on a cluster they are the mover's)",
    "root": "the suite runs as root beside the engine: it can mount, make network namespaces and run an engine of its own",
}


@dataclass(frozen=True)
class Target:
    """One backend under test."""

    name: str
    can: frozenset[str]

    @property
    def settings(self) -> dict[str, str]:
        """What every facade over this backend is started with, names without their prefix."""
        more = {"STORAGE_CLASS": os.environ.get("AGENT_SANDBOX_TEST_STORAGE_CLASS", "fast")} if self.name == "kubernetes" else {}
        return {"DEFAULT_IMAGE": sandbox_image(), "MAX_SANDBOXES": "64"} | more


def sandbox_image() -> str:
    """The sandbox image of the suites: has Python 3 and a shell."""
    return os.environ.get("AGENT_SANDBOX_TEST_IMAGE") or "localhost/agent-sandbox-python:1"


TARGETS = {
    "memory": Target("memory", frozenset({"bounds"})),
    "docker": Target(
        "docker", frozenset({"processes", "kernel", "engine", "durable", "images", "cpus", "bounds"}) | ({"root"} if os.geteuid() == 0 else set())
    ),
    "kubernetes": Target("kubernetes", frozenset({"processes", "kernel", "durable", "images"})),
}
