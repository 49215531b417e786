"""doctor: looks at everything that a sandbox needs, and says what to fix."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from .checks import Check, check_cluster, check_docker, check_server
from .output import note, print_json, print_table
from .target import Command, target_of

app = typer.Typer(rich_markup_mode=None)
PARTS: Final = ("server", "docker", "cluster")


@app.command(cls=Command)
def doctor(
    ctx: typer.Context,
    part: Annotated[
        list[str] | None, typer.Argument(metavar="[PART...]", help=f"{', '.join(PARTS)}; default: what is set up here.", show_default=False)
    ] = None,
) -> None:
    """Check the server, the engine and the cluster, and say what to fix. The exit code is 1 when something is broken."""
    for name in part or []:
        if name not in PARTS:
            raise typer.BadParameter(f"there is no part {name!r}: {', '.join(PARTS)}")
    target = target_of(ctx)
    found: list[Check] = []
    for name, look in (("server", check_server), ("docker", check_docker), ("cluster", check_cluster)):
        if not part or name in part:
            found += look(target, asked=bool(part))
    if target.as_json:
        print_json({"checks": [one.to_json() for one in found]})
    else:
        print_table(("check", "state", "found"), [(one.name, one.state, one.found) for one in found])
        for one in found:
            if one.fix:
                note(f"{one.name}: {one.fix}")
    if any(one.state == "failed" for one in found):
        raise typer.Exit(1)
