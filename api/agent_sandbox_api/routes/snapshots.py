"""Snapshots and forks."""

from __future__ import annotations

from datetime import UTC, datetime

from agent_sandbox_core.models import Sandbox, Snapshot
from fastapi import APIRouter, Request
from starlette.responses import Response

from ..answers import json_answer
from ..clients import ClientWatch
from ..context import Borrowed
from ..openapi import errors
from ..schemas import ForkSnapshot, SnapshotList, TakeSnapshot
from .sandboxes import IdempotencyKey, check_idempotency_key, digest

router = APIRouter(prefix="/v1", tags=["snapshots"])


@router.post(
    "/sandboxes/{sandbox_id}/snapshots",
    status_code=201,
    response_model=Snapshot,
    responses=errors(400, 404, 409, 413, 502),
    summary="Take a snapshot",
)
async def take(sandbox_id: str, context: Borrowed, body: TakeSnapshot | None = None) -> Response:
    """The workspace at one point in time; what runs is frozen meanwhile and goes on afterwards. It outlives its sandbox."""
    with context.metrics.snapshot_seconds.labels("snapshot").time():
        taken = await context.backend.snapshot(sandbox_id, name=body.name if body else None)
    context.metrics.snapshot_bytes.inc(taken.size_bytes)
    return json_answer(taken, 201)


@router.get("/snapshots", response_model=SnapshotList, responses=errors(502), summary="List snapshots")
async def list_all(context: Borrowed, sandbox_id: str | None = None) -> Response:
    """Oldest first; with `sandbox_id` those of one sandbox."""
    return json_answer(SnapshotList(snapshots=list(await context.backend.list_snapshots(sandbox_id))))


@router.get("/snapshots/{snapshot_id}", response_model=Snapshot, responses=errors(404, 502), summary="Look at a snapshot")
async def get(snapshot_id: str, context: Borrowed) -> Response:
    """Its facts."""
    return json_answer(await context.backend.get_snapshot(snapshot_id))


@router.delete("/snapshots/{snapshot_id}", status_code=204, response_class=Response, responses=errors(404, 409, 502), summary="Delete a snapshot")
async def delete(snapshot_id: str, context: Borrowed) -> Response:
    """Sandboxes that were forked from it live on."""
    await context.backend.delete_snapshot(snapshot_id)
    return Response(status_code=204)


@router.post(
    "/snapshots/{snapshot_id}/fork",
    status_code=201,
    response_model=Sandbox,
    responses=errors(400, 403, 404, 409, 429, 502),
    summary="Fork a snapshot",
)
async def fork(
    snapshot_id: str, request: Request, context: Borrowed, body: ForkSnapshot | None = None, idempotency_key: IdempotencyKey = None
) -> Response:
    """A new sandbox with the snapshot's files and its source's spec, with the given changes."""
    body = body or ForkSnapshot()
    source = await context.backend.snapshot_spec(snapshot_id)
    check_idempotency_key(idempotency_key)
    spec, lifetime = context.policy.fork(source, body), context.policy.lifetime(body.timeout_seconds)
    with context.metrics.snapshot_seconds.labels("fork").time():
        expires_at = datetime.now(UTC) + lifetime
        if idempotency_key is not None:
            request_digest = digest(f"fork {snapshot_id}", body)
            made = await context.backend.create(
                spec, expires_at=expires_at, source=snapshot_id, idempotency_key=idempotency_key, request_digest=request_digest
            )
        else:
            async with ClientWatch(request.receive):
                made = await context.backend.create(spec, expires_at=expires_at, source=snapshot_id)
    return json_answer(made, 201)
