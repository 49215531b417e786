"""exec, ps, logs, kill."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import threading
from typing import Annotated, Any, Final, NoReturn

import typer

from .failures import UNKNOWN, Failure
from .output import distance, duration, note, print_json, print_line, print_table, show
from .remote import CHUNK, Json, Remote
from .target import Command, connected, target_of
from .values import SandboxId, parse_env, parse_seconds

app = typer.Typer(rich_markup_mode=None)
PROCESS_ID_LENGTH: Final = 32
SHELL: Final = ["/bin/sh", "-c", "if command -v bash >/dev/null 2>&1; then exec bash; else exec sh; fi"]
ProcessId = Annotated[str, typer.Argument(metavar="PROCESS", help="Its id, the beginning of it, or its tag; see ps.", show_default=False)]
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
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[--] COMMAND [ARGUMENT...]", help="With -t the default is a shell.", show_default=False)
    ] = None,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Pass standard input on.")] = False,
    tty: Annotated[bool, typer.Option("--tty", "-t", help="In a terminal, as for a shell; with -i.")] = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="In the background; prints the id for logs and kill.")] = False,
    script: Annotated[str | None, typer.Option("--script", "-c", metavar="TEXT", help="A line for /bin/sh in place of COMMAND.")] = None,
    workdir: Annotated[str | None, typer.Option("--workdir", "-w", metavar="PATH", help="Where it runs. Default: /workspace.")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="NAME[=VALUE]", help="A variable; without a value it is taken from here.", show_default=False),
    ] = None,
    timeout: Annotated[
        int | None,
        typer.Option(
            "--timeout", parser=parse_seconds, metavar="DURATION", help="Its end: 90s, 15m. Default: the server's; none with -i, -t and -d."
        ),
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", metavar="TEXT", help="With -d: a name for it.")] = None,
) -> None:
    """Run a command, with its output and its exit code, or a shell with -it.

    Options stand before COMMAND; what follows is the command's. The exit code is the command's, 125 when it is not known.
    """
    body = _body(command or [], script, tty=tty)
    body |= {"env": parse_env(env or [])} | ({"workdir": workdir} if workdir else {}) | ({"timeout_seconds": timeout} if timeout else {})
    if detach and (interactive or tty):
        raise typer.BadParameter("-d runs in the background: it goes without -i and -t")
    if tty and not sys.stdin.isatty():
        raise typer.BadParameter("-t needs a terminal as standard input: leave it out")
    as_json = target_of(ctx).as_json
    with connected(ctx) as remote:
        try:
            if detach:
                made = remote.call("POST", f"{_path(sandbox)}/processes", body=body | ({"tag": tag} if tag else {}))
                show(made, as_json, lambda: print_line(made["id"]))
                return
            if tty:
                from .terminal import run_in_terminal  # noqa: PLC0415 - loads a WebSocket client

                code = run_in_terminal(remote, sandbox, body)
            elif interactive:
                code = _run_with_input(remote, sandbox, body)
            elif as_json:
                result = remote.call("POST", f"{_path(sandbox)}/exec", body=body, once=True)
                print_json(result)
                code = result["exit_code"]
            else:
                code = _run(remote, sandbox, body)
        except Failure as failure:
            failure.exit_code = UNKNOWN if failure.exit_code == 1 else failure.exit_code
            raise
    raise typer.Exit(code)


def _body(command: list[str], script: str | None, *, tty: bool) -> Json:
    words = command[1:]  # after the -- of ExecCommand
    if (script is None) == (not words) and not (tty and script is None):
        raise typer.BadParameter("give a command after the sandbox, or a line for the shell with -c")
    return {"command": script if script is not None else words or SHELL}


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


def _run_with_input(remote: Remote, sandbox: str, body: Json) -> int:
    """Follows a command that reads our standard input. It is ours, so it ends with us."""
    # A process that we start outlives its client: whatever ends us must end it.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    process = f"{_path(sandbox)}/processes/{remote.call('POST', f'{_path(sandbox)}/processes', body=body | {'stdin': True})['id']}"
    try:
        threading.Thread(target=_feed, args=(remote, process), name="standard input", daemon=True).start()
        with remote.receive("GET", f"{process}/output", follow=True) as answer:
            for event in remote.lines(answer):
                if event["type"] == "exit":
                    return _finish(event)
                if event["type"] == "gap":
                    note("sandboxctl: output was lost here, it came faster than it was read")
                else:
                    _write(event)
        raise Failure(LOST, UNKNOWN)
    finally:
        with contextlib.suppress(Failure):
            remote.call("DELETE", process)


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _feed(remote: Remote, process: str) -> None:
    """Sends our standard input. A command that reads no more is no error."""
    sent = 0
    source = sys.stdin.fileno()
    with contextlib.suppress(Failure):
        while block := os.read(source, CHUNK):
            remote.send("PUT", f"{process}/stdin", block, offset=sent)
            sent += len(block)
        remote.send("PUT", f"{process}/stdin", b"", offset=sent, eof=True)


@app.command(cls=Command)
def ps(ctx: typer.Context, sandbox: SandboxId) -> None:
    """List background processes."""
    with connected(ctx) as remote:
        found = remote.call("GET", f"{_path(sandbox)}/processes")
        rows = [
            (one["id"][:12], one.get("tag") or "", _state(one), str(one.get("pid") or ""), distance(one["started_at"]), _words(one["command"]))
            for one in found["processes"]
        ]
        show(found, target_of(ctx).as_json, lambda: print_table(("id", "tag", "state", "pid", "started", "command"), rows))


def _state(process: Json) -> str:
    if process["state"] == "running":
        return "running"
    reason = process.get("reason")
    return f"exited {process['exit_code']}" + (f" ({reason.replace('_', ' ')})" if reason not in (None, "exited") else "")


def _words(command: str | list[str]) -> str:
    text = command if isinstance(command, str) else shlex.join(command)
    return " ".join(text.split())


def find_process(remote: Remote, sandbox: str, given: str) -> str:
    """The whole id of a process of which the beginning or the tag was given."""
    if len(given) == PROCESS_ID_LENGTH:
        return given
    processes = remote.call("GET", f"{_path(sandbox)}/processes")["processes"]
    found = [one["id"] for one in processes if one.get("tag") == given] or [one["id"] for one in processes if one["id"].startswith(given)]
    if len(found) != 1:
        what = "no process" if not found else f"{len(found)} processes"
        raise Failure(f"{what} of {sandbox} can be meant by {given!r}: see `sandboxctl ps {sandbox}`", code="not_found" if not found else "ambiguous")
    return str(found[0])


@app.command(cls=Command)
def logs(
    ctx: typer.Context,
    sandbox: SandboxId,
    process: ProcessId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it ends; Ctrl-C leaves it running.")] = False,
    after: Annotated[int, typer.Option("--after", min=0, metavar="NUMBER", help="Only what came after this number (`seq` in --json).")] = 0,
) -> None:
    """Print the output of a background process: what is still kept of it."""
    as_json = target_of(ctx).as_json
    with connected(ctx) as remote:
        path = f"{_path(sandbox)}/processes/{find_process(remote, sandbox, process)}/output"
        ended = False
        with remote.receive("GET", path, follow=follow, after=after) as answer:
            for event in remote.lines(answer):
                ended = ended or event["type"] == "exit"
                if as_json:
                    print_event(event)
                elif event["type"] == "gap":
                    note("sandboxctl: what came before this is not kept any more")
                elif event["type"] != "exit":
                    _write(event)
        if follow and not ended:
            raise Failure("the connection ended before the process did: go on with --follow --after", code="connection_lost")


def print_event(event: Json) -> None:
    """One object on one line."""
    sys.stdout.write(json.dumps(event, ensure_ascii=False) + "\n")
    sys.stdout.flush()


@app.command(cls=Command)
def kill(
    ctx: typer.Context,
    sandbox: SandboxId,
    process: ProcessId,
    name: Annotated[str, typer.Option("--signal", "-s", metavar="NAME", help="The signal; KILL reaches all that it started.")] = "KILL",
    tree: Annotated[bool | None, typer.Option("--tree/--no-tree", help="Also what it started. Default: with KILL.", show_default=False)] = None,
) -> None:
    """End a background process and all that it started. Its output stays readable."""
    whole = name.upper().removeprefix("SIG") in ("KILL", "9") if tree is None else tree
    with connected(ctx) as remote:
        path = f"{_path(sandbox)}/processes/{find_process(remote, sandbox, process)}"
        found = remote.call("POST", f"{path}/signal", body={"signal": int(name) if name.isdigit() else name.upper(), "tree": whole})
        show(found, target_of(ctx).as_json, lambda: print_line(f"{found['id'][:12]} {_state(found)}"))
