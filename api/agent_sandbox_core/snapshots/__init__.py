"""Snapshots: the manifest, the archive as it is received and checked, and the store.

Belongs here: what a snapshot is and where it is kept, for every backend. Must not be here: when one is taken, of what, and who may.
"""

from .manifest import Manifest, Record, StoredSpec
from .secrets import SnapshotSecrets
from .store import OpenSnapshot, SnapshotStore
from .tar import ArchiveIndex, InvalidArchive, TarInspector

__all__ = [
    "ArchiveIndex",
    "InvalidArchive",
    "Manifest",
    "OpenSnapshot",
    "Record",
    "SnapshotSecrets",
    "SnapshotStore",
    "StoredSpec",
    "TarInspector",
]
