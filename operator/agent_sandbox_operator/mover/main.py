"""The mover's process, alone or inside the operator's: settings, store, lock, watches, workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Final, Literal

from agent_sandbox_core.errors import SandboxError
from agent_sandbox_core.snapshots import BlobStore
from agent_sandbox_kube.client import Kube, connect
from agent_sandbox_kube.config import ConfigError
from agent_sandbox_kube.errors import KubeError
from agent_sandbox_kube.informer import Informer
from agent_sandbox_kube.resources import SANDBOXES, SNAPSHOTS, Resource

from agent_sandbox_operator.health import HealthServer
from agent_sandbox_operator.logs import configure_logging
from agent_sandbox_operator.metrics import Metrics
from agent_sandbox_operator.settings import SettingsError

from .claims import Claims, Slots, new_identity
from .cluster import Cluster, Trouble
from .context import Context, Key, MoverLimits
from .engine import Engine
from .lock import held
from .settings import MoverSettings, load_mover_settings
from .sweep import SweepTimes
from .vault import Vault, now_utc

logger = logging.getLogger(__name__)

FIRST_LIST_SECONDS: Final = 300.0
KINDS: Final[tuple[tuple[Literal["Sandbox", "Snapshot"], Resource], ...]] = (("Sandbox", SANDBOXES), ("Snapshot", SNAPSHOTS))


class StartError(Exception):
    """The mover cannot start, or could not go on. The message is one line."""


def run() -> None:
    """Runs the mover until SIGTERM or SIGINT. Raises StartError."""
    settings = _load()
    configure_logging(settings.log_level, settings.log_format)
    asyncio.run(_run_alone(settings))


async def run_mover(stop: asyncio.Event) -> None:
    """Runs the mover in somebody else's process, until `stop` is set. Raises StartError."""
    await _serve(_load(), stop, asyncio.Event())


def _load() -> MoverSettings:
    try:
        return load_mover_settings()
    except SettingsError as error:
        raise StartError(str(error)) from error


async def _run_alone(settings: MoverSettings) -> None:
    loop, stop, ready = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    health = HealthServer(
        settings.health_host,
        settings.health_port,
        Metrics(),
        alive=lambda: (True, "it runs"),
        ready=lambda: (ready.is_set(), "it works" if ready.is_set() else "it has not begun to work"),
    )
    try:
        await health.start()
    except OSError as error:
        raise StartError(f"port {settings.health_port} cannot be listened on: {error.strerror}") from error
    try:
        await _serve(settings, stop, ready)
    finally:
        await health.stop()


async def _serve(settings: MoverSettings, stop: asyncio.Event, ready: asyncio.Event) -> None:
    """Works until it is told to stop. What is under way then is left as a killed mover leaves it: the next one takes it up."""
    working = asyncio.ensure_future(_work(settings, ready))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and not stop.is_set():
            await working
            raise StartError("the mover ended unexpectedly")
    except TimeoutError as error:
        raise StartError(
            f"nothing could be listed for {FIRST_LIST_SECONDS:.0f} s: check that the CRDs are installed and the API server answers"
        ) from error
    except (SandboxError, KubeError, ConfigError, Trouble) as error:
        raise StartError(str(error)) from error
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
    logger.info("the mover has ended")


async def _work(settings: MoverSettings, ready: asyncio.Event) -> None:
    identity = new_identity()
    async with connect() as kube, _opened(settings) as blobs:
        cluster = Cluster(kube, identity)
        vault = Vault(blobs, settings.installation or await cluster.cluster_id())
        async with contextlib.AsyncExitStack() as stack:
            if vault.lock_file is not None:
                await stack.enter_async_context(held(vault.lock_file))
                await blobs.sweep_spool(now_utc().timestamp())
            context = Context(
                cluster=cluster,
                vault=vault,
                claims=Claims(identity, exclusive=vault.lock_file is not None),
                limits=MoverLimits(settings.max_snapshot_bytes, settings.patience_seconds),
                slots=Slots(settings.transfers),
            )
            times = SweepTimes(timedelta(seconds=settings.stray_seconds), timedelta(seconds=settings.trash_seconds))
            engine = Engine(context, settings.namespaces, times)
            logger.info("the mover %s works on %s, installation %s", identity, blobs.address, vault.installation)
            for informer in await stack.enter_async_context(_watching(kube, engine, settings.namespaces)):
                # A Snapshot must find its Sandbox: nothing is decided before both lists are in.
                await informer.wait_synced(FIRST_LIST_SECONDS)
            ready.set()
            async with asyncio.TaskGroup() as group:
                group.create_task(engine.run(settings.workers, settings.sweep_seconds))
                group.create_task(_resync(engine, settings.resync_seconds))


@contextlib.asynccontextmanager
async def _watching(kube: Kube, engine: Engine, namespaces: tuple[str, ...]) -> AsyncIterator[list[Informer]]:
    """The informers: what they hear goes to the engine."""
    async with contextlib.AsyncExitStack() as stack:
        informers = []
        for namespace in namespaces or (None,):
            for kind, resource in KINDS:
                informer = Informer(kube, resource, namespace)
                stack.enter_context(informer.listen(_router(engine, kind, informer)))
                informers.append(await stack.enter_async_context(informer))
        yield informers


def _router(engine: Engine, kind: Literal["Sandbox", "Snapshot"], informer: Informer) -> Callable[[Key], None]:
    return lambda key: engine.take(kind, key, informer.get(key))


@contextlib.asynccontextmanager
async def _opened(settings: MoverSettings) -> AsyncIterator[BlobStore]:
    blobs = await asyncio.to_thread(BlobStore.open, settings.store_url, spool=settings.spool_directory)
    try:
        yield blobs
    finally:
        await blobs.aclose()


async def _resync(engine: Engine, seconds: float) -> None:
    """Whatever was missed is looked at again."""
    while True:
        await asyncio.sleep(seconds)
        engine.look_at_all()
