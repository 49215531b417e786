"""The operator's metrics, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
UNTIL_READY = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """What is counted. Labels are few and their values bounded: no names of objects."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix = "agent_sandbox_operator"
        self.reconciles = Counter(f"{prefix}_reconciles", "Reconciles that came to an end.", registry=self.registry)
        self.errors = Counter(f"{prefix}_reconcile_errors", "Reconciles that failed and are tried again.", ["reason"], registry=self.registry)
        self.seconds = Histogram(f"{prefix}_reconcile_seconds", "Duration of a reconcile.", buckets=SECONDS, registry=self.registry)
        self.writes = Counter(f"{prefix}_writes", "Writes to the API server.", ["kind", "verb"], registry=self.registry)
        self.transitions = Counter(f"{prefix}_transitions", "Changes of the condition Ready, by its new reason.", ["reason"], registry=self.registry)
        self.until_ready = Histogram(
            f"{prefix}_ready_seconds", "From the creation of a Sandbox to its first Ready.", buckets=UNTIL_READY, registry=self.registry
        )
        self.watch_events = Counter(f"{prefix}_watch_events", "Events that came by watch.", ["kind"], registry=self.registry)
        self.resyncs = Counter(f"{prefix}_resyncs", "Lists of everything.", ["result"], registry=self.registry)
        self._prefix = prefix

    def watch(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        Gauge(f"{self._prefix}_{name}", help_text, registry=self.registry).set_function(value)

    def render(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self.registry)
