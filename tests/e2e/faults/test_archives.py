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


HARMLESS = [
    Member("d", tarfile.DIRTYPE, mode=0o755),
    Member("d/f", content=b"content"),
    Member("h", tarfile.LNKTYPE, "d/f"),
    Member("out", tarfile.SYMTYPE, "/etc"),
    Member("dots", tarfile.SYMTYPE, "../../.."),
]
ZEROS = [Member("bomb", content=b"\0" * 200_000_000)]
MANY = [Member(f"b{number}") for number in range(20_000)]
BOMBS = {"one file": ZEROS, "one file, a lying record": ZEROS, "many files": MANY, "many files, a lying record": MANY}
DAMAGED = ("no index", "cut in a member", "garbage after", "not a tar", "empty", "index lies")


def damaged(archive: bytes, how: str) -> bytes:
    """The tar of a snapshot, made incomplete."""
    index = archive.rindex(b".sandbox-init/index.json")
    return {
        "no index": archive[: index // 512 * 512] + b"\0" * 1024,
        "cut in a member": archive[:700],
        "garbage after": archive + b"garbage" * 1000,
        "not a tar": b"hello " * 1000,
        "empty": b"",
        "index lies": archive.replace(b'"entries":0', b'"entries":9'),
    }[how]


@pytest.fixture(scope="module")
def bounded(target: Target, docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facade]:
    """A facade that takes snapshots of up to 4 MB."""
    with running_facade(target, docker, tmp_path_factory.mktemp("bounded") / "data", MAX_SNAPSHOT_BYTES=str(LIMIT)) as facade:
        yield facade


@pytest.fixture(scope="module")
def forged(bounded: Facade) -> dict[str, str]:
    """Snapshots of an empty workspace by what they were forged into while the facade was down (records never change, so it keeps them)."""
    source = bounded.api.new(memory_mb=16)["id"]
    kinds = [*HOSTILE, *BOMBS, *DAMAGED, "harmless"]
    made = {kind: str(bounded.api.snap(source)["id"]) for kind in kinds}
    bounded.api.delete(source)
    bounded.stop()
    for kind, members in (HOSTILE | BOMBS | {"harmless": HARMLESS}).items():
        forge(bounded.data, made[kind], members, honest=not kind.endswith("a lying record"))
    for how in DAMAGED:
        archive = plain(stored_files(bounded.data, made[how])[0].read_bytes())
        write(bounded.data, made[how], damaged(archive, how))
    bounded.api.forget_connections()
    bounded.start()
    assert {row["id"] for row in bounded.api.snapshots()} == set(made.values())
    return made


@pytest.fixture(scope="module")
def victim(bounded: Facade, forged: dict[str, str]) -> str:
    """A sandbox with something to lose."""
    assert forged
    sandbox: str = bounded.api.new()["id"]
    bounded.api.sh(sandbox, "mkdir d; echo precious > d/f; sleep 319 >/dev/null 2>&1 &")
    return sandbox


def unharmed(api: Api, victim: str) -> None:
    """The victim is as it was: files, processes, /tmp."""
    assert api.sandbox(victim)["status"] == "running"
    assert api.sh(victim, "ls -A; ls -A d; ls -A /tmp; cat d/f") == "d\nf\nprecious\n"
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
def test_a_hostile_archive_is_refused_and_the_old_state_kept(bounded: Facade, victim: str, forged: dict[str, str], kind: str) -> None:
    refused_everywhere(bounded.api, victim, forged[kind])


@pytest.mark.behaviour("FAULT-030")
def test_a_forged_archive_of_harmless_members_is_taken(bounded: Facade, forged: dict[str, str]) -> None:
    """The forgery itself is right: what the tests above see refused is the member, not the forging."""
    fork = bounded.api.fork(forged["harmless"])["id"]
    shown = bounded.api.sh(fork, "ls -A; cat d/f h; readlink out dots; stat -c %h h")
    assert shown == "d\ndots\nh\nout\ncontentcontent/etc\n../../..\n2\n"
    bounded.api.delete(fork)


@pytest.mark.behaviour("FAULT-030")
@pytest.mark.parametrize("how", DAMAGED)
def test_an_archive_that_is_incomplete_is_refused(bounded: Facade, victim: str, forged: dict[str, str], how: str) -> None:
    refused_everywhere(bounded.api, victim, forged[how])


@pytest.mark.behaviour("FAULT-031")
@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_refused_with_bounded_memory_and_disk(bounded: Facade, victim: str, forged: dict[str, str], kind: str) -> None:
    assert stored_files(bounded.data, forged[kind])[0].stat().st_size < LIMIT
    before = bounded.figures().rss
    bounded.reset_peak()
    refused_everywhere(bounded.api, victim, forged[kind])
    assert bounded.figures().peak - before < 100_000_000
    assert int(bounded.api.sh(victim, "du -sk /workspace | cut -f1")) < 10_000
