"""snapshot create, list, get, delete."""

from __future__ import annotations

from typing import Annotated

import typer

from .output import distance, moment, print_facts, print_json, print_line, print_lines, print_table, show, size
from .sandboxes import delete_each, finish
from .target import Command, connected, target_of
from .values import Quiet, SandboxId, SnapshotId, complete_sandbox, complete_snapshot

app = typer.Typer(name="snapshot", help="Take, list, show and delete snapshots.", no_args_is_help=True, rich_markup_mode=None)
Name = Annotated[str | None, typer.Option("--name", metavar="TEXT", help="A name for people, at most 128 characters.")]


@app.command(cls=Command)
def create(ctx: typer.Context, sandbox: SandboxId, name: Name = None) -> None:
    """Take a snapshot of a sandbox's files and print its id. What runs there is paused meanwhile."""
    with connected(ctx) as remote:
        made = remote.call("POST", f"/v1/sandboxes/{sandbox}/snapshots", body={"name": name})
        show(made, target_of(ctx).as_json, lambda: print_line(made["id"]))


@app.command("list", cls=Command)
def list_all(
    ctx: typer.Context,
    sandbox: Annotated[
        str | None, typer.Option("--sandbox", "-s", metavar="SANDBOX", help="Those of one sandbox.", autocompletion=complete_sandbox)
    ] = None,
    quiet: Quiet = False,
) -> None:
    """List snapshots."""
    with connected(ctx) as remote:
        found = remote.call("GET", "/v1/snapshots", sandbox_id=sandbox)
        if target_of(ctx).as_json:
            print_json(found)
        elif quiet:
            for one in found["snapshots"]:
                print_line(one["id"])
        else:
            rows = [
                (
                    one["id"],
                    " ".join((one["name"] or "").split()),
                    one["sandbox_id"],
                    size(one["size_bytes"]),
                    one.get("file_count") or "",
                    distance(one["created_at"]),
                )
                for one in found["snapshots"]
            ]
            print_table(("id", "name", "sandbox", "size", "files", "taken"), rows)


@app.command(cls=Command)
def get(ctx: typer.Context, snapshot: SnapshotId) -> None:
    """Show a snapshot."""
    with connected(ctx) as remote:
        found = remote.call("GET", f"/v1/snapshots/{snapshot}")
        facts = [
            ("id", found["id"]),
            ("name", found["name"]),
            ("sandbox", found["sandbox_id"]),
            ("image", found["image"]),
            ("size", size(found["size_bytes"])),
            ("files", found.get("file_count")),
            ("taken", moment(found["created_at"])),
            ("digest", found.get("digest")),
            ("parent", found.get("parent_id")),
        ]
        show(found, target_of(ctx).as_json, lambda: print_facts(facts))


@app.command(cls=Command)
def delete(
    ctx: typer.Context,
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT...", help="Ids.", autocompletion=complete_snapshot, show_default=False)],
    missing_ok: Annotated[bool, typer.Option("--missing-ok", help="One that does not exist is no error.")] = False,
) -> None:
    """Delete snapshots. Sandboxes that were forked from them live on."""
    with connected(ctx) as remote:
        deleted, failures = delete_each(remote, "/v1/snapshots", snapshots, missing_ok=missing_ok)
        show({"deleted": deleted}, target_of(ctx).as_json, lambda: print_lines(f"deleted {one}" for one in deleted))
        finish(failures)
