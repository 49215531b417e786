"""Engines under test on the real Docker engine, each an installation of its own whose leftovers fail the test."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from agent_sandbox_api.backends.docker import DockerEngine, DockerOptions, specs
from agent_sandbox_api.backends.engine import InstanceRecord
from agent_sandbox_core.models import Command, SandboxSpec
from agent_sandbox_core.names import new_sandbox_id

from tests.support.docker import Docker, _tool
from tests.support.target import sandbox_image

MakeEngine = Callable[..., Awaitable[DockerEngine]]


def new_record(**changes: Any) -> InstanceRecord:
    """A record as LocalBackend makes it; `changes` go to the spec."""
    now = datetime.now(UTC)
    spec = {"image": sandbox_image(), "cpus": 1.0, "memory_mb": 128, "pids_limit": 64} | changes
    return InstanceRecord(new_sandbox_id(), SandboxSpec.model_validate(spec), now, now + timedelta(hours=1))


async def run_in(engine: DockerEngine, sandbox_id: str, command: str | list[str], seconds: float = 20) -> str:
    """The output of a command that must succeed."""
    guest = engine.guest(sandbox_id)
    try:
        result = await guest.run(Command(command=command, timeout_seconds=seconds), max_output_bytes=1 << 20)
    finally:
        await guest.aclose()
    assert result.exit_code == 0, f"{command!r}: {result}"
    return result.stdout


async def make(engine: DockerEngine, **changes: Any) -> InstanceRecord:
    """A committed sandbox."""
    record = new_record(**changes)
    await engine.create(record)
    await engine.commit(record.sandbox_id)
    return record


def stir(docker: Docker, sandbox_id: str) -> None:
    """Lets something happen to a sandbox's container outside, without harm."""
    name = specs.container_name(sandbox_id)
    docker.client.api.rename(name, f"{name}.stirred")
    docker.client.api.rename(f"{name}.stirred", name)


@pytest.fixture(scope="session")
def guest_binaries() -> None:
    """sandbox-init as the package has it, built when it is not there."""
    if not os.environ.get("AGENT_SANDBOX_INIT_DIR"):
        _tool("build_guest").build()


class Leftovers:
    """What is in the engine of the installations of one test."""

    def __init__(self, docker: Docker) -> None:
        self.docker = docker
        self.instances: list[str] = []

    def rows(self) -> list[tuple[str, str, str]]:
        return [row for row in self.docker.everything() if any(instance in row[2] for instance in self.instances)]

    def remove(self) -> None:
        for kind, name, _ in self.rows():
            if kind == "container":
                self.docker.client.api.remove_container(name.split(",")[0].lstrip("/"), force=True, v=True)
        for kind, name, _ in self.rows():
            if kind == "volume":
                self.docker.client.api.remove_volume(name, force=True)


@pytest.fixture
def leftovers(engine: Docker) -> Iterator[Leftovers]:
    """Watches installations by their ids; whatever is left of them at the end fails the test and is removed."""
    watch = Leftovers(engine)
    yield watch
    left = watch.rows()
    watch.remove()
    assert not left, f"left in the engine: {left}"


@pytest.fixture
async def make_engine(leftovers: Leftovers, guest_binaries: None) -> AsyncIterator[MakeEngine]:
    """Opens engines; the same `instance_id` again is the next process of the same installation. They are emptied and closed at the end."""
    made: list[DockerEngine] = []

    async def start(*, instance_id: str | None = None, opened: bool = True, **options: Any) -> DockerEngine:
        chosen = DockerOptions(instance_id or f"test-{secrets.token_hex(6)}", **options)
        leftovers.instances.append(chosen.instance_id)
        engine = DockerEngine(chosen)
        made.append(engine)
        if opened:
            await engine.open()
        return engine

    yield start
    for engine in made:
        if not engine._closing.is_set():
            for instance in await engine.instances():
                await engine.remove(instance.record.sandbox_id)
            await engine.close()
    async with asyncio.timeout(10):
        while any(thread.name.startswith("docker-") for thread in threading.enumerate()):
            await asyncio.sleep(0.05)


@pytest.fixture
async def box(make_engine: MakeEngine) -> DockerEngine:
    """An open engine."""
    return await make_engine()
