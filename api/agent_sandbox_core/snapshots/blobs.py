"""Blobs and their records in a store (obstore: a directory, memory, or an object store), under keys.

Objects of a key: `<key>.tar.zst` is the archive; `<key>.json` is the record, written after it and only once: that is the commit. A blob
without a record is nobody's. The record holds the digest of the whole blob, so a changed byte is noticed before anything is replaced.
What a key means is for the callers: an id in Docker mode, a path below an installation's folder on a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, ObjectStore
from pydantic import ValidationError

from agent_sandbox_core.errors import BackendError, Conflict

from .faults import DamagedRecord, ObjectMissing, StoreFull, StoreUnreachable, damaged, disk_error
from .manifest import Record
from .names import BLOB, RECORD
from .spool import PREFIX, Spool, Spooled, check_digest

logger = logging.getLogger(__name__)

MAX_CONCURRENCY: Final = 2
"""Parts of one upload at a time; with parts of 8 MiB that bounds its memory."""
PART_BYTES: Final = 8 << 20
MAX_SMALL_BYTES: Final = 1 << 20
THREADS: Final = 4
PART_SUFFIX: Final = ".part"
"""Of a file that is being copied into a directory store."""
CONNECT_TIMEOUT: Final = timedelta(seconds=5)
REQUEST_TIMEOUT: Final = timedelta(minutes=1)
"""For one part of an archive, there or back."""
SMALL_SECONDS: Final = 20.0
"""For a small object, and for each page of a list."""
RETRY_TIMEOUT: Final = timedelta(seconds=10)
"""The library tries again that long; who can wait longer does so with something to tell."""


@dataclass(frozen=True, slots=True)
class OpenSnapshot:
    """A snapshot that is being read: its record and the plain tar, whose last bytes come only when the digest was right."""

    record: Record
    chunks: AsyncIterator[bytes]


class BlobStore:
    """A store by keys. `spool` is a local directory with room for the largest archive."""

    def __init__(self, store: ObjectStore, *, spool: Path, directory: Path | None = None, address: str = "") -> None:
        self.address = address or type(store).__name__
        self.directory = directory
        self._store = store
        self._executor = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="snapshots")
        self.spool = Spool(spool, self._executor)

    @classmethod
    def open(cls, address: str, *, spool: Path) -> BlobStore:
        """The store at `file:///directory` (made when missing), `memory:///`, or `s3://bucket/prefix` and what else obstore knows.

        Credentials come from the environment, as obstore documents it.
        """
        parts = urlsplit(address)
        try:
            if parts.scheme == "file":
                directory = Path(unquote(parts.path))
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                return cls(LocalStore(directory), spool=spool, directory=directory, address=address)
            if parts.scheme == "memory":
                return cls(obstore.store.from_url(address), spool=spool, address=address)
            store = obstore.store.from_url(
                address,
                client_options={"connect_timeout": CONNECT_TIMEOUT, "timeout": REQUEST_TIMEOUT, "allow_http": _http_allowed()},
                retry_config={"max_retries": 4, "retry_timeout": RETRY_TIMEOUT},
            )
            return cls(store, spool=spool, address=f"{parts.scheme}://{parts.hostname or ''}{parts.path}")
        except OSError as error:
            raise disk_error(error, f"the snapshot store {parts.path} cannot be opened") from error
        except (BaseError, ValueError) as error:
            raise BackendError(f"the address of the snapshot store ({parts.scheme}://…) cannot be used: {short(error)}") from error

    async def commit(self, key: str, record: Record, spooled: Spooled) -> None:
        """Stores a spooled archive and then its record, durably; all or nothing. The spooled file may be gone afterwards, or not."""
        blob, name = key + BLOB, key + RECORD
        try:
            if self.directory is not None:
                await self.spool.run(_move_synced, spooled.path, self.directory, blob)
            else:
                await obstore.put_async(self._store, blob, spooled.path, chunk_size=PART_BYTES, max_concurrency=MAX_CONCURRENCY)
            await _to_its_end(obstore.put_async(self._store, name, record.to_bytes(), mode="create"))
            if self.directory is not None:
                await self.spool.run(_sync, self.directory / name)
        except AlreadyExistsError as error:
            raise Conflict(f"snapshot {record.id} is in the store already") from error
        except BaseException as error:
            # The record may have been written although its answer was lost: it goes first, so that no record is without its blob.
            for leftover in (name, blob):
                with contextlib.suppress(BaseError, OSError):
                    await obstore.delete_async(self._store, leftover)
            if isinstance(error, BaseError | OSError):
                raise self.error(error, f"could not keep snapshot {record.id}, which was not taken") from error
            raise

    async def record(self, key: str) -> Record:
        """The record of a key, as the store has it now. ObjectMissing, DamagedRecord."""
        body = await self.get_small(key + RECORD)
        try:
            return Record.model_validate_json(body)
        except ValidationError as error:
            raise DamagedRecord(f"the record {key}{RECORD} in the snapshot store cannot be read ({error.error_count()} faults)") from error

    async def delete(self, key: str) -> None:
        """Removes record and blob, the record first: what is left after a crash is a stray blob. ObjectMissing when there is no record."""
        await self.delete_object(key + RECORD)
        try:
            with contextlib.suppress(ObjectMissing):
                await self.delete_object(key + BLOB)
        except BackendError as error:
            logger.warning("an archive of a deleted snapshot is left to the sweep: %s", error.message)

    @contextlib.asynccontextmanager
    async def read(self, key: str, record: Record) -> AsyncIterator[OpenSnapshot]:
        """Opens a blob for a restore or a fork. It can be read to its end even when it is deleted meanwhile."""
        try:
            file = await self.open_blob(key + BLOB)
        except ObjectMissing as error:
            raise damaged(record, "its archive is gone") from error
        try:
            async with contextlib.aclosing(self.spool.send(file, record)) as chunks:
                yield OpenSnapshot(record, chunks)
        except BackendError:
            # A guest that sees the damage first can only say that the archive is bad; why it is bad is known here.
            await self.spool.run(check_digest, file, record)
            raise
        finally:
            await self.spool.run(file.close)

    async def open_blob(self, name: str) -> BinaryIO:
        """An object as a local file; from an object store it is fetched first, so that a slow network does not keep a sandbox frozen."""
        try:
            if self.directory is not None:
                return await self.spool.acquire(_close, _open, self.directory / name)
            async with asyncio.timeout(SMALL_SECONDS):
                size = (await obstore.head_async(self._store, name))["size"]
            file = await self.spool.acquire(_close, _temporary, self.spool.directory)
            try:
                # By parts, so that each has a bound in time of its own, however large the whole is.
                for start in range(0, size, PART_BYTES):
                    part = await obstore.get_range_async(self._store, name, start=start, end=min(size, start + PART_BYTES))
                    await self.spool.run(file.write, part)
                await self.spool.run(file.seek, 0)
            except BaseException:
                await self.spool.run(file.close)
                raise
        except (BaseError, OSError) as error:
            raise self.error(error, f"could not read {name}") from error
        return file

    async def get_small(self, name: str) -> bytes:
        """The bytes of a small object."""
        try:
            async with asyncio.timeout(SMALL_SECONDS):
                answer = await obstore.get_async(self._store, name)
                if answer.meta["size"] > MAX_SMALL_BYTES:
                    raise DamagedRecord(f"{name} in the snapshot store has {answer.meta['size']} bytes, which is no record of a snapshot")
                return bytes(await answer.bytes_async())
        except (BaseError, OSError) as error:
            raise self.error(error, f"could not read {name}") from error

    async def put_small(self, name: str, data: bytes, *, create: bool = False) -> bool:
        """Writes a small object; with `create` only when there is none, else the answer is False."""
        try:
            async with asyncio.timeout(SMALL_SECONDS):
                await obstore.put_async(self._store, name, data, mode="create" if create else "overwrite")
        except AlreadyExistsError:
            return False
        except (BaseError, OSError) as error:
            raise self.error(error, f"could not write {name}") from error
        return True

    async def delete_object(self, name: str) -> None:
        """Removes one object; ObjectMissing when a store that can tell has none."""
        try:
            async with asyncio.timeout(SMALL_SECONDS):
                await obstore.delete_async(self._store, name)
        except (BaseError, OSError) as error:
            raise self.error(error, f"could not delete {name}") from error

    async def list_top(self) -> list[tuple[str, datetime]]:
        """Names and times of the objects at the top; all of them, or an error."""
        try:
            async with asyncio.timeout(SMALL_SECONDS):
                found = await obstore.list_with_delimiter_async(self._store)
        except (BaseError, OSError) as error:
            raise self.error(error, "could not be listed") from error
        return [(meta["path"], meta["last_modified"]) for meta in found["objects"]]

    async def list_below(self, prefix: str) -> list[tuple[str, datetime]]:
        """Names and times of all objects below a folder; all of them, or an error."""
        found = []
        pages = aiter(obstore.list(self._store, prefix, chunk_size=1000))
        try:
            while True:
                async with asyncio.timeout(SMALL_SECONDS):
                    page = await anext(pages, None)
                if page is None:
                    break
                found += [(meta["path"], meta["last_modified"]) for meta in page]
        except (BaseError, OSError) as error:
            raise self.error(error, "could not be listed") from error
        return found

    async def sweep_spool(self, older_than: float) -> list[str]:
        """Removes spooled files of crashed processes that were last written before that time (seconds since the epoch)."""
        return await self.spool.run(_sweep_spool, self.spool.directory, older_than)

    async def aclose(self) -> None:
        """Ends the threads."""
        await asyncio.to_thread(self._executor.shutdown)

    def error(self, error: Exception, what: str) -> BackendError:
        """A library's error as one of ours."""
        store = f"the snapshot store {self.address} {what}"
        if isinstance(error, NotFoundError | FileNotFoundError):
            return ObjectMissing(f"{store}: there is no such object")
        if isinstance(error, OSError) and error.errno is not None:
            return disk_error(error, store)
        kind, told = _read_error(error)
        return kind(f"{store}: {told}, then try again")


