"""What a command works with: options that every command has, and the server that they mean."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand
from typer.main import get_command_from_info
from typer.models import CommandInfo

from .failures import Failure, reporting

if TYPE_CHECKING:
    from .remote import Remote

DEFAULT_URL: Final = "http://127.0.0.1:8080"
URL, KEY, BACKEND = "AGENT_SANDBOX_URL", "AGENT_SANDBOX_API_KEY", "AGENT_SANDBOX_BACKEND"
PLUGIN: Final = "AGENT_SANDBOX_KUBECTL_PLUGIN"
"""Set when we are `kubectl sandbox`."""
BACKENDS: Final = ("docker", "kubernetes", "memory")

Url = Annotated[str | None, typer.Option("--url", metavar="URL", help=f"The server. Default: {URL}, else {DEFAULT_URL}.")]
Key = Annotated[str | None, typer.Option("--api-key", metavar="KEY", help=f"The server's API key. Default: {KEY}, which other users cannot see.")]
Backend = Annotated[
    str | None, typer.Option("--backend", metavar="NAME", help="No server: work directly with docker, kubernetes or memory (ends with the command).")
]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", metavar="NAME", help="With --backend kubernetes: the namespace.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; errors too, on standard error.")]


@dataclass(frozen=True)
class Target:
    """The options as they were given, at the program or at the command."""

    url: str | None = None
    api_key: str | None = None
    backend: str | None = None
    namespace: str | None = None
    as_json: bool = False

    def filled(self, others: Target | None) -> Target:
        """With the others' values where this one has none."""
        given: dict[str, Any] = {one.name: getattr(self, one.name) or getattr(others, one.name, one.default) for one in fields(self)}
        return Target(**given)

    def backend_name(self) -> str | None:
        """The backend to work with directly; None: a server."""
        if self.url and self.backend:
            raise Failure("--url means a server and --backend none: give one of them", 2)
        if self.url:
            return None
        found = self.backend or (None if os.environ.get(URL) else "kubernetes" if os.environ.get(PLUGIN) else None)
        if found is not None and found not in BACKENDS:
            raise Failure(f"there is no backend {found!r}: use one of {', '.join(BACKENDS)}", 2)
        return found

    def server(self) -> tuple[str, str | None]:
        """Address and key of the server."""
        return (self.url or os.environ.get(URL) or DEFAULT_URL).rstrip("/"), self.api_key or os.environ.get(KEY) or None


def target_of(ctx: typer.Context) -> Target:
    """The target of a command."""
    found: Target = ctx.obj
    return found


@contextmanager
def connected(ctx: typer.Context) -> Iterator[Remote]:
    """The server of a command, or one that lives as long as the block. What goes wrong inside is told, and ends the program."""
    from .remote import Remote  # noqa: PLC0415 - loads an HTTP client

    target = target_of(ctx)
    with reporting(as_json=target.as_json), ExitStack() as stack:
        backend = target.backend_name()
        if backend is None:
            url, key = target.server()
        else:
            from .local import serving  # noqa: PLC0415

            url, key = stack.enter_context(serving(backend, target.namespace))
        yield stack.enter_context(Remote(url, key))


def _shared(url: Url = None, api_key: Key = None, backend: Backend = None, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """The options of every command."""


class Command(TyperCommand):
    """A command that has the shared options too; `target_of(ctx)` is what they say."""

    def __init__(self, name: str | None, *, params: list[Any] | None = None, **attributes: Any) -> None:
        shared = get_command_from_info(CommandInfo(name="shared", callback=_shared), pretty_exceptions_short=False, rich_markup_mode=None)
        self._shared = {param.name for param in shared.params}
        super().__init__(name, params=[*(params or []), *shared.params], **attributes)

    def invoke(self, ctx: Any) -> Any:
        """Takes the shared options out, which the function does not know."""
        given = {name: ctx.params.pop(name) for name in self._shared if name in ctx.params}
        ctx.obj = Target(**given).filled(ctx.obj if isinstance(ctx.obj, Target) else None)
        return super().invoke(ctx)
