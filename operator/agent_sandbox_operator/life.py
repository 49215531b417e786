"""How often a sandbox has started, how it last ended, and whether it comes back: counted from what is seen, so that no event has to be."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from agent_sandbox_core.v1alpha1 import SandboxObject
from agent_sandbox_core.v1alpha1.sandbox import LastTermination, SandboxReason

from .views import Ended, PodView

MAX_RETURNS: Final = 5
WINDOW: Final = timedelta(minutes=10)
OUT_OF_MEMORY: Final = "OOMKilled"
MAX_MESSAGE: Final = 1000
MAX_KEPT: Final = 16
GRACE: Final = timedelta(seconds=3)
"""A container that ends this short a time before its pod must be gone ends because of that."""


@dataclass(frozen=True, slots=True)
class Life:
    """A sandbox's life so far. `recent` are the times at which it returned by itself in the last ten minutes."""

    incarnation: int
    recent: tuple[datetime, ...]
    last_termination: LastTermination | None

    @property
    def worn_out(self) -> bool:
        """It has returned as often as it may: the next death is the last."""
        return len(self.recent) >= MAX_RETURNS


def read_life(sandbox: SandboxObject, pod: PodView | None, now: datetime, *, released: bool, leaving_on_purpose: bool) -> Life:
    """From the last status and what the pod shows.

    `released`: a crash loop was ended by an edit, so counting begins anew. `leaving_on_purpose`: the pod goes because of an edit or the end of
    the sandbox's time, which is no death.
    """
    status = sandbox.status
    before = status.incarnation or 0
    recent = [] if released else [one for one in status.recent_starts if now - one < WINDOW]
    incarnation = before
    if pod is not None and pod.incarnation > before:
        incarnation = pod.incarnation
        fresh = incarnation - max(before, pod.starts_before)
        # The first start of a new pod is a return only when nobody asked for that pod.
        if before <= pod.starts_before and pod.cause != "return":
            fresh -= 1
        # Nor is one after an orderly end.
        if pod.container.ended is not None and pod.container.ended.orderly:
            fresh -= 1
        recent += [pod.container.running_since or now] * fresh
    ended = None if pod is None or leaving_on_purpose else _how_it_ended(sandbox, pod, now)
    last = status.last_termination
    if ended is not None and (last is None or ended.time > last.time):
        last = ended
    return Life(incarnation, tuple(recent[-MAX_KEPT:]), last)


def stop_reason(termination: LastTermination | None) -> SandboxReason:
    """The reason of a sandbox that is down and returns."""
    if termination is None:
        return "Starting"
    if termination.reason == OUT_OF_MEMORY:
        return "OOMKilled"
    if termination.reason == "Evicted":
        return "Evicted"
    if termination.reason == "Deleted":
        return "Starting"
    return "Crashed"


def _how_it_ended(sandbox: SandboxObject, pod: PodView, now: datetime) -> LastTermination | None:
    if pod.deleted is not None and not pod.container.starts:
        return None
    if pod.disruption is not None and (pod.deleted is not None or pod.finished):
        return _termination("Evicted", f"its pod was taken from node {pod.node} ({pod.disruption})", None, pod.deleted or now)
    if pod.finished and pod.reason:
        return _termination(pod.reason, pod.message or f"its pod ended on node {pod.node}", None, _end_of(pod, now))
    ended = pod.container.ended
    if pod.deleted is not None and (ended is None or ended.time is None or ended.time >= pod.deleted - GRACE):
        return _termination("Deleted", "its pod was deleted by somebody else than the operator", None, pod.deleted)
    if ended is None or ended.orderly:
        return None
    return _termination(ended.reason or "Error", _tell(sandbox, ended), ended.exit_code, ended.time or now)


def _end_of(pod: PodView, now: datetime) -> datetime:
    ended = pod.container.ended
    return ended.time if ended is not None and ended.time is not None else pod.created or now


def _tell(sandbox: SandboxObject, ended: Ended) -> str:
    if ended.reason == OUT_OF_MEMORY:
        return f"it used more memory than its limit of {sandbox.spec.resources.memory} and was killed"
    return ended.message.strip() or f"its first process ended with exit code {ended.exit_code}"


def _termination(reason: str, message: str, exit_code: int | None, time: datetime) -> LastTermination:
    return LastTermination(reason=reason, message=message[:MAX_MESSAGE], exit_code=exit_code, time=time)
