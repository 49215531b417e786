"""The tar inspector: everything regular passes, cut anywhere; everything hostile, damaged or cut short is refused."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest
from agent_sandbox_core.errors import PayloadTooLarge
from agent_sandbox_core.snapshots import ArchiveIndex, InvalidArchive, TarInspector
from hypothesis import given, settings
from hypothesis import strategies as st

from .archives import MANIFEST, archive, folder, member, pack

LIMIT = 1 << 30
Member = tuple[tarfile.TarInfo, bytes]


def inspect(raw: bytes, step: int = 65536, **more: Any) -> ArchiveIndex:
    inspector = TarInspector(**{"max_bytes": LIMIT, "manifest": MANIFEST, **more})
    for at in range(0, len(raw), step):
        inspector.feed(raw[at : at + step])
    return inspector.finish()


parts = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=40).filter(
    lambda part: part not in (".", "..", ".sandbox-init") and len(part.encode()) <= 255
)


@st.composite
def trees(draw: st.DrawFn, prefix: str = "", depth: int = 3) -> list[Member]:
    """The members of a directory, in walk order."""
    found: list[Member] = []
    for part in sorted(draw(st.sets(parts, max_size=4))):
        name = prefix + part
        kind = draw(st.sampled_from("fffdls" if depth else "fffls"))
        if kind == "d":
            found += [folder(name), *draw(trees(name + "/", depth - 1))]
        elif kind == "l":
            found.append(member(name, kind=tarfile.SYMTYPE, link=draw(st.sampled_from(["/etc/passwd", "../..", "x" * 200, "é"]))))
        elif kind == "s":
            found.append(member(name, b"x", **{"SCHILY.xattr.user.a": draw(st.sampled_from(["1", "two\nlines"]))}))
        else:
            found.append(member(name, draw(st.binary(max_size=1500)), mtime=draw(st.sampled_from([0, 1.5, 1733033333.123, -2.25]))))
    return found


@settings(max_examples=60)
@given(trees(), st.integers(1, 3000))
def test_every_regular_tree_passes_wherever_it_is_cut(members: list[Member], step: int) -> None:
    raw = archive(members)
    index = inspect(raw, step)
    assert index.entries == len(members)
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        assert tar.getnames()[1:-1] == [info.name for info, _ in members]


@settings(max_examples=40)
@given(trees(), st.data())
def test_no_cut_archive_passes(members: list[Member], data: st.DataObject) -> None:
    raw = archive(members)
    with pytest.raises(InvalidArchive):
        inspect(raw[: data.draw(st.integers(0, len(raw) - 513))])


@settings(max_examples=60)
@given(trees(), st.data())
def test_no_changed_byte_before_the_end_passes(members: list[Member], data: st.DataObject) -> None:
    raw = bytearray(archive(members))
    at = data.draw(st.integers(0, raw.rindex(b".sandbox-init/index.json") - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((InvalidArchive, PayloadTooLarge)):
        inspect(bytes(raw))


@given(st.binary(max_size=3000))
def test_random_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidArchive):
        inspect(raw)


HOSTILE: dict[str, list[Member]] = {
    "absolute name": [member("/etc/passwd", b"x")],
    "dots at the front": [member("../evil", b"x")],
    "dots in the middle": [folder("a"), member("a/../../evil", b"x")],
    "a dot": [member("./evil", b"x")],
    "a dots directory": [folder("a"), folder("a/..")],
    "an empty part": [folder("a"), member("a//evil", b"x")],
    "below a link": [member("link", kind=tarfile.SYMTYPE, link="/etc"), member("link/evil", b"x")],
    "below a file": [member("file", b"x"), member("file/evil", b"x")],
    "below nothing": [member("missing/evil", b"x")],
    "in a directory that was left": [folder("a"), folder("b"), member("a/late", b"x")],
    "absolute hard link": [member("h", kind=tarfile.LNKTYPE, link="/etc/passwd")],
    "hard link with dots": [member("h", kind=tarfile.LNKTYPE, link="../x")],
    "hard link to the manifest": [member("h", kind=tarfile.LNKTYPE, link=".sandbox-init/manifest.json")],
    "hard link to nothing": [member("h", kind=tarfile.LNKTYPE, link="")],
    "symlink to nothing": [member("s", kind=tarfile.SYMTYPE, link="")],
    "character device": [member("d", kind=tarfile.CHRTYPE)],
    "block device": [member("d", kind=tarfile.BLKTYPE)],
    "pipe": [member("d", kind=tarfile.FIFOTYPE)],
    "old contiguous file": [member("d", b"x", kind=tarfile.CONTTYPE)],
    "reserved name": [folder(".sandbox-init")],
    "below the reserved name": [folder(".sandbox-init"), member(".sandbox-init/x", b"x")],
    "name over 255 bytes": [member("x" * 256, b"x")],
    "name with a NUL": [member("a", b"x", path="a\0b")],
    "xattr outside user": [member("a", b"x", **{"SCHILY.xattr.security.capability": "x"})],
    "unknown record": [member("a", b"x", **{"GNU.volume.label": "x"})],
    "huge size": [member("a", b"x", size="99999999999999999999")],
    "negative size": [member("a", b"x", size="-1")],
    "half a sparse file": [member("a", b"x", **{"GNU.sparse.major": "1", "GNU.sparse.name": "a"})],
    "two manifests": [member(".sandbox-init/manifest.json", b"{}")],
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_members_are_refused(members: list[Member]) -> None:
    with pytest.raises(InvalidArchive):
        inspect(archive(members))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_other_dialects_of_tar_are_refused(form: int) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=form) as tar:
        tar.addfile(member(".sandbox-init/manifest.json", MANIFEST, mtime=0)[0], io.BytesIO(MANIFEST))
        tar.addfile(folder("d" * 90)[0])
        tar.addfile(member("d" * 90 + "/" + "n" * 90)[0])
    with pytest.raises(InvalidArchive):
        inspect(raw.getvalue())


def test_a_sparse_file_passes_under_its_real_name() -> None:
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "d/real", "GNU.sparse.realsize": "5000000"}
    assert inspect(archive([folder("d"), member("GNUSparseFile.0/1", b"1\n0\n0\n".ljust(512, b"\0"), **sparse)])).entries == 2
    with pytest.raises(InvalidArchive):
        inspect(archive([member("GNUSparseFile.0/1", bytes(512), **{**sparse, "GNU.sparse.name": "/etc/x"})]))


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.update(sha256="0" * 64),
        lambda index: index.update(entries=index["entries"] + 1),
        lambda index: index.update(format=2),
        lambda index: index.update(files=-1),
        lambda index: index.update(bytes="1"),
        lambda index: index.pop("skipped"),
    ],
    ids=["digest", "count", "format", "negative", "text", "missing"],
)
def test_an_index_that_does_not_fit_is_refused(change: Any) -> None:
    with pytest.raises(InvalidArchive):
        inspect(archive([member("a", b"x")], change=change))


def test_another_manifest_than_the_one_given_is_refused() -> None:
    with pytest.raises(InvalidArchive, match="another manifest"):
        inspect(archive([], head=b'{"format":1,"id":"other"}'))
    with pytest.raises(InvalidArchive, match="begins with"):
        inspect(pack([member("a", b"x")]) + bytes(1024))


def test_limits_on_bytes_and_entries_hold() -> None:
    raw = archive([member(f"f{number}", b"x" * 1000) for number in range(10)])
    assert inspect(raw, max_bytes=len(raw), max_entries=10).files == 10
    with pytest.raises(PayloadTooLarge, match="MAX_SNAPSHOT_BYTES"):
        inspect(raw, max_bytes=len(raw) - 1)
    with pytest.raises(PayloadTooLarge, match="more than 9 files"):
        inspect(raw, max_entries=9)


def test_bytes_after_the_end_are_refused_and_zeros_are_not() -> None:
    raw = archive([member("a", b"x")])
    assert inspect(raw + bytes(10240)).files == 1
    with pytest.raises(InvalidArchive, match="after its end"):
        inspect(raw + b"x")
