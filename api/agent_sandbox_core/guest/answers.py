"""What the guest answers, translated at one boundary: error codes to errors.py, JSON to checked values. All of it is untrusted input."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from agent_sandbox_core.channel import Answer
from agent_sandbox_core.errors import BackendError, Conflict, Forbidden, InvalidRequest, NotFound, PayloadTooLarge, SandboxError
from agent_sandbox_core.interfaces import GuestFile

ERRORS: Final[dict[str, type[SandboxError]]] = {
    "invalid_request": InvalidRequest,
    "forbidden": Forbidden,
    "not_found": NotFound,
    "no_such_process": NotFound,
    "conflict": Conflict,
    "busy": Conflict,
    "payload_too_large": PayloadTooLarge,
    "range_not_satisfiable": InvalidRequest,
    "internal_error": BackendError,
    "no_space": BackendError,
    "invalid_archive": BackendError,  # archives come from the store, not from the caller: it is ours that is damaged
}
"""Every code of init/API.md; a test compares the two."""

ERROR_STATUS: Final = 400
MAX_MESSAGE = 2000
SHOWN_CHARACTERS = 200


class GuestProtocolError(BackendError):
    """The guest answered what the guest API does not allow."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a command ended; `code` is what a shell would say (0-255)."""

    reason: str
    code: int
    message: str


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The part of a Process that the client needs. `exit` is None while it runs."""

    next_seq: int
    duration_ms: int
    exit: Exit | None


def raise_error(answer: Answer) -> NoReturn:
    """Raises the error that an answer with a status of 400 or more stands for."""
    try:
        error = json.loads(answer.body)["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError) as problem:
        raise GuestProtocolError(f"the sandbox answered {answer.status} without an error of its API: delete the sandbox if this repeats") from problem
    message = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in message[:MAX_MESSAGE])
    kind = ERRORS.get(code)
    if kind is None:
        raise BackendError(f"{message} ({code[:SHOWN_CHARACTERS]})")
    raise kind(message)


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = json.loads(body)
    except ValueError as error:
        raise GuestProtocolError(f"the sandbox answered what is no JSON: {body[:SHOWN_CHARACTERS]!r}") from error
    if not isinstance(found, dict):
        raise GuestProtocolError(f"the sandbox answered JSON that is no object: {body[:SHOWN_CHARACTERS]!r}")
    return found


def parse_process(data: dict[str, Any]) -> ProcessState:
    """Checks the Process of an answer or of an exit frame."""
    ended = data.get("exit")
    return ProcessState(
        next_seq=_natural(data, "next_seq"),
        duration_ms=_natural(data, "duration_ms"),
        exit=None if ended is None else _parse_exit(ended),
    )


def parse_output(data: dict[str, Any]) -> list[tuple[int, int, bytes]]:
    """The (seq, fd, bytes) of a start's `output`."""
    try:
        frames = [(item["seq"], item["fd"], base64.b64decode(item["data"], validate=True)) for item in data["output"]]
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise GuestProtocolError("the sandbox answered with output that is not as its API says") from error
    if not all(type(seq) is int and fd in (1, 2) for seq, fd, _ in frames):
        raise GuestProtocolError("the sandbox answered with output that is not as its API says")
    return frames


def parse_file(data: Any) -> GuestFile:
    """Checks a FileInfo."""
    try:
        file = GuestFile(
            name=base64.b64decode(data["name"], validate=True),
            path=base64.b64decode(data["path"], validate=True),
            type=str(data["type"]),
            size=data["size"],
            mode=int(data["mode"], 8) & 0o7777,
            mtime_ns=data["mtime_ns"],
        )
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise GuestProtocolError(f"the sandbox described a file not as its API says ({error})") from error
    if type(file.size) is not int or file.size < 0 or type(file.mtime_ns) is not int:
        raise GuestProtocolError("the sandbox described a file with a size or a time that is no number")
    return file


def parse_file_header(answer: Answer) -> GuestFile:
    """The File-Info header of a read."""
    try:
        data = json.loads(base64.b64decode(answer.headers[b"file-info"], validate=True))
    except (KeyError, ValueError, binascii.Error) as error:
        raise GuestProtocolError("the sandbox sent a file without a readable File-Info") from error
    return parse_file(data)


def _parse_exit(data: Any) -> Exit:
    if not isinstance(data, dict):
        raise GuestProtocolError("the sandbox reported an exit that is not as its API says")
    reason, code = data.get("reason"), _natural(data, "code")
    if not isinstance(reason, str) or code > 255:
        raise GuestProtocolError("the sandbox reported an exit that is not as its API says")
    return Exit(reason=reason, code=code, message=str(data.get("message") or "")[:MAX_MESSAGE])


def _natural(data: dict[str, Any], key: str) -> int:
    value = data.get(key)
    if type(value) is not int or value < 0:
        raise GuestProtocolError(f"the sandbox answered with a {key} that is no number of 0 or more")
    return value
