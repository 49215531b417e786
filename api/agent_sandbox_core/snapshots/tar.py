"""Reads the tar of init/API.md, "Archives", as it passes by: no I/O, no copies of file data, bounded memory.

What comes out of a sandbox is untrusted: the code in there may have replaced what sends. So names, kinds, sizes and numbers are checked
before anything is stored, and the index at the end proves that nothing is missing. What can lead out of a folder, and what is no file,
directory or link, is refused. The members come in walk order, a directory before what is in it; so a member below a link, or below
nothing, is found by keeping one path of directories.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, fields
from typing import Final

from agent_sandbox_core.errors import BackendError, PayloadTooLarge

MANIFEST_NAME: Final = b".sandbox-init/manifest.json"
INDEX_NAME: Final = b".sandbox-init/index.json"
FAILURE_NAME: Final = b".sandbox-init/error.json"
RESERVED: Final = b".sandbox-init"
FORMAT: Final = 1
BLOCK: Final = 512
MAX_ENTRIES: Final = 1_000_000
MAX_RECORDS_BYTES: Final = 1 << 20
MAX_JSON_BYTES: Final = 1 << 20
MAX_PATH_BYTES: Final = 32 * 1024
MAX_NAME_BYTES: Final = 255
MAX_DEPTH: Final = 8192

_ZEROS = bytes(BLOCK)
_FILE, _HARDLINK, _SYMLINK, _DIRECTORY, _EXTENDED = b"0", b"1", b"2", b"5", b"x"
_RECORD = re.compile(rb"([1-9][0-9]{0,7}) ([^=\n]+)=")
_NUMBER = re.compile(rb"(0|[1-9][0-9]{0,18})\Z")
_TIME = re.compile(rb"-?[0-9]{1,19}(\.[0-9]{1,9})?\Z")
_TEXT_KEYS = frozenset((b"path", b"linkpath", b"GNU.sparse.name"))
_SPARSE = frozenset((b"GNU.sparse.major", b"GNU.sparse.minor", b"GNU.sparse.name", b"GNU.sparse.realsize"))


class InvalidArchive(BackendError):
    """The archive is hostile, damaged or cut short; nothing of it may be kept."""


@dataclass(frozen=True, slots=True)
class ArchiveIndex:
    """What an archive holds, as its last member says. `bytes` is the data of its files, holes left out."""

    files: int
    directories: int
    symlinks: int
    hardlinks: int
    skipped: int
    bytes: int
    entries: int
    sha256: str


class TarInspector:
    """Feed it the bytes, cut anywhere; `finish` tells the index. It raises InvalidArchive or PayloadTooLarge at the first fault."""

    def __init__(self, *, max_bytes: int, manifest: bytes | None = None, max_entries: int = MAX_ENTRIES) -> None:
        self.manifest = b""
        """The manifest, once it was read; compared with the one that is expected when that was given."""
        self.entries = 0
        self._expected = manifest
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._total = 0
        self._sum = hashlib.sha256()
        self._digest: str | None = None
        self._index: ArchiveIndex | None = None
        self._rest = b""
        self._skip = 0
        self._body: tuple[bytes, int] | None = None
        self._records: dict[bytes, bytes] = {}
        self._folders: list[bytes] = []
        self._zeros = 0

    def feed(self, data: bytes) -> None:
        """Takes the next bytes."""
        self._total += len(data)
        if self._total > self._max_bytes:
            raise PayloadTooLarge(f"the archive of the workspace has more than {self._max_bytes} bytes: delete files, or raise MAX_SNAPSHOT_BYTES")
        if self._rest:
            data = self._rest + data
        used = self._advance(data)
        if self._digest is None:
            self._sum.update(memoryview(data)[:used])
        self._rest = data[used:]

    def finish(self) -> ArchiveIndex:
        """The index; InvalidArchive when the end has not come."""
        if self._index is None or self._zeros < 2 * BLOCK or self._rest:
            raise InvalidArchive(f"the archive ends in the middle, after {self._total} bytes: the transfer was cut; try again")
        return self._index

    def _advance(self, data: bytes) -> int:
        """Goes on as far as the bytes allow; returns how many are used up."""
        at, end = 0, len(data)
        while True:
            if self._skip:
                step = min(self._skip, end - at)
                at += step
                self._skip -= step
                if self._skip:
                    return at
            if self._index is not None:
                if any(data[at:]):
                    raise InvalidArchive("the archive has bytes after its end")
                self._zeros += end - at
                return end
            if self._body is not None:
                kind, size = self._body
                padded = _padded(size)
                if end - at < padded:
                    return at
                self._body = None
                self._take_body(kind, data[at : at + size])
                at += padded
            elif end - at < BLOCK:
                return at
            else:
                self._take_header(data, at)
                at += BLOCK

    def _take_header(self, data: bytes, at: int) -> None:
        block = data[at : at + BLOCK]
        if block[257:265] != b"ustar\x0000":
            raise InvalidArchive("the archive ends without its index" if block == _ZEROS else "the archive has a header that is none")
        if sum(block) - sum(block[148:156]) + 256 != _octal(block, 148, 156):
            raise InvalidArchive("the archive has a header with a wrong checksum")
        kind, size = block[156:157], _octal(block, 124, 136)
        if kind == _EXTENDED:
            if self._records or not 0 < size <= MAX_RECORDS_BYTES:
                raise InvalidArchive(f"the archive has extended records of {size} bytes, or two in a row")
            self._body = (_EXTENDED, size)
            return
        records, self._records = self._records, {}
        name = records.get(b"path") or block[:100].partition(b"\0")[0]
        link = records.get(b"linkpath") or block[157:257].partition(b"\0")[0]
        if block[345]:
            raise InvalidArchive(f"{_show(name)} has a name prefix")
        if _octal(block, 100, 108) > 0o7777:
            raise InvalidArchive(f"{_show(name)} has a mode over 7777")
        _octal(block, 136, 148)
        if records:
            size = int(records.get(b"size", size))
            name = self._sparse_name(name, kind, records)
        if kind == _DIRECTORY and name.endswith(b"/"):
            name = name[:-1]
        if not self.manifest:
            self._begin_manifest(name, kind, size, plain=not records)
        elif name == INDEX_NAME:
            self._begin_index(data, at, kind, size, plain=not records)
        elif name == FAILURE_NAME and kind == _FILE and 0 < size <= MAX_JSON_BYTES:
            self._body = (FAILURE_NAME, size)
        else:
            self._check_member(name, link, kind, size)

    def _begin_manifest(self, name: bytes, kind: bytes, size: int, *, plain: bool) -> None:
        if name != MANIFEST_NAME or kind != _FILE or not plain or not 0 < size <= MAX_JSON_BYTES:
            raise InvalidArchive(f"the archive begins with {_show(name)}, not with its manifest")
        self._body = (MANIFEST_NAME, size)

    def _begin_index(self, data: bytes, at: int, kind: bytes, size: int, *, plain: bool) -> None:
        if kind != _FILE or not plain or not 0 < size <= MAX_JSON_BYTES:
            raise InvalidArchive("the archive has an index that is none")
        self._sum.update(memoryview(data)[:at])
        self._digest = self._sum.hexdigest()
        self._body = (INDEX_NAME, size)

    def _check_member(self, name: bytes, link: bytes, kind: bytes, size: int) -> None:
        self.entries += 1
        if self.entries > self._max_entries:
            raise PayloadTooLarge(f"the workspace has more than {self._max_entries} files: delete some, a snapshot can hold no more")
        parent, _, last = name.rpartition(b"/")
        # A parent that is checked itself leaves only the last part to check.
        folders = self._folders
        while folders and folders[-1] != parent:
            folders.pop()
        if parent and not folders:
            raise InvalidArchive(f"{_show(name)} is in no directory of the archive")
        if last in (b"", b".", b"..") or name[0] == 0x2F or b"\0" in last or len(last) > MAX_NAME_BYTES or len(name) > MAX_PATH_BYTES:
            raise InvalidArchive(f"the archive has a member with the name {_show(name)}, which can lead out of it or is too long")
        if name == RESERVED:
            raise InvalidArchive(f"the archive has a member with the reserved name {_show(name)}")
        if kind == _FILE:
            if link:
                raise InvalidArchive(f"{_show(name)} has a link target and is no link")
            self._skip = _padded(size)
            return
        if size:
            raise InvalidArchive(f"{_show(name)} has data and is no file")
        if kind == _DIRECTORY and not link:
            if len(folders) >= MAX_DEPTH:
                raise InvalidArchive(f"{_show(name)} lies deeper than {MAX_DEPTH} directories")
            folders.append(name)
        else:
            _check_link(name, link, kind)

    def _sparse_name(self, name: bytes, kind: bytes, records: dict[bytes, bytes]) -> bytes:
        found = _SPARSE & records.keys()
        if not found:
            return name
        if (
            found != _SPARSE
            or kind != _FILE
            or b"path" in records
            or records[b"GNU.sparse.major"] != b"1"
            or records[b"GNU.sparse.minor"] != b"0"
            or not _NUMBER.match(records[b"GNU.sparse.realsize"])
        ):
            raise InvalidArchive(f"{_show(name)} is a sparse file of an unknown kind")
        return records[b"GNU.sparse.name"]

    def _take_body(self, kind: bytes, body: bytes) -> None:
        if kind == _EXTENDED:
            self._records = _parse_records(body)
        elif kind == MANIFEST_NAME:
            if self._expected is not None and body != self._expected:
                raise InvalidArchive("the archive has another manifest than it was given")
            self.manifest = body
        elif kind == FAILURE_NAME:
            raise BackendError(f"the workspace could not be archived: {_failure_message(body)}")
        else:
            self._index = self._parse_index(body)

    def _parse_index(self, body: bytes) -> ArchiveIndex:
        try:
            data = json.loads(body)
            index = ArchiveIndex(**{field.name: data[field.name] for field in fields(ArchiveIndex)})
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArchive("the archive has an index that cannot be read") from error
        numbers = (index.files, index.directories, index.symlinks, index.hardlinks, index.skipped, index.bytes, index.entries)
        if data.get("format") != FORMAT or not all(type(number) is int and number >= 0 for number in numbers):
            raise InvalidArchive("the archive has an index that is not as its format says")
        if index.sha256 != self._digest:
            raise InvalidArchive("the digest in the archive's index is not that of its bytes: it was damaged on its way; try again")
        if index.entries != self.entries:
            raise InvalidArchive(f"the archive's index counts {index.entries} members, there are {self.entries}")
        return index


def _failure_message(body: bytes) -> str:
    """What the sandbox says about its failed archive: its words, so cut to a bearable length."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = None
    return message[:1000] if isinstance(message, str) else "the sandbox gave no reason; try again"


