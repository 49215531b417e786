"""Sandboxes: their lifecycle."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Annotated, Final

from agent_sandbox_core.errors import InvalidRequest
from agent_sandbox_core.models import Sandbox
from fastapi import APIRouter, Header, Request
from pydantic import BaseModel
from starlette.responses import Response

from ..answers import json_answer
from ..clients import ClientWatch
from ..context import Borrowed
from ..openapi import errors
from ..schemas import CreateSandbox, Rollback, SandboxList, SetTimeout

router = APIRouter(prefix="/v1/sandboxes", tags=["sandboxes"])

MAX_KEY: Final = 255
IdempotencyKey = Annotated[
    str | None,
    Header(
        description=f"Makes a create safe to repeat: the same key (1 to {MAX_KEY} printable ASCII characters) with the same body gives the same "
        "sandbox as long as it lives, with another body a 409. Without one, a create whose client goes away is undone."
    ),
]


def check_idempotency_key(key: str | None) -> None:
    """InvalidRequest for a key that cannot be one."""
    if key is not None and not (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
        raise InvalidRequest(f"the Idempotency-Key cannot be used: it has 1 to {MAX_KEY} printable ASCII characters")


def digest(kind: str, body: BaseModel) -> str:
    """What identifies a request: the same for bodies that mean the same, since defaults are filled in and the order of env is not looked at."""
    content = json.dumps(body.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(f"{kind}\0{content}".encode()).hexdigest()


@router.post("", status_code=201, response_model=Sandbox, responses=errors(400, 403, 409, 429, 502), summary="Create a sandbox")
async def create(body: CreateSandbox, request: Request, context: Borrowed, idempotency_key: IdempotencyKey = None) -> Response:
    """Answers when the sandbox runs and can take commands."""
    check_idempotency_key(idempotency_key)
    spec, lifetime = context.policy.spec(body), context.policy.lifetime(body.timeout_seconds)
    with context.metrics.operation_seconds.labels("create").time():
        expires_at = datetime.now(UTC) + lifetime
        if idempotency_key is not None:
            made = await context.backend.create(spec, expires_at=expires_at, idempotency_key=idempotency_key, request_digest=digest("create", body))
        else:
            async with ClientWatch(request.receive):
                made = await context.backend.create(spec, expires_at=expires_at)
    return json_answer(made, 201)


@router.get("", response_model=SandboxList, responses=errors(502), summary="List sandboxes")
async def list_all(context: Borrowed) -> Response:
    """Oldest first."""
    return json_answer(SandboxList(sandboxes=list(await context.backend.list())))


@router.get("/{sandbox_id}", response_model=Sandbox, responses=errors(404, 502), summary="Look at a sandbox")
async def get(sandbox_id: str, context: Borrowed) -> Response:
    """`reason`, `message` and `last_termination` say why it is not running."""
    return json_answer(await context.backend.get(sandbox_id))


@router.delete("/{sandbox_id}", status_code=204, response_class=Response, responses=errors(404, 502), summary="Delete a sandbox")
async def delete(sandbox_id: str, context: Borrowed) -> Response:
    """Ends whatever it is doing; its snapshots stay."""
    with context.metrics.operation_seconds.labels("delete").time():
        await context.backend.delete(sandbox_id)
    return Response(status_code=204)


@router.post("/{sandbox_id}/timeout", response_model=Sandbox, responses=errors(400, 404, 502), summary="Set the time to live")
async def set_timeout(sandbox_id: str, body: SetTimeout, context: Borrowed) -> Response:
    """Counted from now; it may shorten it too."""
    await context.backend.spec(sandbox_id)  # existence comes before rules
    expires_at = datetime.now(UTC) + context.policy.lifetime(body.timeout_seconds)
    return json_answer(await context.backend.set_expiry(sandbox_id, expires_at))


@router.post("/{sandbox_id}/rollback", response_model=Sandbox, responses=errors(400, 404, 409, 502), summary="Roll back to a snapshot")
async def rollback(sandbox_id: str, body: Rollback, context: Borrowed) -> Response:
    """All processes end and the workspace is as it was in the snapshot. Keeps id and expiry, and revives a stopped sandbox."""
    with context.metrics.snapshot_seconds.labels("rollback").time():
        return json_answer(await context.backend.rollback(sandbox_id, body.snapshot_id))
