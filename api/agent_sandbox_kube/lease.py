"""Leader election by a coordination.k8s.io/Lease. It renews in a thread of its own, so that a busy event loop does not lose the lease.

As in client-go, whether another's lease has run out is judged by the own clock since its last change was seen, never by the times written into it: clocks of
nodes differ. A holder that could not renew for two thirds of the lease's time counts it as lost, before anybody else may take it. What it counts from is the
moment before a renewal was sent, since others may count from the moment it arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from .client import Kube, Object, connect
from .config import ConfigError
from .errors import AlreadyExists, Conflict, KubeError, NotFound
from .resources import LEASES

logger = logging.getLogger(__name__)

LEASE_SECONDS: Final = 15
RENEW_SHARE: Final = 2 / 3
"""Of the lease's time: after so long without a renewal it counts as lost."""
RETRY_SHARE: Final = 2 / 15


class _Lost(Exception):
    """It was ours and is not any more."""


class Lease:
    """One candidate. `on_acquired` and `on_lost` are called from its thread; `on_lost` at most once, and then the candidate has ended."""

    def __init__(
        self,
        namespace: str,
        name: str,
        identity: str,
        *,
        on_acquired: Callable[[], None],
        on_lost: Callable[[str], None],
        lease_seconds: int = LEASE_SECONDS,
    ) -> None:
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._on_acquired = on_acquired
        self._on_lost = on_lost
        self._lease_seconds = lease_seconds
        self._renew_seconds, self._retry_seconds = lease_seconds * RENEW_SHARE, lease_seconds * RETRY_SHARE
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._seen: tuple[str, float] = ("", 0.0)
        self._holds = False
        self._renewed = 0.0

    @property
    def held(self) -> bool:
        """Whether this candidate holds it now: also right when its thread gets no time."""
        return self._holds and time.monotonic() - self._renewed < self._lease_seconds

    def start(self) -> None:
        """Begins to stand for election."""
        self._thread.start()

    def close(self, seconds: float = 5.0) -> None:
        """Gives the lease back, so that another may have it at once, and ends the thread; bounded."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        why = "its thread failed"
        try:
            asyncio.run(self._stand())
            why = ""
        except (KubeError, ConfigError) as error:
            why = str(error)
        finally:
            # Also after a failure that nobody has thought of: a holder that does not renew must not go on.
            if why:
                self._end(why)

    async def _stand(self) -> None:
        async with connect() as kube:
            while not self._stop.is_set():
                try:
                    won = await self._step(kube)
                except _Lost as error:
                    self._end(str(error))
                    return
                if won and not self._holds:
                    self._holds = True
                    self._on_acquired()
                self._pause()
            if self._holds:
                self._holds = False
                await self._release(kube)

    async def _step(self, kube: Kube) -> bool:
        """One attempt: True when the lease is ours by it. _Lost when it was ours and is not any more."""
        began = time.monotonic()
        patience = self._renewed + self._renew_seconds - began if self._holds else self._renew_seconds
        try:
            async with asyncio.timeout(patience):
                won = await self._try(kube)
        except (KubeError, TimeoutError) as error:
            logger.warning("lease %s/%s could not be had or renewed: %s", self._namespace, self._name, error or "no answer in time")
            if self._holds and time.monotonic() - self._renewed >= self._renew_seconds:
                raise _Lost(f"it could not be renewed for {self._renew_seconds:.0f} s") from error
            return False
        if won:
            self._renewed = began
        elif self._holds:
            raise _Lost("another process holds it")
        return won

    def _pause(self) -> None:
        deadline = time.monotonic() + self._retry_seconds * random.uniform(0.8, 1.2)  # noqa: S311 - jitter, no secret
        if self._holds:
            deadline = min(deadline, self._renewed + self._renew_seconds)
        # Neither this thread nor its loop has anything else to do.
        self._stop.wait(max(deadline - time.monotonic(), 0))

    async def _try(self, kube: Kube) -> bool:
        """True when the lease is ours after it, False when it is another's. KubeError when that is not known; Conflict too: then the next attempt tells."""
        try:
            lease = await kube.get(LEASES, self._name, self._namespace)
        except NotFound:
            manifest = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}, "spec": self._spec({}, first=True)}
            try:
                await kube.create(LEASES, manifest, self._namespace)
            except AlreadyExists:
                return False
            return True
        version, spec = lease["metadata"]["resourceVersion"], lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder and holder != self._identity and self._runs(version, spec):
            return False
        try:
            await kube.patch(LEASES, self._name, self._namespace, {"metadata": {"resourceVersion": version}, "spec": self._spec(spec)})
        except Conflict:
            if holder == self._identity:
                raise
            return False
        return True

    def _runs(self, version: str, spec: Object) -> bool:
        """Whether another's lease has not run out."""
        if version != self._seen[0]:
            self._seen = (version, time.monotonic())
        return time.monotonic() - self._seen[1] < float(spec.get("leaseDurationSeconds") or self._lease_seconds)

    async def _release(self, kube: Kube) -> None:
        with contextlib.suppress(KubeError, TimeoutError):
            async with asyncio.timeout(self._retry_seconds):
                found = await kube.get(LEASES, self._name, self._namespace)
                if found.get("spec", {}).get("holderIdentity") == self._identity:
                    patch = {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"]}, "spec": {"holderIdentity": None}}
                    await kube.patch(LEASES, self._name, self._namespace, patch)

    def _spec(self, before: Object, *, first: bool = False) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        ours = before.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._lease_seconds,
            "renewTime": now,
            "acquireTime": before.get("acquireTime", now) if ours else now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (0 if ours or first else 1),
        }

    def _end(self, why: str) -> None:
        if self._holds:
            self._holds = False
            self._on_lost(f"lease {self._namespace}/{self._name} is lost: {why}")
        elif not self._stop.is_set():
            self._on_lost(f"lease {self._namespace}/{self._name} cannot be had: {why}")
