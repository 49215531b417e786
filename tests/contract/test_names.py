"""Awkward names (B07): every byte string that is a name goes through PUT, GET, list, exec, snapshot and rollback as it is."""

from __future__ import annotations

import os
import unicodedata

import pytest

from tests.support.client import Api, expect, refused
from tests.support.target import Target

NAMES = [
    "a b.txt",
    "[x].txt",
    "broken[.txt",
    "2026-01-02_22:34.log",
    "-rf",
    "--checkpoint=1",
    "$(id).txt",
    "quo'te\".txt",
    "日本語.txt",
    unicodedata.normalize("NFC", "é.txt"),
    unicodedata.normalize("NFD", "é.txt"),
    "*.txt",
    "~",
    "back\\slash",
    "%2e%2e.txt",
    "n" * 255,
    "new\nline",
    "tab\t\x1b[31m",
    " lead and trail ",
    "...",
    "a%b&c=d?e#f+g;h",
    "%",
    "%41",
    "🙂" * 63,
    "\x7f\x01",
]


@pytest.mark.behaviour("FILE-030", "B07")
def test_awkward_names_go_everywhere_as_they_are(api: Api, box: str, target: Target) -> None:
    contents = {name: os.urandom(8) for name in NAMES}
    for name, content in contents.items():
        info = api.write(box, name, content)
        assert info["name"] == name and info["path"] == f"/workspace/{name}"

    def holds() -> None:
        assert {entry["name"]: entry["size"] for entry in api.ls(box)} == dict.fromkeys(NAMES, 8)
        for name, content in contents.items():
            assert api.read(box, name) == content
            if "processes" in target.can:
                assert api.sh(box, ["python3", "-c", "import sys;print(open(sys.argv[1],'rb').read().hex())", f"./{name}"]).strip() == content.hex()

    holds()
    snapshot = api.snap(box)["id"]
    for name in NAMES:
        api.write(box, name, b"changed!!")
    api.write(box, "extra", b"x")
    api.rollback(box, snapshot)
    holds()
    assert {entry["name"] for entry in api.ls(api.fork(snapshot)["id"])} == set(NAMES)


@pytest.mark.behaviour("FILE-031", "B07")
def test_a_name_of_256_bytes_is_400(api: Api, room: str) -> None:
    refused(api.put(room, "n" * 256, b"x"), 400)
    refused(api.put(room, "dir/" + "é" * 128, b"x"), 400)
    refused(api.put(room, "/".join(["d" * 200] * 30), b"x"), 400)


@pytest.mark.behaviour("FILE-032")
@pytest.mark.needs("processes")
def test_names_that_are_not_utf8_are_listed_and_can_be_addressed(api: Api, box: str) -> None:
    make = "import os\nfor n in (b'\\xff\\xfe', b'caf\\xe9', b'ok'): open(n,'wb').write(n)\n"
    api.sh(box, ["python3", "-c", make + "os.mkdir(b'd\\xff'); open(b'd\\xff/f','w').write('in')"])
    listed = api.names(box)
    assert sorted(listed) == sorted(["%FF%FE", "caf%E9", "ok", "d%FF"])
    files = f"/sandboxes/{box}/files"

    def addressed(shown: str) -> dict[str, str]:
        return {"path": shown, "path_encoding": "percent"}

    for shown, content in (("%FF%FE", b"\xff\xfe"), ("caf%E9", b"caf\xe9"), ("d%FF/f", b"in")):
        answer = api.call("GET", files, params=addressed(shown))
        expect(answer, 200)
        assert answer.content == content
        expect(api.get(box, shown), 404)
    assert expect(api.call("PUT", files, params=addressed("d%FF/g%FE"), content=b"new"), 200)["name"] == "g%FE"
    assert api.sh(box, ["python3", "-c", "import os;print(sorted(os.listdir(b'd\\xff')))"]) == "[b'f', b'g\\xfe']\n"
    answer = api.call("GET", f"{files}/list", params=addressed("d%FF"))
    assert [entry["name"] for entry in expect(answer, 200)["entries"]] == ["f", "g%FE"]
    refused(api.call("GET", files, params=addressed("100%")), 400)
    snapshot = api.snap(box)["id"]
    fork = api.fork(snapshot)["id"]
    assert api.names(fork) == listed


@pytest.mark.behaviour("FILE-033")
@pytest.mark.needs("processes")
def test_names_that_need_long_archive_headers_come_back_in_their_folder(api: Api, box: str) -> None:
    script = """
import os
deep = "/".join(["d" * 100] * 12)
os.makedirs(deep)
for n in (99, 100, 101, 155, 156, 200, 255):
    open(f"{deep}/{'x' * n}", "w").write(str(n))
os.symlink("t" * 300, f"{deep}/long-link")
os.link(f"{deep}/{'x' * 255}", f"{deep}/{'h' * 255}")
"""
    api.sh(box, ["python3", "-c", script])
    look = "find . -printf '%P|%y|%m|%l|%n\\n' | grep -v '^|' | LC_ALL=C sort"
    before = api.sh(box, look)
    snapshot = api.snap(box)["id"]
    api.sh(box, "find . -mindepth 1 -delete")
    api.rollback(box, snapshot)
    assert api.sh(box, look) == before
