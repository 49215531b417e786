"""exec."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import typer

from .failures import UNKNOWN, Failure
from .output import duration, note, print_json
from .remote import Json, Remote
from .target import Command, connected, target_of
from .values import SandboxId, parse_env, parse_seconds

app = typer.Typer(rich_markup_mode=None)
LOST: Final = "the connection ended before the command did: its outcome is unknown"


class ExecCommand(Command):
    """Options before and after the sandbox are ours; from the first other word, or from --, on they are the command's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the options first."""
        before, rest = self._split(ctx, args)
        if rest:
            between, words = self._split(ctx, rest[1:])
            args = [*before, *between, rest[0], "--", *words]
        return super().parse_args(ctx, args)

    def _split(self, ctx: Any, args: list[str]) -> tuple[list[str], list[str]]:
        found, _, _ = self.make_parser(ctx).parse_args(list(args))
        rest = [word for word in (found.get("sandbox"), *(found.get("command") or ())) if isinstance(word, str)]
        options = args[: len(args) - len(rest)]
        return options[:-1] if options[-1:] == ["--"] else options, rest


@app.command("exec", cls=ExecCommand, context_settings={"allow_interspersed_args": False})
def execute(
    ctx: typer.Context,
    sandbox: SandboxId,
    *,
    command: Annotated[list[str] | None, typer.Argument(metavar="[--] COMMAND [ARGUMENT...]", show_default=False)] = None,
    script: Annotated[str | None, typer.Option("--script", "-c", metavar="TEXT", help="A line for /bin/sh in place of COMMAND.")] = None,
    workdir: Annotated[str | None, typer.Option("--workdir", "-w", metavar="PATH", help="Where it runs. Default: /workspace.")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="NAME[=VALUE]", help="A variable; without a value it is taken from here.", show_default=False),
    ] = None,
    timeout: Annotated[
        int | None,
        typer.Option("--timeout", parser=parse_seconds, metavar="DURATION", help="Its end: 90s, 15m."),
    ] = None,
) -> None:
    """Run a command, with its output and its exit code.

    Options stand before COMMAND; what follows is the command's. The exit code is the command's, 125 when it is not known.
    """
    body = _body(command or [], script)
    body |= {"env": parse_env(env or [])} | ({"workdir": workdir} if workdir else {}) | ({"timeout_seconds": timeout} if timeout else {})
    with connected(ctx) as remote:
        try:
            if target_of(ctx).as_json:
                result = remote.call("POST", f"{_path(sandbox)}/exec", body=body)
                print_json(result)
                code = result["exit_code"]
            else:
                code = _run(remote, sandbox, body)
        except Failure as failure:
            failure.exit_code = UNKNOWN if failure.exit_code == 1 else failure.exit_code
            raise
    raise typer.Exit(code)


def _body(command: list[str], script: str | None) -> Json:
    words = command[1:]  # after the -- of ExecCommand
    if (script is None) == (not words):
        raise typer.BadParameter("give a command after the sandbox, or a line for the shell with -c")
    return {"command": words if script is None else script}


def _path(sandbox: str) -> str:
    return f"/v1/sandboxes/{sandbox}"


def _run(remote: Remote, sandbox: str, body: Json) -> int:
    """Follows a command that ends when we go."""
    with remote.receive("POST", f"{_path(sandbox)}/exec/stream", body=body) as answer:
        for event in remote.lines(answer):
            if event["type"] == "exit":
                return _finish(event)
            _write(event)
    raise Failure(LOST, UNKNOWN)


def _write(event: Json) -> None:
    stream = sys.stdout if event["type"] == "stdout" else sys.stderr
    stream.buffer.write(event["data"].encode(errors="surrogateescape"))
    stream.flush()


def _finish(event: Json) -> int:
    if event.get("timed_out"):
        note(f"sandboxctl: it was killed at its timeout, after {duration(event['duration_ms'] / 1000)}: give a longer --timeout")
    code: int = event["exit_code"]
    return code
