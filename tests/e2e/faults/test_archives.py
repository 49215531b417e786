"""Hostile archives in the store: refused by rollback and by fork, the old state kept, nothing written outside, bounded memory."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator

import pytest

from tests.support.client import Api, refused
from tests.support.docker import Docker
from tests.support.forgery import Member, forge, plain, stored_files, write
from tests.support.lifecycle import running_facade
from tests.support.server import Facade
from tests.support.target import Target

pytestmark = pytest.mark.needs("engine", "processes")

LIMIT = 4_000_000
HOSTILE = {
    "absolute": [Member("/workspace/../tmp/evil", content=b"x")],
    "absolute in the workspace": [Member("/workspace/evil", content=b"x")],
    "dots": [Member("../tmp/evil", content=b"x")],
    "dots inside": [Member("a/../../tmp/evil", content=b"x")],
    "through an absolute link": [Member("out", tarfile.SYMTYPE, "/tmp"), Member("out/evil", content=b"x")],
    "through a relative link": [Member("up", tarfile.SYMTYPE, ".."), Member("up/tmp/evil", content=b"x")],
    "through a link to itself": [Member("loop", tarfile.SYMTYPE, "loop"), Member("loop/evil", content=b"x")],
    "a folder that turns into a link": [Member("d", tarfile.DIRTYPE), Member("d", tarfile.SYMTYPE, "/tmp"), Member("d/evil", content=b"x")],
    "hard link to an absolute path": [Member("h", tarfile.LNKTYPE, "/etc/passwd")],
    "hard link with dots": [Member("h", tarfile.LNKTYPE, "../etc/passwd")],
    "hard link through a link": [Member("out", tarfile.SYMTYPE, "/etc"), Member("h", tarfile.LNKTYPE, "out/passwd")],
    "hard link to nothing": [Member("h", tarfile.LNKTYPE, "nothing")],
    "character device": [Member("dev", tarfile.CHRTYPE)],
    "block device": [Member("dev", tarfile.BLKTYPE)],
    "reserved name": [Member(".sandbox-init/evil", content=b"x")],
    "reserved name as a link": [Member(".sandbox-init", tarfile.SYMTYPE, "/tmp")],
    "claims more than there is": [Member("f", content=b"x", claims=1_000_000)],
    "claims an absurd size": [Member("f", content=b"x", claims=1 << 60)],
    "sparse over the limit": [
        Member(
            "s",
            content=b"0\n" + b"\0" * 510,
            pax=(("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0"), ("GNU.sparse.name", "s"), ("GNU.sparse.realsize", str(1 << 50))),
        )
    ],
    "pax path with dots": [Member("fine", content=b"x", pax=(("path", "../tmp/evil"),))],
    "a file below a file": [Member("f", content=b"x"), Member("f/evil", content=b"x")],
}


@pytest.fixture(scope="module")
def bounded(target: Target, docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facade]:
    """A facade that takes snapshots of up to 4 MB."""
    with running_facade(target, docker, tmp_path_factory.mktemp("bounded") / "data", MAX_SNAPSHOT_BYTES=str(LIMIT)) as facade:
        yield facade


@pytest.fixture(scope="module")
def victim(bounded: Facade) -> str:
    """A sandbox with something to lose."""
    sandbox: str = bounded.api.new()["id"]
    bounded.api.sh(sandbox, "mkdir d; echo precious > d/f; sleep 319 >/dev/null 2>&1 &")
    return sandbox


@pytest.fixture
def snapshot(bounded: Facade) -> Iterator[str]:
    """A snapshot of an empty workspace, to be forged."""
    source = bounded.api.new(memory_mb=16)["id"]
    made: str = bounded.api.snap(source)["id"]
    bounded.api.delete(source)
    yield made
    bounded.api.drop(made)


def unharmed(api: Api, victim: str) -> None:
    """The victim is as it was: files, processes, /tmp."""
    assert api.sandbox(victim)["status"] == "running"
    assert api.sh(victim, "ls -A . d /tmp; cat d/f") == "/tmp:\n\n.:\nd\n\nd:\nf\nprecious\n"
    assert "319" in api.sh(victim, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")


def refused_everywhere(api: Api, victim: str, snapshot: str) -> None:
    """Rollback and fork both say no, and no sandbox comes of it."""
    before = [row["id"] for row in api.sandboxes()]
    for answer in (api.roll(victim, snapshot), api.branch(snapshot)):
        assert answer.status_code in (400, 413, 502), answer.text
        refused(answer, answer.status_code)
    assert [row["id"] for row in api.sandboxes()] == before
    unharmed(api, victim)


@pytest.mark.behaviour("FAULT-030")
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_is_refused_and_the_old_state_kept(bounded: Facade, victim: str, snapshot: str, kind: str) -> None:
    forge(bounded.data, snapshot, HOSTILE[kind])
    refused_everywhere(bounded.api, victim, snapshot)


@pytest.mark.behaviour("FAULT-030")
def test_a_forged_archive_of_harmless_members_is_taken(bounded: Facade, snapshot: str) -> None:
    """The forgery itself is right: what the tests above see refused is the member, not the forging."""
    members = [
        Member("d", tarfile.DIRTYPE, mode=0o755),
        Member("d/f", content=b"content"),
        Member("h", tarfile.LNKTYPE, "d/f"),
        Member("out", tarfile.SYMTYPE, "/etc"),
        Member("dots", tarfile.SYMTYPE, "../../.."),
    ]
    forge(bounded.data, snapshot, members)
    fork = bounded.api.fork(snapshot)["id"]
    assert bounded.api.sh(fork, "ls -A; cat d/f h; readlink out dots; stat -c %h h") == "d\ndots\nh\nout\ncontentcontent/etc\n../../..\n2\n"
    bounded.api.delete(fork)


@pytest.mark.behaviour("FAULT-030")
@pytest.mark.parametrize("damage", ["no index", "cut in a member", "garbage after", "not a tar", "empty", "index lies"])
def test_an_archive_that_is_incomplete_is_refused(bounded: Facade, victim: str, snapshot: str, damage: str) -> None:
    archive = plain(stored_files(bounded.data, snapshot)[0].read_bytes())
    index = archive.rindex(b".sandbox-init/index.json")
    forged = {
        "no index": archive[: index // 512 * 512] + b"\0" * 1024,
        "cut in a member": archive[:700],
        "garbage after": archive + b"garbage" * 1000,
        "not a tar": b"hello " * 1000,
        "empty": b"",
        "index lies": archive.replace(b'"format":1', b'"format":9') if b'"format":1' in archive else archive[:-2000],
    }[damage]
    write(bounded.data, snapshot, forged)
    refused_everywhere(bounded.api, victim, snapshot)


@pytest.mark.behaviour("FAULT-031")
@pytest.mark.parametrize("kind", ["one file", "many files"])
def test_a_bomb_is_refused_with_bounded_memory_and_disk(bounded: Facade, victim: str, snapshot: str, kind: str) -> None:
    members = [Member("bomb", content=b"\0" * 200_000_000)] if kind == "one file" else [Member(f"b{n}") for n in range(20_000)]
    forge(bounded.data, snapshot, members)
    assert stored_files(bounded.data, snapshot)[0].stat().st_size < LIMIT
    before = bounded.figures().rss
    bounded.reset_peak()
    refused_everywhere(bounded.api, victim, snapshot)
    assert bounded.figures().peak - before < 100_000_000
    assert int(bounded.api.sh(victim, "du -sk /workspace | cut -f1")) < 10_000
