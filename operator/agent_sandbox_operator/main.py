"""The operator's process: settings, Lease, probes, signals, and kopf in a thread of its own.

Two event loops: the main one has the queue, the workers, the client and the probes; kopf has its own in a thread, since it cancels every task of its
loop when it ends. Their only contact is `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import kopf
from agent_sandbox_kube.client import Kube, connect
from agent_sandbox_kube.config import ConfigError
from agent_sandbox_kube.errors import KubeError
from agent_sandbox_kube.lease import Lease

from .capabilities import Capabilities
from .cluster import Cluster
from .controller import Controller
from .enforcement import Enforcement
from .handlers import build_registry, watch_settings
from .health import HealthServer
from .logs import configure_logging
from .metrics import Metrics
from .notices import Notices
from .policies import Policies
from .probe import Prober
from .queue import WorkQueue
from .resync import Resync
from .sandbox import Reconciler
from .settings import OperatorSettings, SettingsError, load_settings
from .store import Key, Kind, Object, Store

logger = logging.getLogger(__name__)

FIRST_LIST_PAUSES: Final = (1, 2, 4, 8, 15)
KOPF_END_SECONDS: Final = 12.0
STALE_RESYNCS: Final = 4
"""After so many missed resyncs the process is not alive any more."""
LOST_LEASE_EXIT_CODE: Final = 3
MOVER: Final = "agent_sandbox_operator.mover.main"


class StartError(Exception):
    """The operator cannot start, or could not go on. The message is one line."""


def run(*, with_mover: bool = False) -> None:
    """Runs the operator until SIGTERM or SIGINT. Raises StartError."""
    try:
        settings = load_settings()
    except SettingsError as error:
        raise StartError(str(error)) from error
    configure_logging(settings.log_level, settings.log_format)
    asyncio.run(Operator(settings, with_mover=with_mover).run())


class Operator:
    """One process: a standby until it holds the Lease, then at work until it is told to stop."""

    def __init__(self, settings: OperatorSettings, *, with_mover: bool) -> None:
        self._settings = settings
        self._with_mover = with_mover
        self._metrics = Metrics()
        self._stop = asyncio.Event()
        self._resync: Resync | None = None
        self._watching = threading.Event()
        self._working = False
        self._leading = False

    async def run(self) -> None:
        """From start to end. Raises StartError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        settings = self._settings
        health = HealthServer(settings.health_host, settings.health_port, self._metrics, alive=self._is_alive, ready=self._is_ready)
        try:
            await health.start()
        except OSError as error:
            raise StartError(f"port {settings.health_port} cannot be listened on: {error.strerror}") from error
        try:
            async with connect() as kube, self._elected(kube):
                if not self._stop.is_set():
                    await self._work(kube)
        except (KubeError, ConfigError) as error:
            raise StartError(str(error)) from error
        finally:
            await health.stop()
        logger.info("the operator has ended")

    @contextlib.asynccontextmanager
    async def _elected(self, kube: Kube) -> AsyncIterator[None]:
        """Holds the Lease inside: entered when it is ours, or when the process was told to stop. It is given back at the end; when it is lost, the process dies."""
        settings = self._settings
        if not settings.lease:
            yield
            return
        loop, acquired = asyncio.get_running_loop(), asyncio.Event()
        lease = Lease(
            settings.lease_namespace or kube.connection.namespace,
            settings.lease_name,
            f"{socket.gethostname()}_{os.getpid()}_{secrets.token_hex(4)}",
            on_acquired=lambda: _call(loop, acquired.set),
            on_lost=_die,
        )
        lease.start()
        try:
            waiting = [asyncio.create_task(acquired.wait()), asyncio.create_task(self._stop.wait())]
            _, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in rest:
                task.cancel()
            self._leading = acquired.is_set()
            yield
        finally:
            await asyncio.to_thread(lease.close)

    async def _work(self, kube: Kube) -> None:
        settings, metrics = self._settings, self._metrics
        store, queue = Store(), WorkQueue[Key]()
        cluster = Cluster(kube, metrics, settings.namespaces)
        policies = Policies(cluster, settings.blocked_networks)
        enforcement = Enforcement(settings, cluster, policies, settings.canary_namespace or settings.lease_namespace or kube.connection.namespace)
        prober = Prober(cluster.open_channel, queue.add, seconds=settings.probe_seconds)
        reconciler = Reconciler(
            store=store,
            cluster=cluster,
            prober=prober,
            policies=policies,
            enforcement=enforcement,
            capabilities=Capabilities(settings),
            notices=Notices(cluster, metrics),
            metrics=metrics,
        )
        controller = Controller(store, queue, reconciler, metrics)
        self._resync = resync = Resync(store, cluster, queue, policies, metrics)
        metrics.watch("queue_depth", "Sandboxes that wait for a worker.", lambda: queue.depth)
        metrics.watch("queue_age_seconds", "How long the first of them has waited.", queue.age)
        metrics.watch("sandboxes", "Sandboxes that are known.", lambda: store.count("sandboxes"))
        if not await self._list_first(resync):
            return
        watches = Watches(settings.namespaces, controller, self._watching)
        tasks: list[asyncio.Task[Any]] = [
            *controller.start(settings.workers),
            asyncio.create_task(resync.run(settings.resync_seconds), name="resync"),
            asyncio.create_task(watches.run(), name="watches"),
        ]
        if settings.verify_network:

            def look_at_all() -> None:
                for key in store.keys("sandboxes"):
                    queue.add(key)

            tasks.append(asyncio.create_task(enforcement.run(look_at_all), name="enforcement"))
        if self._with_mover:
            tasks.append(asyncio.create_task(importlib.import_module(MOVER).run_mover(self._stop), name="mover"))
        self._working = True
        stopped = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            failed = next((task for task in done if task is not stopped), None)
            if failed is not None and not self._stop.is_set():
                cause = None if failed.cancelled() else failed.exception()
                raise StartError(f"{failed.get_name()} ended unexpectedly: {cause or 'no cause is known'}") from cause
        finally:
            self._working = False
            self._stop.set()
            stopped.cancel()
            await watches.stop()
            await controller.stop()
            await prober.aclose()
            for task in tasks:
                if task.get_name() in {"enforcement", "resync", "watches"}:
                    task.cancel()
            await asyncio.gather(*tasks, stopped, return_exceptions=True)

    async def _list_first(self, resync: Resync) -> bool:
        """The list that everything begins with. False when it was stopped before."""
        for pause in itertools.chain(FIRST_LIST_PAUSES, itertools.repeat(FIRST_LIST_PAUSES[-1])):
            try:
                await resync.run_once()
            except KubeError as error:
                logger.warning("the first list failed (%s); it is tried again in %d s", error, pause)
            else:
                return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause)
            if self._stop.is_set():
                return False
        return False

    def _is_alive(self) -> tuple[bool, str]:
        if not self._working or self._resync is None or self._resync.last is None:
            return True, "ok"
        age = asyncio.get_running_loop().time() - self._resync.last
        late = age > STALE_RESYNCS * self._settings.resync_seconds + 60
        return not late, f"nothing could be listed for {age:.0f} s" if late else "ok"

    def _is_ready(self) -> tuple[bool, str]:
        if self._settings.lease and not self._leading:
            return True, "standby"  # as ready as it can be
        if not self._working:
            return False, "it has not begun to work"
        return (True, "ok") if self._watching.is_set() else (False, "the watches are not open yet")


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function)


