"""Commands: run to the end, or followed as a stream. A client that goes away takes its command with it."""

from __future__ import annotations

import time
from typing import Any

from agent_sandbox_core.models import ExecResult, ExitEvent, OutputEvent
from fastapi import APIRouter, Request
from starlette.responses import Response

from ..answers import json_answer
from ..clients import ClientWatch
from ..context import Borrowed
from ..openapi import errors
from ..schemas import RunCommand
from ..streams import EventAnswer, EventFeed

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}", tags=["commands"])

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One JSON object a line; blank lines are a sign of life. The exit line is the last one: without it the outcome is unknown",
        "content": {
            "application/x-ndjson": {
                "schema": {"oneOf": [{"$ref": "#/components/schemas/OutputEvent"}, {"$ref": "#/components/schemas/ExitEvent"}]},
                "example": '{"type":"stdout","data":"hello\\n"}\n{"type":"exit","exit_code":0,"timed_out":false,"duration_ms":3}\n',
            }
        },
    },
    # Declares the models of the lines, which no route returns as a whole.
    "2XX": {"model": OutputEvent | ExitEvent, "description": "A line"},
}


@router.post("/exec", response_model=ExecResult, responses=errors(400, 404, 409, 502), summary="Run a command to its end")
async def run(sandbox_id: str, body: RunCommand, request: Request, context: Borrowed) -> Response:
    """A timeout kills everything that the command started and keeps the output so far. Exit code 128+n is death by signal n."""
    guest = await context.backend.guest(sandbox_id)
    command = context.policy.command(body)
    begun = time.perf_counter()
    with context.metrics.execs_running.track_inprogress():
        async with ClientWatch(request.receive):
            result = await guest.run(command, max_output_bytes=context.settings.max_exec_output_bytes)
    context.metrics.exec_seconds.labels("exec").observe(time.perf_counter() - begun)
    return json_answer(result)


@router.post("/exec/stream", response_class=Response, responses=errors(400, 404, 409, 502) | _STREAM, summary="Run a command and follow its output")
async def stream(sandbox_id: str, body: RunCommand, request: Request, context: Borrowed) -> Response:
    """Like exec, without its limit on output."""
    guest = await context.backend.guest(sandbox_id)
    feed = EventFeed(guest, context.policy.command(body))
    try:
        async with ClientWatch(request.receive):
            await feed.start()
    except BaseException:
        await feed.aclose()
        raise
    return EventAnswer(feed)
