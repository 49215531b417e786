"""The snapshot store fails: disk full, read-only, flipped bytes. A clear error, no partial snapshot, and the sandbox is fine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.client import Api, refused
from tests.support.docker import Docker
from tests.support.lifecycle import running_facade
from tests.support.server import Facade
from tests.support.target import Target

pytestmark = pytest.mark.needs("engine", "processes")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], check=True, timeout=10)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


@pytest.fixture
def cramped(target: Target, docker: Docker, mounted: Path) -> Iterator[Facade]:
    """A facade whose data folder is on that file system."""
    with running_facade(target, docker, mounted / "data") as facade:
        yield facade


def blob(facade: Facade, snapshot: str) -> Path:
    """The file of a snapshot's archive."""
    return next(file for file in facade.data.rglob(f"*{snapshot}*") if file.name.endswith(".tar.zst"))


@pytest.mark.behaviour("FAULT-020")
@pytest.mark.needs("root")
def test_a_disk_that_fills_up_while_a_snapshot_is_written(cramped: Facade, mounted: Path) -> None:
    api = cramped.api
    box = api.new()["id"]
    api.sh(
        box,
        "head -c 40000000 /dev/urandom > big; echo small > small; (while :; do date +%s%N > tick; sleep 0.05; done) >/dev/null 2>&1 &",
    )
    digest = api.sh(box, "sha256sum big")
    before = sum(file.stat().st_size for file in mounted.rglob("*") if file.is_file())
    for _ in range(3):
        message = refused(api.take(box), 502)
        assert "space" in message.lower() or "full" in message.lower(), message
    assert api.snapshots() == []
    after = sum(file.stat().st_size for file in mounted.rglob("*") if file.is_file())
    assert after - before < 1_000_000, "no part of a failed snapshot is left"
    assert api.sh(box, "sha256sum big") == digest
    tick = api.read(box, "tick")
    assert api.run(box, "sleep 0.3")["exit_code"] == 0 and api.read(box, "tick") != tick
    api.sh(box, "rm big")
    snapshot = api.snap(box)["id"]
    api.rollback(box, snapshot)
    assert api.names(box) in (["small"], ["small", "tick"])


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """The folder turns read-only for everybody, root too, for the time of the block."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True, timeout=10)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True, timeout=10)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


@pytest.mark.behaviour("FAULT-021")
@pytest.mark.needs("root")
def test_a_store_that_turns_read_only(facade: Facade, api: Api, box: str) -> None:
    api.write(box, "f", b"1")
    first = api.snap(box)["id"]
    api.write(box, "f", b"2")
    with read_only(blob(facade, first).parent):
        refused(api.take(box), 502, says="read-only")
        refused(api.call("DELETE", f"/snapshots/{first}"), 502)
        assert [row["id"] for row in api.snapshots(box)] == [first]
        assert api.sh(box, "cat f") == "2"
        api.rollback(box, first)
        assert api.read(box, "f") == b"1"
    second = api.snap(box)["id"]
    assert [row["id"] for row in api.snapshots(box)] == [first, second]


def damage(file: Path, at: float) -> None:
    """Flips one bit at this part of the file."""
    content = bytearray(file.read_bytes())
    content[int((len(content) - 1) * at)] ^= 0x10
    file.write_bytes(content)


@pytest.mark.behaviour("FAULT-022")
@pytest.mark.parametrize("at", [0.0, 0.4, 0.999, 1.0])
def test_a_flipped_byte_is_refused_by_digest_and_the_old_state_kept(facade: Facade, api: Api, box: str, at: float) -> None:
    api.sh(box, "head -c 300000 /dev/urandom > f; echo x > g")
    snapshot = api.snap(box)["id"]
    api.sh(box, "echo changed > f; echo new > h; sleep 318 >/dev/null 2>&1 & echo ok")
    damage(blob(facade, snapshot), at)
    for answer in (api.roll(box, snapshot), api.branch(snapshot)):
        message = refused(answer, 502)
        assert snapshot in message or "digest" in message.lower() or "damaged" in message.lower(), message
    assert api.names(box) == ["f", "g", "h"] and api.read(box, "f") == b"changed\n"
    assert api.sandbox(box)["status"] == "running"
    assert "318" in api.sh(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"), "a refused rollback ends no process"
    assert len([row for row in api.sandboxes() if row["source_snapshot_id"] == snapshot]) == 0


@pytest.mark.behaviour("FAULT-023")
def test_a_truncated_or_missing_blob_is_refused(facade: Facade, api: Api, box: str) -> None:
    api.sh(box, "head -c 300000 /dev/urandom > f")
    snapshot = api.snap(box)["id"]
    file = blob(facade, snapshot)
    content = file.read_bytes()
    for cut in (content[:-1], content[: len(content) // 2], b""):
        file.write_bytes(cut)
        refused(api.roll(box, snapshot), 502)
        refused(api.branch(snapshot), 502)
    file.unlink()
    answer = api.roll(box, snapshot)
    assert answer.status_code in (404, 502)
    refused(answer, answer.status_code)
    assert len(api.read(box, "f")) == 300_000
    assert api.call("DELETE", f"/snapshots/{snapshot}").status_code in (204, 404)


@pytest.mark.behaviour("FAULT-024")
def test_a_damaged_record_hides_no_other_snapshot(facade: Facade, api: Api, box: str) -> None:
    good, bad = api.snap(box)["id"], api.snap(box)["id"]
    record = next(file for file in facade.data.rglob(f"*{bad}*") if file.suffix == ".json")
    content = record.read_bytes()
    record.write_bytes(content[: len(content) // 2])
    listed = [row["id"] for row in api.snapshots(box)]
    assert good in listed
    answer = api.call("GET", f"/snapshots/{bad}")
    assert answer.status_code in (200, 404, 502)
    assert api.fork(good)["status"] == "running"
    record.write_bytes(content)
    assert api.fork(bad)["status"] == "running"
