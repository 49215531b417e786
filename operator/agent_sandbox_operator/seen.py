"""What a decision is made from, and what it can be."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from agent_sandbox_core.v1alpha1 import ENDED_RESTORES, SandboxObject, SandboxPhase, SandboxReason, source_marker

from .life import Life, read_life
from .specs import Cause, template_hash
from .views import PodView, PvcView

Feature = Literal["user-namespace", "image-volume"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the status says. `wake`: look again after so many seconds although nothing may happen."""

    phase: SandboxPhase
    reason: SandboxReason
    message: str
    ready: Literal["True", "False", "Unknown"] = "False"
    wake: float | None = None


@dataclass(frozen=True, slots=True)
class CreateWorkspace:
    """Make the PVC."""


@dataclass(frozen=True, slots=True)
class GrowWorkspace:
    """Ask for a larger PVC."""

    size: str


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Make the pod."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete exactly this pod. `without`: the feature that the next one shall do without."""

    uid: str
    why: str
    without: Feature | None = None


@dataclass(frozen=True, slots=True)
class DeleteSandbox:
    """Delete the Sandbox: its time is over."""


@dataclass(frozen=True, slots=True)
class StartProbe:
    """Open a channel and ask sandbox-init."""


Action = CreateWorkspace | GrowWorkspace | CreatePod | DeletePod | DeleteSandbox | StartProbe


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict, and what to do first."""

    verdict: Verdict
    action: Action | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """What asking sandbox-init over a channel gave, for one start of the container and one state of its files."""

    state: Literal["asking", "answered", "failed"]
    failures: int = 0
    message: str = ""
    version: str | None = None
    pids_limit: int | None = None
    measured: bool = True
    """False when the status of before is believed instead: then it also knows about limits."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """The newest warning about a pod or a PVC that does not get on."""

    kind: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class NetworkView:
    """Whether the network policies bite, as far as it was seen."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """All that a decision is made from."""

    sandbox: SandboxObject
    now: datetime
    pod: PodView | None
    pvc: PvcView | None
    network: NetworkView
    probe: Probe | None = None
    refusal: Verdict | None = None
    """What the API server said to the last try to make a child, until it is worth another one."""
    grow_refusal: str | None = None
    """What it said to a larger PVC."""
    trouble: Trouble | None = None
    node_lost: bool = False
    features: frozenset[Feature] = frozenset({"user-namespace", "image-volume"})
    """What may be given up."""

    @property
    def ephemeral(self) -> bool:
        """The workspace is in the pod."""
        return self.sandbox.spec.workspace.ephemeral

    @property
    def hash(self) -> str:
        """Of the pod that the spec asks for."""
        return template_hash(self.sandbox.spec)

    @property
    def marker(self) -> str:
        """Of the last restore of the workspace."""
        holder = self.pod if self.ephemeral else self.pvc
        return holder.marker if holder is not None else ""

    @property
    def edited(self) -> bool:
        """The pod that is there, or was there last, is not what the spec asks for."""
        made_from = self.pod.template_hash if self.pod is not None else self.sandbox.status.pod_template_hash
        return made_from is not None and made_from != self.hash

    @property
    def expired(self) -> bool:
        """Its time is over."""
        end = effective_expiry(self.sandbox)
        return end is not None and self.now >= end

    @property
    def released(self) -> bool:
        """It was stopped by a crash loop, and somebody has done something about that since."""
        return self.sandbox.status.reason == "CrashLoop" and (self.edited or wants_restore(self))

    @property
    def life(self) -> Life:
        """How often it started, and how it last ended."""
        replaced = self.edited and not self.ephemeral
        on_purpose = self.expired or replaced or self.sandbox.metadata.deletion_timestamp is not None or self.sandbox.status.reason == "CrashLoop"
        return read_life(self.sandbox, self.pod, self.now, released=self.released, leaving_on_purpose=on_purpose)


def effective_expiry(sandbox: SandboxObject) -> datetime | None:
    """The end of its life: expiresAt, else timeoutSeconds after its creation."""
    if sandbox.spec.expires_at is not None:
        return sandbox.spec.expires_at
    created, seconds = sandbox.metadata.creation_timestamp, sandbox.spec.timeout_seconds
    return created + timedelta(seconds=seconds) if created is not None and seconds is not None else None


def wants_fill(seen: Seen) -> bool:
    """spec.source names a Snapshot whose files are not there yet."""
    last = seen.sandbox.status.last_restore
    if seen.sandbox.spec.source is None:
        return False
    about = last is not None and last.request_id == source_marker(seen.sandbox.metadata.uid)
    return not seen.marker or (about and last is not None and last.phase not in ENDED_RESTORES)


def wants_restore(seen: Seen) -> bool:
    """spec.restore asks for something that was not done. The mover marks the workspace first and tells the end in lastRestore after that."""
    asked, last = seen.sandbox.spec.restore, seen.sandbox.status.last_restore
    holder = seen.pod if seen.ephemeral else seen.pvc
    if asked is None or holder is None:
        return False
    if last is not None and last.request_id == asked.request_id:
        return last.phase not in ENDED_RESTORES
    return asked.request_id not in {holder.marker, holder.restore_at_creation}
