"""snapshot create, list, get, delete, export, import."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from .failures import Failure
from .output import distance, moment, note, print_facts, print_json, print_line, print_lines, print_table, show, size
from .progress import Progress, progress
from .remote import CHUNK, Remote
from .sandboxes import delete_each, finish
from .target import Command, connected, target_of
from .values import Quiet, SandboxId, SnapshotId, complete_sandbox, complete_snapshot

app = typer.Typer(name="snapshot", help="Take, list, delete, export and import snapshots.", no_args_is_help=True, rich_markup_mode=None)
Name = Annotated[str | None, typer.Option("--name", metavar="TEXT", help="A name for people, at most 128 characters.")]


@app.command(cls=Command)
def create(ctx: typer.Context, sandbox: SandboxId, name: Name = None) -> None:
    """Take a snapshot of a sandbox's files and print its id. What runs there is paused meanwhile."""
    with connected(ctx) as remote:
        made = remote.call("POST", f"/v1/sandboxes/{sandbox}/snapshots", body={"name": name}, once=True)
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


@app.command("export", cls=Command)
def export_one(
    ctx: typer.Context,
    snapshot: SnapshotId,
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="Where to; - is standard output. Default: SNAPSHOT.tar.zst.", show_default=False)
    ] = None,
) -> None:
    """Write a snapshot to a file: a tar with zstd, which every installation can import."""
    with connected(ctx) as remote:
        if file == "-":
            digest, count = download(remote, snapshot, sys.stdout.buffer, None)
        else:
            target = Path(file or f"{snapshot}.tar.zst")
            partial = target.with_name(f".{target.name}.part")
            try:
                with partial.open("wb") as sink:
                    digest, count = download(remote, snapshot, sink, str(target))
                partial.replace(target)
            except OSError as error:
                raise Failure(f"{target} cannot be written ({error.strerror or error}): give another FILE") from None
            finally:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
            facts = {"snapshot_id": snapshot, "file": str(target), "size_bytes": count, "digest": digest}
            show(facts, target_of(ctx).as_json, lambda: print_line(f"{target}  {size(count)}  {digest}"))


def download(remote: Remote, snapshot: str, sink: BinaryIO, shown: str | None) -> tuple[str, int]:
    """Copies a snapshot's file and checks what came against its digest, which is returned with the size."""
    digest, count = hashlib.sha256(), 0
    with remote.receive("GET", f"/v1/snapshots/{snapshot}/content") as answer, progress(shown, int(answer.headers.get("content-length", 0))) as bar:
        for chunk in remote.chunks(answer):
            sink.write(chunk)
            digest.update(chunk)
            count += len(chunk)
            bar.advance(len(chunk))
        promised = answer.headers.get("x-snapshot-digest")
    found = f"sha256:{digest.hexdigest()}"
    if promised != found:
        raise Failure(f"what came of {snapshot} is not what the server has ({found}, not {promised}): nothing was kept, try again", code="damaged")
    return found, count


@app.command("import", cls=Command)
def import_one(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="From where; - is standard input.", show_default=False)],
    name: Name = None,
) -> None:
    """Bring a snapshot's file in and print its id. It is verified before it is listed."""
    with connected(ctx) as remote:
        headers = {"Content-Type": "application/zstd"}
        if file == "-":
            made = remote.send("POST", "/v1/snapshots/import", read_blocks(sys.stdin.buffer, None), headers=headers, name=name)
        else:
            path = Path(file)
            try:
                with path.open("rb") as source, progress(str(path), path.stat().st_size) as bar:
                    headers |= {"Content-Length": str(path.stat().st_size)}
                    made = remote.send("POST", "/v1/snapshots/import", read_blocks(source, bar), headers=headers, name=name)
            except OSError as error:
                raise Failure(f"{path} cannot be read ({error.strerror or error})") from None
        show(made, target_of(ctx).as_json, lambda: print_line(made["id"]))
        if not target_of(ctx).as_json:
            note(f"{made['image']}, {size(made['size_bytes'])}, taken {distance(made['created_at'])}")


def read_blocks(source: BinaryIO, bar: Progress | None) -> Iterator[bytes]:
    """The bytes of a file."""
    while block := source.read(CHUNK):
        if bar is not None:
            bar.advance(len(block))
        yield block
