"""Events on Sandboxes: what `kubectl describe` shows besides the status. One for each change of the condition Ready that somebody would want to know."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from .cluster import Cluster
from .metrics import Metrics
from .seen import Seen, Verdict

SILENT: Final = frozenset({"Creating", "Starting", "Filling", "Deleting"})
"""Steps on the way that everybody expects."""
NORMAL: Final = frozenset({"Ready", "Restoring", "Replacing", "Expired"})


class Notices:
    """Tells changes."""

    def __init__(self, cluster: Cluster, metrics: Metrics) -> None:
        self._cluster = cluster
        self._metrics = metrics

    async def tell(self, seen: Seen, verdict: Verdict) -> None:
        """An Event, when the condition has changed."""
        before = seen.sandbox.condition("Ready")
        if before is not None and (before.status, before.reason) == (verdict.ready, verdict.reason):
            return
        self._metrics.transitions.labels(verdict.reason).inc()
        if verdict.reason == "Ready" and seen.sandbox.status.init_version is None and seen.sandbox.metadata.creation_timestamp is not None:
            self._metrics.until_ready.observe((datetime.now(UTC) - seen.sandbox.metadata.creation_timestamp).total_seconds())
        if verdict.reason in SILENT:
            return
        await self._cluster.post_event(seen.sandbox, verdict.reason, verdict.message, warning=verdict.reason not in NORMAL)
