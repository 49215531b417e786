"""ChannelGuest and the real sandbox-init, in a container, with nothing between them but `docker exec`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpcore
import pytest
from agent_sandbox_core.channel import ChannelBudget
from agent_sandbox_core.errors import BackendError, ChannelError, Conflict, Forbidden, InvalidRequest, NotFound, OutcomeUnknown, PayloadTooLarge
from agent_sandbox_core.guest import ChannelGuest
from agent_sandbox_core.models import Command, ExecResult, ExitEvent, OutputEvent, SandboxSpec
from agent_sandbox_core.names import new_snapshot_id
from agent_sandbox_core.snapshots import Manifest, SnapshotStore, StoredSpec

from .container import GuestContainer, running_guest

MIB = 1 << 20
SPEC = SandboxSpec(image="image", cpus=1, memory_mb=256, pids_limit=256, env={"TOKEN": "s3cr3t"})


async def until(condition: Callable[[], object], within: float = 10) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


def command(what: str | list[str], seconds: float = 30, **more: str) -> Command:
    return Command(command=what, timeout_seconds=seconds, **more)


async def pieces(data: bytes, size: int = 65536) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


@pytest.fixture(scope="module")
def container(engine: object) -> Iterator[GuestContainer]:
    with running_guest() as running:
        yield running


@pytest.fixture
def own(engine: object) -> Iterator[GuestContainer]:
    with running_guest() as running:
        yield running


@contextlib.asynccontextmanager
async def connected(container: GuestContainer) -> AsyncIterator[ChannelGuest]:
    budget = ChannelBudget()
    guest = ChannelGuest(container.open_channel, budget=budget)
    try:
        yield guest
    finally:
        await guest.aclose()
        await until(lambda: budget.open == 0)


@pytest.fixture
async def guest(container: GuestContainer) -> AsyncIterator[ChannelGuest]:
    async with connected(container) as near:
        yield near


async def run(guest: ChannelGuest, what: str | list[str], seconds: float = 30, limit: int = 10 * MIB, **more: str) -> ExecResult:
    return await guest.run(command(what, seconds, **more), max_output_bytes=limit)


async def read(guest: ChannelGuest, path: bytes, **how: int) -> bytes:
    async with guest.read_file(path, **how) as body:
        return b"".join([part async for part in body.chunks])


async def test_outcomes_are_those_of_a_shell(guest: ChannelGuest) -> None:
    cases: list[tuple[str | list[str], int]] = [
        ("exit 255", 255),
        ("kill -9 $$", 137),
        ("kill -TERM $$", 143),
        (["no-such-binary"], 127),
        (["/etc/passwd"], 126),
        (["true"], 0),
    ]
    results = {str(what): await run(guest, what) for what, _ in cases}
    assert {what: result.exit_code for what, result in results.items()} == {str(what): code for what, code in cases}
    assert "no-such-binary" in results["['no-such-binary']"].stderr
    assert "/etc/passwd" in results["['/etc/passwd']"].stderr


async def test_bad_starts_are_refused_with_what_to_do(guest: ChannelGuest) -> None:
    for bad in (command("true", workdir="/nowhere"), command(["a\0b"]), command(["echo", "x" * 131072]), command("true", workdir="/etc/passwd")):
        with pytest.raises(InvalidRequest):
            await guest.run(bad, max_output_bytes=MIB)


async def test_text_is_decoded_over_the_whole_stream(guest: ChannelGuest) -> None:
    for k in range(4):
        code = f"import sys;sys.stdout.buffer.write(b'a'*{k}+('漢'*400000).encode());sys.stderr.buffer.write(b'b'*{k}+('🙂'*200000).encode())"
        whole = await run(guest, ["python3", "-c", code], 60)
        assert whole.stdout == "a" * k + "漢" * 400000
        assert whole.stderr == "b" * k + "🙂" * 200000
        assert not whole.truncated
        cut = await run(guest, ["python3", "-c", code], 60, limit=1_000_001)
        assert cut.truncated
        assert ("a" * k + "漢" * 400000).startswith(cut.stdout.removesuffix("\ufffd"))
        found = {"stdout": "", "stderr": ""}
        async for event in guest.stream(command(["python3", "-c", code], 60)):
            if isinstance(event, OutputEvent):
                found[event.type] += event.data
        assert found == {"stdout": "a" * k + "漢" * 400000, "stderr": "b" * k + "🙂" * 200000}


async def test_a_slow_reader_gets_all_of_a_long_stream_and_the_exit_last(guest: ChannelGuest) -> None:
    size, events = 0, []
    async for event in guest.stream(command("seq 1 1000000", 120)):
        if isinstance(event, OutputEvent):
            size += len(event.data)
            if size % 7 == 0:
                await asyncio.sleep(0.01)
        events.append(event)
    assert size == 6_888_896
    assert events[-2].data.endswith("\n1000000\n")  # type: ignore[union-attr]
    assert isinstance(events[-1], ExitEvent)
    assert sum(isinstance(event, ExitEvent) for event in events) == 1


async def test_output_over_the_limit_is_cut_and_the_command_runs_to_its_end(guest: ChannelGuest) -> None:
    result = await run(guest, "seq 1 2000000", 120)
    assert (result.exit_code, result.truncated, len(result.stdout)) == (0, True, 10 * MIB)


async def test_a_thousand_short_commands_lose_nothing(guest: ChannelGuest) -> None:
    gate = asyncio.Semaphore(20)

    async def one(number: int) -> None:
        async with gate:
            if number % 2:
                result = await run(guest, "echo hello")
                assert (result.stdout, result.exit_code, result.truncated) == ("hello\n", 0, False)
            else:
                events = [event async for event in guest.stream(command("echo hello"))]
                assert "".join(event.data for event in events[:-1] if isinstance(event, OutputEvent)) == "hello\n"
                assert isinstance(events[-1], ExitEvent)
                assert events[-1].exit_code == 0

    await asyncio.gather(*(one(number) for number in range(1000)))


async def test_output_comes_also_while_no_second_channel_can_be_opened(container: GuestContainer) -> None:
    """As when a command has filled the process table before the bridge for its output could start."""
    opened, room = 0, False

    async def open_channel() -> httpcore.AsyncNetworkStream:
        nonlocal opened
        if opened and not room:
            raise ChannelError("the bridge did not start: the process table is full")
        opened += 1
        return await container.open_channel()

    guest = ChannelGuest(open_channel, budget=ChannelBudget())
    try:
        slow = "for i in 1 2 3 4; do echo $i; sleep 0.5; done; head -c 3000000 /dev/zero | tr '\\0' x; exit 5"
        events = [event async for event in guest.stream(command(slow))]
        assert "".join(event.data for event in events if isinstance(event, OutputEvent)) == "1\n2\n3\n4\n" + 3_000_000 * "x"
        assert isinstance(events[-1], ExitEvent) and events[-1].exit_code == 5 and opened == 1
        result = await run(guest, "sleep 12; echo done")
        assert (result.stdout, result.exit_code, opened) == ("done\n", 0, 1), "longer than a lost connection is sought again"
        room = True
        assert (await run(guest, "sleep 3; echo done")).stdout == "done\n" and opened == 2, "the event stream comes as soon as there is room"
    finally:
        await guest.aclose()


async def test_the_answer_does_not_wait_for_what_a_command_leaves_behind(guest: ChannelGuest) -> None:
    for left in ("sleep 301 & echo started", "setsid sleep 301 & echo started", "(sleep 301 >&2) & echo started"):
        began = time.monotonic()
        result = await run(guest, left)
        assert (result.stdout, result.exit_code) == ("started\n", 0)
        assert time.monotonic() - began < 5
    await run(guest, "pkill -f 'sleep 30[1]'")


async def test_a_timeout_kills_the_tree_and_keeps_the_output(guest: ChannelGuest) -> None:
    script = 'echo before; (setsid sh -c "sleep 4; echo late > /workspace/late") & sh -c \'trap "" TERM; sleep 303\' | cat; wait'
    began = time.monotonic()
    result = await run(guest, script, 1)
    assert (result.stdout, result.timed_out) == ("before\n", True)
    assert result.exit_code != 0
    assert time.monotonic() - began < 4
    assert (await run(guest, "pgrep -fc 'sleep 30[3]'")).stdout == "0\n"
    await asyncio.sleep(3.5)
    with pytest.raises(NotFound):
        await guest.stat(b"late")


async def test_a_cancelled_command_stops(guest: ChannelGuest) -> None:
    loop = "while :; do date +%N > /workspace/tick; sleep 0.05; done"
    for _ in range(3):
        task = asyncio.create_task(run(guest, loop))
        await asyncio.sleep(0.3)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    async with contextlib.aclosing(guest.stream(command("echo x; " + loop))) as events:  # type: ignore[type-var]
        async for _ in events:
            break
    await until(lambda: not guest._calls.control.busy and not guest._processes._events.runs)

    async def loops() -> str:
        return (await run(guest, "pgrep -fc 'date +%[N]'")).stdout

    for _ in range(100):
        if await loops() == "0\n":
            break
    assert await loops() == "0\n"


async def test_a_restart_under_a_command_is_an_unknown_outcome(own: GuestContainer) -> None:
    async with connected(own) as guest:
        task = asyncio.create_task(run(guest, "sleep 60", 100))
        await until(lambda: guest._processes._events.open)
        await asyncio.to_thread(own.restart)
        with pytest.raises(OutcomeUnknown):
            await asyncio.wait_for(task, 25)
        assert (await run(guest, "echo again")).stdout == "again\n"


async def test_killed_bridges_are_reconnected_and_never_a_result(guest: ChannelGuest) -> None:
    task = asyncio.create_task(run(guest, "for i in 1 2 3 4 5; do seq 1 20000; sleep 0.3; done; exit 5", 60))
    await until(lambda: guest._processes._events.open)
    for _ in range(3):
        with contextlib.suppress(OutcomeUnknown, BackendError):
            await run(guest, "pkill -9 -f 'sandbox-init connec[t]'; exit 3")
    result = await asyncio.wait_for(task, 40)
    assert (result.exit_code, result.truncated) == (5, False)
    assert result.stdout == "".join(f"{n}\n" for n in range(1, 20001)) * 5


async def test_files_come_back_as_they_were_written(guest: ChannelGuest) -> None:
    for size in (0, 1, 131071, 131072, 131073, 200000, 5 * MIB):
        data = os.urandom(size)
        info = await guest.write_file(b"deep/er/new dir/blob.bin", pieces(data), mode=0o600)
        assert (info.size, info.mode, info.type) == (size, 0o600, "file")
        assert await read(guest, b"deep/er/new dir/blob.bin") == data
        assert hashlib.sha256(data).hexdigest() in (await run(guest, "sha256sum 'deep/er/new dir/blob.bin'")).stdout
    assert await read(guest, b"deep/er/new dir/blob.bin", start=5, end=9) == data[5:9]
    assert await read(guest, b"deep/er/new dir/blob.bin", start=1000) == data[1000:]
    await guest.remove(b"deep", recursive=True)
    with pytest.raises(NotFound):
        await guest.stat(b"deep")


async def test_a_file_over_the_limit_is_refused_both_ways_and_nothing_is_left(guest: ChannelGuest) -> None:
    for size in (20_000, 3 * MIB):
        with pytest.raises(PayloadTooLarge):
            await guest.write_file(b"large.bin", pieces(bytes(size)), max_bytes=size - 1)
        with pytest.raises(NotFound):
            await guest.stat(b"large.bin")
        await guest.write_file(b"large.bin", pieces(bytes(size)), max_bytes=size)
        with pytest.raises(PayloadTooLarge):
            await read(guest, b"large.bin", max_bytes=size - 1)
        assert len(await read(guest, b"large.bin", max_bytes=size)) == size
        await guest.remove(b"large.bin")
    assert [entry.name for entry in await guest.list_dir(b"/workspace") if b"large" in entry.name] == []


async def test_an_upload_whose_source_fails_leaves_nothing(guest: ChannelGuest) -> None:
    async def failing() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(65536)
        raise PayloadTooLarge("the caller sent too much")

    with pytest.raises(PayloadTooLarge, match="the caller"):
        await guest.write_file(b"partial.bin", failing())
    names = [entry.name for entry in await guest.list_dir(b".")]
    assert not [name for name in names if b"partial" in name or name.startswith(b".tmp")]


async def test_a_large_read_that_is_left_early_costs_only_its_channel(guest: ChannelGuest) -> None:
    await guest.write_file(b"big", pieces(bytes(20 * MIB)))
    async with guest.read_file(b"big") as body:
        async for _ in body.chunks:
            break
    assert len(await read(guest, b"big")) == 20 * MIB
    await guest.remove(b"big")


async def test_a_transfer_does_not_hold_up_a_command(guest: ChannelGuest) -> None:
    await guest.write_file(b"big", pieces(bytes(20 * MIB)))
    async with guest.read_file(b"big") as body:
        chunks = aiter(body.chunks)
        await anext(chunks)
        result = await asyncio.wait_for(run(guest, "echo free; ls | wc -l"), 3)
        assert result.stdout.startswith("free\n")
        assert [entry.name for entry in await guest.list_dir(b".")]
        assert await read(guest, b"/etc/hostname")
    await guest.remove(b"big")


async def test_any_name_that_is_a_name_is_listed_and_read(guest: ChannelGuest) -> None:
    names = [
        b"a b.txt",
        b"[x].txt",
        b"-rf",
        b"$(id).txt",
        "日本語.txt".encode(),
        b"back\\slash",
        b"%2e%2e.txt",
        b"\xff\xfe.bin",
        b"new\nline",
        b"~",
        b"*" * 255,
    ]
    for name in names:
        await guest.write_file(b"names/" + name, pieces(name))
    listed = await guest.list_dir(b"names")
    assert [entry.name for entry in listed] == sorted(names)
    for name in names:
        assert await read(guest, b"names/" + name) == name
    with pytest.raises(InvalidRequest):
        await guest.write_file(b"names/" + b"x" * 256, pieces(b""))
    moved = await guest.move(b"names/~", b"names/moved")
    assert moved.name == b"moved"
    with pytest.raises(Conflict):
        await guest.move(b"names/moved", b"names/-rf")
    await guest.remove(b"names", recursive=True)


async def test_paths_that_lead_out_or_to_nothing_are_refused(guest: ChannelGuest) -> None:
    await run(guest, "ln -sfn /tmp out; ln -sfn /etc/passwd pw; mkdir -p folder")
    for path in (b"out/evil", b"../x", b"/workspace/../tmp/x", b"/tmp/x"):
        with pytest.raises((InvalidRequest, Forbidden)):
            await guest.write_file(path, pieces(b"x"))
    with pytest.raises(InvalidRequest):
        await read(guest, b"folder")
    with pytest.raises(InvalidRequest):
        await guest.write_file(b"folder", pieces(b"x"))
    with pytest.raises(Forbidden):
        await read(guest, b"/proc/1/environ")
    for path in (b"", b"a\0b", b"//workspace/x"):
        with pytest.raises(InvalidRequest):
            await guest.stat(path)
    assert (await guest.stat(b"pw")).type == "symlink"
    await guest.make_dir(b"folder/a/b")
    assert (await guest.stat(b"folder/a/b")).type == "directory"
    await run(guest, "rm -r out pw folder")


async def test_a_snapshot_through_the_store_is_the_same_tree_again(own: GuestContainer, tmp_path: Path) -> None:
    store = SnapshotStore.open(f"file://{tmp_path}/store", spool=tmp_path / "spool")
    build = """mkdir -p empty dir 'sp ace/deep' locked && echo data > dir/file && ln -s dir/file link && ln -s nowhere gone && ln dir/file hard
    printf '#!/bin/sh\\n' > run.sh && chmod 755 run.sh && : > zero && echo x > locked/in && chmod 500 locked && truncate -s 5M sparse && echo end >> sparse
    python3 -c "import os;open(b'\\xff\\xfe','w').close();os.makedirs('d/'*60)" ; for i in $(seq 100); do echo $i > f$i; done"""
    look = "find . -mindepth 1 -printf '%P|%y|%m|%T@|%l\\n' | LC_ALL=C sort; find . -type f -exec sha256sum {} + | LC_ALL=C sort -k2; ls -la | wc -l"
    async with connected(own) as guest:
        assert (await run(guest, build)).exit_code == 0
        before = await run(guest, look)
        manifest = Manifest(id=new_snapshot_id(), sandbox_id="sb_0", spec=StoredSpec.of(SPEC), created_at=datetime.now(UTC))
        record = await store.save(manifest, guest.archive, max_bytes=100 * MIB)
        assert record.file_count >= 104
        assert (await run(guest, "chmod -R u+w . && find . -mindepth 1 -delete; echo junk > junk; sleep 1000 & echo $!")).exit_code == 0
        boot = guest.boot_id
        for _ in range(2):
            async with store.read(record.id) as opened:
                restored = await guest.restore(opened.chunks, bytes=record.data_bytes, entries=record.entries, max_bytes=100 * MIB)
            assert restored.boot_id != boot
            after = await run(guest, look)
            assert after.stdout == before.stdout
            assert (await run(guest, "pgrep -fc 'sleep 100[0]'")).stdout == "0\n"
    await store.aclose()


async def test_a_flipped_byte_is_refused_and_the_old_state_is_kept(own: GuestContainer, tmp_path: Path) -> None:
    store = SnapshotStore.open(f"file://{tmp_path}/store", spool=tmp_path / "spool")
    async with connected(own) as guest:
        await guest.write_file(b"data", pieces(os.urandom(3 * MIB)))
        manifest = Manifest(id=new_snapshot_id(), sandbox_id="sb_0", spec=StoredSpec.of(SPEC), created_at=datetime.now(UTC))
        record = await store.save(manifest, guest.archive, max_bytes=100 * MIB)
        await guest.write_file(b"data", pieces(b"newer"))
        blob = tmp_path / "store" / f"{record.id}.tar.zst"
        raw = bytearray(blob.read_bytes())
        for at in (10, len(raw) // 2, len(raw) - 1):
            raw[at] ^= 1
            blob.write_bytes(raw)
            with pytest.raises(BackendError, match="is damaged in the store"):
                async with store.read(record.id) as opened:
                    await guest.restore(opened.chunks, bytes=record.data_bytes, entries=record.entries, max_bytes=100 * MIB)
            raw[at] ^= 1
            assert await read(guest, b"data") == b"newer"
    await store.aclose()


async def test_an_archive_is_a_tar_that_others_read(guest: ChannelGuest) -> None:
    await guest.write_file(b"tree/one", pieces(b"1"))
    raw = b"".join([part async for part in guest.archive(b'{"format":1}')])
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        names = tar.getnames()
        assert names[0] == ".sandbox-init/manifest.json"
        assert names[-1] == ".sandbox-init/index.json"
        found = tar.extractfile("tree/one")
        assert found is not None
        assert found.read() == b"1"
    await guest.remove(b"tree", recursive=True)


async def test_commands_go_on_after_an_archive_and_their_clock_stands_still_meanwhile(guest: ChannelGuest) -> None:
    task = asyncio.create_task(run(guest, "sleep 1; echo went on", 10))
    await until(lambda: guest._processes._events.runs)
    async with contextlib.aclosing(guest.archive(b'{"format":1}')) as archive:  # type: ignore[type-var]
        async for _ in archive:
            break
    assert (await task).stdout == "went on\n"


async def test_health_and_resources_are_told(guest: ChannelGuest) -> None:
    health, resources = await guest.health(), await guest.resources()
    assert (health["api"], health["boot_id"]) == (1, guest.boot_id)
    assert {"memory", "pids", "workspace", "init"} <= resources.keys()
