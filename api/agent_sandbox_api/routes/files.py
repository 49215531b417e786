"""Files: raw bytes in and out, listings."""

from __future__ import annotations

import contextlib
from typing import Annotated

from agent_sandbox_core.errors import PayloadTooLarge
from agent_sandbox_core.models import FileInfo
from agent_sandbox_core.paths import PathEncoding, file_info, parse_path, refuse_hidden_dots, show_path
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from ..answers import json_answer
from ..context import Borrowed
from ..openapi import errors
from ..policy import parse_mode
from ..schemas import FileList
from ..streams import FileAnswer

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}/files", tags=["files"])

FilePath = Annotated[str, Query(description="Absolute, or relative to /workspace", examples=["src/main.py"])]
Encoding = Annotated[
    PathEncoding,
    Query(
        description="`text`: the path is taken as it is. `percent`: `%XX` in it (after the URL's own decoding) stands for a byte, as names that are "
        "not UTF-8 are shown in listings"
    ),
]
Mode = Annotated[str, Query(pattern=r"^[0-7]{3,4}$", description="Permission bits in octal, at most 0777", examples=["644"])]
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


@router.get("", response_class=Response, responses=errors(400, 404, 409, 413, 502) | {200: {"content": _BYTES}}, summary="Read a file")
async def read(sandbox_id: str, path: FilePath, context: Borrowed, path_encoding: Encoding = "text") -> Response:
    """The raw bytes of a regular file, links followed."""
    guest = await context.backend.guest(sandbox_id)
    raw = parse_path(path, path_encoding)
    async with contextlib.AsyncExitStack() as stack:
        body = await stack.enter_async_context(guest.read_file(raw, max_bytes=context.settings.max_file_bytes))
        return FileAnswer(body, stack.pop_all())


@router.put(
    "",
    response_model=FileInfo,
    responses=errors(400, 403, 404, 409, 413, 502),
    summary="Write a file",
    openapi_extra={"requestBody": {"required": True, "content": _BYTES}},
)
async def write(
    sandbox_id: str, path: FilePath, request: Request, context: Borrowed, *, mode: Mode = "644", path_encoding: Encoding = "text"
) -> Response:
    """Replaces the file, or the link, in one step; parents are created. Only under /workspace."""
    guest = await context.backend.guest(sandbox_id)
    raw, bits, limit = refuse_hidden_dots(parse_path(path, path_encoding)), parse_mode(mode), context.settings.max_file_bytes
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise PayloadTooLarge(f"the upload has {int(length)} bytes; a file can have {limit}")
    written = await guest.write_file(raw, request.stream(), mode=bits, max_bytes=limit)
    return json_answer(file_info(written))


@router.get("/list", response_model=FileList, responses=errors(400, 404, 409, 502), summary="List a directory")
async def list_entries(sandbox_id: str, context: Borrowed, path: FilePath = "/workspace", path_encoding: Encoding = "text") -> Response:
    """By name; links are not followed but the last part of the path is."""
    guest = await context.backend.guest(sandbox_id)
    raw = parse_path(path, path_encoding)
    entries = [file_info(entry) for entry in await guest.list_dir(raw)]
    return json_answer(FileList(path=show_path(raw), entries=entries))
