"""Answers as they go over the wire: models as JSON, errors in the one shape, schema errors without what the caller sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agent_sandbox_core.errors import SandboxError
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

JSON: Final = "application/json"
_CODES: Final = {
    400: "invalid_request",
    401: "unauthorized",
    403: "forbidden",
    405: "method_not_allowed",
    409: "conflict",
    413: "payload_too_large",
    429: "limit_exceeded",
    502: "backend_error",
    503: "unavailable",
}
"""Codes of HTTP errors that the framework raises. 404 is not among them: not_found speaks of sandboxes, snapshots and files, not of routes."""
# Bounds are rules and safe to show; other context of a schema error may hold what the caller sent.
_SAFE_CONTEXT: Final = frozenset({"gt", "ge", "lt", "le", "min_length", "max_length", "actual_length", "pattern", "expected"})


def json_answer(model: BaseModel, status: int = 200) -> Response:
    """A model as it is; FastAPI would validate and serialise it once more."""
    return Response(model.model_dump_json(), status, media_type=JSON)


def error_answer(status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error in our shape: exactly these keys."""
    body = json.dumps({"error": {"code": code, "message": _clean(message)}}, ensure_ascii=False)
    return Response(body, status, headers=headers, media_type=JSON)


async def answer_sandbox_error(_: Request, error: Exception) -> Response:
    """An error of ours."""
    assert isinstance(error, SandboxError)
    return error_answer(error.status, error.code, error.message)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """An error that the framework raised: an unknown route, a wrong method, a body that cannot be parsed."""
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {request.url.path[:200]}: /docs lists what there is"
    elif error.status_code == 405:
        message = f"{request.method} is not possible on {request.url.path[:200]}: /docs lists what is"
    return error_answer(error.status_code, _CODES.get(error.status_code, "http_error"), message, error.headers)


async def answer_schema_error(_: Request, error: Exception) -> Response:
    """FastAPI's own shape, without `input`: it would echo env values."""
    assert isinstance(error, RequestValidationError)
    return Response(json.dumps({"detail": [_shorten(detail) for detail in error.errors()]}, ensure_ascii=False), 422, media_type=JSON)


def _shorten(detail: Mapping[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {"type": detail["type"], "loc": _clean_places(detail["loc"]), "msg": _clean(str(detail["msg"]))}
    context = {name: value for name, value in (detail.get("ctx") or {}).items() if name in _SAFE_CONTEXT}
    if context:
        told["ctx"] = context
    return told


def _clean_places(places: Sequence[Any]) -> list[Any]:
    return [place if isinstance(place, int) else _clean(str(place))[:200] for place in places]


def _clean(text: str) -> str:
    """Text that can be sent as UTF-8: a name in a JSON body may hold half a surrogate pair."""
    return text.encode(errors="replace").decode()
