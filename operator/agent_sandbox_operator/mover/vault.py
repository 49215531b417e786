"""The snapshots of one installation in a store: `<installation>/<namespace>/<name>.<uid>/`, with these objects.

`archive.tar.zst`  the archive
`archive.json`     its record: the commit
`keep`             the Snapshot's deletionPolicy is Retain: never swept
`trash`            since when it belongs to no Snapshot; swept after a grace
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from agent_sandbox_core.errors import BackendError, InvalidRequest
from agent_sandbox_core.models import rfc3339
from agent_sandbox_core.snapshots import BlobStore, Damaged, ObjectMissing, OpenSnapshot, Record
from agent_sandbox_core.snapshots.names import BLOB, RECORD
from agent_sandbox_core.v1alpha1 import SnapshotObject

ARCHIVE: Final = "archive"
KEEP: Final = "keep"
TRASH: Final = "trash"
_INSTALLATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
_FOLDER = re.compile(r"(?P<namespace>[a-z0-9][a-z0-9-]*)/(?P<name>[a-z0-9][a-z0-9-]*)\.(?P<uid>[A-Za-z0-9-]+)\Z")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a Snapshot's archive is: its namespace, name and uid."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}.{self.uid}"


def place_of(snapshot: SnapshotObject) -> Place:
    """A Snapshot's own place."""
    return Place(snapshot.metadata.namespace, snapshot.metadata.name, snapshot.metadata.uid)


@dataclass(slots=True)
class Kept:
    """What a listing found at one place."""

    objects: dict[str, datetime] = field(default_factory=dict)
    """Names of objects and when each was written."""

    @property
    def committed(self) -> bool:
        """There is a record."""
        return ARCHIVE + RECORD in self.objects

    @property
    def retained(self) -> bool:
        """It is never swept."""
        return KEEP in self.objects

    @property
    def newest(self) -> datetime:
        """When something was last written here."""
        return max(self.objects.values())


