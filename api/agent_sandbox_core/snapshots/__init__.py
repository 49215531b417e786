"""Snapshots: the manifest, the archive as it is received and checked, and the store.

Belongs here: what a snapshot is and where it is kept, for every backend. Must not be here: when one is taken, of what, and who may.
"""

from .blobs import BlobStore, OpenSnapshot
from .faults import Damaged, ObjectMissing, StoreFull, StoreUnreachable
from .manifest import Manifest, Record, StoredSpec
from .secrets import SnapshotSecrets
from .store import SnapshotStore
from .tar import ArchiveIndex, InvalidArchive, TarInspector

__all__ = [
    "ArchiveIndex",
    "BlobStore",
    "Damaged",
    "InvalidArchive",
    "Manifest",
    "ObjectMissing",
    "OpenSnapshot",
    "Record",
    "SnapshotSecrets",
    "SnapshotStore",
    "StoreFull",
    "StoreUnreachable",
    "StoredSpec",
    "TarInspector",
]
