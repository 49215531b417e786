"""Dying and coming back, on a clock that is moved by hand."""

from __future__ import annotations

import pytest
from agent_sandbox_api.backends.box import Lives
from agent_sandbox_api.backends.memory import MemoryEngine
from agent_sandbox_core.errors import BackendError, InvalidRequest
from agent_sandbox_core.models import Sandbox

from .worlds import World, settle, until


async def phase(world: World, box: str, wanted: str) -> Sandbox:
    """The sandbox, once this process knows it in that phase."""
    await until(lambda: (world.backend._boxes[box].phase == wanted and world.backend._boxes[box].settled) or wanted == "Restarting")
    return world.backend._boxes[box].view()


async def test_a_sandbox_that_died_comes_back_on_its_workspace_and_remembers_why(alive: World) -> None:
    box = await alive.new()
    await alive.write(box, b"f", b"kept")
    alive.engine.crash(box, reason="OOMKilled", message="it used more than 512 MiB")
    await settle()
    row = await phase(alive, box, "Running")
    assert row.incarnation == 2 and row.last_termination is not None and row.last_termination.reason == "OOMKilled"
    assert row.reason is None and await alive.read(box, b"f") == b"kept"


async def test_while_it_is_stopped_calls_say_why(alive: World) -> None:
    box = await alive.new()
    for _ in range(2):
        alive.engine.crash(box, message="killed by hand")
        await settle()
    row = alive.backend._boxes[box].view()
    assert (row.status, row.phase, row.reason) == ("stopped", "Restarting", "Died")
    with pytest.raises(InvalidRequest, match=r"stopped \(Died\): killed by hand; it is being started again"):
        await alive.backend.guest(box)
    await alive.clock.advance(1)
    assert (await phase(alive, box, "Running")).incarnation == 3


async def test_it_returns_five_times_in_ten_minutes_and_then_stays_stopped_until_a_rollback(alive: World) -> None:
    box = await alive.new(7200)
    snapshot = (await alive.backend.snapshot(box, name=None)).id
    for incarnation in range(2, 7):
        alive.engine.crash(box)
        await settle()
        await alive.clock.advance(5)
        assert (await phase(alive, box, "Running")).incarnation == incarnation
    alive.engine.crash(box)
    row = await phase(alive, box, "Stopped")
    assert row.reason == "CrashLoop" and row.message and "roll it back" in row.message
    await alive.clock.advance(1200)
    assert (await alive.backend.get(box)).phase == "Stopped", "it stays stopped"
    with pytest.raises(InvalidRequest, match="CrashLoop"):
        await alive.backend.snapshot(box, name=None)
    revived = await alive.backend.rollback(box, snapshot)
    assert revived.status == "running" and (revived.created_at, revived.expires_at) == (row.created_at, row.expires_at)
    alive.engine.crash(box)
    await settle()
    assert (await phase(alive, box, "Running")).status == "running", "a rollback gives it all its lives back"


async def test_deaths_far_apart_do_not_count_together(alive: World) -> None:
    box = await alive.new(10_000)
    for incarnation in range(2, 12):
        alive.engine.crash(box)
        await settle()
        await alive.clock.advance(200)
        assert (await phase(alive, box, "Running")).incarnation == incarnation


async def test_a_stopped_sandbox_can_be_deleted(alive: World) -> None:
    box = await alive.new()
    for _ in range(3):
        alive.engine.crash(box)
        await settle()
    await alive.backend.delete(box)
    assert await alive.engine.instances() == []


async def test_a_lost_workspace_is_told_and_a_rollback_makes_it_anew(alive: World) -> None:
    box = await alive.new(env={"A": "b"})
    await alive.write(box, b"f", b"1")
    snapshot = (await alive.backend.snapshot(box, name=None)).id
    alive.engine.lose(box)
    await settle()
    row = await alive.backend.get(box)
    assert (row.status, row.phase, row.reason) == ("stopped", "Failed", "WorkspaceLost")
    with pytest.raises(InvalidRequest, match="WorkspaceLost"):
        await alive.backend.guest(box)
    assert (await alive.backend.rollback(box, snapshot)).status == "running"
    assert await alive.read(box, b"f") == b"1" and await alive.sh(box, "echo $A") == "b\n"


async def test_one_that_was_removed_by_hand_is_told_by_the_next_look(alive: World) -> None:
    box = await alive.new()
    await alive.engine.remove(box)
    assert (await alive.backend.list())[0].phase == "Failed"
    await alive.backend.delete(box)
    assert await alive.backend.list() == []


async def test_what_died_while_the_server_was_down_comes_back_at_its_start(world: World) -> None:
    async with world.running():
        box = await world.new()
        await world.write(box, b"f", b"kept")
    world.engine.crash(box, reason="HostRebooted")
    async with world.running():
        row = await phase(world, box, "Running")
        assert row.incarnation == 2 and row.last_termination is not None and row.last_termination.reason == "HostRebooted"
        assert await world.read(box, b"f") == b"kept"


class Stubborn(MemoryEngine):
    """Cannot restart anything."""

    tries = 0

    async def restart(self, sandbox_id: str) -> None:
        await self.ping()
        self.tries += 1
        raise BackendError("no space for it")


async def test_failed_starts_count_and_end_in_a_crash_loop_that_names_them(world: World) -> None:
    world.engine = engine = Stubborn()
    async with world.running():
        box = await world.new()
        engine.crash(box)
        await settle()
        await world.clock.advance(60)
        row = await phase(world, box, "Stopped")
        assert engine.tries == 5 and row.reason == "CrashLoop" and row.message and "no space for it" in row.message


async def test_while_the_engine_is_away_nothing_counts(world: World) -> None:
    world.engine = engine = Stubborn()
    async with world.running():
        box = await world.new()
        engine.crash(box)
        await settle()
        engine.unplug()
        await world.clock.advance(300)
        assert engine.tries == 1 and world.backend._boxes[box].phase == "Restarting"
        engine.plug_in()
        await world.clock.advance(30)
        assert engine.tries == 5 and world.backend._boxes[box].phase == "Stopped"


def test_lives_are_counted_in_a_window() -> None:
    lives = Lives()
    for second in range(5):
        assert lives.next_delay(second) is not None
        lives.count(second)
    assert lives.next_delay(599) is None and lives.next_delay(600) == 4.0
    lives.reset()
    assert lives.next_delay(600) == 0.0
