"""What the API server, or the way to it, says no with.

KubeError              base: `status` (HTTP), `reason` and `message` are the API server's own words
├── Invalid            400, 422: the object or the request is not valid
├── Unauthorized       401: the credentials are not accepted, renewed ones neither
├── Forbidden          403: missing rights, a quota, Pod Security or another admission
├── NotFound           404: the object, its namespace or its kind is not there
├── Conflict           409: it was changed meanwhile
│   └── AlreadyExists  409: its name is taken
├── Gone               410: a resourceVersion that is too old
├── TooManyRequests    429, after bounded retries
├── Unavailable        500, 502-504: the API server, or what it calls, failed; a change may have been made
└── Unreachable        no answer; a change may have been made
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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

    def __str__(self) -> str:
        return f"{self.args[0]}; {self.advice}" if self.advice else str(self.args[0])

    @property
    def advice(self) -> str:
        """What to do next, where the API server's own words leave that open."""
        return ""


class NotFound(KubeError):
    """404: the object, its namespace or its kind is not there."""


class Conflict(KubeError):
    """409: it was changed meanwhile (reason Conflict), or a precondition does not hold."""

    @property
    def exists(self) -> bool:
        """The name is taken."""
        return self.reason == "AlreadyExists"


class AlreadyExists(Conflict):
    """409: the name is taken."""


class Unauthorized(KubeError):
    """401: the credentials are not accepted, renewed ones neither."""

    @property
    def advice(self) -> str:
        return "check the user of the kubeconfig, or the pod's service account"


class Forbidden(KubeError):
    """403: missing rights, a quota, Pod Security or another admission; `message` says which."""

    @property
    def by_quota(self) -> bool:
        """A ResourceQuota is used up."""
        return "exceeded quota" in self.message

    @property
    def by_pod_security(self) -> bool:
        """The namespace's Pod Security level does not admit the pod."""
        return "violates PodSecurity" in self.message

    @property
    def by_rights(self) -> bool:
        """A role lacks: admission never speaks like this."""
        return " cannot " in self.message and " resource " in self.message

    @property
    def advice(self) -> str:
        if self.by_quota:
            return "delete what is not needed there, or raise the quota"
        if self.by_pod_security:
            return "lower the namespace's level, or correct the pod"
        return "grant it by a Role and a RoleBinding, or a ClusterRole" if self.by_rights else ""


class Invalid(KubeError):
    """400 or 422: the object or the request is not valid."""


class Gone(KubeError):
    """410: a resourceVersion that is too old. List again."""


class TooManyRequests(KubeError):
    """429, after bounded retries."""

    @property
    def advice(self) -> str:
        return "try again later"


class Unavailable(KubeError):
    """500, 502, 503, 504: the API server, or a webhook it calls, failed. For a change it is unknown whether it was made."""


class Unreachable(KubeError):
    """No answer: no connection, a broken one, or silence over the time limit. For a change it is unknown whether it was made."""


_KINDS: dict[int, type[KubeError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: TooManyRequests,
    500: Unavailable,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}


def error_of(doing: str, status: int, body: bytes) -> KubeError:
    """The error for an answer: usually a v1.Status, but a proxy may send anything."""
    try:
        told = json.loads(body)
    except ValueError:
        told = {}
    if isinstance(told, dict) and told.get("kind") == "Status":
        return error_of_status(doing, told, status)
    message = " ".join(body[:200].decode(errors="replace").split()) or "no explanation came"
    return _kind(status, "")(doing, status, "", f"HTTP {status}: {message}")


def error_of_status(doing: str, told: Mapping[str, Any], status: int = 0) -> KubeError:
    """The error for a v1.Status."""
    status, reason, details = status or _number(told.get("code")), str(told.get("reason") or ""), told.get("details")
    message = str(told.get("message") or reason or f"HTTP {status}")
    return _kind(status, reason)(doing, status, reason, message, details if isinstance(details, dict) else None)


def _kind(status: int, reason: str) -> type[KubeError]:
    return AlreadyExists if reason == "AlreadyExists" else _KINDS.get(status, KubeError)


def _number(told: object) -> int:
    return told if isinstance(told, int) else 500
