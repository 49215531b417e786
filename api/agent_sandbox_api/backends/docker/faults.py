"""The one boundary where faults of the engine, of docker-py and of the transport become errors of ours.

BackendError (core)
├── EngineUnreachable     nothing answered at the address, or the answer did not come in time; says what to do
└── EngineRefusal         the engine answered with an error status; has `engine_status` and `detail`
"""

from __future__ import annotations

import asyncio
import json
from typing import Final

import docker.errors
import h11
import requests.exceptions
from agent_sandbox_core.errors import BackendError, SandboxError

NOT_FOUND: Final = 404
CONFLICT: Final = 409


class EngineUnreachable(BackendError):
    """The engine could not be reached, or did not answer in time."""


class EngineRefusal(BackendError):
    """The engine answered with an error. `engine_status` is its HTTP status, `detail` its own words."""

    def __init__(self, message: str, engine_status: int, detail: str) -> None:
        super().__init__(message)
        self.engine_status = engine_status
        self.detail = detail

    @property
    def missing(self) -> bool:
        """Whether the object of the call does not exist."""
        return self.engine_status == NOT_FOUND

    @property
    def conflicting(self) -> bool:
        """Whether the object is in use, in the wrong state, or its name is taken."""
        return self.engine_status == CONFLICT


# Everything that docker-py, requests, h11 or the operating system raise on the way to the engine and back.
FAULTS: Final = (
    docker.errors.DockerException,
    requests.exceptions.RequestException,
    h11.ProtocolError,
    OSError,
    EOFError,
    json.JSONDecodeError,
)


def refuse(doing: str, status: int, detail: str) -> EngineRefusal:
    """The error for an answer with an error status; `doing` says what was tried, with the object's name."""
    words = detail.strip() or "no reason given"
    return EngineRefusal(f"{doing} failed; the Docker engine says: {words}", status, words)


def translate(doing: str, address: str, error: BaseException) -> SandboxError:
    """The error of ours for a fault; one that is ours already stays as it is."""
    if isinstance(error, SandboxError):
        return error
    if isinstance(error, docker.errors.APIError) and error.response is not None:
        return refuse(doing, error.response.status_code, str(error.explanation or error))
    if isinstance(error, TimeoutError | asyncio.TimeoutError | requests.exceptions.Timeout):
        return EngineUnreachable(f"{doing} failed: the Docker engine at {address} did not answer in time: look at its load and its log")
    cause = root_cause(error)
    return EngineUnreachable(f"{doing} failed: the Docker engine at {address} cannot be used ({cause}): start it, or check DOCKER_HOST")


def root_cause(error: BaseException) -> str:
    """The innermost reason of a chain, which is the one that names the cause (`No such file or directory`), in one short line."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        inner = error.__cause__ or error.__context__ or next((item for item in error.args if isinstance(item, BaseException)), None)
        if inner is None or isinstance(inner, SandboxError):
            break
        error = inner
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(reason).split())[:300]
