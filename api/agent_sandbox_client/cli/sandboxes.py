"""create, list, get, timeout, delete, rollback, fork."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .failures import Failure
from .output import distance, moment, note, print_facts, print_json, print_line, print_lines, print_table, show
from .remote import Json, Remote
from .target import Command, connected, target_of
from .values import Cpus, Memory, Quiet, SandboxId, SnapshotId, Timeout, complete_sandbox, parse_env, parse_pairs, parse_seconds

app = typer.Typer(rich_markup_mode=None)
Labels = Annotated[list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="May be given more than once.", show_default=False)]


@app.command(cls=Command)
def create(
    ctx: typer.Context,
    *,
    image: Annotated[str | None, typer.Option("--image", "-i", metavar="IMAGE", help="Default: the server's.")] = None,
    cpus: Cpus = None,
    memory: Memory = None,
    pids: Annotated[int | None, typer.Option("--pids", metavar="NUMBER", help="Most processes and threads.")] = None,
    network: Annotated[bool, typer.Option("--network/--no-network", help="Outbound access.")] = False,
    writable: Annotated[bool, typer.Option("--writable", help="Make everything writable, and not /workspace and /tmp alone.")] = False,
    timeout: Timeout = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            "-e",
            metavar="NAME[=VALUE]",
            help="A variable; without a value it is taken from here. May be given more than once.",
            show_default=False,
        ),
    ] = None,
    label: Labels = None,
) -> None:
    """Create a sandbox and print its id."""
    body: dict[str, Any] = {
        "image": image,
        "cpus": cpus,
        "memory_mb": memory,
        "pids_limit": pids,
        "network": network,
        "read_only_rootfs": not writable,
        "timeout_seconds": timeout,
        "env": parse_env(env or []),
        "labels": parse_pairs(label or [], "label") or None,
    }
    with connected(ctx) as remote:
        made = remote.call("POST", "/v1/sandboxes", body={name: value for name, value in body.items() if value is not None}, once=True)
        show(made, target_of(ctx).as_json, lambda: print_line(made["id"]))


@app.command("list", cls=Command)
def list_all(
    ctx: typer.Context,
    label: Labels = None,
    status: Annotated[str | None, typer.Option("--status", metavar="STATUS", help="running or stopped.")] = None,
    quiet: Quiet = False,
) -> None:
    """List sandboxes."""
    with connected(ctx) as remote:
        found = remote.call(
            "GET", "/v1/sandboxes", label=[f"{name}={value}" for name, value in parse_pairs(label or [], "label").items()], status=status
        )
        if target_of(ctx).as_json:
            print_json(found)
        elif quiet:
            for one in found["sandboxes"]:
                print_line(one["id"])
        else:
            rows = [
                (one["id"], one["status"], one.get("reason") or "", one["image"], distance(one["created_at"]), distance(one["expires_at"]))
                for one in found["sandboxes"]
            ]
            print_table(("id", "status", "reason", "image", "created", "expires"), rows)


@app.command(cls=Command)
def get(ctx: typer.Context, sandbox: SandboxId) -> None:
    """Show a sandbox."""
    with connected(ctx) as remote:
        found = remote.call("GET", f"/v1/sandboxes/{sandbox}")
        show(found, target_of(ctx).as_json, lambda: describe(found))


def describe(found: Json) -> None:
    """The facts of a sandbox, for people."""
    last = found.get("last_termination")
    print_facts(
        [
            ("id", found["id"]),
            ("status", found["status"] + (f" ({found['reason']})" if found.get("reason") else "")),
            ("message", found.get("message")),
            ("image", found["image"]),
            ("cpus", found["cpus"]),
            ("memory", f"{found['memory_mb']} MiB"),
            ("processes", f"at most {found['pids_limit']}"),
            ("network", "open" if found["network"] else "none"),
            ("root", "read-only" if found["read_only_rootfs"] else "writable"),
            ("created", moment(found["created_at"])),
            ("expires", moment(found["expires_at"])),
            ("started", f"{found['incarnation']} times" if found.get("incarnation", 1) > 1 else None),
            ("last end", f"{last['reason']}: {last['message']} ({distance(last['time'])})" if last else None),
            ("snapshot", found.get("source_snapshot_id")),
            ("labels", ", ".join(f"{name}={value}" for name, value in found.get("labels", {}).items())),
        ]
    )


@app.command(cls=Command)
def timeout(
    ctx: typer.Context,
    sandbox: SandboxId,
    duration: Annotated[int, typer.Argument(parser=parse_seconds, metavar="DURATION", help="From now: 90s, 15m, 2h.", show_default=False)],
) -> None:
    """Set how long a sandbox lives, counted from now."""
    with connected(ctx) as remote:
        found = remote.call("POST", f"/v1/sandboxes/{sandbox}/timeout", body={"timeout_seconds": duration})
        show(found, target_of(ctx).as_json, lambda: print_line(f"{found['id']} expires {moment(found['expires_at'])}"))


@app.command(cls=Command)
def delete(
    ctx: typer.Context,
    sandboxes: Annotated[list[str], typer.Argument(metavar="SANDBOX...", help="Ids.", autocompletion=complete_sandbox, show_default=False)],
    missing_ok: Annotated[bool, typer.Option("--missing-ok", help="One that does not exist is no error.")] = False,
) -> None:
    """Delete sandboxes; their snapshots stay."""
    with connected(ctx) as remote:
        deleted, failures = delete_each(remote, "/v1/sandboxes", sandboxes, missing_ok=missing_ok)
        show({"deleted": deleted}, target_of(ctx).as_json, lambda: print_lines(f"deleted {one}" for one in deleted))
        finish(failures)


def delete_each(remote: Remote, path: str, ids: list[str], *, missing_ok: bool) -> tuple[list[str], list[Failure]]:
    """Deletes what can be deleted; the rest is told at the end."""
    deleted, failures = [], []
    for one in ids:
        try:
            remote.call("DELETE", f"{path}/{one}")
            deleted.append(one)
        except Failure as failure:
            if not (missing_ok and failure.code == "not_found"):
                failures.append(failure)
    return deleted, failures


def finish(failures: list[Failure]) -> None:
    """Raises the last failure, having told the others."""
    for failure in failures[:-1]:
        note(f"sandboxctl: {failure.message}")
    if failures:
        raise failures[-1]


@app.command(cls=Command)
def rollback(ctx: typer.Context, sandbox: SandboxId, snapshot: SnapshotId) -> None:
    """Put a snapshot's files back into a sandbox.

    All its processes end. Id, expiry and name stay as they are.
    """
    with connected(ctx) as remote:
        found = remote.call("POST", f"/v1/sandboxes/{sandbox}/rollback", body={"snapshot_id": snapshot})
        show(found, target_of(ctx).as_json, lambda: print_line(f"{found['id']} is as in {snapshot}"))


@app.command(cls=Command)
def fork(
    ctx: typer.Context,
    snapshot: SnapshotId,
    *,
    count: Annotated[int, typer.Option("--count", "-c", min=1, max=100, help="How many.")] = 1,
    timeout: Timeout = None,
    cpus: Cpus = None,
    memory: Memory = None,
    network: Annotated[
        bool | None, typer.Option("--network/--no-network", help="Outbound access. Default: the source's.", show_default=False)
    ] = None,
) -> None:
    """Create sandboxes from a snapshot and print their ids."""
    body = {"timeout_seconds": timeout, "cpus": cpus, "memory_mb": memory, "network": network}
    body = {name: value for name, value in body.items() if value is not None}
    with connected(ctx) as remote:
        made = []
        try:
            for _ in range(count):
                made.append(remote.call("POST", f"/v1/snapshots/{snapshot}/fork", body=body, once=True))
                if not target_of(ctx).as_json:
                    print_line(made[-1]["id"])
        finally:
            if target_of(ctx).as_json:
                print_json({"sandboxes": made} if count > 1 else made[0] if made else {"sandboxes": []})
