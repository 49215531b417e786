"""The errors of the SDK. Every one tells what happened, to which object, and in `next_step` what to do about it where the message does not say so itself.

AgentSandboxError            base; `code`, `status` (HTTP, None when there was no answer), `message`, `next_step`
├── InvalidRequest           400, 422: the request cannot be carried out as it stands
├── Unauthorized             401: no API key, or a wrong one
├── Forbidden                403: the server's policy refuses it (image, network, path)
├── NotFound                 404: a file, or one of these
│   ├── SandboxNotFound
│   ├── SnapshotNotFound
│   └── ProcessNotFound
├── Conflict                 409: another operation holds the object, or it is there already
├── PayloadTooLarge          413: a file, a body or a snapshot is over its limit
├── LimitExceeded            429: the server has no room for more sandboxes
├── BackendError             502: the engine, the cluster or the sandbox failed
├── Unavailable              503: the server is stopping or not ready
├── InternalError            500 and whatever else a server should not answer
├── Unreachable              nothing answers at the address: nothing was done
├── RequestTimedOut          the server did not answer within the request's time: what it was doing may still happen
├── ConnectionLost           the connection broke before the answer was complete: the outcome is unknown
├── WaitTimedOut             a background command still runs after the time that `wait` was given
├── CommandFailed            `check=True` and the command did not succeed; `result` has all of it
├── TransferFailed           a local file or folder could not be sent, received or unpacked
└── StartFailed              the in-process backend cannot be used
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from .answers import CommandResult


class AgentSandboxError(Exception):
    """Base of all errors that the SDK raises."""

    code: str = "error"
    status: int | None = None
    advice: ClassVar[str | None] = None

    def __init__(self, message: str, *, code: str | None = None, status: int | None = None, next_step: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.status = status or type(self).status
        self.next_step = next_step or self.advice

    def __str__(self) -> str:
        return f"{self.message}: {self.next_step}" if self.next_step else self.message


class InvalidRequest(AgentSandboxError):
    """The request cannot be carried out as it stands; the message says why."""

    code, status = "invalid_request", 400


class Unauthorized(AgentSandboxError):
    """The API key is missing or wrong."""

    code, status = "unauthorized", 401
    advice = "set AGENT_SANDBOX_API_KEY, or pass api_key="


class Forbidden(AgentSandboxError):
    """A policy of the server refuses it: image, network, path."""

    code, status = "forbidden", 403


class NotFound(AgentSandboxError):
    """The named object does not exist."""

    code, status = "not_found", 404


class SandboxNotFound(NotFound):
    """No sandbox has this id."""

    advice = "it was destroyed or its lifetime is over; Sandbox.list() shows those that live, set_timeout() lets one live longer"


class SnapshotNotFound(NotFound):
    """No snapshot has this id."""

    advice = "Snapshot.list() shows those that are kept"


class ProcessNotFound(NotFound):
    """The sandbox knows no command with this id."""

    advice = "ended commands are kept for ten minutes and end with a rollback; commands.list() shows those that are known"


class Conflict(AgentSandboxError):
    """Another operation holds the object, it is there already, or a key was used for another request."""

    code, status = "conflict", 409


class PayloadTooLarge(AgentSandboxError):
    """A file, a body or a snapshot is over the server's limit."""

    code, status = "payload_too_large", 413


class LimitExceeded(AgentSandboxError):
    """The server has no room for more sandboxes."""

    code, status = "limit_exceeded", 429


class BackendError(AgentSandboxError):
    """The engine, the cluster or the sandbox failed. The outcome of a command that was running is unknown."""

    code, status = "backend_error", 502


class Unavailable(AgentSandboxError):
    """The server is stopping or not ready yet."""

    code, status = "unavailable", 503


class InternalError(AgentSandboxError):
    """The server met a fault, or answered what no agent-sandbox server answers."""

    code, status = "internal_error", 500


class Unreachable(AgentSandboxError, ConnectionError):
    """Nothing answers at the server's address. Nothing was done."""

    code = "unreachable"


class RequestTimedOut(AgentSandboxError, TimeoutError):
    """The server did not answer within the request's time. What it was doing may still happen."""

    code = "request_timed_out"


class ConnectionLost(AgentSandboxError, ConnectionError):
    """The connection broke before the answer was complete. Whether the request was carried out is unknown."""

    code = "connection_lost"


class WaitTimedOut(AgentSandboxError, TimeoutError):
    """A background command still runs after the time that `wait` was given."""

    code = "wait_timed_out"


class CommandFailed(AgentSandboxError):
    """A command that was run with `check=True` did not succeed. `result` has its exit code and its output."""

    code = "command_failed"

    def __init__(self, message: str, result: CommandResult) -> None:
        super().__init__(message)
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.result)


class TransferFailed(AgentSandboxError):
    """A local file or folder could not be sent, received or unpacked; what was there before is still there."""

    code = "transfer_failed"


class StartFailed(AgentSandboxError):
    """The in-process backend cannot be used."""

    code = "start_failed"


_BY_STATUS: Final[dict[int, type[AgentSandboxError]]] = {
    kind.status: kind
    for kind in (InvalidRequest, Unauthorized, Forbidden, NotFound, Conflict, PayloadTooLarge, LimitExceeded, BackendError, Unavailable)
    if kind.status is not None
} | {422: InvalidRequest, 416: InvalidRequest}
_NOT_FOUND: Final = (
    (re.compile(r"sandbox \S+ not found\Z"), SandboxNotFound),
    (re.compile(r"snapshot \S+ not found\Z"), SnapshotNotFound),
    (re.compile(r"process \S+ not found in sandbox \S+\Z"), ProcessNotFound),
)
_SHOWN: Final = 200


def error_of(status: int, body: object, place: str) -> AgentSandboxError:
    """The error that an answer of this status is. `body`: its JSON, None when it has none; `place`: the server, for a message."""
    kind = _BY_STATUS.get(status, InternalError)
    code, message = _told(body)
    if message is None:
        kind = InternalError if kind is NotFound else kind
        return kind(
            f"{place} answered {status} and not as an agent-sandbox server does", status=status, next_step="look at the address and at what is there"
        )
    if kind is NotFound:
        kind = next((known for pattern, known in _NOT_FOUND if pattern.match(message)), NotFound)
    return kind(message, code=code, status=status)


def _told(body: object) -> tuple[str | None, str | None]:
    """Code and message of an error's body, in the server's shape or as schema errors have it."""
    if not isinstance(body, dict):
        return None, None
    if isinstance(error := body.get("error"), dict) and isinstance(message := error.get("message"), str):
        return str(error.get("code")), message
    if isinstance(detail := body.get("detail"), list):
        # The places of a schema error begin with "body" or "query".
        lines = [f"{'.'.join(str(part) for part in one.get('loc', ())[1:])}: {one.get('msg')}" for one in detail if isinstance(one, dict)]
        return "invalid_request", "; ".join(lines)[: 10 * _SHOWN] or None
    return None, None