def _check_link(name: bytes, link: bytes, kind: bytes) -> None:
    if kind == _SYMLINK:
        if not link or b"\0" in link or len(link) > MAX_PATH_BYTES:
            raise InvalidArchive(f"{_show(name)} is a link to nothing")
    elif kind == _HARDLINK:
        parts = link.split(b"/")
        if b"\0" in link or not {b"", b".", b".."}.isdisjoint(parts) or parts[0] == RESERVED or len(link) > MAX_PATH_BYTES:
            raise InvalidArchive(f"{_show(name)} is a hard link to {_show(link)}, which leads out of the archive")
    else:
        raise InvalidArchive(f"{_show(name)} is a device, a pipe or another kind of member ({_show(kind)}) that is not allowed")


def _parse_records(body: bytes) -> dict[bytes, bytes]:
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(body):
        head = _RECORD.match(body, at)
        if head is None:
            raise InvalidArchive("the archive has a damaged extended record")
        end, key = at + int(head[1]), head[2]
        if end > len(body) or end <= head.end() - 1 or body[end - 1 : end] != b"\n" or key in records:
            raise InvalidArchive("the archive has a damaged or repeated extended record")
        value = body[head.end() : end - 1]
        if not _record_allowed(key, value):
            raise InvalidArchive(f"the archive has an extended record {_show(key)}={_show(value)}, which is not allowed")
        records[key] = value
        at = end
    return records


def _record_allowed(key: bytes, value: bytes) -> bool:
    if key == b"mtime":
        return _TIME.match(value) is not None
    if key in _TEXT_KEYS:
        return bool(value) and b"\0" not in value
    if key == b"size":
        return _NUMBER.match(value) is not None
    if key == b"hdrcharset":
        return value == b"BINARY"
    return key in _SPARSE or key.startswith(b"SCHILY.xattr.user.")


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _octal(block: bytes, start: int, end: int) -> int:
    try:
        return int(block[start:end].rstrip(b"\0 ") or b"x", 8)
    except ValueError as error:
        raise InvalidArchive("the archive has a header with a number that is not octal") from error


def _show(name: bytes) -> str:
    return repr(name[:200])[1:]
