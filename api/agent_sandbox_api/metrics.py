"""Prometheus metrics of one app, in a registry of their own."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence
from typing import get_args

from agent_sandbox_core.models import Phase, Sandbox
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

PHASES: tuple[Phase, ...] = get_args(Phase)
_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_SLOW = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """What is counted. Labels hold routes, methods, statuses and kinds: never ids, so their number is bounded."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "agent_sandbox_requests", "Requests that were answered, by route", ("method", "route", "status"), registry=self.registry
        )
        self.request_seconds = Histogram(
            "agent_sandbox_request_seconds", "Time to answer a request, streams to their end", ("route",), buckets=_QUICK, registry=self.registry
        )
        self.exec_seconds = Histogram(
            "agent_sandbox_exec_seconds", "Time of a command as its caller sees it", ("kind",), buckets=_QUICK, registry=self.registry
        )
        self.execs_running = Gauge("agent_sandbox_execs_running", "Commands that run for a caller now", registry=self.registry)
        self.operation_seconds = Histogram(
            "agent_sandbox_operation_seconds",
            "Time of a create, a delete and the like that succeeded",
            ("operation",),
            buckets=_SLOW,
            registry=self.registry,
        )
        self.snapshot_seconds = Histogram(
            "agent_sandbox_snapshot_seconds",
            "Time of a snapshot, a rollback or a fork that succeeded",
            ("operation",),
            buckets=_SLOW,
            registry=self.registry,
        )
        self.snapshot_bytes = Counter("agent_sandbox_snapshot_bytes", "Stored bytes of the snapshots that were taken", registry=self.registry)
        self.sandboxes = Gauge("agent_sandbox_sandboxes", "Sandboxes by phase, when the engine answers", ("phase",), registry=self.registry)
        self.channels_open = Gauge("agent_sandbox_channels_open", "Open channels to sandboxes", registry=self.registry)

    def count_sandboxes(self, sandboxes: Sequence[Sandbox]) -> None:
        """Sets the number of sandboxes of every phase."""
        tally = Tally(sandbox.phase for sandbox in sandboxes)
        for phase in PHASES:
            self.sandboxes.labels(phase).set(tally[phase])

    def forget_sandboxes(self) -> None:
        """Takes the numbers away: the engine does not answer, and old ones would be a lie."""
        self.sandboxes.clear()

    def render(self) -> tuple[bytes, str]:
        """The text and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
