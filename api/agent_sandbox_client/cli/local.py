"""A server inside this process, for commands that name a backend."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

from .failures import Failure


@contextmanager
def serving(backend: str, namespace: str | None) -> Iterator[tuple[str, str]]:
    """Address and key of a server over `backend`, on the loopback interface, that ends with the block."""
    # By name: the client's layer must not depend on the server's, and a client may be installed without it.
    try:
        inside = importlib.import_module("agent_sandbox_api.inside")
    except ModuleNotFoundError as error:
        raise Failure(f"--backend needs the server, which cannot be loaded ({error}): pip install 'agent-sandbox-operator[{backend}]'") from None
    if namespace is not None:
        os.environ["AGENT_SANDBOX_NAMESPACE"] = namespace
    try:
        with inside.serving(backend) as place:
            yield place
    except inside.StartError as error:
        raise Failure(f"the {backend} backend cannot be used: {error}") from None
