"""The memory engine's files, archives and shell."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator

import pytest
from agent_sandbox_api.backends.memory.archive import read_archive, write_archive
from agent_sandbox_api.backends.memory.guest import Machine, MemoryGuest
from agent_sandbox_api.backends.memory.tree import Node, Tree, directory, walk
from agent_sandbox_core.errors import BackendError, Conflict, Forbidden, InvalidRequest, NotFound, PayloadTooLarge, SandboxError
from agent_sandbox_core.models import Command, ExecResult
from agent_sandbox_core.snapshots import TarInspector
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture
def tree() -> Tree:
    made = Tree()
    made.write(b"dir/file", b"content", 0o640)
    links = {b"in": b"dir", b"out": b"/tmp", b"up": b"../tmp", b"loop": b"loop", b"gone": b"nowhere", b"pw": b"/etc/passwd"}
    for name, target in links.items():
        made.workspace.link(name, Node("symlink", 0o777, data=target))
    return made


def test_links_inside_work_and_links_that_lead_out_are_refused(tree: Tree) -> None:
    assert tree.write(b"in/new", b"1", 0o644).path == b"/workspace/dir/new"
    for path in (b"out/x", b"up/x", b"../x", b"/workspace/../etc/x", b"/x", b"in/../../x", b"/tmp/x"):
        with pytest.raises(Forbidden):
            tree.write(path, b"evil", 0o644)
    with pytest.raises(InvalidRequest, match="circle"):
        tree.write(b"loop/x", b"", 0o644)
    assert tree.root.entries[b"tmp"].entries == {}


def test_a_write_replaces_a_link_and_never_a_directory(tree: Tree) -> None:
    assert tree.write(b"pw", b"mine", 0o600).path == b"/workspace/pw" and tree.read(b"pw")[1].data == b"mine"
    for path in (b"dir", b"in/", b"/workspace", b"."):
        with pytest.raises(InvalidRequest):
            tree.write(path, b"x", 0o644)


def test_a_refused_path_makes_no_directories(tree: Tree) -> None:
    for path in (b"a/b/../../../x", b"a/b/" + b"n" * 256, b"a/../.sandbox-init"):
        with pytest.raises(SandboxError):
            tree.write(path, b"x", 0o644)
    assert b"a" not in tree.workspace.entries


def test_what_is_not_there_or_of_another_kind_is_told(tree: Tree) -> None:
    for path in (b"nope", b"gone", b"nope/x", b"pw"):
        with pytest.raises(NotFound):
            tree.read(path)
    with pytest.raises(InvalidRequest, match="directory"):
        tree.read(b"dir")
    with pytest.raises(InvalidRequest, match="no directory"):
        tree.list(b"dir/file")
    with pytest.raises(InvalidRequest, match="no directory"):
        tree.read(b"dir/file/x")


def test_directories_moves_and_removals(tree: Tree) -> None:
    assert tree.make_dir(b"a/b", 0o700).path == b"/workspace/a/b" and tree.make_dir(b"a/b", 0o755).path == b"/workspace/a/b"
    tree.move(b"dir/file", b"a/b/moved", overwrite=False)
    with pytest.raises(Conflict):
        tree.remove(b"a", recursive=False)
    with pytest.raises(InvalidRequest, match="into itself"):
        tree.move(b"a", b"a/b/c", overwrite=False)
    with pytest.raises(Conflict, match="overwrite"):
        tree.move(b"in", b"a/b/moved", overwrite=False)
    tree.move(b"in", b"a/b/moved", overwrite=True)
    tree.remove(b"a", recursive=True)
    assert [entry.name for entry in tree.list(b"/workspace")] == [b"dir", b"gone", b"loop", b"out", b"pw", b"up"]


NAMES = st.binary(min_size=1, max_size=140).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..", b".sandbox-init", b"lost+found")
)
TIMES = st.integers(min_value=-(10**18), max_value=4 * 10**18)


@st.composite
def workspaces(draw: st.DrawFn, depth: int = 0) -> Node:
    top = directory(draw(st.integers(0, 0o777)))
    files: list[Node] = []
    for name in draw(st.lists(NAMES, max_size=5, unique=True)):
        kind = draw(st.sampled_from(["file", "symlink", "directory", "hardlink"] if depth < 3 else ["file", "symlink"]))
        if kind == "directory":
            node = draw(workspaces(depth + 1))
        elif kind == "symlink":
            node = Node("symlink", 0o777, data=draw(NAMES))
        elif kind == "hardlink" and files:
            node = draw(st.sampled_from(files))
        else:
            node = Node("file", draw(st.integers(0, 0o7777)), data=draw(st.binary(max_size=2000)))
            node.xattrs = {b"user.note": draw(st.binary(min_size=1, max_size=20))} if draw(st.booleans()) else {}
            files.append(node)
        node.mtime_ns = draw(TIMES)
        top.entries[name] = node
    return top


def facts(top: Node) -> list[object]:
    """All that an archive keeps, hard links as groups."""
    groups: dict[int, int] = {}
    return [
        (path, node.type, node.mode if node.type != "symlink" else 0, node.mtime_ns, node.data, node.xattrs, groups.setdefault(id(node), len(groups)))
        for path, node in walk(top)
    ]


@settings(max_examples=150, deadline=None)
@given(workspaces())
def test_an_archive_is_sound_and_brings_the_same_tree_back(top: Node) -> None:
    content = b"".join(write_archive(top, b'{"format":1}'))
    inspector = TarInspector(max_bytes=1 << 30, manifest=b'{"format":1}')
    for at in range(0, len(content), 700):
        inspector.feed(content[at : at + 700])
    assert inspector.finish().entries == len(list(walk(top)))
    assert facts(read_archive(content)) == facts(top)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert len(archive.getnames()) == len(list(walk(top))) + 2


async def chunks(content: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for at in range(0, len(content), size):
        yield content[at : at + size]


async def test_a_restore_that_fails_changes_nothing(tree: Tree) -> None:
    machine = Machine({}, {})
    guest = MemoryGuest(lambda: machine)
    await guest.write_file(b"f", chunks(b"kept"))
    content = b"".join(write_archive(tree.workspace, b"{}"))
    boot = machine.boot_id
    for damaged in (content[:-1500], content[:600] + b"\xff" + content[601:], b"no tar at all" * 100):
        with pytest.raises(BackendError):
            await guest.restore(chunks(damaged), bytes=1, entries=1, max_bytes=1 << 20)
    with pytest.raises(PayloadTooLarge):
        await guest.restore(chunks(content), bytes=1, entries=1, max_bytes=2000)
    assert [entry.name for entry in await guest.list_dir(b"/workspace")] == [b"f"] and machine.boot_id == boot
    await guest.restore(chunks(content), bytes=1, entries=1, max_bytes=1 << 20)
    assert b"f" not in machine.tree.workspace.entries and machine.boot_id != boot


async def run(command: str | list[str], **more: object) -> ExecResult:
    machine = Machine({"BOX": "from the box"}, {})
    return await MemoryGuest(lambda: machine).run(Command.model_validate({"command": command, "timeout_seconds": 5} | more), max_output_bytes=100)


@pytest.mark.parametrize(
    ("script", "out", "code"),
    [
        ("echo a 'b  $BOX' \"$BOX\" ${BOX}x $NONE|".replace("|", ""), "a b  $BOX from the box from the boxx \n", 0),
        ("false && echo no || echo yes; echo $?", "yes\n0\n", 0),
        ("true || echo no; false; echo $?", "1\n", 0),
        ("echo one > f; echo two >> f; cat f; echo gone > f; cat f", "one\ntwo\ngone\n", 0),
        ("mkdir -p a/b; cd a; pwd; ls\ncd nope || exit 7; echo no", "/workspace/a\nb\n", 7),
        ('echo "a \\" b" c\\ d', 'a " b c d\n', 0),
        ("sh -c 'exit 3'; echo $?", "3\n", 0),
        ("printf '%s=%d;' a 1 b 2; rm -f nope; rm nope", "a=1;b=2;", 1),
        ("exit 300", "", 44),
    ],
)
async def test_the_shell_does_what_it_can(script: str, out: str, code: int) -> None:
    result = await run(script)
    assert (result.stdout, result.exit_code) == (out, code), result.stderr


@pytest.mark.parametrize(
    "script", ["a | b", "a &", "echo $(x)", "echo `x`", "(a)", "if true", "echo *", "x < y", "echo 'open", "&& a", "echo >", "f() { a; }"]
)
async def test_the_shell_refuses_what_it_cannot(script: str) -> None:
    result = await run(script)
    assert result.exit_code in (2, 127) and result.stderr and not result.stdout


async def test_outcomes_are_kept_apart() -> None:
    assert (await run(["no-such-program"])).exit_code == 127
    timed_out = await run("echo before; sleep 60", timeout_seconds=0.05)
    assert (timed_out.exit_code, timed_out.timed_out, timed_out.stdout) == (137, True, "before\n")
    cut = await run("seq 1 1000")
    assert cut.truncated and len(cut.stdout) == 100 and cut.exit_code == 0
    with pytest.raises(InvalidRequest, match="workdir"):
        await run("true", workdir="/no/such")
    assert (await run(["env"], env={"A": "b"})).stdout.startswith("HOME=/workspace\n")
