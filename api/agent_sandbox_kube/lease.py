"""Leader election by a coordination.k8s.io/Lease. It renews in a thread of its own, so that a busy event loop does not lose the lease.

As in client-go, whether another's lease has run out is judged by the own clock since its last change was seen, never by the times written into it: clocks of
nodes differ. A holder that could not renew for `RENEW_SECONDS` counts the lease as lost, before anybody else may take it (`LEASE_SECONDS`).
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
from .errors import Conflict, KubeError, NotFound
from .resources import LEASES

logger = logging.getLogger(__name__)

LEASE_SECONDS: Final = 15
RENEW_SECONDS: Final = 10.0
RETRY_SECONDS: Final = 2.0


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
        scale = lease_seconds / LEASE_SECONDS
        self._renew_seconds, self._retry_seconds = RENEW_SECONDS * scale, RETRY_SECONDS * scale
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._seen: tuple[str, float] = ("", 0.0)
        self.held = False
        """Whether this candidate holds it now."""

    def start(self) -> None:
        """Begins to stand for election."""
        self._thread.start()

    def close(self, seconds: float = 5.0) -> None:
        """Gives the lease back, so that another may have it at once, and ends the thread; bounded."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            asyncio.run(self._stand())
        except (KubeError, ConfigError) as error:
            self._lose(str(error))

    async def _stand(self) -> None:
        async with connect() as kube:
            renewed = time.monotonic()
            while not self._stop.is_set():
                try:
                    async with asyncio.timeout(self._renew_seconds):
                        got = await self._try(kube)
                except (KubeError, TimeoutError) as error:
                    got = None
                    logger.warning("lease %s/%s could not be renewed: %s", self._namespace, self._name, error or "no answer in time")
                now = time.monotonic()
                if got:
                    renewed = now
                    if not self.held:
                        self.held = True
                        self._on_acquired()
                elif self.held and (got is False or now - renewed > self._renew_seconds):
                    self._lose("another process holds it" if got is False else f"it could not be renewed for {self._renew_seconds:.0f} s")
                    return
                await asyncio.to_thread(self._stop.wait, self._retry_seconds * random.uniform(0.8, 1.2))  # noqa: S311 - jitter, no secret
            if self.held:
                self.held = False
                with contextlib.suppress(KubeError, TimeoutError):
                    async with asyncio.timeout(self._retry_seconds):
                        await self._release(kube)

    async def _try(self, kube: Kube) -> bool:
        """One step: True when the lease is ours after it, False when it is another's."""
        try:
            lease = await kube.get(LEASES, self._name, self._namespace)
        except NotFound:
            lease = None
        if lease is None:
            manifest = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}, "spec": self._spec(None)}
            with contextlib.suppress(Conflict):
                await kube.create(LEASES, manifest, self._namespace)
                return True
            return False
        version = lease["metadata"]["resourceVersion"]
        holder = lease.get("spec", {}).get("holderIdentity") or ""
        if holder and holder != self._identity:
            if version != self._seen[0]:
                self._seen = (version, time.monotonic())
            duration = float(lease["spec"].get("leaseDurationSeconds") or self._lease_seconds)
            if time.monotonic() - self._seen[1] < duration:
                return False
        patch = {"metadata": {"resourceVersion": version}, "spec": self._spec(lease)}
        try:
            await kube.patch(LEASES, self._name, self._namespace, patch)
        except Conflict:
            return False if holder != self._identity else await self._still_ours(kube)
        return True

    async def _still_ours(self, kube: Kube) -> bool:
        """After a conflict on our own lease: somebody has only touched it, or has taken it."""
        found = await kube.get(LEASES, self._name, self._namespace)
        return bool(found.get("spec", {}).get("holderIdentity") == self._identity)

    async def _release(self, kube: Kube) -> None:
        found = await kube.get(LEASES, self._name, self._namespace)
        if found.get("spec", {}).get("holderIdentity") == self._identity:
            patch = {"metadata": {"resourceVersion": found["metadata"]["resourceVersion"]}, "spec": {"holderIdentity": None}}
            await kube.patch(LEASES, self._name, self._namespace, patch)

    def _spec(self, before: Object | None) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = (before or {}).get("spec", {})
        ours = spec.get("holderIdentity") == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._lease_seconds,
            "renewTime": now,
            "acquireTime": spec.get("acquireTime", now) if ours else now,
            "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (0 if ours or before is None else 1),
        }

    def _lose(self, why: str) -> None:
        if self.held:
            self.held = False
            self._on_lost(f"lease {self._namespace}/{self._name} is lost: {why}")
        elif not self._stop.is_set():
            self._on_lost(f"lease {self._namespace}/{self._name} cannot be had: {why}")
