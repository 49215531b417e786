"""Fixtures over worlds.py."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent_sandbox_api.backends.memory import Call, MemoryEngine

from .worlds import World


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AGENT_SANDBOX_")]:
        monkeypatch.delenv(name)


async def burst(call: Call) -> int:
    """A program with many small writes."""
    for number in range(int(call.argv[1])):
        await call.print(f"{number}\n")
    return 0


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "data", MemoryEngine({"burst": burst}))


@pytest.fixture
async def alive(world: World) -> AsyncIterator[World]:
    """A world whose backend runs."""
    async with world.running():
        yield world
