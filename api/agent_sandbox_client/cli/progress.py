"""A bar on standard error for what takes long, when somebody looks at it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Something that is told how far it is."""

    def advance(self, count: int) -> None:
        """So many bytes more."""


class _Nothing:
    def advance(self, count: int) -> None:
        """Nobody looks."""


@contextmanager
def progress(what: str | None, total: int | None) -> Iterator[Progress]:
    """A bar for `total` bytes; without a terminal, or without a name, nothing is shown."""
    if what is None or not sys.stderr.isatty():
        yield _Nothing()
        return
    from rich.console import Console  # noqa: PLC0415 - slow to load
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn  # noqa: PLC0415
    from rich.progress import Progress as Bars  # noqa: PLC0415

    with Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bars:
        task = bars.add_task(what, total=total or None)

        class _Bar:
            def advance(self, count: int) -> None:
                bars.update(task, advance=count)

        yield _Bar()
