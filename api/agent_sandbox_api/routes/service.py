"""Health and metrics."""

from __future__ import annotations

from agent_sandbox_core.errors import SandboxError
from agent_sandbox_core.version import __version__
from fastapi import APIRouter
from starlette.responses import Response

from ..answers import json_answer
from ..backends.engine import CountsChannels
from ..context import Borrowed
from ..schemas import Health

router = APIRouter(tags=["service"])


@router.get("/healthz", response_model=Health, summary="Whether the server is up")
async def health(context: Borrowed) -> Response:
    """Needs no key and asks no engine: it says that this process answers."""
    return json_answer(Health(status="ok", backend=context.backend.name, version=__version__))


@router.get("/metrics", summary="Prometheus metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(context: Borrowed) -> Response:
    """Requests, commands, sandboxes, snapshots and channels."""
    try:
        context.metrics.count_sandboxes(await context.backend.list())
    except SandboxError:
        context.metrics.forget_sandboxes()
    if isinstance(context.backend, CountsChannels):
        context.metrics.channels_open.set(context.backend.open_channels())
    text, kind = context.metrics.render()
    return Response(text, media_type=kind)
