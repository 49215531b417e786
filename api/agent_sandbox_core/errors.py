"""The error tree. Every error tells what happened, which object, and what to do next; none holds a key or an env value.

SandboxError                 base; has `code`, `status` (HTTP) and `message`
├── InvalidRequest           400: the request cannot be carried out as it stands
├── Forbidden                403: policy refuses it (image, network, path)
├── NotFound                 404
│   ├── SandboxNotFound      the message is exact: `sandbox {id} not found`
│   └── SnapshotNotFound     the message is exact: `snapshot {id} not found`
├── Conflict                 409: another operation holds the object, or the same id was used for something else
├── PayloadTooLarge          413
├── LimitExceeded            429: MAX_SANDBOXES or a quota
├── BackendError             502: the engine, the cluster or the sandbox failed
│   ├── OutcomeUnknown       a command may have run, may still run; never an exit code
│   ├── SandboxDied          its container ended; `out_of_memory` when the engine confirms that as the cause
│   └── ChannelError         a channel could not be opened or broke before a request was sent
└── Unavailable              503: shutting down, or not ready yet
"""

from __future__ import annotations

from typing import ClassVar


class SandboxError(Exception):
    """Base of all errors that reach a caller."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(SandboxError):
    """The request cannot be carried out as it stands."""

    code, status = "invalid_request", 400


class Forbidden(SandboxError):
    """A policy refuses it: image, network, path."""

    code, status = "forbidden", 403


class NotFound(SandboxError):
    """The named object does not exist."""

    code, status = "not_found", 404


class SandboxNotFound(NotFound):
    """No sandbox has this id. The message is part of the contract."""

    def __init__(self, sandbox_id: str) -> None:
        super().__init__(f"sandbox {sandbox_id} not found")
        self.sandbox_id = sandbox_id


class SnapshotNotFound(NotFound):
    """No snapshot has this id. The message is part of the contract."""

    def __init__(self, snapshot_id: str) -> None:
        super().__init__(f"snapshot {snapshot_id} not found")
        self.snapshot_id = snapshot_id


class Conflict(SandboxError):
    """Another operation holds the object, or its id was used for something else."""

    code, status = "conflict", 409


class PayloadTooLarge(SandboxError):
    """A body, a file or a snapshot is over its limit."""

    code, status = "payload_too_large", 413


class LimitExceeded(SandboxError):
    """MAX_SANDBOXES or a quota is used up."""

    code, status = "limit_exceeded", 429


class BackendError(SandboxError):
    """The engine, the cluster or the sandbox failed."""

    code, status = "backend_error", 502


class OutcomeUnknown(BackendError):
    """A command may have run, and may still run: never to be read as an exit code."""


class SandboxDied(BackendError):
    """The sandbox's container ended. `out_of_memory`: the engine confirms that as the cause, so a command in flight ended with 137."""

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class ChannelError(BackendError):
    """A channel could not be opened, or broke before the request was sent: safe to try again."""


class Unavailable(SandboxError):
    """Shutting down, or not ready yet: try again later."""

    code, status = "unavailable", 503
