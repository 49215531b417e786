"""LocalBackend: quota, creates that fail or are left, times to live, work that holds a sandbox, restarts of the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent_sandbox_api.backends.engine import InstanceRecord
from agent_sandbox_api.backends.local import LocalLimits
from agent_sandbox_api.backends.memory import MemoryEngine
from agent_sandbox_core.errors import (
    BackendError,
    Conflict,
    LimitExceeded,
    OutcomeUnknown,
    PayloadTooLarge,
    SandboxError,
    SandboxNotFound,
    SnapshotNotFound,
)
from agent_sandbox_core.models import Command, Snapshot

from .worlds import World, make_spec, settle, until


class SlowEngine(MemoryEngine):
    """Steps wait for a gate; some fail."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.failing: set[str] = set()
        self.entered = 0

    async def _step(self, name: str) -> None:
        self.entered += 1
        await self.gate.wait()
        if name in self.failing:
            raise BackendError(f"{name} was made to fail")

    async def create(self, record: InstanceRecord) -> None:
        await super().create(record)
        await self._step("create")

    async def commit(self, sandbox_id: str) -> None:
        await self._step("commit")
        await super().commit(sandbox_id)

    async def restart(self, sandbox_id: str) -> None:
        await self._step("restart")
        await super().restart(sandbox_id)

    async def remove(self, sandbox_id: str) -> None:
        await self._step("remove")
        await super().remove(sandbox_id)


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncIterator[tuple[World, SlowEngine]]:
    engine = SlowEngine()
    world = World(tmp_path / "data", engine, limits=LocalLimits(max_sandboxes=3))
    async with world.running():
        yield world, engine


async def test_the_limit_holds_under_concurrent_creates(slow: tuple[World, SlowEngine]) -> None:
    world, engine = slow
    engine.gate.clear()
    creates = [asyncio.create_task(world.new()) for _ in range(10)]
    await until(lambda: sum(task.done() for task in creates) == 7)
    engine.gate.set()
    results = await asyncio.gather(*creates, return_exceptions=True)
    assert sum(isinstance(result, LimitExceeded) for result in results) == 7 and len(await engine.instances()) == 3
    with pytest.raises(LimitExceeded, match="3"):
        await world.new()
    await world.backend.delete(next(result for result in results if isinstance(result, str)))
    await world.new()


@pytest.mark.parametrize("step", ["create", "commit"])
async def test_a_failed_create_leaves_nothing_and_holds_no_place(slow: tuple[World, SlowEngine], step: str) -> None:
    world, engine = slow
    engine.failing = {step}
    for _ in range(5):
        with pytest.raises(BackendError, match=step):
            await world.new()
    assert await engine.instances() == [] and await world.backend.list() == []
    engine.failing = set()
    assert len({await world.new() for _ in range(3)}) == 3


async def test_what_a_failed_create_could_not_remove_is_removed_later(slow: tuple[World, SlowEngine]) -> None:
    world, engine = slow
    engine.failing = {"commit", "remove"}
    with pytest.raises(BackendError, match="commit"):
        await world.new()
    assert len(await engine.instances()) == 1 and await world.backend.list() == []
    engine.failing = set()
    await world.clock.advance(11)
    assert await engine.instances() == []


async def test_a_create_that_is_cancelled_leaves_nothing(slow: tuple[World, SlowEngine]) -> None:
    world, engine = slow
    engine.gate.clear()
    create = asyncio.create_task(world.new())
    await until(lambda: engine.entered)
    create.cancel()
    with pytest.raises(asyncio.CancelledError):
        await create
    engine.gate.set()
    await until(lambda: not engine._slots)
    assert await world.backend.list() == []


async def test_a_create_with_a_key_goes_on_and_a_retry_finds_it(slow: tuple[World, SlowEngine]) -> None:
    world, engine = slow

    async def create(digest: str = "d") -> str:
        made = await world.backend.create(make_spec(), expires_at=world.later(), idempotency_key="k", request_digest=digest)
        return made.id

    engine.gate.clear()
    first = asyncio.create_task(create())
    await until(lambda: engine.entered)
    first.cancel()
    second = asyncio.create_task(create())
    with pytest.raises(Conflict, match="Idempotency-Key"):
        await create("other")
    engine.gate.set()
    made = await second
    assert await create() == made and [row.id for row in await world.backend.list()] == [made]
    with pytest.raises(Conflict):
        await create("other")
    await world.backend.delete(made)
    assert await create() != made