class Vault:
    """One installation's part of a store."""

    def __init__(self, blobs: BlobStore, installation: str) -> None:
        if not _INSTALLATION.match(installation):
            raise InvalidRequest(f"{installation[:80]!r} cannot be the name of an installation: use letters, digits, dots, dashes, at most 63")
        self.blobs = blobs
        self.installation = installation
        self._reading: dict[Place, int] = {}

    @property
    def lock_file(self) -> Path | None:
        """In a directory store the file whose lock makes a mover the only one; None elsewhere."""
        return None if self.blobs.directory is None else self.blobs.directory / self.installation / "mover.lock"

    def key(self, place: Place) -> str:
        """The key of its archive."""
        return f"{self.installation}/{place}/{ARCHIVE}"

    def location(self, place: Place) -> str:
        """Its archive's name in the store, as a Snapshot's status tells it."""
        return self.key(place) + BLOB

    def place_of(self, snapshot: SnapshotObject) -> Place:
        """Where a Snapshot's archive is: at its own place, or for one that came out of a backup at the place of the uid it had before.

        Its status says so, but a status that names another Snapshot's place is not believed.
        """
        own, location = place_of(snapshot), snapshot.status.location or ""
        prefix, tail = f"{self.installation}/", f"/{ARCHIVE}{BLOB}"
        if location.startswith(prefix) and location.endswith(tail):
            told = _parse_folder(location[len(prefix) : -len(tail)])
            if told is not None and (told.namespace, told.name) == (own.namespace, own.name):
                return told
        return own

    async def record(self, place: Place) -> Record | None:
        """Its record, None when no snapshot is there."""
        try:
            return await self.blobs.record(self.key(place))
        except ObjectMissing:
            return None

    async def find_by_name(self, namespace: str, name: str) -> Place | None:
        """The one place with a record for that name, whatever the uid. BackendError when there are several."""
        found = [
            place
            for place, kept in (await self._list(f"{self.installation}/{namespace}/")).items()
            if place.name == name and kept.committed and TRASH not in kept.objects
        ]
        if len(found) > 1:
            raise BackendError(
                f"the store has {len(found)} archives for the name {name} ({', '.join(place.uid for place in sorted(found))}): "
                "import the right one (spec.source.archive)"
            )
        return found[0] if found else None

    @contextlib.asynccontextmanager
    async def read(self, place: Place, digest: str | None) -> AsyncIterator[OpenSnapshot]:
        """Opens an archive for a restore, after a look at whether it is the one that the Snapshot's status tells of."""
        self._reading[place] = self._reading.get(place, 0) + 1
        try:
            try:
                record = await self.blobs.record(self.key(place))
            except ObjectMissing as error:
                raise Damaged(f"the archive of Snapshot {place.namespace}/{place.name} is gone from the store: use another Snapshot") from error
            if digest is not None and record.digest != digest:
                raise Damaged(
                    f"the archive of Snapshot {place.namespace}/{place.name} in the store is another than its status says: use another Snapshot"
                )
            async with self.blobs.read(self.key(place), record) as opened:
                yield opened
        finally:
            self._reading[place] -= 1
            if not self._reading[place]:
                del self._reading[place]

    def is_read(self, place: Place) -> bool:
        """Somebody here is reading it."""
        return place in self._reading

    async def delete(self, place: Place) -> None:
        """Removes all that is at a place, the record first; fine when there is nothing."""
        for name in (ARCHIVE + RECORD, ARCHIVE + BLOB, KEEP, TRASH):
            with contextlib.suppress(ObjectMissing):
                await self.blobs.delete_object(f"{self.installation}/{place}/{name}")
        if self.blobs.directory is not None:
            await self.blobs.spool.run(_remove_folder, self.blobs.directory / self.installation / str(place))

    async def set_keep(self, place: Place, *, keep: bool) -> None:
        """Says whether the archive stays when its Snapshot is gone."""
        name = f"{self.installation}/{place}/{KEEP}"
        if keep:
            await self.blobs.put_small(name, b"")
        else:
            with contextlib.suppress(ObjectMissing):
                await self.blobs.delete_object(name)

    async def put_in_trash(self, place: Place, now: datetime) -> None:
        """Begins its grace."""
        await self.blobs.put_small(f"{self.installation}/{place}/{TRASH}", rfc3339(now).encode())

    async def take_from_trash(self, place: Place) -> None:
        """It belongs to a Snapshot again."""
        with contextlib.suppress(ObjectMissing):
            await self.blobs.delete_object(f"{self.installation}/{place}/{TRASH}")

    async def trashed_at(self, place: Place) -> datetime | None:
        """Since when it is in the trash, None when it is not (or the mark cannot be read: then it is marked anew)."""
        try:
            moment = datetime.fromisoformat((await self.blobs.get_small(f"{self.installation}/{place}/{TRASH}")).decode())
        except (ObjectMissing, ValueError):
            return None
        return moment if moment.tzinfo is not None else None

    async def delete_uncommitted(self, place: Place) -> None:
        """Removes a blob that has no record; one that has stays."""
        if await self.record(place) is not None:
            return
        with contextlib.suppress(ObjectMissing):
            await self.blobs.delete_object(self.location(place))

    async def list_all(self) -> dict[Place, Kept]:
        """All places; complete, or an error."""
        return await self._list(f"{self.installation}/")

    async def _list(self, prefix: str) -> dict[Place, Kept]:
        found: dict[Place, Kept] = {}
        for name, written in await self.blobs.list_below(prefix):
            folder, _, last = name.removeprefix(f"{self.installation}/").rpartition("/")
            place = _parse_folder(folder)
            if place is not None:
                found.setdefault(place, Kept()).objects[last] = written
        return found


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is to be done about what a listing found."""

    trash: tuple[Place, ...] = ()
    untrash: tuple[Place, ...] = ()
    check: tuple[Place, ...] = ()
    """In the trash: gone when its time is over."""
    uncommitted: tuple[Place, ...] = ()


def plan_sweep(
    found: dict[Place, Kept], snapshots: Iterable[Place], *, scope: Iterable[str], busy: Iterable[Place], now: datetime, stray: timedelta
) -> Sweep:
    """Compares the store, listed *before* the Snapshots, with them. `scope`: the namespaces that were listed, empty for all.

    `busy`: places of Snapshots that are being taken, which have a blob before their record.
    """
    owned, names, taken = set(snapshots), frozenset(scope), set(busy)
    ours = {place: kept for place, kept in found.items() if not names or place.namespace in names}
    strays = {place: kept for place, kept in ours.items() if place not in owned and not kept.retained and now - kept.newest >= stray}
    return Sweep(
        trash=tuple(sorted(place for place, kept in strays.items() if TRASH not in kept.objects)),
        check=tuple(sorted(place for place, kept in strays.items() if TRASH in kept.objects)),
        untrash=tuple(sorted(place for place in owned if place in ours and TRASH in ours[place].objects)),
        uncommitted=tuple(
            sorted(place for place in owned - taken if place in ours and _uncommitted(ours[place]) and now - ours[place].newest >= stray)
        ),
    )


def _uncommitted(kept: Kept) -> bool:
    return ARCHIVE + BLOB in kept.objects and not kept.committed


def check_location(location: str, namespace: str, installation: str) -> str:
    """A location that a Snapshot of this namespace may import from: inside the store, and no other namespace's archive. InvalidRequest."""
    parts = location.split("/")
    if any(part in {"", ".", ".."} for part in parts) or "\0" in location or "\\" in location:
        raise InvalidRequest(f"spec.source.archive.location {location[:200]!r} is no path below the store's root: use names and single slashes")
    if parts[0] == installation and (len(parts) < 3 or parts[1] != namespace):
        raise InvalidRequest(f"spec.source.archive.location {location[:200]!r} belongs to another namespace: copy the file to a folder for imports")
    return location


def now_utc() -> datetime:
    """The time."""
    return datetime.now(UTC)


def _parse_folder(folder: str) -> Place | None:
    found = _FOLDER.match(folder)
    return Place(found["namespace"], found["name"], found["uid"]) if found else None


def _remove_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it is not empty, or never was
        folder.rmdir()
