"""The workers: each takes a key from the queue, reconciles it, and says when to look again."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from agent_sandbox_kube.errors import KubeError
from pydantic import ValidationError

from .metrics import Metrics
from .queue import Closed, WorkQueue
from .sandbox import Reconciler, StepsExhausted
from .store import Key, Kind, Object, Store, key_of, owner_key
from .views import faulty_fields

logger = logging.getLogger(__name__)

END_SECONDS: Final = 10.0


class Controller:
    """Routes what watches tell into the queue, and works it off. All methods belong to one event loop."""

    def __init__(self, store: Store, queue: WorkQueue[Key], reconciler: Reconciler, metrics: Metrics) -> None:
        self._store = store
        self._queue = queue
        self._reconciler = reconciler
        self._metrics = metrics
        self._workers: list[asyncio.Task[None]] = []

    def take(self, kind: Kind, event: str | None, raw: Object) -> None:
        """Takes in what a watch told."""
        self._metrics.watch_events.labels(kind).inc()
        news = self._store.drop(kind, raw) if event == "DELETED" else self._store.put(kind, raw)
        owner = key_of(raw) if kind == "sandboxes" else owner_key(raw)
        if news and owner is not None:
            self._queue.add(owner)

    def start(self, count: int) -> list[asyncio.Task[None]]:
        """Starts the workers; none ends before stop()."""
        self._workers = [asyncio.create_task(self._work(), name=f"worker-{number}") for number in range(count)]
        return self._workers

    async def stop(self) -> None:
        """Lets everyone end what is begun, within 10 s."""
        self._queue.close()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=END_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            try:
                key = await self._queue.get()
            except Closed:
                return
            try:
                await self._reconcile(key)
            finally:
                self._queue.done(key)

    async def _reconcile(self, key: Key) -> None:
        began = time.perf_counter()
        try:
            after = await self._reconciler.reconcile(key)
        except (KubeError, StepsExhausted) as error:
            delay = self._queue.retry(key)
            self._metrics.errors.labels(getattr(error, "reason", "") or type(error).__name__).inc()
            logger.warning("sandbox %s/%s: %s; tried again in %.1f s", *key, error, delay)
        except ValidationError as error:
            delay = self._queue.retry(key)
            self._metrics.errors.labels("Invalid").inc()
            logger.error("sandbox %s/%s cannot be read (%s): the CRD that is installed is not this operator's", *key, faulty_fields(error))  # noqa: TRY400 - told, not a fault here
        except Exception:  # the top: one Sandbox that cannot be reconciled must not stop the others
            delay = self._queue.retry(key)
            self._metrics.errors.labels("Fault").inc()
            logger.exception("sandbox %s/%s: a fault of the operator; tried again in %.1f s", *key, delay)
        else:
            self._queue.forget(key)
            if after is not None:
                self._queue.add_after(key, after)
        finally:
            self._metrics.reconciles.inc()
            self._metrics.seconds.observe(time.perf_counter() - began)
