"""/healthz, /readyz and /metrics of the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from .metrics import Metrics

logger = logging.getLogger(__name__)

Check = Callable[[], tuple[bool, str]]

STOP_SECONDS: Final = 2.0
METRICS_TYPE: Final = "text/plain; version=0.0.4"


class HealthServer:
    """A small HTTP server. `alive` and `ready` say whether all is well, and how it stands."""

    def __init__(self, host: str, port: int, metrics: Metrics, *, alive: Check, ready: Check) -> None:
        self._host = host
        self._port = port
        self._metrics = metrics
        self._alive = alive
        self._ready = ready
        self._runner: web.AppRunner | None = None
        self.port = port

    async def start(self) -> None:
        """Listens. OSError when the address is taken."""
        app = web.Application()
        app.router.add_get("/healthz", self._answer(self._alive))
        app.router.add_get("/readyz", self._answer(self._ready))
        app.router.add_get("/metrics", self._show_metrics)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, shutdown_timeout=STOP_SECONDS)
        await site.start()
        self.port = self._runner.addresses[0][1]
        logger.info("health and metrics are served on port %d", self.port)

    async def stop(self) -> None:
        """Closes everything."""
        if self._runner is not None:
            async with asyncio.timeout(2 * STOP_SECONDS):
                await self._runner.cleanup()

    def _answer(self, check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            well, text = check()
            return web.Response(status=200 if well else 503, text=f"{text}\n")

        return handle

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": METRICS_TYPE})
