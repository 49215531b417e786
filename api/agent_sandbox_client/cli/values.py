"""Values of options: durations, sizes, variables, ids."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Annotated, Any, Final

import typer

from .failures import Failure
from .target import Target

_SIZES: Final = {"": 1, "m": 1, "mi": 1, "mb": 1, "g": 1024, "gi": 1024, "gb": 1024}
COMPLETION_SECONDS: Final = 2.0


def parse_seconds(text: str) -> int:
    """90, 90s, 15m, 2h, 1h30m, 1d as seconds."""
    found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text.strip().lower())
    if not text.strip() or found is None:
        raise typer.BadParameter(f"{text!r} is no duration: write 90, 90s, 15m, 2h or 1d")
    return sum(int(number or 0) * unit for number, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True))


def parse_memory(text: str) -> int:
    """512, 512Mi, 2Gi as MiB."""
    found = re.fullmatch(r"(\d+)([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _SIZES:
        raise typer.BadParameter(f"{text!r} is no size: write 512, 512Mi or 2Gi")
    return int(found[1]) * _SIZES[found[2]]


def parse_pairs(given: Iterable[str], what: str) -> dict[str, str]:
    """NAME=VALUE pairs."""
    pairs = {}
    for one in given:
        name, separator, value = one.partition("=")
        if not separator or not name:
            raise typer.BadParameter(f"{one!r} is no {what}: write NAME=VALUE")
        pairs[name] = value
    return pairs


def parse_env(given: Iterable[str]) -> dict[str, str]:
    """NAME=VALUE pairs; NAME alone takes the value from this environment, where no list of processes shows it."""
    pairs = {}
    for one in given:
        name, separator, value = one.partition("=")
        if not separator and name not in os.environ:
            raise typer.BadParameter(f"{name} is not set here: write {name}=VALUE, or set it")
        pairs[name] = value if separator else os.environ[name]
    return pairs


def _complete(ctx: typer.Context, incomplete: str, path: str, key: str) -> list[tuple[str, str]]:
    """Ids that begin so. Completion is never the place for an error or a long wait."""
    import httpx  # noqa: PLC0415 - slow to load

    parent = ctx.find_root()
    target = Target(**{name: value for name, value in parent.params.items() if name in {"url", "api_key", "backend"}})
    try:
        if target.backend_name() is not None:
            return []
        url, secret = target.server()
        answer = httpx.get(f"{url}{path}", headers={"Authorization": f"Bearer {secret}"} if secret else {}, timeout=COMPLETION_SECONDS)
        found: list[dict[str, Any]] = answer.json()[key]
        return [(one["id"], str(one.get("name") or one.get("image") or "")) for one in found if one["id"].startswith(incomplete)]
    except (Failure, httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return []


def complete_sandbox(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of sandboxes, for the shell."""
    return _complete(ctx, incomplete, "/v1/sandboxes", "sandboxes")


def complete_snapshot(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of snapshots, for the shell."""
    return _complete(ctx, incomplete, "/v1/snapshots", "snapshots")


SandboxId = Annotated[str, typer.Argument(metavar="SANDBOX", help="The sandbox's id.", autocompletion=complete_sandbox, show_default=False)]
SnapshotId = Annotated[str, typer.Argument(metavar="SNAPSHOT", help="The snapshot's id.", autocompletion=complete_snapshot, show_default=False)]
Timeout = Annotated[
    int | None,
    typer.Option("--timeout", "-t", parser=parse_seconds, metavar="DURATION", help="How long it lives: 90s, 15m, 2h. Default: the server's."),
]
Memory = Annotated[int | None, typer.Option("--memory", "-m", parser=parse_memory, metavar="SIZE", help="Memory limit: 512Mi, 2Gi.")]
Cpus = Annotated[float | None, typer.Option("--cpus", metavar="NUMBER", help="CPU limit: 0.5, 2.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print ids only.")]
