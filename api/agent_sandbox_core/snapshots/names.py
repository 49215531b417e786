"""Names of snapshots and of their objects in a store."""

from __future__ import annotations

import re

from agent_sandbox_core.errors import SnapshotNotFound

BLOB = ".tar.zst"
RECORD = ".json"
INSTANCE = "instance.json"
_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}\Z")


def check_id(snapshot_id: str) -> str:
    """The id itself when it can be the name of an object, else SnapshotNotFound: no other id was ever given out."""
    if not _ID.match(snapshot_id):
        raise SnapshotNotFound(snapshot_id)
    return snapshot_id


def id_of(object_name: str, suffix: str) -> str | None:
    """The id in the name of a blob or a record, None for other objects."""
    if object_name == INSTANCE or not object_name.endswith(suffix):
        return None
    stem = object_name.removesuffix(suffix)
    return stem if _ID.match(stem) else None
