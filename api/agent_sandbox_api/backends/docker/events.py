"""What happens to our containers outside of us: one followed answer of the engine, reopened when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Final
from urllib.parse import urlencode

from agent_sandbox_core.errors import BackendError

from . import labels
from .client import EngineClient
from .options import DockerOptions

logger = logging.getLogger(__name__)

ACTIONS: Final = ("die", "oom", "pause", "unpause", "start", "destroy", "rename")
FIRST_PAUSE_SECONDS: Final = 0.2
LONGEST_PAUSE_SECONDS: Final = 10.0


async def follow_changes(client: EngineClient, options: DockerOptions, closing: asyncio.Event) -> AsyncGenerator[str]:
    """Ids of sandboxes to whose containers something happened, until `closing`. What happens while it reconnects is not seen here."""
    doing = "following the engine's events"
    mine = labels.label_filter(role=labels.CONTAINER, instance=options.instance_id)
    query = urlencode({"filters": json.dumps(mine | {"type": ["container"], "event": list(ACTIONS)})})
    pause = FIRST_PAUSE_SECONDS
    while not closing.is_set():
        try:
            target = await client.path(f"/events?{query}")
            async with client.connection(doing) as connection, contextlib.aclosing(connection.follow(doing, "GET", target)) as events:
                stop = asyncio.get_running_loop().create_task(abort_when(closing, connection.wire.abort))
                try:
                    async for event in events:
                        pause = FIRST_PAUSE_SECONDS
                        sandbox_id = event.get("Actor", {}).get("Attributes", {}).get(labels.SANDBOX)
                        if sandbox_id:
                            yield str(sandbox_id)
                finally:
                    stop.cancel()
        except BackendError as error:
            if not closing.is_set():
                logger.warning("%s: trying again in %.1f s", error.message, pause)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closing.wait(), pause)
        pause = min(pause * 2, LONGEST_PAUSE_SECONDS)


async def abort_when(closing: asyncio.Event, abort: Callable[[], None]) -> None:
    """Ends a connection when the engine object is closed."""
    await closing.wait()
    abort()