def _read_error(error: Exception) -> tuple[type[BackendError], str]:
    """What kind of error a library's is, and what to do about it: it tells much in its text only."""
    text = str(error)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or "Permission denied" in text:
        return BackendError, "access was denied; check its credentials or the owner and mode of the directory"
    if "No space left" in text or "QuotaExceeded" in text:
        return StoreFull, "the disk is full; free space or delete snapshots"
    if "Read-only file system" in text:
        return BackendError, "the file system is read-only; make it writable"
    told = "it does not answer" if isinstance(error, TimeoutError) else short(error)
    return StoreUnreachable, f"{told}; check that it can be reached"


def short(error: Exception) -> str:
    """The first line of a library's message: the rest repeats it in Rust."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _http_allowed() -> bool:
    """Asked here, since the library ignores its own variable once it is given other options of the client."""
    return os.environ.get("AWS_ALLOW_HTTP", "").lower() in {"true", "1", "yes"}


async def _to_its_end(write: Awaitable[object]) -> None:
    """Waits for a short write even when the caller is cancelled meanwhile: one that is still under way could come after the clean-up."""
    writing = asyncio.ensure_future(write)
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        with contextlib.suppress(BaseError, OSError):
            await writing
        raise


def _move_synced(source: Path, directory: Path, name: str) -> None:
    """Moves a file so that it is whole and durable under its new name, also from another file system."""
    target = directory / name
    _sync_file(source)
    made = _make_folders(directory, target.parent)
    try:
        source.replace(target)
    except OSError:
        part = target.with_name(target.name + PART_SUFFIX)
        try:
            shutil.copyfile(source, part)
            _sync_file(part)
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    for folder in (target.parent, *made):
        _sync_file(folder)


def _make_folders(directory: Path, folder: Path) -> list[Path]:
    """Makes the folders of a key; returns those that got a new entry."""
    missing = [one for one in (folder, *folder.parents) if one.is_relative_to(directory) and not one.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return [one.parent for one in missing]


def _sync(path: Path) -> None:
    _sync_file(path)
    _sync_file(path.parent)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def _temporary(directory: Path) -> BinaryIO:
    """A file without a name: nothing is left of it, whatever happens."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return open(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), "w+b")  # noqa: PTH123 - no path; the caller closes it


def _close(file: BinaryIO) -> None:
    file.close()


def _sweep_spool(directory: Path, limit: float) -> list[str]:
    removed = []
    for path in directory.glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime <= limit:
                path.unlink()
                removed.append(path.name)
    return removed
