"""Forged snapshots: the archive of a real one with other members, its index and digests made right again: only the members are wrong."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import zstandard

INDEX = ".sandbox-init/index.json"
COUNTS = {tarfile.REGTYPE: "files", tarfile.DIRTYPE: "directories", tarfile.SYMTYPE: "symlinks", tarfile.LNKTYPE: "hardlinks"}


@dataclass(frozen=True)
class Member:
    """One member of a forged archive."""

    name: str
    kind: bytes = tarfile.REGTYPE
    target: str = ""
    content: bytes = b""
    mode: int = 0o644
    claims: int | None = None
    """A size that the header claims in place of the content's."""
    pax: tuple[tuple[str, str], ...] = ()

    def packed(self) -> bytes:
        """Header and padded content."""
        info = tarfile.TarInfo(self.name)
        info.type, info.linkname, info.mode, info.uid, info.gid = self.kind, self.target, self.mode, 1000, 1000
        info.pax_headers = dict(self.pax)
        if self.kind == tarfile.REGTYPE:
            info.size = len(self.content) if self.claims is None else self.claims
        if self.kind in (tarfile.CHRTYPE, tarfile.BLKTYPE):
            info.devmajor, info.devminor = 1, 3
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + self.content + b"\0" * (-len(self.content) % 512)


def stored_files(data: Path, snapshot: str) -> tuple[Path, Path]:
    """(blob, record) of a snapshot below a facade's data folder."""
    files = list(data.rglob(f"*{snapshot}*"))
    return next(file for file in files if file.name.endswith(".tar.zst")), next(file for file in files if file.name == f"{snapshot}.json")


def plain(blob: bytes) -> bytes:
    """The tar in a snapshot's blob."""
    with zstandard.ZstdDecompressor().stream_reader(blob, read_across_frames=True) as reader:
        return reader.read()


def write(data: Path, snapshot: str, archive: bytes, index: dict[str, int] | None = None) -> None:
    """Puts this tar in place of a snapshot's own. With its index the record is made to agree in all its figures, else in digest and size."""
    blob, record = stored_files(data, snapshot)
    new = zstandard.ZstdCompressor(level=3).compress(archive)
    blob.write_bytes(new)
    described = json.loads(record.read_text())
    described |= {"digest": f"sha256:{hashlib.sha256(new).hexdigest()}", "size_bytes": len(new)}
    if index is not None:
        described |= {"tar_bytes": len(archive), "entries": index["entries"], "file_count": index["files"], "data_bytes": index["bytes"]}
    record.write_text(json.dumps(described))


def forge(data: Path, snapshot: str, members: Iterable[Member], *, honest: bool = True) -> None:
    """Replaces what the snapshot of an empty workspace holds by these members; an honest record agrees with them in all its figures."""
    original = plain(stored_files(data, snapshot)[0].read_bytes())
    with tarfile.open(fileobj=io.BytesIO(original)) as tar:
        inside = tar.getmembers()
        last = inside[-1]
        assert last.name == INDEX, "the last member is the index"
        reader = tar.extractfile(last)
        assert reader is not None
        index = json.loads(reader.read())
        # Header blocks of the index member, PAX ones included, begin where the member before it ends.
        before = inside[-2]
        end = before.offset_data + (before.size + 511) // 512 * 512
    body = bytearray(original[:end])
    for member in members:
        packed = member.packed()
        body += packed
        count = COUNTS.get(member.kind)
        if count is not None:
            index[count] += 1
        index["entries"] += 1
        index["bytes"] += len(member.content)
    index["sha256"] = hashlib.sha256(body).hexdigest()
    body += Member(INDEX, content=json.dumps(index).encode()).packed() + b"\0" * 1024
    write(data, snapshot, bytes(body), index if honest else None)
