"""The mover's loop: what the watches tell is routed into a queue of keys, and workers reconcile them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Final, Literal

from agent_sandbox_core.errors import SandboxError
from agent_sandbox_core.v1alpha1 import ENDED_RESTORES, SandboxObject, SnapshotObject
from pydantic import ValidationError

from agent_sandbox_operator.queue import Closed, WorkQueue
from agent_sandbox_operator.views import faulty_fields

from .cluster import Trouble
from .context import Context, Key
from .restores import Restores
from .snapshots import DONE, Snapshots
from .sweep import SETTLE_SECONDS, Sweeper, SweepTimes

logger = logging.getLogger(__name__)

Kind = Literal["Sandbox", "Snapshot", "gone"]
Task = tuple[Kind, str, str]
"""What to look at: a Sandbox or a Snapshot by namespace and name, or by namespace and uid a Snapshot that is gone."""
END_SECONDS: Final = 5.0


class Engine:
    """Holds what the watches told last, and works. All methods belong to one event loop."""

    def __init__(self, context: Context, namespaces: Iterable[str] = (), times: SweepTimes | None = None) -> None:
        self._context = context
        self._queue: WorkQueue[Task] = WorkQueue()
        self._sandboxes: dict[Key, SandboxObject] = {}
        self._snapshots: dict[Key, SnapshotObject] = {}
        self._gone: dict[str, SnapshotObject] = {}
        self._waiting: dict[Key, set[Key]] = {}
        """Of each Snapshot the Sandboxes that wait for it."""
        self._pending: dict[Key, set[Key]] = {}
        """Of each Sandbox the Snapshots that are not ended."""
        self._takes = Snapshots(context, self._sandboxes.get)
        self._restores = Restores(context, self._await_snapshot)
        self.sweeper = Sweeper(context, tuple(namespaces), times or SweepTimes(), busy=lambda: set(self._takes.taking), reads=self._reads)

    # What the watches tell

    def take(self, kind: Literal["Sandbox", "Snapshot"], key: Key, raw: dict[str, Any] | None) -> None:
        """Takes in the newest version of an object; None: it is gone."""
        try:
            if kind == "Sandbox":
                self._take_sandbox(key, None if raw is None else SandboxObject.read(raw))
            else:
                self._take_snapshot(key, None if raw is None else SnapshotObject.read(raw))
        except ValidationError as error:
            logger.error("%s %s/%s cannot be read (%s): the CRD that is installed is not this mover's", kind, *key, faulty_fields(error))  # noqa: TRY400 - no fault here

    def _take_sandbox(self, key: Key, sandbox: SandboxObject | None) -> None:
        if sandbox is None:
            gone = self._sandboxes.pop(key, None)
            if gone is not None:
                self._restores.withdraw(gone, deleted=True)
        else:
            self._sandboxes[key] = sandbox
            self._restores.withdraw(sandbox)
            self._queue.add(("Sandbox", *key))
        for waiting in self._pending.get(key, ()):
            self._queue.add(("Snapshot", *waiting))

    def _take_snapshot(self, key: Key, snapshot: SnapshotObject | None) -> None:
        known = self._snapshots.pop(key, None)
        if known is not None and (snapshot is None or snapshot.metadata.uid != known.metadata.uid):
            self._end(key, known)
            known = None
        if snapshot is not None:
            self._snapshots[key] = snapshot
            ended = snapshot.status.phase in DONE
            self._note_pending(snapshot, key, ended=ended)
            if known is not None and known.spec.deletion_policy != snapshot.spec.deletion_policy:
                self._takes.policy_edited.add(snapshot.metadata.uid)
                ended = False
            if not ended:
                self._queue.add(("Snapshot", *key))
        for waiting in self._waiting.pop(key, ()):
            self._queue.add(("Sandbox", *waiting))

    def _end(self, key: Key, snapshot: SnapshotObject) -> None:
        """A Snapshot is gone; so, after a while, is its archive."""
        self._context.work.withdraw(("Snapshot", *key))
        self._takes.policy_edited.discard(snapshot.metadata.uid)
        self._note_pending(snapshot, key, ended=True)
        self._gone[snapshot.metadata.uid] = snapshot
        self._queue.add_after(("gone", key[0], snapshot.metadata.uid), SETTLE_SECONDS)

    def _note_pending(self, snapshot: SnapshotObject, key: Key, *, ended: bool) -> None:
        name = snapshot.spec.source.sandbox_name
        if name is None:
            return
        pending = self._pending.setdefault((key[0], name), set())
        if ended:
            pending.discard(key)
        else:
            pending.add(key)
        if not pending:
            del self._pending[key[0], name]

    def _await_snapshot(self, snapshot: Key, sandbox: Key) -> None:
        self._waiting.setdefault(snapshot, set()).add(sandbox)

    def _reads(self, namespace: str, name: str) -> bool:
        """Some Sandbox is being given the files of that Snapshot."""
        return any(
            key[0] == namespace
            and (last := sandbox.status.last_restore) is not None
            and last.snapshot_name == name
            and last.phase not in ENDED_RESTORES
            for key, sandbox in self._sandboxes.items()
        )

    # Work

    async def run(self, workers: int, sweep_seconds: float) -> None:
        """For ever; what runs when it is cancelled is left as a killed mover would leave it, and taken up by the next."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(self._work())
                group.create_task(self.sweeper.run(sweep_seconds))
        finally:
            self._queue.close()

    def look_at_all(self) -> None:
        """Whatever was missed is found."""
        for key in self._sandboxes:
            self._queue.add(("Sandbox", *key))
        for key in self._snapshots:
            self._queue.add(("Snapshot", *key))

    async def _work(self) -> None:
        while True:
            try:
                task = await self._queue.get()
            except Closed:
                return
            try:
                await self._reconcile(task)
            finally:
                self._queue.done(task)

    async def _reconcile(self, task: Task) -> None:
        try:
            after = await self._look(task)
        except (Trouble, SandboxError) as error:
            delay = self._queue.retry(task)
            logger.warning("%s %s/%s: %s; tried again in %.1f s", *task, error, delay)
        except Exception:  # the top: one object that cannot be worked on must not stop the others
            delay = self._queue.retry(task)
            logger.exception("%s %s/%s: a fault of the mover; tried again in %.1f s", *task, delay)
        else:
            self._queue.forget(task)
            if after is not None:
                self._queue.add_after(task, after)

    async def _look(self, task: Task) -> float | None:
        kind, namespace, name = task
        if kind == "Sandbox":
            sandbox = self._sandboxes.get((namespace, name))
            return None if sandbox is None else await self._restores.reconcile(sandbox)
        if kind == "Snapshot":
            snapshot = self._snapshots.get((namespace, name))
            return None if snapshot is None else await self._takes.reconcile(snapshot)
        gone = self._gone[name]
        after = await self.sweeper.forget(gone)
        if after is None:
            self._gone.pop(name, None)
        return after
