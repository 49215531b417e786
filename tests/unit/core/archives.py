"""Archives as sandbox-init writes them, made with Python's tarfile, and whatever a hostile one would write."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from agent_sandbox_core.models import SandboxSpec
from agent_sandbox_core.names import new_snapshot_id
from agent_sandbox_core.snapshots import Manifest, StoredSpec

SPEC = SandboxSpec(image="python:3.12-slim", cpus=1, memory_mb=256, pids_limit=64, env={"TOKEN": "s3cr3t-value"}, labels={"a": "b"})
MANIFEST = b'{"format":1}'
MTIME = 1733033333.1234567


def manifest(**more: Any) -> Manifest:
    return Manifest(
        **{"id": new_snapshot_id(), "sandbox_id": "sb_0123456789abcdef", "spec": StoredSpec.of(SPEC), "created_at": datetime.now(UTC), **more}
    )


def member(
    name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "", mtime: float = MTIME, **pax: str
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mtime, info.pax_headers = kind, link, len(data), mtime, pax
    return info, data


def folder(name: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, kind=tarfile.DIRTYPE)


def pack(members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """The members alone, without an end."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
        size = tar.offset
    return raw.getvalue()[:size]


def archive(
    members: Iterable[tuple[tarfile.TarInfo, bytes]], head: bytes = MANIFEST, change: Callable[[dict[str, Any]], None] = lambda index: None
) -> bytes:
    """A whole archive; `change` spoils its index."""
    members = list(members)
    body = pack([member(".sandbox-init/manifest.json", head, mtime=0), *members])
    index: dict[str, Any] = {
        "format": 1,
        "files": sum(info.isreg() for info, _ in members),
        "directories": sum(info.isdir() for info, _ in members),
        "symlinks": sum(info.issym() for info, _ in members),
        "hardlinks": sum(info.islnk() for info, _ in members),
        "skipped": 0,
        "bytes": sum(len(data) for _, data in members),
        "entries": len(members),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    change(index)
    return body + pack([member(".sandbox-init/index.json", json.dumps(index).encode(), mtime=0)]) + bytes(1024)


async def pieces(data: bytes, size: int = 65536) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def source(members: Iterable[tuple[tarfile.TarInfo, bytes]], size: int = 65536) -> Callable[[bytes], AsyncIterator[bytes]]:
    """What `Guest.archive` is for a store."""
    kept = list(members)
    return lambda head: pieces(archive(kept, head), size)
