"""What commands print: tables and facts for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

COLOURS: Final = {
    "running": "green", "ready": "green", "ok": "green",
    "stopped": "yellow", "warning": "yellow",
    "exited": "dim", "failed": "red", "skipped": "dim",
}  # fmt: skip


def print_json(value: Any) -> None:
    """One JSON document."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_line(text: str) -> None:
    """One line."""
    sys.stdout.write(text + "\n")


def print_lines(texts: Iterable[str]) -> None:
    """Lines."""
    for text in texts:
        print_line(text)


def note(text: str) -> None:
    """A remark beside the output."""
    sys.stderr.write(text + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table: with colours on a terminal, else plain columns that nothing cuts."""
    rows = [[str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415 - slow to load
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column.upper(), overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell, style=COLOURS.get(cell.lower(), "")) for cell in row))
        Console(highlight=False).print(table)
        return
    lines = [[column.upper() for column in columns], *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    for line in lines:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def print_facts(facts: Iterable[tuple[str, Any]]) -> None:
    """Names and values, one a line; what is empty is left out."""
    shown = [(name, value) for name, value in facts if value not in (None, "", {}, [])]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        print_line(f"{name.ljust(width)}  {value}")


def show(value: Any, as_json: bool, text: Callable[[], None]) -> None:
    """JSON, or text for people."""
    if as_json:
        print_json(value)
    else:
        text()


def moment(text: str | None) -> str:
    """A time, and how far away it is."""
    return f"{text} ({distance(text)})" if text else ""


def distance(text: str | None) -> str:
    """How far a time is away: `5m ago`, `in 2h`."""
    if not text:
        return ""
    seconds = (datetime.fromisoformat(text) - datetime.now(UTC)).total_seconds()
    size = duration(abs(seconds))
    return f"in {size}" if seconds > 0 else f"{size} ago"


def duration(seconds: float) -> str:
    """A duration in its largest unit, two when they are small: 45s, 12m, 3h, 2d."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds)}s"


def size(count: int | None) -> str:
    """A number of bytes."""
    if count is None:
        return ""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
