"""The data folder: who uses it, the installation's id, and what LocalBackend must remember beside the engine."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final

from agent_sandbox_core.errors import BackendError
from agent_sandbox_core.models import rfc3339

logger = logging.getLogger(__name__)

LOCK: Final = "lock"
INSTANCE: Final = "instance-id"
LEDGER: Final = "sandboxes.json"
SNAPSHOTS: Final = "snapshots"
SPOOL: Final = "spool"
SECRETS: Final = "snapshot-env"
FORMAT: Final = 1


class FolderError(Exception):
    """The data folder cannot be used. The message is one line."""


class DataFolder:
    """One data folder, held by one process at a time: two servers would sweep each other's work."""

    def __init__(self, path: Path, lock: IO[str], instance_id: str) -> None:
        self.path = path
        self.instance_id = instance_id
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> DataFolder:
        """Makes the folder when it is missing, takes its lock and reads its id. Raises FolderError."""
        path = path.absolute()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Held open for reading only: a file system on which something is open for writing could not be made read-only.
            lock = open(os.open(path / LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), encoding="ascii")  # noqa: PTH123, SIM115 - kept open
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = lock.read().strip() or "unknown"
                lock.close()
                raise FolderError(f"{path} is already in use by pid {holder}: give each server a folder of its own") from None
            (path / LOCK).write_text(f"{os.getpid()}\n")
            return cls(path, lock, _read_instance(path / INSTANCE))
        except OSError as error:
            raise FolderError(f"{path} cannot be used ({error.strerror or error}): make it a folder that this user may write") from error

    def close(self) -> None:
        """Gives the folder back."""
        self._lock.close()


def _read_instance(file: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        if found := file.read_text().strip():
            return found
    made = secrets.token_hex(8)
    write_file(file, made + "\n")
    return made


@dataclass(frozen=True, slots=True)
class Entry:
    """What is remembered of a sandbox: changes that its engine does not know."""

    expires_at: datetime | None = None
    """The time that the timeout call set; None: as at creation."""
    parent: str | None = None
    """The snapshot that it was last rolled back to; None: its source."""


class Ledger:
    """Entries by sandbox id, in one file that is replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / LEDGER
        self._writing = asyncio.Lock()
        self._entries: dict[str, Entry] = {}

    def load(self) -> None:
        """Reads the file. One that cannot be read is put aside: sandboxes then have the times of their creation again."""
        try:
            data = json.loads(self._file.read_bytes())
            self._entries = {name: _parse(entry) for name, entry in data["sandboxes"].items()}
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            aside = self._file.with_suffix(".damaged")
            self._file.replace(aside)
            logger.error("%s cannot be read and was moved to %s: changed expiry times are lost (%s)", self._file, aside, type(error).__name__)  # noqa: TRY400

    def get(self, sandbox_id: str) -> Entry:
        """What is remembered; nothing for most."""
        return self._entries.get(sandbox_id, Entry())

    async def put(self, sandbox_id: str, entry: Entry) -> None:
        """Remembers; on disk when it returns. BackendError when that fails, and then nothing has changed."""
        before = self._entries.get(sandbox_id)
        self._entries[sandbox_id] = entry
        try:
            await self._write()
        except BackendError:
            if before is None:
                self._entries.pop(sandbox_id, None)
            else:
                self._entries[sandbox_id] = before
            raise

    async def forget(self, sandbox_id: str) -> None:
        """Drops a sandbox that is gone. A file that cannot be written now is written with the next change."""
        if self._entries.pop(sandbox_id, None) is not None:
            with contextlib.suppress(BackendError):
                await self._write()

    async def keep_only(self, known: set[str]) -> None:
        """Drops all others."""
        for gone in self._entries.keys() - known:
            await self.forget(gone)

    async def _write(self) -> None:
        async with self._writing:
            text = json.dumps({"format": FORMAT, "sandboxes": {name: _dump(entry) for name, entry in self._entries.items()}})
            try:
                await asyncio.to_thread(write_file, self._file, text)
            except OSError as error:
                raise BackendError(f"{self._file} cannot be written ({error.strerror or error}): nothing was changed; look at the disk") from error


def write_file(file: Path, text: str) -> None:
    """Replaces a file as a whole; on disk when it returns, readable by its owner alone."""
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _dump(entry: Entry) -> dict[str, Any]:
    return {"expires_at": rfc3339(entry.expires_at) if entry.expires_at else None, "parent": entry.parent}


def _parse(data: dict[str, Any]) -> Entry:
    when = data.get("expires_at")
    return Entry(datetime.fromisoformat(when) if when else None, data.get("parent"))
