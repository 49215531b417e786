"""Errors of the API server as errors of the HTTP API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from agent_sandbox_core.errors import BackendError, InvalidRequest, LimitExceeded, SandboxError
from agent_sandbox_kube.errors import Forbidden, Invalid, KubeError, NotFound


@contextlib.contextmanager
def translated(missing: SandboxError | None = None) -> Iterator[None]:
    """`missing`: what a 404 means here."""
    try:
        yield
    except NotFound as error:
        if missing is not None:
            raise missing from error
        raise BackendError(str(error)) from error
    except Forbidden as error:
        if error.by_quota:
            raise LimitExceeded(f"no more sandboxes are allowed here ({error.message}): delete one, or wait until one expires") from error
        raise BackendError(str(error)) from error
    except Invalid as error:
        raise InvalidRequest(str(error)) from error
    except KubeError as error:
        raise BackendError(str(error)) from error
