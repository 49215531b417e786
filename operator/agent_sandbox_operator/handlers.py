"""What kopf is for: the watches. A handler routes what it hears and does nothing else.

Only on.event is used: kopf keeps no state of its own then (no finalizer, no annotation, no PATCH), and what is lost in a watch is found by the resync.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import aiohttp
import kopf
from agent_sandbox_core.v1alpha1 import GROUP, LABEL_SANDBOX, VERSION
from agent_sandbox_kube.config import load_connection

from .store import Kind, Object

Route = Callable[[Kind, str | None, Object], None]
"""Takes a kind, the type of the event (None: from the first list) and the object. Called in kopf's thread."""

SERVER_SECONDS: Final = 240
CLIENT_SECONDS: Final = 300
CHUNK: Final = 500
CONNECTIONS: Final = 16
LOGIN_LASTS: Final = timedelta(minutes=10)


class Backoffs(Iterable[float]):
    """Pauses after a failed list: endless, since an outage of the API server must not end the watches."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1, 1, 2, 3, 5, 8, 13, 21), itertools.repeat(30))


def watch_settings() -> kopf.OperatorSettings:
    """kopf's settings: bounded watches, endless retries, children by label, nothing posted."""
    settings = kopf.OperatorSettings()
    settings.watching.server_timeout = SERVER_SECONDS
    settings.watching.client_timeout = CLIENT_SECONDS
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = CHUNK
    for plural in ("pods", "persistentvolumeclaims"):
        settings.watching.label_selectors["", "v1", plural] = LABEL_SANDBOX
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = Backoffs()
    settings.queueing.idle_timeout = 1.0
    settings.posting.enabled = False
    settings.process.ultimate_exiting_timeout = 60
    # The kinds are fixed and installed before the operator: no watch of CRDs and namespaces, and no right to it.
    settings.scanning.disabled = True
    settings.peering.standalone = True
    return settings


def build_registry(route: Route) -> kopf.OperatorRegistry:
    """The handlers."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.AiohttpSession:
        """The same identity as everywhere else, with a bound on connections: kopf's own session has none."""
        connection = await load_connection()
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=connection.tls or False, limit=CONNECTIONS), headers=await connection.headers()
        )
        return kopf.AiohttpSession(
            server=connection.server,
            aiohttp_session=session,
            default_namespace=connection.namespace,
            # Tokens of a service account change; after this it logs in anew.
            expiration=datetime.now(UTC) + LOGIN_LASTS,
        )

    @kopf.on.event(GROUP, VERSION, "sandboxes", registry=registry)
    async def sandbox_event(event: Any, **_: Any) -> None:
        route("sandboxes", event["type"], event["object"])

    @kopf.on.event("", "v1", "pods", labels={LABEL_SANDBOX: kopf.PRESENT}, registry=registry)
    async def pod_event(event: Any, **_: Any) -> None:
        route("pods", event["type"], event["object"])

    @kopf.on.event("", "v1", "persistentvolumeclaims", labels={LABEL_SANDBOX: kopf.PRESENT}, registry=registry)
    async def pvc_event(event: Any, **_: Any) -> None:
        route("persistentvolumeclaims", event["type"], event["object"])

    return registry
