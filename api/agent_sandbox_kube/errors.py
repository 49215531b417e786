"""What the API server, or the way to it, says no with."""

from __future__ import annotations

import json
from typing import Any


class KubeError(Exception):
    """An answer that is no success. `status` is the HTTP status (0: none came), `reason` and `message` are the API server's own words."""

    def __init__(self, doing: str, status: int, reason: str, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(f"{doing} failed: {message}")
        self.doing = doing
        self.status = status
        self.reason = reason
        self.message = message
        self.details = details or {}


class NotFound(KubeError):
    """404: the object, its namespace or its kind is not there."""


class Conflict(KubeError):
    """409: it exists already (reason AlreadyExists), or it was changed meanwhile (reason Conflict)."""

    @property
    def exists(self) -> bool:
        """The name is taken."""
        return self.reason == "AlreadyExists"


class Forbidden(KubeError):
    """403: missing rights, a quota, Pod Security or another admission; `message` says which."""

    @property
    def by_quota(self) -> bool:
        """A ResourceQuota is used up."""
        return "exceeded quota" in self.message


class Invalid(KubeError):
    """400 or 422: the object is not valid."""


class Gone(KubeError):
    """410: a resourceVersion that is too old. List again."""


class TooManyRequests(KubeError):
    """429, after bounded retries."""


class Unreachable(KubeError):
    """No answer: no connection, a broken one, or silence over the time limit. For a change it is unknown whether it was made."""


_KINDS: dict[int, type[KubeError]] = {400: Invalid, 403: Forbidden, 404: NotFound, 409: Conflict, 410: Gone, 422: Invalid, 429: TooManyRequests}


def error_of(doing: str, status: int, body: bytes) -> KubeError:
    """The error for an answer: usually a v1.Status, but a proxy may send anything."""
    try:
        told = json.loads(body)
    except ValueError:
        told = {}
    if not isinstance(told, dict):
        told = {}
    message = str(told.get("message") or body[:200].decode(errors="replace").strip() or f"HTTP {status}")
    return _KINDS.get(status, KubeError)(doing, status, str(told.get("reason") or ""), message, told.get("details"))
