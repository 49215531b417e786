r"""Paths between the API's text and the guest's bytes.

Any byte string is a file name on Linux. In answers, bytes that are not UTF-8 appear as `%XX` (upper case); every other character, a
literal `%` too, appears as it is. In a request a path is taken literally (`?path=a%25b` is the file `a%b`), unless the query says
`path_encoding=percent`: then the value, after the URL's own decoding, is read once more as percent-encoded bytes. So every name has a form:

    shown `caf%E9.txt`      ->  ?path=caf%25E9.txt&path_encoding=percent       (the byte E9)
    file  `100%.txt`        ->  ?path=100%25.txt  or  ?path=100%2525.txt&path_encoding=percent
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Literal, cast
from urllib.parse import quote_from_bytes, unquote_to_bytes

from .errors import InvalidRequest
from .interfaces import GuestFile
from .models import FileInfo

PathEncoding = Literal["text", "percent"]

WORKSPACE = b"/workspace"
MAX_PATH_BYTES = 4096
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})?")
_LONE_BYTE = re.compile("[\udc80-\udcff]")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_US = -62_135_596_800_000_000
_LAST_US = 253_402_300_799_999_999


def parse_path(value: str, encoding: PathEncoding = "text") -> bytes:
    """The guest's bytes of a path in a request. InvalidRequest for what can name no file; where it may lead is the guest's to decide."""
    try:
        raw = value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("the path is not valid Unicode: send other bytes with path_encoding=percent") from error
    if encoding == "percent":
        raw = _ESCAPE.sub(_unescape, raw)
    return check_path(raw)


def check_path(raw: bytes) -> bytes:
    """The path itself, or InvalidRequest: empty, with a NUL, too long, or with a double slash in front."""
    if not raw:
        raise InvalidRequest("the path is empty: name a file, absolute or relative to /workspace")
    if b"\0" in raw:
        raise InvalidRequest("the path holds a NUL byte, which no file name can")
    if raw.startswith(b"//"):
        raise InvalidRequest(f"the path {show_path(raw[:200])} begins with two slashes: write it with one")
    if len(raw) >= MAX_PATH_BYTES:
        raise InvalidRequest(f"the path has {len(raw)} bytes; a path can have {MAX_PATH_BYTES - 1}")
    return raw


def refuse_hidden_dots(raw: bytes) -> bytes:
    """The path itself, or InvalidRequest when it would climb (`..`) for whoever decodes it once more: no name an honest writer needs."""
    if b".." in unquote_to_bytes(raw).split(b"/") and b".." not in raw.split(b"/"):
        raise InvalidRequest(f"the path {show_path(raw[:200])} hides '..' behind percent-encoding: encode a path once, or choose another name")
    return raw


def show_path(raw: bytes) -> str:
    """A name or path for an answer: bytes that are not UTF-8 as %XX."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return _LONE_BYTE.sub(lambda found: f"%{ord(found[0]) - 0xDC00:02X}", raw.decode(errors="surrogateescape"))


def quote_path(raw: bytes) -> str:
    """A path as a query value of the guest API: percent-encoded bytes."""
    return quote_from_bytes(raw, safe="/")


def file_info(file: GuestFile) -> FileInfo:
    """A guest's file as the API shows it; times beyond the years 1 to 9999 are shown as the nearest of them."""
    micros = min(max(file.mtime_ns // 1000, _FIRST_US), _LAST_US)
    kind = file.type if file.type in ("file", "directory", "symlink") else "other"
    return FileInfo(
        name=show_path(file.name),
        path=show_path(file.path),
        type=cast("Literal['file', 'directory', 'symlink', 'other']", kind),
        size=file.size,
        modified_at=_EPOCH + timedelta(microseconds=micros),
    )


def _unescape(found: re.Match[bytes]) -> bytes:
    if found[1] is None:
        raise InvalidRequest("with path_encoding=percent a '%' is followed by two hex digits: write a literal one as %25")
    return bytes([int(found[1], 16)])
