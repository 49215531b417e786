"""A blob that somebody else made, taken in: copied, compared with its digest, then read through as if it came out of a sandbox.

Nothing of it is trusted: what it unpacks to is bounded, and refused for what an archive from a sandbox would be refused for.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import zstandard
from pydantic import ValidationError

from agent_sandbox_core.errors import PayloadTooLarge

from .faults import Damaged, disk_error
from .manifest import Manifest
from .spool import BATCH_BYTES, MAX_WINDOW_BYTES, PREFIX, Spool, Spooled
from .tar import InvalidArchive, TarInspector

_READ_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class Imported:
    """A foreign blob that was found whole and harmless, on the local disk."""

    manifest: Manifest
    spooled: Spooled


@contextlib.asynccontextmanager
async def imported(spool: Spool, file: BinaryIO, digest: str, max_bytes: int) -> AsyncIterator[Imported]:
    """Takes in `file`; the copy is there for the block. Damaged when it is not what `digest` says, InvalidArchive, PayloadTooLarge."""
    found = await spool.acquire(_give_back, _take_in, spool.directory, file, digest, max_bytes)
    try:
        yield found
    finally:
        await spool.run(_give_back, found)


def _give_back(found: Imported) -> None:
    found.spooled.path.unlink(missing_ok=True)


def _take_in(directory: Path, file: BinaryIO, digest: str, max_bytes: int) -> Imported:
    path: Path | None = None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=directory, prefix=PREFIX)
        path = Path(name)
        with os.fdopen(descriptor, "wb") as copy:
            size = _copy(file, copy, digest, max_bytes)
        with path.open("rb") as copy:
            return _inspect(copy, path, size, digest, max_bytes)
    except BaseException as error:
        if path is not None:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(error, f"the file could not be copied to {directory}") from error
        raise


def _copy(file: BinaryIO, copy: BinaryIO, digest: str, max_bytes: int) -> int:
    found = hashlib.sha256()
    size = 0
    while data := file.read(BATCH_BYTES):
        size += len(data)
        if size > max_bytes:
            raise PayloadTooLarge(f"the file has more than {max_bytes} bytes: raise MAX_SNAPSHOT_BYTES, or import a smaller one")
        found.update(data)
        copy.write(data)
    # What it is instead is not told: who may name a file here need not be allowed to read it.
    if f"sha256:{found.hexdigest()}" != digest:
        raise Damaged(f"the file is not the one with the digest {digest}: copy it again, or correct the digest")
    return size


def _inspect(copy: BinaryIO, path: Path, size: int, digest: str, max_bytes: int) -> Imported:
    inspector = TarInspector(max_bytes=max_bytes)
    tar_bytes = 0
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    try:
        with decompressor.stream_reader(copy, read_size=_READ_BYTES, closefd=False) as tar:
            while part := tar.read(BATCH_BYTES):
                tar_bytes += len(part)
                inspector.feed(part)
    except zstandard.ZstdError as error:
        raise InvalidArchive(f"the file cannot be decompressed: {error}") from error
    index = inspector.finish()
    try:
        manifest = Manifest.model_validate_json(inspector.manifest)
    except ValidationError as error:
        raise InvalidArchive(f"the manifest in the file cannot be read ({error.error_count()} faults)") from error
    return Imported(manifest, Spooled(path, size, digest, tar_bytes, index))
