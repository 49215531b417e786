"""What can go wrong with a stored snapshot, so that a caller can tell what may help.

BackendError
├── StoreUnreachable   nothing is known to be wrong with the snapshot: the same again, later, may work
├── StoreFull          the disk, or the store's quota, has no room
├── ObjectMissing      the store has no object of that name
└── Damaged            what the store holds is not what was written
    └── DamagedRecord  a record that is none
"""

from __future__ import annotations

import errno

from agent_sandbox_core.errors import BackendError

from .manifest import Record


class StoreUnreachable(BackendError):
    """The store did not answer, or not in time."""


class StoreFull(BackendError):
    """There is no room for it."""


class ObjectMissing(BackendError):
    """The store has no object of that name."""


class Damaged(BackendError):
    """What the store holds is not what was written."""


class DamagedRecord(Damaged):
    """A record in the store that is none."""


def damaged(record: Record, why: str) -> Damaged:
    """A blob that is not what was written."""
    return Damaged(f"snapshot {record.id} is damaged in the store ({why}): nothing was changed; use another snapshot")


def disk_error(error: OSError, what: str) -> BackendError:
    """An error of the local disk, with what to do about it."""
    if error.errno == errno.ENOSPC:
        return StoreFull(f"{what}: the disk is full: free space or delete snapshots, then try again")
    if error.errno == errno.EDQUOT:
        return StoreFull(f"{what}: the disk quota is used up: free space or delete snapshots, then try again")
    advice = {
        errno.EROFS: "the file system is read-only: make it writable, then try again",
        errno.EACCES: "the server may not write there: change its owner or mode, then try again",
        errno.EPERM: "the server may not write there: change its owner or mode, then try again",
    }
    return BackendError(f"{what}: {advice.get(error.errno or 0, f'{error.strerror or error}; look at the disk, then try again')}")
