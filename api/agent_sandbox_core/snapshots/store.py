"""The snapshot store: a directory, memory, or an object store, by one address (obstore).

Objects: `<id>.tar.zst` is the archive; `<id>.json` is the record, written after it and only once: that is the commit. A blob without a
record is nobody's and is swept. The record holds the digest of the whole blob, so a changed byte is noticed before anything is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, ObjectStore
from pydantic import ValidationError

from agent_sandbox_core.errors import BackendError, Conflict, SandboxError, SnapshotNotFound

from .manifest import Manifest, Record
from .names import BLOB, INSTANCE, RECORD, check_id, id_of
from .spool import PREFIX, Spool, Spooled, check_digest, damaged, disk_error

logger = logging.getLogger(__name__)

MAX_CONCURRENCY: Final = 2
"""Parts of one upload at a time; with parts of 8 MiB that bounds its memory."""
PART_BYTES: Final = 8 << 20
READERS: Final = 16
"""Records read at a time for a list."""
MAX_RECORD_BYTES: Final = 1 << 20
STRAY_SECONDS: Final = 3600.0
"""A blob without a record, or a spooled file, is a stray when it is older; a younger one may be another process's work."""

Archive = Callable[[bytes], AsyncIterator[bytes]]
"""Gives the tar of a workspace for a manifest: `Guest.archive`."""


@dataclass(frozen=True, slots=True)
class OpenSnapshot:
    """A snapshot that is being read: its record and the plain tar, whose last bytes come only when the digest was right."""

    record: Record
    chunks: AsyncIterator[bytes]


async def _to_its_end(write: Awaitable[object]) -> None:
    """Waits for a short write even when the caller is cancelled meanwhile: one that is still under way could come after the clean-up."""
    writing = asyncio.ensure_future(write)
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        with contextlib.suppress(BaseError, OSError):
            await writing
        raise


