"""The workspace as the tar of init/API.md, "Archives", and back: the same files as every other backend's."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from typing import Final

from agent_sandbox_core.errors import InvalidRequest
from agent_sandbox_core.snapshots import InvalidArchive
from agent_sandbox_core.snapshots.tar import BLOCK, INDEX_NAME, MANIFEST_NAME, RESERVED

from .tree import Node, directory, walk

SKIPPED_AT_TOP: Final = (RESERVED, b"lost+found")
XATTR: Final = "SCHILY.xattr."
_SECOND: Final = 1_000_000_000


def write_archive(workspace: Node, manifest: bytes) -> Iterator[bytes]:
    """The tar's bytes. Everything that is read of the tree is read before the first of them, so it is one point in time."""
    members = [(path, node, node.data) for path, node in walk(workspace) if path.split(b"/", 1)[0] not in SKIPPED_AT_TOP]
    counts = {"files": 0, "directories": 0, "symlinks": 0, "hardlinks": 0, "skipped": 0, "bytes": 0, "entries": len(members)}
    total = hashlib.sha256()
    seen: dict[int, bytes] = {}
    yield _hashed(total, _header(MANIFEST_NAME, b"0", len(manifest)) + _padded(manifest))
    for path, node, data in members:
        first = seen.get(id(node)) if node.type == "file" else None
        if first is not None:
            counts["hardlinks"] += 1
            yield _hashed(total, _member(path, node, b"1", link=first))
        elif node.type == "file":
            seen[id(node)] = path
            counts["files"] += 1
            counts["bytes"] += len(data)
            yield _hashed(total, _member(path, node, b"0", size=len(data)) + _padded(data))
        elif node.type == "symlink":
            counts["symlinks"] += 1
            yield _hashed(total, _member(path, node, b"2", link=data))
        else:
            counts["directories"] += 1
            yield _hashed(total, _member(path, node, b"5"))
    index = json.dumps({"format": 1, **counts, "sha256": total.hexdigest()}).encode()
    yield _header(INDEX_NAME, b"0", len(index)) + _padded(index) + bytes(2 * BLOCK)


def read_archive(content: bytes) -> Node:
    """A workspace from the tar's bytes, which TarInspector has found to be sound."""
    top = directory()
    times: list[tuple[Node, int]] = []
    made: dict[bytes, Node] = {b"": top}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
            for info in archive:
                path = _bytes(info.name)
                if path in (MANIFEST_NAME, INDEX_NAME):
                    continue
                parent, _, name = path.rpartition(b"/")
                node = made[_bytes(info.linkname)] if info.islnk() else _node(archive, info)
                made[parent].entries[name] = made[path] = node
                times.append((node, _mtime(info)))
    except (tarfile.TarError, KeyError, AttributeError) as error:
        raise InvalidArchive("the archive cannot be unpacked: a member refers to one that is not there") from error
    for node, mtime in times:
        node.mtime_ns = mtime
    return top


def _node(archive: tarfile.TarFile, info: tarfile.TarInfo) -> Node:
    if info.isdir():
        node = directory(info.mode)
    elif info.issym():
        node = Node("symlink", 0o777, data=_bytes(info.linkname))
    elif info.isfile():
        body = archive.extractfile(info)
        assert body is not None
        node = Node("file", info.mode, data=body.read())
    else:
        raise InvalidRequest("the archive has a member that is no file, directory or link")
    node.xattrs = {_bytes(key.removeprefix(XATTR)): _bytes(value) for key, value in info.pax_headers.items() if key.startswith(XATTR)}
    return node


def _mtime(info: tarfile.TarInfo) -> int:
    seconds, _, fraction = info.pax_headers.get("mtime", str(int(info.mtime))).partition(".")
    nanos = int(fraction.ljust(9, "0") or "0")
    return int(seconds) * _SECOND + (-nanos if seconds.startswith("-") else nanos)


def _member(path: bytes, node: Node, kind: bytes, *, size: int = 0, link: bytes = b"") -> bytes:
    records: dict[bytes, bytes] = {}
    if _is_long(path):
        records[b"path"] = path
    if _is_long(link):
        records[b"linkpath"] = link
    seconds, nanos = divmod(node.mtime_ns, _SECOND)
    if nanos or not 0 <= seconds < 8**11:
        records[b"mtime"] = _seconds(node.mtime_ns)
    if kind != b"1":
        records |= {XATTR.encode() + key: value for key, value in node.xattrs.items()}
    header = _header(path, kind, size, mode=node.mode & 0o7777, mtime=min(max(seconds, 0), 8**11 - 1), link=link)
    return (_extended(records) if records else b"") + header


def _seconds(mtime_ns: int) -> bytes:
    sign, value = ("-", -mtime_ns) if mtime_ns < 0 else ("", mtime_ns)
    seconds, nanos = divmod(value, _SECOND)
    return f"{sign}{seconds}.{nanos:09d}".encode()


def _extended(records: dict[bytes, bytes]) -> bytes:
    if any(not _is_text(records.get(key, b"")) for key in (b"path", b"linkpath")):
        records = {b"hdrcharset": b"BINARY", **records}
    body = b"".join(_record(key, value) for key, value in records.items())
    return _header(b"PaxHeaders.0/member", b"x", len(body)) + _padded(body)


def _record(key: bytes, value: bytes) -> bytes:
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + 1
    while len(str(length)) + len(rest) != length:
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


def _header(name: bytes, kind: bytes, size: int, *, mode: int = 0o644, mtime: int = 0, link: bytes = b"") -> bytes:
    fields = [
        (b"member" if _is_long(name) else name).ljust(100, b"\0"),
        *(b"%07o\0" % value for value in (mode, 1000, 1000)),
        b"%011o\0" % size,
        b"%011o\0" % mtime,
        b" " * 8,
        kind,
        (b"" if _is_long(link) else link).ljust(100, b"\0"),
        b"ustar\x0000",
    ]
    block = bytearray(b"".join(fields).ljust(BLOCK, b"\0"))
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def _is_long(name: bytes) -> bool:
    """Whether a name needs an extended record: too long for the header, or not ASCII."""
    return len(name) > 99 or not name.isascii()


def _is_text(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def _hashed(total: hashlib._Hash, data: bytes) -> bytes:
    total.update(data)
    return data


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
