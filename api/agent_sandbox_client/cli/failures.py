"""How a command ends that could not do its work: one line on standard error, and an exit code.

1    the work was refused or failed
2    the command line is wrong
125  exec: the command's own exit code is not known (it did not start, or the connection was lost)
130  interrupted
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import typer

UNKNOWN: Final = 125
INTERRUPTED: Final = 130


class Failure(Exception):
    """What happened, and what to do next."""

    def __init__(self, message: str, exit_code: int = 1, *, code: str = "failed", status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
        self.code = code
        self.status = status


@contextmanager
def reporting(*, as_json: bool) -> Iterator[None]:
    """Tells a failure to the user and ends the program with its exit code."""
    try:
        yield
    except Failure as failure:
        if as_json:
            error = {"code": failure.code, "message": failure.message} | ({"status": failure.status} if failure.status else {})
            line = json.dumps({"error": error}, ensure_ascii=False)
        else:
            line = f"sandboxctl: {failure.message}"
        sys.stdout.flush()
        sys.stderr.write(line + "\n")
        raise typer.Exit(failure.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
