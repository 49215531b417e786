"""The archive on its way: checked, compressed and hashed in a thread while it comes in, and the same way back.

The event loop only moves bytes. At most two batches of 1 MiB are in memory, so a slow disk slows the sandbox's sender down.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Final, TypeVar, cast

import zstandard

from .faults import damaged, disk_error
from .manifest import Manifest, Record
from .tar import ArchiveIndex, TarInspector

T = TypeVar("T")

BATCH_BYTES: Final = 1 << 20
PIECE_BYTES: Final = 128 << 10
"""What is parsed at a time: hashing and compressing it lets the event loop have the interpreter in between."""
LEVEL: Final = 1
"""Measured on source text and random data: 1 is a third faster than 2 and twice as fast as 3, for a file 10 % larger."""
MAX_WINDOW_BYTES: Final = 8 << 20
PREFIX: Final = "snapshot-"


@dataclass(frozen=True, slots=True)
class Spooled:
    """A whole, checked and compressed archive on the local disk."""

    path: Path
    size_bytes: int
    digest: str
    tar_bytes: int
    index: ArchiveIndex

    def record(self, manifest: Manifest) -> Record:
        """The record of this archive."""
        return Record(
            manifest=manifest,
            digest=self.digest,
            size_bytes=self.size_bytes,
            tar_bytes=self.tar_bytes,
            entries=self.index.entries,
            file_count=self.index.files,
            data_bytes=self.index.bytes,
            skipped=self.index.skipped,
        )


class Spool:
    """A local directory for archives on their way in or out. Nothing stays in it."""

    def __init__(self, directory: Path, executor: Executor) -> None:
        self.directory = directory
        self._executor = executor

    async def receive(self, chunks: AsyncIterator[bytes], manifest: bytes, max_bytes: int) -> Spooled:
        """Takes a tar from a sandbox; `chunks` is closed in any case, and on failure nothing is left. The caller removes the file."""
        writer: _Writer | None = None
        pending: asyncio.Future[None] | None = None
        try:
            writer = await self.acquire(_Writer.discard, _Writer, self.directory, manifest, max_bytes)
            batch: list[bytes] = []
            size = 0
            async for chunk in chunks:
                batch.append(chunk)
                size += len(chunk)
                if size >= BATCH_BYTES:
                    if pending is not None:
                        await asyncio.shield(pending)
                    pending = self._submit(writer.take, batch)
                    batch, size = [], 0
            if pending is not None:
                await asyncio.shield(pending)
            return await self.run(writer.finish, batch)
        except BaseException as error:
            if writer is not None:
                await _settled(pending)
                await self.run(writer.discard)
            if isinstance(error, OSError):
                raise disk_error(error, f"the snapshot could not be written to {self.directory}") from error
            raise
        finally:
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()

    @contextlib.asynccontextmanager
    async def received(self, chunks: AsyncIterator[bytes], manifest: bytes, max_bytes: int) -> AsyncIterator[Spooled]:
        """Like receive; the file is there for the block."""
        spooled = await self.receive(chunks, manifest, max_bytes)
        try:
            yield spooled
        finally:
            await self.discard(spooled)

    async def discard(self, spooled: Spooled) -> None:
        """Removes a spooled archive; fine when it was moved away."""
        await self.run(_remove, spooled.path)

    async def send(self, file: BinaryIO, record: Record) -> AsyncGenerator[bytes, None]:
        """The plain tar of a blob. Its last bytes, without which a tar is no archive, come when digest and sizes were found right."""
        reader = _Reader(file, record)
        held: deque[bytes] = deque()
        future = self._submit(reader.read)
        try:
            while part := await asyncio.shield(future):
                future = self._submit(reader.read)
                held.append(part)
                if len(held) > 1:
                    yield held.popleft()
            while held:
                yield held.popleft()
        finally:
            await _settled(future)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Runs a function in a thread; when the wait is cancelled, the thread is waited for all the same."""
        future = self._submit(function, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await _settled(future)
            raise

    async def acquire(self, give_back: Callable[[T], object], function: Callable[..., T], *arguments: object) -> T:
        """Like run, for a function that opens something: when the wait is cancelled, what it opened is given back."""
        future = self._submit(function, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await _settled(future)
            if future.exception() is None:
                await self.run(give_back, future.result())
            raise

    def _submit(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


class _Writer:
    """The thread's side of receive."""

    def __init__(self, directory: Path, manifest: bytes, max_bytes: int) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._inspector = TarInspector(max_bytes=max_bytes, manifest=manifest)
        parameters = zstandard.ZstdCompressionParameters.from_level(LEVEL, write_checksum=True)
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        self._digest = hashlib.sha256()
        self._size = self._tar_bytes = 0
        descriptor, name = tempfile.mkstemp(dir=directory, prefix=PREFIX)
        self._path = Path(name)
        self._file = os.fdopen(descriptor, "wb", buffering=BATCH_BYTES)

    def take(self, batch: list[bytes]) -> None:
        for chunk in batch:
            for at in range(0, len(chunk), PIECE_BYTES):
                piece = chunk if len(chunk) <= PIECE_BYTES else chunk[at : at + PIECE_BYTES]
                self._inspector.feed(piece)
                self._tar_bytes += len(piece)
                self._write(self._compressor.compress(piece))

    def finish(self, batch: list[bytes]) -> Spooled:
        self.take(batch)
        index = self._inspector.finish()
        self._write(self._compressor.flush())
        self._file.close()
        return Spooled(self._path, self._size, f"sha256:{self._digest.hexdigest()}", self._tar_bytes, index)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()  # it may try to write what is in its buffer, on a full disk
        self._path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        if data:
            self._digest.update(data)
            self._size += len(data)
            self._file.write(data)


class _Reader:
    """The thread's side of send."""

    def __init__(self, file: BinaryIO, record: Record) -> None:
        self._source = _Hashing(file)
        self._record = record
        self._done = 0
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._tar = decompressor.stream_reader(cast("IO[bytes]", self._source), read_size=BATCH_BYTES // 4, closefd=False)

    def read(self) -> bytes:
        """The next MiB of the tar; nothing at the end, when all has been checked."""
        record = self._record
        try:
            part = self._tar.read(BATCH_BYTES)
        except zstandard.ZstdError as error:
            raise damaged(record, f"it cannot be decompressed: {error}") from error
        self._done += len(part)
        if self._done > record.tar_bytes:
            raise damaged(record, f"it unpacks to more than {record.tar_bytes} bytes")
        if not part:
            self._source.read_rest()
            self._source.check(record)
            if self._done != record.tar_bytes:
                raise damaged(record, f"it unpacks to {self._done} bytes, not to {record.tar_bytes}")
        return part


class _Hashing(io.RawIOBase):
    """A file whose bytes are hashed as they are read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        data = self._file.read(size)
        self.digest.update(data)
        return data

    def read_rest(self) -> None:
        """Hashes what is left."""
        while self.read(BATCH_BYTES):
            pass

    def check(self, record: Record) -> None:
        """Compares the digest of all that was read."""
        digest = f"sha256:{self.digest.hexdigest()}"
        if digest != record.digest:
            raise damaged(record, f"its digest is {digest}, it was written with {record.digest}")


def check_digest(file: BinaryIO, record: Record) -> None:
    """Raises what `damaged` gives when a blob is not what was written."""
    file.seek(0)
    source = _Hashing(file)
    source.read_rest()
    source.check(record)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


async def _settled(future: asyncio.Future[T] | None) -> None:
    """Waits for a thread, whatever is cancelled meanwhile, and drops what it raised: it must be done with a file before that goes."""
    while future is not None and not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    if future is not None and not future.cancelled():
        future.exception()
