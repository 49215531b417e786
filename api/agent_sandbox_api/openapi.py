"""The schema: what FastAPI finds in the routes, plus the two ways to send a key and the error shapes, which no route declares for itself."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from .schemas import ErrorBody

DESCRIPTION: Final = """\
Sandboxes for AI agents' code: run commands, move files, take snapshots, roll back and fork.

Send a key as `Authorization: Bearer KEY` or `X-API-Key: KEY`. Every error but 422 is `{"error": {"code", "message"}}`; the message says what
happened and what to do next. Times are RFC 3339 in UTC. Paths are absolute or relative to `/workspace`.
"""
TAGS: Final = [
    {"name": "sandboxes", "description": "Create, list, keep alive, roll back, delete"},
    {"name": "commands", "description": "Run commands to their end, or follow their output"},
    {"name": "files", "description": "Read, write and list files"},
    {"name": "snapshots", "description": "Keep a workspace, and start new sandboxes from it"},
    {"name": "service", "description": "Health and metrics"},
]
_SCHEMES: Final = {
    "HTTPBearer": {"type": "http", "scheme": "bearer", "description": "One of AGENT_SANDBOX_API_KEYS; beats X-API-Key when both are sent"},
    "APIKeyHeader": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "One of AGENT_SANDBOX_API_KEYS"},
}
_COMMON: Final = {"401": "No valid key", "default": "Any other error"}
_MEANINGS: Final = {
    "400": "It cannot be carried out as it stands",
    "403": "A rule of this installation refuses it",
    "404": "There is no such sandbox, snapshot or file",
    "409": "Another operation holds the sandbox",
    "413": "Over a size limit",
    "429": "The limit of sandboxes is reached",
    "502": "The engine or the sandbox failed, or the outcome is unknown",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route, for these error statuses."""
    return {status: {"model": ErrorBody, "description": _MEANINGS[str(status)]} for status in statuses}


def build_schema(app: FastAPI) -> dict[str, Any]:
    """The complete schema of the app."""
    schema = get_openapi(title=app.title, version=app.version, description=app.description, tags=app.openapi_tags, routes=app.routes)
    components = schema.setdefault("components", {})
    components["securitySchemes"] = _SCHEMES
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    for path, operations in schema["paths"].items():
        if path == "/healthz":
            continue
        for operation in operations.values():
            operation["security"] = [{name: []} for name in _SCHEMES]
            for status, description in _COMMON.items():
                operation["responses"].setdefault(status, {"description": description, "content": content})
    return schema