class SnapshotStore:
    """All snapshots of one installation. `spool` is a local directory with room for the largest archive."""

    def __init__(self, store: ObjectStore, *, spool: Path, directory: Path | None = None, address: str = "") -> None:
        self._store = store
        self._directory = directory
        self._address = address or type(store).__name__
        self._executor = ThreadPoolExecutor(max_workers=4, thread_name_prefix="snapshots")
        self._spool = Spool(spool, self._executor)
        self._records: dict[str, Record] = {}
        self._active: set[str] = set()

    @classmethod
    def open(cls, address: str, *, spool: Path) -> SnapshotStore:
        """The store at `file:///directory` (made when missing), `memory:///`, or `s3://bucket/prefix` and what else obstore knows.

        Credentials come from the environment, as obstore documents it.
        """
        parts = urlsplit(address)
        try:
            if parts.scheme == "file":
                directory = Path(unquote(parts.path))
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                return cls(LocalStore(directory), spool=spool, directory=directory, address=address)
            return cls(obstore.store.from_url(address), spool=spool, address=f"{parts.scheme}://{parts.hostname or ''}{parts.path}")
        except OSError as error:
            raise disk_error(error, f"the snapshot store {parts.path} cannot be opened") from error
        except (BaseError, ValueError) as error:
            raise BackendError(f"the address of the snapshot store ({parts.scheme}://…) cannot be used: {_short(error)}") from error

    async def claim(self, instance: str) -> None:
        """Makes the store this installation's. Conflict when it is another's: the two would sweep each other's snapshots."""
        try:
            await obstore.put_async(self._store, INSTANCE, instance.encode(), mode="create")
        except AlreadyExistsError:
            owner = (await self._get_small(INSTANCE)).decode(errors="replace").strip()
            if owner != instance:
                message = f"the snapshot store {self._address} belongs to installation {owner[:64]}, this one is {instance}"
                raise Conflict(f"{message}: give each a store of its own") from None
        except (BaseError, OSError) as error:
            raise self._error(error, "could not be claimed") from error

    async def save(self, manifest: Manifest, archive: Archive, *, max_bytes: int) -> Record:
        """Takes a snapshot: on disk, checked and compressed; then, with the sandbox going on already, in the store. All or nothing."""
        snapshot_id = check_id(manifest.id)
        body = manifest.to_bytes()
        if snapshot_id in self._active or await self._exists(snapshot_id):
            raise Conflict(f"snapshot {snapshot_id} exists already")
        self._active.add(snapshot_id)
        committed = False
        try:
            spooled = await self._spool.receive(archive(body), body, max_bytes)
            try:
                record = Record(
                    manifest=manifest,
                    digest=spooled.digest,
                    size_bytes=spooled.size_bytes,
                    tar_bytes=spooled.tar_bytes,
                    entries=spooled.index.entries,
                    file_count=spooled.index.files,
                    data_bytes=spooled.index.bytes,
                    skipped=spooled.index.skipped,
                )
                await self._commit(record, spooled)
                committed = True
            finally:
                await self._spool.run(_remove, spooled.path)
        except asyncio.CancelledError:
            if committed:
                # Nobody will be told of it, so it must not be there. What cannot be taken back is a snapshot too many, not one too few.
                with contextlib.suppress(SandboxError):
                    await self.delete(snapshot_id)
            raise
        finally:
            self._active.discard(snapshot_id)
        self._records[snapshot_id] = record
        return record

    async def get(self, snapshot_id: str) -> Record:
        """The record, as the store has it now."""
        try:
            record = self._parse(snapshot_id, await self._get_small(check_id(snapshot_id) + RECORD))
        except NotFoundError:
            self._records.pop(snapshot_id, None)
            raise SnapshotNotFound(snapshot_id) from None
        self._records[snapshot_id] = record
        return record

    async def list_records(self) -> list[Record]:
        """All records, oldest first. One that cannot be read is logged and left out: it must not hide the others."""
        found = {snapshot_id for name, _ in await self._names() if (snapshot_id := id_of(name, RECORD))}
        for gone in self._records.keys() - found:
            del self._records[gone]
        readers = asyncio.Semaphore(READERS)

        async def read(snapshot_id: str) -> None:
            async with readers:
                try:
                    await self.get(snapshot_id)
                except SnapshotNotFound:
                    return  # deleted meanwhile
                except DamagedRecord as error:
                    logger.error("a snapshot is left out of the list: %s", error.message)  # noqa: TRY400 - the message is all there is

        async with _unwrapped(), asyncio.TaskGroup() as group:
            for snapshot_id in found - self._records.keys():
                group.create_task(read(snapshot_id))
        return sorted(self._records.values(), key=lambda record: (record.manifest.created_at, record.id))

    async def delete(self, snapshot_id: str) -> None:
        """Removes a snapshot, the record first: what is left after a crash is a stray blob."""
        name = check_id(snapshot_id)
        with contextlib.suppress(DamagedRecord):
            await self.get(name)
        self._records.pop(name, None)
        try:
            await obstore.delete_async(self._store, name + RECORD)
        except NotFoundError:
            raise SnapshotNotFound(snapshot_id) from None
        except (BaseError, OSError) as error:
            raise self._error(error, f"could not delete snapshot {snapshot_id}") from error
        try:
            with contextlib.suppress(NotFoundError):
                await obstore.delete_async(self._store, name + BLOB)
        except (BaseError, OSError) as error:
            logger.warning("the archive of the deleted snapshot %s is left to the sweep: %s", snapshot_id, _short(error))

    @contextlib.asynccontextmanager
    async def read(self, snapshot_id: str) -> AsyncIterator[OpenSnapshot]:
        """Opens a snapshot for a restore or a fork. It can be read to its end even when it is deleted meanwhile."""
        record = await self.get(snapshot_id)
        file = await self._open_blob(record)
        try:
            async with contextlib.aclosing(self._spool.send(file, record)) as chunks:
                yield OpenSnapshot(record, chunks)
        except BackendError:
            # A guest that sees the damage first can only say that the archive is bad; why it is bad is known here.
            await self._spool.run(check_digest, file, record)
            raise
        finally:
            await self._spool.run(file.close)

    async def sweep(self, *, older_than: float = STRAY_SECONDS) -> list[str]:
        """Removes blobs without a record and spooled files of crashed processes that are older than so many seconds; returns their names."""
        names = await self._names()
        kept = {snapshot_id for name, _ in names if (snapshot_id := id_of(name, RECORD))} | self._active
        limit = datetime.now(UTC) - timedelta(seconds=older_than)
        removed = []
        for name, modified in names:
            stray = id_of(name, BLOB)
            if (stray and stray not in kept and modified <= limit) or (name.endswith(_PART) and modified <= limit):
                try:
                    await obstore.delete_async(self._store, name)
                except NotFoundError:
                    continue
                except (BaseError, OSError) as error:
                    raise self._error(error, f"could not sweep {name}") from error
                removed.append(name)
        removed += await self._spool.run(_sweep_spool, self._spool.directory, limit.timestamp())
        return removed

    async def aclose(self) -> None:
        """Ends the threads."""
        await asyncio.to_thread(self._executor.shutdown)

    async def _commit(self, record: Record, spooled: Spooled) -> None:
        blob, name = record.id + BLOB, record.id + RECORD
        try:
            if self._directory is not None:
                await self._spool.run(_move_synced, spooled.path, self._directory / blob)
            else:
                await obstore.put_async(self._store, blob, spooled.path, chunk_size=PART_BYTES, max_concurrency=MAX_CONCURRENCY)
            await _to_its_end(obstore.put_async(self._store, name, record.to_bytes(), mode="create"))
            if self._directory is not None:
                await self._spool.run(_sync, self._directory / name)
        except BaseException as error:
            # The record may have been written although its answer was lost: it goes first, so that no record is without its blob.
            for leftover in (name, blob):
                with contextlib.suppress(BaseError, OSError):
                    await obstore.delete_async(self._store, leftover)
            if isinstance(error, BaseError | OSError):
                raise self._error(error, f"could not keep snapshot {record.id}, which was not taken") from error
            raise

    async def _exists(self, snapshot_id: str) -> bool:
        try:
            await self.get(snapshot_id)
        except SnapshotNotFound:
            return False
        return True

    async def _open_blob(self, record: Record) -> BinaryIO:
        """The blob as a local file; from an object store it is fetched first, so that a slow network does not keep a sandbox frozen."""
        blob = record.id + BLOB
        try:
            if self._directory is not None:
                return await self._spool.acquire(_close, _open, self._directory / blob)
            answer = await obstore.get_async(self._store, blob)
            file = await self._spool.acquire(_close, _temporary, self._spool.directory)
            try:
                async for part in answer.stream(min_chunk_size=1 << 20):
                    await self._spool.run(file.write, part)
                await self._spool.run(file.seek, 0)
            except BaseException:
                await self._spool.run(file.close)
                raise
        except (NotFoundError, FileNotFoundError) as error:
            raise damaged(record, "its archive is gone") from error
        except (BaseError, OSError) as error:
            raise self._error(error, f"could not read snapshot {record.id}") from error
        return file

    async def _get_small(self, name: str) -> bytes:
        try:
            answer = await obstore.get_async(self._store, name)
            if answer.meta["size"] > MAX_RECORD_BYTES:
                raise DamagedRecord(f"{name} in the snapshot store has {answer.meta['size']} bytes, which is no record of a snapshot")
            return bytes(await answer.bytes_async())
        except (NotFoundError, FileNotFoundError) as error:
            raise NotFoundError(name) from error
        except (BaseError, OSError) as error:
            raise self._error(error, f"could not read {name}") from error

    async def _names(self) -> list[tuple[str, datetime]]:
        try:
            found = await obstore.list_with_delimiter_async(self._store)
        except (BaseError, OSError) as error:
            raise self._error(error, "could not be listed") from error
        return [(meta["path"], meta["last_modified"]) for meta in found["objects"]]

    def _parse(self, snapshot_id: str, body: bytes) -> Record:
        try:
            record = Record.model_validate_json(body)
        except ValidationError as error:
            raise DamagedRecord(f"the record of snapshot {snapshot_id} in the store cannot be read ({error.error_count()} faults)") from error
        if record.id != snapshot_id:
            raise DamagedRecord(f"the record of snapshot {snapshot_id} in the store is that of {record.id}")
        return record

    def _error(self, error: Exception, what: str) -> BackendError:
        store = f"the snapshot store {self._address} {what}"
        if isinstance(error, OSError) and error.errno is not None:
            return disk_error(error, store)
        text = str(error)
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or "Permission denied" in text:
            return BackendError(f"{store}: access was denied; check its credentials or the owner and mode of the directory, then try again")
        if "No space left" in text:
            return BackendError(f"{store}: the disk is full; free space or delete snapshots, then try again")
        if "Read-only file system" in text:
            return BackendError(f"{store}: the file system is read-only; make it writable, then try again")
        return BackendError(f"{store}: {_short(error)}; check that it can be reached, then try again")


class DamagedRecord(BackendError):
    """A record in the store that is none."""


_PART: Final = ".part"


def _move_synced(source: Path, target: Path) -> None:
    """Moves a file so that it is whole and durable under its new name, also from another file system."""
    _sync_file(source)
    try:
        source.replace(target)
    except OSError:
        part = target.with_name(target.name + _PART)
        try:
            shutil.copyfile(source, part)
            _sync_file(part)
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    _sync_file(target.parent)


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


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _sweep_spool(directory: Path, limit: float) -> list[str]:
    removed = []
    for path in directory.glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime <= limit:
                path.unlink()
                removed.append(path.name)
    return removed


def _short(error: Exception) -> str:
    """The first line of a library's message: the rest repeats it in Rust."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


@contextlib.asynccontextmanager
async def _unwrapped() -> AsyncIterator[None]:
    """The first of the errors of a task group in place of the group."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
