"""Pods and PVCs as decisions see them: what was asked of the API server, read once, nothing changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal

from agent_sandbox_core.v1alpha1 import ANNOTATION_RESTORE_AT_CREATION, ANNOTATION_RESTORED, CONTAINER
from pydantic import ValidationError

from .specs import (
    ANNOTATION_CAUSE,
    ANNOTATION_DELIVERY,
    ANNOTATION_STARTS_BEFORE,
    ANNOTATION_TEMPLATE_HASH,
    Cause,
)

Object = Mapping[str, Any]
_CAUSES: Final[dict[str, Cause]] = {"create": "create", "return": "return", "replace": "replace"}


def faulty_fields(error: ValidationError) -> str:
    """Where an object differs from what its CRD promises; its values are not shown."""
    return ", ".join(".".join(str(part) for part in one["loc"]) for one in error.errors(include_url=False, include_input=False)[:5])


def read_time(text: str | None) -> datetime | None:
    """A time as the API server writes it."""
    return datetime.fromisoformat(text) if text else None


def controller_uid(raw: Object) -> str:
    """uid of the controller among the owners, empty when there is none."""
    owners = raw["metadata"].get("ownerReferences") or []
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a container ended."""

    reason: str
    message: str
    exit_code: int
    time: datetime | None
    began: bool
    """Whether it had started: a pod that is deleted before that ends too."""

    @property
    def orderly(self) -> bool:
        """sandbox-init ends with 0 only when it was asked to over a channel, as after a rollback that takes a fresh root file system."""
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a container does not run yet, in the kubelet's words."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ContainerView:
    """The state of one container."""

    state: Literal["unknown", "waiting", "running", "ended"]
    waiting: Waiting | None
    ended: Ended | None
    """How it, or the one before it, ended last."""
    restarts: int
    running_since: datetime | None

    @property
    def starts(self) -> int:
        """How often it was started."""
        began = self.state == "running" or self.restarts > 0 or (self.ended is not None and self.ended.began)
        return self.restarts + 1 if began else 0


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod."""

    name: str
    uid: str
    owner_uid: str
    created: datetime | None
    deleted: datetime | None
    phase: str
    reason: str
    message: str
    node: str
    image: str
    template_hash: str
    starts_before: int
    cause: Cause
    delivery: str
    marker: str
    restore_at_creation: str
    host_users: bool
    unschedulable: str | None
    """The scheduler's words, when it found no node."""
    disruption: str | None
    """Why somebody takes it away: eviction, preemption, a taint; None when nobody does."""
    ready: bool | None
    container: ContainerView
    installer: ContainerView | None

    @property
    def finished(self) -> bool:
        """It will never run again."""
        return self.phase in {"Failed", "Succeeded"}

    @property
    def incarnation(self) -> int:
        """How often the sandbox has started up to now."""
        return self.starts_before + self.container.starts

    @property
    def running(self) -> bool:
        """Its container runs, as far as the kubelet has told."""
        return self.container.state == "running" and not self.finished


@dataclass(frozen=True, slots=True)
class PvcView:
    """A PVC."""

    name: str
    uid: str
    owner_uid: str
    deleted: datetime | None
    phase: str
    size: str
    marker: str
    restore_at_creation: str


def read_pod(raw: Object) -> PodView:
    """From the API server's JSON."""
    metadata, spec, status = raw["metadata"], raw["spec"], raw.get("status") or {}
    annotations = metadata.get("annotations") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or []}
    scheduled, ready, disruption = conditions.get("PodScheduled"), conditions.get("Ready"), conditions.get("DisruptionTarget")
    unschedulable = scheduled is not None and scheduled["status"] == "False" and scheduled.get("reason") == "Unschedulable"
    disrupted = disruption is not None and disruption["status"] == "True"
    found = _container(status.get("containerStatuses"), CONTAINER)
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        owner_uid=controller_uid(raw),
        created=read_time(metadata.get("creationTimestamp")),
        deleted=read_time(metadata.get("deletionTimestamp")),
        phase=status.get("phase", "Pending"),
        reason=status.get("reason", ""),
        message=status.get("message", ""),
        node=spec.get("nodeName", ""),
        image=next((one["image"] for one in spec.get("containers", ()) if one["name"] == CONTAINER), ""),
        template_hash=annotations.get(ANNOTATION_TEMPLATE_HASH, ""),
        starts_before=_number(annotations.get(ANNOTATION_STARTS_BEFORE)),
        cause=_CAUSES.get(annotations.get(ANNOTATION_CAUSE, ""), "create"),
        delivery=annotations.get(ANNOTATION_DELIVERY, ""),
        marker=annotations.get(ANNOTATION_RESTORED, ""),
        restore_at_creation=annotations.get(ANNOTATION_RESTORE_AT_CREATION, ""),
        host_users=spec.get("hostUsers") is not False,
        unschedulable=(scheduled or {}).get("message", "") if unschedulable else None,
        disruption=(disruption or {}).get("reason", "Evicted") if disrupted else None,
        ready=None if ready is None else ready["status"] == "True",
        container=found or ContainerView("unknown", None, None, 0, None),
        installer=_container(status.get("initContainerStatuses"), None),
    )


def read_pvc(raw: Object) -> PvcView:
    """From the API server's JSON."""
    metadata = raw["metadata"]
    annotations = metadata.get("annotations") or {}
    return PvcView(
        name=metadata["name"],
        uid=metadata["uid"],
        owner_uid=controller_uid(raw),
        deleted=read_time(metadata.get("deletionTimestamp")),
        phase=(raw.get("status") or {}).get("phase", "Pending"),
        size=raw["spec"]["resources"]["requests"]["storage"],
        marker=annotations.get(ANNOTATION_RESTORED, ""),
        restore_at_creation=annotations.get(ANNOTATION_RESTORE_AT_CREATION, ""),
    )


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def _container(statuses: list[Object] | None, name: str | None) -> ContainerView | None:
    raw = next((one for one in statuses or () if name is None or one["name"] == name), None)
    if raw is None:
        return None
    now, before = raw.get("state") or {}, raw.get("lastState") or {}
    ended = now.get("terminated") or before.get("terminated")
    waiting = now.get("waiting")
    if "running" in now:
        state: Literal["unknown", "waiting", "running", "ended"] = "running"
    elif "terminated" in now:
        state = "ended"
    else:
        state = "waiting" if waiting else "unknown"
    return ContainerView(
        state=state,
        waiting=Waiting(waiting.get("reason", ""), waiting.get("message", "")) if waiting else None,
        ended=_read_ended(ended) if ended else None,
        restarts=int(raw.get("restartCount", 0)),
        running_since=read_time((now.get("running") or {}).get("startedAt")),
    )


def _read_ended(raw: Object) -> Ended:
    began = read_time(raw.get("startedAt"))
    return Ended(
        reason=raw.get("reason", ""),
        message=raw.get("message", ""),
        exit_code=int(raw.get("exitCode", -1)),
        time=read_time(raw.get("finishedAt")),
        # What could not be started has the beginning of time.
        began=began is not None and began.timestamp() > 0,
    )
