"""What runs for long, and what tells about the program: serve, operator, mover, openapi, version."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Annotated

import typer
from agent_sandbox_core.version import __version__

from .failures import Failure, reporting
from .output import print_line

app = typer.Typer(rich_markup_mode=None)


def _load(name: str, extra: str) -> ModuleType:
    # By name: the client's layer must not depend on the server's, and a client may be installed without it.
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Failure(f"{name} cannot be loaded ({error}): pip install 'agent-sandbox-operator[{extra}]'") from None


@app.command()
def serve(
    backend: Annotated[
        str | None, typer.Option(help="docker, kubernetes, memory or auto; default: AGENT_SANDBOX_BACKEND, else what is found")
    ] = None,
) -> None:
    """Run the HTTP API. Settings come from the environment (AGENT_SANDBOX_*)."""
    with reporting(as_json=False):
        server = _load("agent_sandbox_api.serve", "docker,kubernetes")
        try:
            server.serve(backend)
        except server.StartError as error:
            raise Failure(str(error)) from None


@app.command()
def operator(
    with_mover: Annotated[bool, typer.Option(help="carry out snapshots and restores in the same process: for a laptop or a test")] = False,
) -> None:
    """Run the operator of the custom resources. Settings come from the environment (AGENT_SANDBOX_*, AGENT_SANDBOX_OPERATOR_*)."""
    with reporting(as_json=False):
        module = _load("agent_sandbox_operator.main", "operator")
        try:
            module.run(with_mover=with_mover)
        except module.StartError as error:
            raise Failure(str(error)) from None


@app.command()
def mover() -> None:
    """Carry out Snapshots and restores. Settings come from the environment (AGENT_SANDBOX_*, AGENT_SANDBOX_MOVER_*)."""
    with reporting(as_json=False):
        module = _load("agent_sandbox_operator.mover.main", "operator")
        try:
            module.run()
        except module.StartError as error:
            raise Failure(str(error)) from None


@app.command()
def openapi() -> None:
    """Print the OpenAPI schema of the HTTP API."""
    with reporting(as_json=False):
        _load("agent_sandbox_api.serve", "docker").print_schema()


@app.command()
def version() -> None:
    """Print the version."""
    print_line(__version__)