def _die(why: str) -> None:
    """Without the Lease not one more write may go out, and another process may hold it already: no orderly end."""
    logger.critical("%s; this process ends at once", why)
    logging.shutdown()
    os._exit(LOST_LEASE_EXIT_CODE)


class Watches:
    """kopf in its thread."""

    def __init__(self, namespaces: tuple[str, ...], controller: Controller, ready: threading.Event) -> None:
        self._namespaces = namespaces
        self._controller = controller
        self._ready = ready
        self._stop = threading.Event()
        self._ended = asyncio.Event()
        self._error: BaseException | None = None

    async def run(self) -> None:
        """Runs until stop(). What ends it sooner is raised."""
        loop = asyncio.get_running_loop()

        def route(kind: Kind, event: str | None, raw: Object) -> None:
            loop.call_soon_threadsafe(self._controller.take, kind, event, raw)

        def target() -> None:
            try:
                kopf.run(
                    registry=build_registry(route),
                    settings=watch_settings(),
                    standalone=True,
                    clusterwide=not self._namespaces,
                    namespaces=self._namespaces,
                    stop_flag=self._stop,
                    ready_flag=self._ready,
                )
            except BaseException as error:  # noqa: BLE001 - the thread's top; it is raised in the main loop
                self._error = error
            finally:
                _call(loop, self._ended.set)

        threading.Thread(target=target, name="kopf", daemon=True).start()
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    async def stop(self) -> None:
        """Ends it, within 12 s: the process does not wait for longer."""
        self._stop.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), KOPF_END_SECONDS)
