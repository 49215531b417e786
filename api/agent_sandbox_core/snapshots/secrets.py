"""The env values of snapshotted sandboxes: in private files of this installation, never in the store."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Collection
from pathlib import Path

from agent_sandbox_core.errors import BackendError

from .faults import disk_error
from .names import check_id

SUFFIX = ".env.json"


class SnapshotSecrets:
    """One file (mode 0600) a snapshot in a directory (0700). A snapshot whose sandbox had no env has none."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def save(self, snapshot_id: str, env: dict[str, str]) -> None:
        """Keeps the values; on disk when it returns."""
        if env:
            await asyncio.to_thread(self._save, check_id(snapshot_id), env)

    async def load(self, snapshot_id: str) -> dict[str, str] | None:
        """The values, None when there are none here."""
        return await asyncio.to_thread(self._load, check_id(snapshot_id))

    async def delete(self, snapshot_id: str) -> None:
        """Removes the values; fine when there are none."""
        await asyncio.to_thread(self._path(check_id(snapshot_id)).unlink, missing_ok=True)

    async def sweep(self, keep: Collection[str]) -> None:
        """Removes the values of all snapshots that are not in `keep`."""
        await asyncio.to_thread(self._sweep, frozenset(keep))

    def _path(self, snapshot_id: str) -> Path:
        return self._directory / (snapshot_id + SUFFIX)

    def _save(self, snapshot_id: str, env: dict[str, str]) -> None:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self._directory, prefix=".new-")  # 0600
            try:
                with os.fdopen(descriptor, "w") as file:
                    json.dump(env, file)
                    file.flush()
                    os.fsync(file.fileno())
                Path(temporary).replace(self._path(snapshot_id))
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise disk_error(error, f"the environment of snapshot {snapshot_id} could not be kept in {self._directory}") from error

    def _load(self, snapshot_id: str) -> dict[str, str] | None:
        try:
            data = json.loads(self._path(snapshot_id).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise BackendError(f"the environment of snapshot {snapshot_id} cannot be read from {self._directory}: make a new snapshot") from error
        return {str(name): str(value) for name, value in data.items()}

    def _sweep(self, keep: frozenset[str]) -> None:
        for path in self._directory.glob("*"):
            if path.name.startswith(".new-") or (path.name.endswith(SUFFIX) and path.name.removesuffix(SUFFIX) not in keep):
                path.unlink(missing_ok=True)
