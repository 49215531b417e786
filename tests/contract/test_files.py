"""Files: bytes in and out, listing, modes, limits, containment."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from tests.support.client import Api, expect, refused
from tests.support.server import Facade
from tests.support.waiting import eventually


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.behaviour("FILE-001")
def test_what_is_put_is_got_listed_and_described_the_same(api: Api, room: str) -> None:
    content = os.urandom(1000)
    info = api.write(room, "one/two/file.bin", content)
    assert (info["name"], info["path"], info["type"], info["size"]) == ("file.bin", "/workspace/one/two/file.bin", "file", 1000)
    assert abs((datetime.fromisoformat(info["modified_at"]) - datetime.now(UTC)).total_seconds()) < 60
    assert api.read(room, "one/two/file.bin") == content == api.read(room, "/workspace/one/two/file.bin")
    assert api.ls(room, "one/two") == [info]
    assert api.ls(room, "/workspace/one/two/") == [info]
    assert [(entry["name"], entry["type"], entry["path"]) for entry in api.ls(room, "one")] == [("two", "directory", "/workspace/one/two")]


@pytest.mark.behaviour("FILE-002")
def test_a_listing_defaults_to_the_workspace_and_is_ordered_by_name(api: Api, box: str) -> None:
    assert api.names(box) == []
    for name in ("b", "a", "Z", "10", "9", ".hidden", "ä"):
        api.write(box, name, name)
    assert api.names(box) == [".hidden", "10", "9", "Z", "a", "b", "ä"]
    body = expect(api.call("GET", f"/sandboxes/{box}/files/list"), 200)
    assert body["path"] == "/workspace" and body["entries"] == api.ls(box, "/workspace")


@pytest.mark.behaviour("FILE-003")
def test_a_missing_file_is_404_and_a_directory_400(api: Api, room: str) -> None:
    api.write(room, "dir/f")
    message = refused(api.get(room, "nope"), 404)
    assert "nope" in message
    refused(api.get(room, "dir"), 400, says="directory")
    refused(api.get(room, "/workspace"), 400, says="directory")
    refused(api.get(room, "dir/f/x"), 404 if api.get(room, "dir/f/x").status_code == 404 else 400)
    refused(api.call("GET", f"/sandboxes/{room}/files/list", params={"path": "nope"}), 404)
    refused(api.call("GET", f"/sandboxes/{room}/files/list", params={"path": "dir/f"}), 400)
    refused(api.put(room, "dir", b"x"), 400, says="directory")
    refused(api.put(room, "/workspace", b"x"), 400)
    refused(api.put(room, "dir/f/x", b"x"), 400)


@pytest.mark.behaviour("FILE-004")
@pytest.mark.parametrize(
    "path",
    [
        "",
        "a\0b",
        "//workspace/x",
        "/etc/x",
        "/x",
        "../x",
        "/workspace/../etc/x",
        "/workspace/./../tmp/x",
        "a/../../x",
        "n" * 256,
        "/workspace/" + "n" * 256,
    ],
)
def test_a_path_that_cannot_be_written_is_refused(api: Api, room: str, path: str) -> None:
    answer = api.put(room, path, b"evil")
    assert answer.status_code in (400, 403), answer.text
    refused(answer, answer.status_code)
    if path in ("", "a\0b", "//workspace/x") or "n" * 256 in path:
        refused(answer, 400)


@pytest.mark.behaviour("FILE-005")
@pytest.mark.parametrize("path", ["", "a\0b", "//workspace/x"])
def test_a_path_that_is_none_cannot_be_read_or_listed(api: Api, room: str, path: str) -> None:
    refused(api.get(room, path), 400)
    refused(api.call("GET", f"/sandboxes/{room}/files/list", params={"path": path}), 400)


@pytest.mark.behaviour("FILE-006")
def test_dots_inside_the_workspace_are_fine(api: Api, room: str) -> None:
    api.write(room, "d/./e/../f", b"1")
    assert api.read(room, "/workspace/d/f") == b"1"


@pytest.mark.behaviour("FILE-007")
@pytest.mark.parametrize(("mode", "shown"), [("644", "644"), ("0600", "600"), ("755", "755"), ("000", "0"), ("0777", "777")])
@pytest.mark.needs("processes")
def test_the_mode_is_set_whatever_the_umask(api: Api, room: str, mode: str, shown: str) -> None:
    api.write(room, "moded", b"x", mode=mode)
    assert api.sh(room, "stat -c %a moded; rm -f moded").strip() == shown


@pytest.mark.behaviour("FILE-008")
@pytest.mark.parametrize("mode", ["1777", "7777", "4755", "2755"])
def test_a_mode_over_0777_is_400(api: Api, room: str, mode: str) -> None:
    refused(api.put(room, "x", b"x", mode=mode), 400, says="mode")
    assert "x" not in api.names(room)


@pytest.mark.behaviour("FILE-009")
def test_a_put_replaces_content_and_mode_in_one_step(api: Api, room: str) -> None:
    api.write(room, "same", b"long content", mode="755")
    info = api.write(room, "same", b"new")
    assert info["size"] == 3 and api.read(room, "same") == b"new"


@pytest.mark.behaviour("FILE-010")
def test_over_the_limit_is_413_and_nothing_is_left(small: Api) -> None:
    sandbox = small.new()["id"]
    refused(small.put(sandbox, "big", b"x" * 300_001), 413, says="300000")

    def unsized() -> Iterator[bytes]:
        for _ in range(40):
            yield b"y" * 10_000

    refused(small.put(sandbox, "deep/big", unsized()), 413)
    assert small.names(sandbox) == [] or small.ls(sandbox, "deep") == []
    small.write(sandbox, "fits", b"x" * 300_000)
    assert small.names(sandbox)[-1] == "fits" and len(small.read(sandbox, "fits")) == 300_000


@pytest.mark.behaviour("FILE-011")
@pytest.mark.needs("processes")
def test_reading_a_file_over_the_limit_is_413(small: Api) -> None:
    sandbox = small.new()["id"]
    small.sh(sandbox, "head -c 300001 /dev/zero > big; truncate -s 9G sparse")
    refused(small.get(sandbox, "big"), 413, says="300000")
    refused(small.get(sandbox, "sparse"), 413)


@pytest.mark.behaviour("FILE-012", "B08")
@pytest.mark.needs("processes")
@pytest.mark.parametrize("size", [0, 1, 131071, 131072, 200000, 20971520, 52428800])
def test_uploads_of_every_size_arrive_whole_and_belong_to_the_user(api: Api, room: str, size: int) -> None:
    content = os.urandom(size)
    api.write(room, "deep/er/new dir/blob.bin", content, mode="600")
    assert digest(api.read(room, "deep/er/new dir/blob.bin")) == digest(content)
    shown = api.sh(
        room,
        "cd 'deep/er/new dir'; sha256sum < blob.bin; stat -c '%u:%g %a' blob.bin; stat -c '%u:%g' . .. ../..",
    )
    assert shown.split() == [digest(content), "-", "1000:1000", "600", *["1000:1000"] * 3]
    api.sh(room, "rm -rf deep")


@pytest.mark.behaviour("FILE-013", "B08")
def test_one_byte_over_the_default_limit_is_413(api: Api, box: str) -> None:
    refused(api.put(box, "big", b"\0" * 52_428_801), 413)
    assert api.names(box) == []


@pytest.mark.behaviour("FILE-014", "B08")
@pytest.mark.needs("processes")
@pytest.mark.slow
def test_parallel_uploads_are_streamed_not_held_in_memory(api: Api, facade: Facade) -> None:
    content = os.urandom(52_428_800)
    with ThreadPoolExecutor(5) as pool:
        boxes = list(pool.map(lambda _: str(api.new(memory_mb=128)["id"]), range(10)))
    before = facade.figures().rss
    facade.reset_peak()
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda sandbox: api.write(sandbox, "blob", content), boxes))
    assert facade.figures().peak - before <= 2 * 10 * len(content)
    assert {api.sh(sandbox, "sha256sum < blob").split()[0] for sandbox in boxes} == {digest(content)}


@pytest.mark.behaviour("FILE-015")
def test_an_upload_that_breaks_off_leaves_nothing(api: Api, box: str) -> None:
    api.write(box, "f", b"old")

    def broken() -> Iterator[bytes]:
        yield b"x" * 100_000
        raise OSError("the client's disk failed")

    for path in ("f", "new/g"):
        with pytest.raises(OSError, match="disk failed"):
            api.put(box, path, broken())
    eventually(lambda: api.read(box, "f") == b"old" and set(api.names(box)) <= {"f", "new"}, within=10, why="no part of a broken upload is left")
    if "new" in api.names(box):
        eventually(lambda: api.names(box, "new") == [], within=10, why="no part of a broken upload is left in a new folder")


@pytest.mark.behaviour("FILE-016", "B09")
@pytest.mark.needs("processes")
def test_links_and_dots_never_lead_a_write_out(api: Api) -> None:
    sandbox = api.new(read_only_rootfs=False)["id"]
    api.sh(
        sandbox,
        "ln -s /etc out; ln -s /etc/passwd pw; ln -s /tmp tmp; mkdir real; ln -s real inside; ln -s nowhere dangling; ln -s loop loop",
    )
    before = api.sh(sandbox, "sha256sum /etc/passwd; ls -la /etc /tmp | sha256sum")
    for path in (
        "out/evil",
        "../x",
        "/workspace/../etc/x",
        "..%2f..%2fetc%2fx",
        "/workspace/./../tmp/x",
        "tmp/x",
        "loop/x",
        "inside/../../x",
        "/proc/self/cwd/../x",
    ):
        answer = api.put(sandbox, path, b"evil")
        assert answer.status_code in (400, 403), (path, answer.text)
        refused(answer, answer.status_code)
    for raw in ("..%2f..%2fetc%2fx", "..%252f..%252fetc%252fx", "%2e%2e/x", "/workspace/%2e%2e/etc/x"):
        assert api.call("PUT", f"/sandboxes/{sandbox}/files?path={raw}", content=b"evil").status_code in (400, 403), raw
    api.write(sandbox, "inside/ok", b"fine")
    assert api.read(sandbox, "real/ok") == b"fine"
    for link in ("pw", "dangling", "loop"):
        assert api.write(sandbox, link, b"replaced")["type"] == "file"
        assert api.sh(sandbox, f"stat -c %F {link}; cat {link}") == "regular file\nreplaced"
    assert api.sh(sandbox, "sha256sum /etc/passwd; ls -la /etc /tmp | sha256sum") == before
    assert api.sh(sandbox, "ls -A real") == "ok\n"


@pytest.mark.behaviour("FILE-017", "B09")
@pytest.mark.needs("processes")
def test_a_read_shows_what_the_sandboxs_user_may_read_and_no_more(api: Api, room: str) -> None:
    api.sh(room, "ln -sfn /etc out; ln -sf /etc/passwd pw; ln -sf /etc/shadow sh; echo x > shut; chmod 0 shut; ln -sfn /proc/1 through")
    assert api.read(room, "/etc/passwd") == api.sh(room, "cat /etc/passwd").encode() == api.read(room, "pw")
    assert api.read(room, "out/hostname") == api.sh(room, "cat /etc/hostname").encode()
    for path in ("/etc/shadow", "sh", "out/shadow", "shut"):
        answer = api.get(room, path)
        assert answer.status_code in (400, 403), (path, answer.text)
        refused(answer, answer.status_code)
    for path in (
        "/proc/self/environ",
        "/proc/1/environ",
        "/proc/self/mem",
        "/proc/thread-self/environ",
        "/proc/1/root/etc/passwd",
        "/proc/1/fd/0",
        "/proc/1/exe",
        "through/root/etc/passwd",
        "/proc/self/cwd",
    ):
        answer = api.get(room, path)
        assert answer.status_code in (400, 403, 404), (path, answer.text)
    api.sh(room, "rm -f out pw sh shut through")


@pytest.mark.behaviour("FILE-018")
@pytest.mark.needs("processes")
def test_special_files_are_refused_and_never_hang(api: Api, room: str) -> None:
    api.sh(room, "mkfifo pipe; ln -sf /dev/zero zero; python3 -c 'import socket;socket.socket(socket.AF_UNIX).bind(\"sock\")'")
    for path in ("pipe", "zero", "sock", "/dev/zero", "/dev/null"):
        refused(api.call("GET", f"/sandboxes/{room}/files", params={"path": path}, timeout=10), 400)
    # A link to what a process has open: of the kind that /proc/self is refused for.
    refused(api.call("GET", f"/sandboxes/{room}/files", params={"path": "/dev/stdin"}, timeout=10), 403)
    assert [(entry["name"], entry["type"]) for entry in api.ls(room) if entry["name"] in ("pipe", "zero", "sock")] == [
        ("pipe", "other"),
        ("sock", "other"),
        ("zero", "symlink"),
    ]
    api.sh(room, "rm -f pipe zero sock")


@pytest.mark.behaviour("FILE-019")
def test_the_reserved_name_is_refused_and_never_listed(api: Api, box: str) -> None:
    api.write(box, "sub/.sandbox-init", b"fine below the top")
    for path in (".sandbox-init", ".sandbox-init/x", "/workspace/.sandbox-init/x", "sub/../.sandbox-init", "/workspace/./.sandbox-init/"):
        refused(api.put(box, path, b"x"), 400, says=".sandbox-init")
    assert api.names(box) == ["sub"]
    assert api.names(box, "sub") == [".sandbox-init"]


@pytest.mark.behaviour("FILE-020")
@pytest.mark.needs("processes")
def test_a_folder_of_ten_thousand_is_listed_whole_and_fast(api: Api, room: str) -> None:
    api.sh(room, "mkdir many; cd many; seq -f 'file%05g' 1 10000 | xargs touch")
    answer = api.call("GET", f"/sandboxes/{room}/files/list", params={"path": "many"}, timeout=10)
    assert [entry["name"] for entry in expect(answer, 200)["entries"]] == [f"file{n:05}" for n in range(1, 10_001)]
    api.sh(room, "rm -rf many")


@pytest.mark.behaviour("FILE-021")
@pytest.mark.needs("processes")
def test_a_full_workspace_or_a_read_only_place_is_an_error_that_says_so(api: Api, room: str) -> None:
    api.sh(room, "mkdir -p locked; chmod 555 locked")
    answer = api.put(room, "locked/x", b"x")
    refused(answer, 403 if answer.status_code == 403 else 400, says="locked")
    assert api.sh(room, "ls -A locked; chmod 755 locked; rmdir locked") == ""