async def test_a_sandbox_goes_when_its_time_is_over(alive: World) -> None:
    short, long = await alive.new(30), await alive.new(300)
    await alive.clock.advance(25)
    assert {row.id for row in await alive.backend.list()} == {short, long}
    await alive.clock.advance(20)
    assert [row.id for row in await alive.backend.list()] == [long]
    await alive.backend.set_expiry(long, alive.later(10))
    await alive.clock.advance(25)
    assert await alive.backend.list() == [] and await alive.engine.instances() == []


async def test_a_changed_expiry_and_everything_else_outlives_a_restart(world: World) -> None:
    async with world.running() as backend:
        kept, gone = await world.new(100, env={"A": "b"}), await world.new(100)
        await backend.set_expiry(kept, world.later(5000))
        await world.write(kept, b"f", b"content")
        snapshot = await backend.snapshot(kept, name="n")
        before = await backend.get(kept)
    await world.clock.advance(200)
    async with world.running() as backend:
        assert [row.id for row in await backend.list()] == [kept]
        assert await backend.get(kept) == before and await world.read(kept, b"f") == b"content"
        await until(lambda: gone not in world.engine._slots)
        assert (await backend.get_snapshot(snapshot.id)).name == "n"
        assert (await backend.snapshot_spec(snapshot.id)).env == {"A": "b"}


async def test_half_made_sandboxes_of_a_dead_server_are_removed(world: World) -> None:
    record = InstanceRecord("sb_00000000000000aa", make_spec(), world.clock.now(), world.later())
    await world.engine.create(record)
    async with world.running() as backend:
        assert await backend.list() == []
        await until(lambda: not world.engine._slots)


async def test_a_snapshot_and_a_rollback_exclude_each_other(slow: tuple[World, SlowEngine]) -> None:
    world, engine = slow
    box = await world.new()
    await world.write(box, b"f", b"1")
    snapshot = (await world.backend.snapshot(box, name=None)).id
    await world.write(box, b"f", b"2")
    engine.gate.clear()
    engine.crash(box)
    await settle()
    rolling = asyncio.create_task(world.backend.rollback(box, snapshot))
    await until(lambda: world.backend._boxes[box].phase == "Restoring")
    for call in (world.backend.snapshot(box, name=None), world.backend.rollback(box, snapshot), world.backend.guest(box)):
        with pytest.raises(Conflict, match="rolled back"):
            await call
    assert [row.phase for row in await world.backend.list()] == ["Restoring"]
    engine.gate.set()
    assert (await rolling).status == "running"
    assert await world.read(box, b"f") == b"1"


async def test_a_rollback_whose_caller_leaves_goes_to_its_end(alive: World) -> None:
    box = await alive.new()
    snapshot = (await alive.backend.snapshot(box, name=None)).id
    await alive.write(box, b"f", b"1")
    rolling = asyncio.create_task(alive.backend.rollback(box, snapshot))
    await until(lambda: alive.backend._boxes[box].work)
    rolling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rolling
    await until(lambda: alive.backend._boxes[box].work is None)
    with pytest.raises(SandboxError, match="does not exist"):
        await alive.read(box, b"f")


@pytest.mark.parametrize("kind", ["rollback", "snapshot"])
async def test_delete_wins_over_work(alive: World, kind: str) -> None:
    box = await alive.new()
    snapshot = (await alive.backend.snapshot(box, name=None)).id
    running = asyncio.create_task(alive.backend.rollback(box, snapshot) if kind == "rollback" else alive.backend.snapshot(box, name=None))
    await until(lambda: alive.backend._boxes[box].work)
    await alive.backend.delete(box)
    ended = (await asyncio.gather(running, return_exceptions=True))[0]
    with pytest.raises(SandboxNotFound):
        await alive.backend.get(box)
    # A snapshot may have been faster than the delete. Whatever its caller was told is so, and its values can be forked.
    told = [ended.id] if isinstance(ended, Snapshot) else []
    assert told or isinstance(ended, SandboxNotFound)
    assert [row.id for row in await alive.backend.list_snapshots()] == [snapshot, *told]
    for kept in (snapshot, *told):
        await alive.backend.snapshot_spec(kept)
    assert await alive.engine.instances() == []


async def test_two_deletes_at_once_are_one(alive: World) -> None:
    box = await alive.new()
    await asyncio.gather(alive.backend.delete(box), alive.backend.delete(box))
    with pytest.raises(SandboxNotFound):
        await alive.backend.delete(box)


async def test_a_delete_that_fails_leaves_the_sandbox_usable(slow: tuple[World, SlowEngine]) -> None:
    world, engine = slow
    box = await world.new()
    engine.failing = {"remove"}
    with pytest.raises(BackendError, match="remove"):
        await world.backend.delete(box)
    assert (await world.backend.get(box)).status == "running" and await world.sh(box, "echo a") == "a\n"
    engine.failing = set()
    await world.backend.delete(box)


