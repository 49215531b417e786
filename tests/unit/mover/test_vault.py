"""The snapshots of one installation in a store, in a directory and on a real S3 server."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from agent_sandbox_core.errors import BackendError, Conflict, InvalidRequest, PayloadTooLarge
from agent_sandbox_core.snapshots import BlobStore, Damaged, InvalidArchive, ObjectMissing, Record, StoreFull, StoreUnreachable
from agent_sandbox_core.snapshots.importing import imported
from agent_sandbox_operator.mover.vault import Place, Vault, check_location, now_utc, plan_sweep

from tests.support.s3 import s3_server
from tests.unit.core.archives import archive, manifest, member, pieces

from .objects import snapshot

MIB = 1 << 20
PLACE = Place("agents", "nightly", "aaaabbbb-1111-4222-8333-444455556666")
OTHER = Place("agents", "weekly", "ccccdddd-1111-4222-8333-444455556666")
HOUR = timedelta(hours=1)


async def put(vault: Vault, place: Place, data: bytes = b"x" * 5000) -> Record:
    made = manifest()
    body = made.to_bytes()
    async with vault.blobs.spool.received(pieces(archive([member("file", data)], head=body)), body, 100 * MIB) as spooled:
        record = spooled.record(made)
        await vault.blobs.commit(vault.key(place), record, spooled)
    return record


async def tar_of(vault: Vault, place: Place, digest: str | None = None) -> bytes:
    async with vault.read(place, digest) as opened:
        return b"".join([part async for part in opened.chunks])


async def test_what_is_put_at_a_place_is_read_from_it(blobs: BlobStore) -> None:
    vault = Vault(blobs, "cluster-a")
    data = os.urandom(9 * MIB)
    record = await put(vault, PLACE, data)
    assert await vault.record(PLACE) == record
    assert data in await tar_of(vault, PLACE, record.digest)
    assert vault.location(PLACE) == f"cluster-a/agents/nightly.{PLACE.uid}/archive.tar.zst"
    assert set((await vault.list_all())[PLACE].objects) == {"archive.tar.zst", "archive.json"}
    await vault.delete(PLACE)
    await vault.delete(PLACE)
    assert await vault.record(PLACE) is None
    assert await vault.list_all() == {}


async def test_two_installations_in_one_store_do_not_see_each_other(blobs: BlobStore) -> None:
    mine, theirs = Vault(blobs, "cluster-a"), Vault(blobs, "cluster-a-b")
    await put(mine, PLACE)
    assert await theirs.record(PLACE) is None
    assert await theirs.list_all() == {}
    assert list(await mine.list_all()) == [PLACE]


async def test_one_place_is_written_once(blobs: BlobStore) -> None:
    vault = Vault(blobs, "cluster-a")
    await put(vault, PLACE)
    with pytest.raises(Conflict):
        await put(vault, PLACE, b"other")


async def test_an_archive_that_is_not_the_one_of_the_status_is_refused(blobs: BlobStore) -> None:
    vault = Vault(blobs, "cluster-a")
    await put(vault, PLACE)
    with pytest.raises(Damaged, match="another than its status says"):
        await tar_of(vault, PLACE, "sha256:" + "0" * 64)
    with pytest.raises(Damaged, match="is gone from the store"):
        await tar_of(vault, OTHER)
    assert not vault.is_read(PLACE)


async def test_an_archive_is_found_by_name_unless_it_is_in_the_trash(blobs: BlobStore) -> None:
    vault = Vault(blobs, "cluster-a")
    await put(vault, PLACE)
    assert await vault.find_by_name("agents", "nightly") == PLACE
    assert await vault.find_by_name("agents", "night") is None
    await vault.put_in_trash(PLACE, now_utc())
    assert await vault.find_by_name("agents", "nightly") is None
    await vault.take_from_trash(PLACE)
    await put(vault, Place("agents", "nightly", "another-uid"))
    with pytest.raises(BackendError, match="2 archives"):
        await vault.find_by_name("agents", "nightly")


async def test_strays_go_to_the_trash_and_what_is_kept_or_owned_stays(blobs: BlobStore) -> None:
    vault = Vault(blobs, "cluster-a")
    kept, foreign = Place("agents", "kept", "u1"), Place("elsewhere", "x", "u2")
    for place in (PLACE, OTHER, kept, foreign):
        await put(vault, place)
    await vault.set_keep(kept, keep=True)
    found, later = await vault.list_all(), now_utc() + 2 * HOUR
    plan = plan_sweep(found, [PLACE], scope=["agents"], busy=(), now=later, stray=HOUR)
    assert plan.trash == (OTHER,)
    assert not (plan.untrash or plan.check or plan.uncommitted)
    young = plan_sweep(found, [PLACE], scope=["agents"], busy=(), now=now_utc(), stray=HOUR)
    assert young.trash == ()
    moment = now_utc()
    await vault.put_in_trash(OTHER, moment)
    assert await vault.trashed_at(OTHER) == moment
    again = await vault.list_all()
    assert plan_sweep(again, [PLACE], scope=(), busy=(), now=later, stray=HOUR).check == (OTHER,)
    assert plan_sweep(again, [PLACE, OTHER], scope=(), busy=(), now=later, stray=HOUR).untrash == (OTHER,)
    await vault.set_keep(kept, keep=False)
    assert kept in plan_sweep(await vault.list_all(), [PLACE], scope=(), busy=(), now=later, stray=HOUR).trash


async def test_a_blob_without_its_record_is_removed_unless_it_is_being_written(blobs: BlobStore) -> None:
    vault = Vault(blobs, "cluster-a")
    await put(vault, PLACE)
    await blobs.delete_object(vault.key(PLACE) + ".json")
    found, later = await vault.list_all(), now_utc() + 2 * HOUR
    assert plan_sweep(found, [PLACE], scope=(), busy=[PLACE], now=later, stray=HOUR).uncommitted == ()
    assert plan_sweep(found, [PLACE], scope=(), busy=(), now=later, stray=HOUR).uncommitted == (PLACE,)
    await vault.delete_uncommitted(PLACE)
    assert await vault.list_all() == {}


def test_a_status_that_names_another_snapshots_archive_is_not_believed(tmp_path: Path) -> None:
    vault = Vault(BlobStore.open((tmp_path / "store").as_uri(), spool=tmp_path / "spool"), "cluster-a")
    own = vault.place_of(snapshot())
    assert own == PLACE
    assert vault.place_of(snapshot(status={"location": vault.location(Place("agents", "nightly", "old-uid"))})) == Place(
        "agents", "nightly", "old-uid"
    )
    for stranger in (vault.location(Place("other", "nightly", "u")), vault.location(OTHER), "cluster-a/mover.lock", "x/../../etc"):
        assert vault.place_of(snapshot(status={"location": stranger})) == own


@pytest.mark.parametrize(
    "location", ["../x", "/etc/passwd", "a//b", "a/./b", "cluster-a/other/x.u/archive.tar.zst", "cluster-a/mover.lock", "a\\b", ""]
)
def test_a_location_outside_the_store_or_of_another_namespace_is_refused(location: str) -> None:
    with pytest.raises(InvalidRequest):
        check_location(location, "agents", "cluster-a")


@pytest.mark.parametrize("location", ["imports/snap_1.tar.zst", "snap_1.tar.zst", "cluster-a/agents/nightly.u/archive.tar.zst"])
def test_a_location_for_imports_or_of_the_own_namespace_is_taken(location: str) -> None:
    assert check_location(location, "agents", "cluster-a") == location


async def foreign(blobs: BlobStore, raw: bytes, name: str = "imports/foreign.tar.zst") -> str:
    """Puts a file for import into the store; returns its digest."""
    import hashlib  # noqa: PLC0415 - only here

    await blobs.put_small(name, raw)
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


async def docker_file(tmp_path: Path, members: AsyncIterator[bytes] | None = None) -> bytes:
    """A snapshot file as Docker mode writes it."""
    store = BlobStore.open((tmp_path / "docker").as_uri(), spool=tmp_path / "docker-spool")
    made = manifest()
    body = made.to_bytes()
    async with store.spool.received(pieces(archive([member("hello.txt", b"from docker")], head=body)), body, 100 * MIB) as spooled:
        await store.commit(made.id, spooled.record(made), spooled)
    await store.aclose()
    return (tmp_path / "docker" / f"{made.id}.tar.zst").read_bytes()


async def test_a_snapshot_file_of_docker_mode_is_taken_in(blobs: BlobStore, tmp_path: Path) -> None:
    vault, raw = Vault(blobs, "cluster-a"), await docker_file(tmp_path)
    digest = await foreign(blobs, raw)
    with await blobs.open_blob("imports/foreign.tar.zst") as file:
        async with imported(blobs.spool, file, digest, 100 * MIB) as found:
            record = found.spooled.record(found.manifest)
            await blobs.commit(vault.key(PLACE), record, found.spooled)
    assert (record.digest, record.file_count, record.manifest.sandbox_id) == (digest, 1, "sb_0123456789abcdef")
    assert b"from docker" in await tar_of(vault, PLACE, digest)
    assert list((tmp_path / "spool").iterdir()) == []


async def test_a_foreign_file_that_is_not_what_it_should_be_is_refused_and_nothing_is_left(blobs: BlobStore, tmp_path: Path) -> None:
    import zstandard  # noqa: PLC0415 - only here

    raw = await docker_file(tmp_path)
    hostile = zstandard.compress(archive([member("../../etc/passwd", b"x")], head=manifest().to_bytes()))
    bomb = zstandard.compress(archive([member("zeros", bytes(64 * MIB))], head=manifest().to_bytes()))
    cases: list[tuple[bytes, str | None, type[Exception]]] = [
        (raw, "sha256:" + "0" * 64, Damaged),
        (raw[: len(raw) // 2], None, InvalidArchive),
        (b"no archive", None, InvalidArchive),
        (hostile, None, InvalidArchive),
        (bomb, None, PayloadTooLarge),
        (bytes(40 * MIB), None, PayloadTooLarge),
        (zstandard.compress(archive([member("a", b"x")], head=b'{"format":1}')), None, InvalidArchive),
    ]
    for data, digest, kind in cases:
        found = await foreign(blobs, data)
        with await blobs.open_blob("imports/foreign.tar.zst") as file, pytest.raises(kind):
            async with imported(blobs.spool, file, digest or found, 32 * MIB):
                pass
    assert list((tmp_path / "spool").iterdir()) == []
    with pytest.raises(ObjectMissing):
        await blobs.open_blob("imports/missing.tar.zst")


async def test_a_store_that_does_not_answer_is_told_as_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        store = BlobStore.open(server.url, spool=tmp_path / "spool")
        vault = Vault(store, "cluster-a")
        await put(vault, PLACE)
        server.stop()
        with pytest.raises(StoreUnreachable, match="check that it can be reached"):
            await vault.record(PLACE)
        await store.aclose()


async def test_a_full_disk_is_told_as_full(tmp_path: Path) -> None:
    small = Path("/dev/full")
    store = BlobStore.open((tmp_path / "store").as_uri(), spool=tmp_path / "spool")
    error = store.error(OSError(28, "No space left on device", str(small)), "could not keep it")
    assert isinstance(error, StoreFull)
    assert "the disk is full" in error.message
    await store.aclose()
