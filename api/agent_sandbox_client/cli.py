"""`sandboxctl`: the command line. Imports are late, so that each command loads only what it needs."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Annotated, NoReturn

import typer
from agent_sandbox_core.version import __version__

app = typer.Typer(
    name="sandboxctl", help="Sandboxes for AI agents' code.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _server() -> ModuleType:
    # By name: the client's layer must not depend on the server's, and a client may be installed without it.
    try:
        return importlib.import_module("agent_sandbox_api.serve")
    except ModuleNotFoundError as error:
        _fail(f"the server cannot be loaded ({error}): install the whole package")


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"sandboxctl: {message}\n")
    raise typer.Exit(1)


@app.command()
def serve(
    backend: Annotated[
        str | None, typer.Option(help="docker, kubernetes, memory or auto; default: AGENT_SANDBOX_BACKEND, else what is found")
    ] = None,
) -> None:
    """Run the HTTP API. Settings come from the environment (AGENT_SANDBOX_*)."""
    server = _server()
    try:
        server.serve(backend)
    except server.StartError as error:
        _fail(str(error))


@app.command()
def openapi() -> None:
    """Print the OpenAPI schema of the HTTP API."""
    _server().print_schema()


@app.command()
def version() -> None:
    """Print the version."""
    sys.stdout.write(f"{__version__}\n")


def main() -> None:
    """The entry point."""
    app()