async def test_a_rollback_ends_commands_with_an_unknown_outcome(alive: World) -> None:
    box = await alive.new()
    snapshot = (await alive.backend.snapshot(box, name=None)).id
    running = asyncio.create_task((await alive.backend.guest(box)).run(Command(command="sleep 60", timeout_seconds=100), max_output_bytes=10))
    await until(lambda: alive.engine.machine(box).processes)
    await alive.backend.rollback(box, snapshot)
    with pytest.raises(OutcomeUnknown, match="rolled back"):
        await running


async def test_lineage_and_forks(alive: World) -> None:
    box = await alive.new(env={"TOKEN": "s3cr3t"})
    await alive.write(box, b"f", b"1")
    first = await alive.backend.snapshot(box, name=None)
    fork = await alive.backend.create(await alive.backend.snapshot_spec(first.id), expires_at=alive.later(), source=first.id)
    assert fork.source_snapshot_id == first.id and await alive.read(fork.id, b"f") == b"1" and await alive.sh(fork.id, "echo $TOKEN") == "s3cr3t\n"
    second = await alive.backend.snapshot(fork.id, name=None)
    assert (first.parent_id, second.parent_id) == (None, first.id)
    await alive.backend.rollback(box, second.id)
    assert (await alive.backend.snapshot(box, name=None)).parent_id == second.id
    named = [file for file in alive.path.rglob("*") if file.is_file() and first.id in file.name]
    assert named and all(b"s3cr3t" not in file.read_bytes() for file in named)


async def test_a_fork_of_a_snapshot_without_its_env_values_says_so(alive: World) -> None:
    box = await alive.new(env={"TOKEN": "s3cr3t"})
    snapshot = (await alive.backend.snapshot(box, name=None)).id
    for file in (alive.path / "snapshot-env").iterdir():
        file.unlink()
    with pytest.raises(BackendError, match="TOKEN"):
        await alive.backend.snapshot_spec(snapshot)


async def test_a_snapshot_over_the_limit_leaves_none(tmp_path: Path) -> None:
    world = World(tmp_path / "data", MemoryEngine(), limits=LocalLimits(max_snapshot_bytes=100_000))
    async with world.running() as backend:
        box = await world.new(env={"A": "b"})
        await world.write(box, b"big", b"x" * 200_000)
        with pytest.raises(PayloadTooLarge):
            await backend.snapshot(box, name=None)
        assert await backend.list_snapshots() == [] and list((world.path / "snapshot-env").iterdir()) == []
        with contextlib.suppress(SnapshotNotFound):
            await backend.delete_snapshot("snap_0000000000000000")


@pytest.mark.parametrize("snapshot", ["instance", "..", "snap_", "snap_0123456789ABCDEF", "a/b", "\0"])
async def test_ids_that_are_none_find_nothing(alive: World, snapshot: str) -> None:
    for call in (alive.backend.get_snapshot, alive.backend.delete_snapshot, alive.backend.snapshot_spec):
        with pytest.raises(SnapshotNotFound):
            await call(snapshot)


async def test_an_engine_that_is_away_is_an_error_and_then_all_goes_on(alive: World) -> None:
    box = await alive.new()
    alive.engine.unplug()
    for call in (alive.backend.list(), alive.backend.get(box), alive.new(), alive.backend.delete(box), alive.backend.ready()):
        with pytest.raises(BackendError):
            await call
    await alive.clock.advance(30)
    alive.engine.plug_in()
    assert [row.id for row in await alive.backend.list()] == [box] and await alive.sh(box, "echo a") == "a\n"


async def test_work_that_a_delete_cut_short_leaves_no_file_behind(alive: World) -> None:
    """At whatever step of the snapshot it comes: between two of them threads open and write files."""
    await alive.backend.snapshot(await alive.new(), name=None)  # one that is whole, so that both folders exist
    for steps in range(0, 40, 2):
        box = await alive.new()
        taking = asyncio.create_task(alive.backend.snapshot(box, name=None))
        for _ in range(steps):
            await asyncio.sleep(0)
        await alive.backend.delete(box)
        with contextlib.suppress(SandboxNotFound):
            await taking
    kept = {row.id for row in await alive.backend.list_snapshots()}
    found = {file.name.split(".")[0] for file in (alive.path / "snapshots").iterdir() if file.name.startswith("snap_")}
    assert found == kept and list((alive.path / "spool").iterdir()) == []
