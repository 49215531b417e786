"""What the engine has, read back: containers, workspaces and tombstones become Instances. Pure; the caller does the asking."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from agent_sandbox_core.models import Termination

from agent_sandbox_api.backends.engine import Instance, InstanceRecord

from . import labels, specs

logger = logging.getLogger(__name__)

KILLED: Final = 137
RUNNING: Final = "running"
PAUSED: Final = "paused"
YEAR_ONE: Final = 1


@dataclass(slots=True)
class Found:
    """Everything of one sandbox. A row is what `GET /containers/json` or `GET /volumes` has of the object."""

    committed: dict[str, Any] | None = None
    replacing: dict[str, Any] | None = None
    making: dict[str, Any] | None = None
    workspace: dict[str, Any] | None = None
    removing: bool = False

    @property
    def container(self) -> dict[str, Any] | None:
        """The container that stands for the sandbox now. One that replaces counts only once the replaced one is gone."""
        return self.committed or self.replacing or self.making


def sort_out(containers: Iterable[dict[str, Any]], volumes: Iterable[dict[str, Any]]) -> dict[str, Found]:
    """Puts rows together by sandbox; rows of other roles are passed over."""
    found: dict[str, Found] = defaultdict(Found)
    for row in containers:
        own = row.get("Labels") or {}
        sandbox_id = own.get(labels.SANDBOX)
        if own.get(labels.ROLE) != labels.CONTAINER or not sandbox_id:
            continue
        names = {name.lstrip("/") for name in row.get("Names") or []}
        if specs.container_name(sandbox_id) in names:
            found[sandbox_id].committed = row
        elif specs.next_name(sandbox_id) in names:
            found[sandbox_id].replacing = row
        elif specs.making_name(sandbox_id) in names:
            found[sandbox_id].making = row
        else:
            logger.warning("a container of the sandbox %s has the foreign name %s and is left alone", sandbox_id, sorted(names))
    for row in volumes:
        own = row.get("Labels") or {}
        sandbox_id = own.get(labels.SANDBOX)
        if not sandbox_id:
            continue
        if own.get(labels.ROLE) == labels.WORKSPACE:
            found[sandbox_id].workspace = row
        elif own.get(labels.ROLE) == labels.TOMBSTONE:
            found[sandbox_id].removing = True
    return dict(found)


def read_instance(found: Found, inspected: Mapping[str, Any] | None, env: Mapping[str, str]) -> Instance | None:
    """The instance of a sandbox; None while it is being removed. A container that does not run needs `inspected`. May raise LabelError."""
    row = found.container
    if found.removing or (row is None and found.workspace is None):
        return None
    if row is None:
        assert found.workspace is not None
        record = labels.read_record(found.workspace["Labels"], {})
        return Instance(record, committed=True, state="lost", termination=container_lost(record))
    own = row["Labels"]
    record = labels.read_record(own, env)
    committed = found.committed is not None or found.replacing is not None
    runs = row["State"] == RUNNING or (inspected is not None and is_running(inspected))
    state: Literal["running", "exited", "lost"] = "running" if runs else "exited"
    termination = labels.read_termination(own)
    if found.workspace is None:
        state, termination = "lost", workspace_lost(record)
    elif not runs and inspected is None:
        state, termination = "lost", container_lost(record)
    elif not runs and inspected is not None:
        termination = read_termination(record, inspected)
    return Instance(record, committed, state, termination, labels.read_incarnation(own))


def is_running(inspected: Mapping[str, Any]) -> bool:
    """Whether a container does what it is there for: a paused one does not."""
    return bool(inspected["State"]["Running"] and not inspected["State"]["Paused"])


def read_termination(record: InstanceRecord, inspected: Mapping[str, Any]) -> Termination:
    """Why a container does not run."""
    state = inspected["State"]
    code = int(state["ExitCode"])
    time = read_time(state.get("FinishedAt", "")) or read_time(inspected.get("Created", "")) or record.created_at
    if state.get("Paused"):
        return Termination(reason="Paused", message="the sandbox's container was paused from outside", time=time)
    if state.get("OOMKilled") and code == KILLED:
        limit = record.spec.memory_mb
        message = f"the sandbox ran out of memory (limit {limit} MB): use less, or create one with more memory_mb"
        return Termination(reason="OOMKilled", message=message, exit_code=code, time=time)
    if state.get("Error"):
        message = f"the sandbox's container could not be started; the engine says: {state['Error'][:1000]}"
        return Termination(reason="StartFailed", message=message, exit_code=code, time=time)
    if state.get("Status") == "created":
        return Termination(reason="NotStarted", message="the sandbox's container was not started yet", time=time)
    if code == KILLED:
        message = "the sandbox's container was killed from outside (signal 9), or the engine was stopped"
        return Termination(reason="Killed", message=message, exit_code=code, time=time)
    return Termination(reason="Exited", message=f"the sandbox's container ended with exit code {code}", exit_code=code, time=time)


def container_lost(record: InstanceRecord) -> Termination:
    """For a workspace whose container was removed by hand. It cannot come back: the environment's values were in the container only."""
    message = (
        "the sandbox's container was removed from outside, and its environment with it: delete the sandbox, or fork a snapshot of it; "
        f"its files are still in the volume {specs.volume_name(record.sandbox_id)}"
    )
    return Termination(reason="ContainerLost", message=message, time=datetime.now(UTC))


def workspace_lost(record: InstanceRecord) -> Termination:
    """For a container whose volume is gone: it never starts on an empty one as if nothing were."""
    message = (
        f"the sandbox's workspace (volume {specs.volume_name(record.sandbox_id)}) is gone from the engine. "
        "Delete the sandbox, or fork it from a snapshot"
    )
    return Termination(reason="WorkspaceLost", message=message, time=datetime.now(UTC))


def read_time(text: str) -> datetime | None:
    """The engine's time stamp; None for its zero time, which stands for never."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.year > YEAR_ONE else None


def read_env(inspected: Mapping[str, Any]) -> dict[str, str]:
    """The environment that a container was made with, the image's own included."""
    pairs = (entry.partition("=") for entry in inspected["Config"].get("Env") or [])
    return {name: value for name, _, value in pairs}
