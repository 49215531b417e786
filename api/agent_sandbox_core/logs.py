"""Where the logs of all our processes go: standard error. What a line looks like is each program's own."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable
from typing import TextIO


def moment(record: logging.LogRecord) -> str:
    """When it was said: RFC 3339 in UTC, to the millisecond."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


def install(formatter: logging.Formatter, level: str, packages: Iterable[str], stream: TextIO | None = None) -> None:
    """Sends the loggers of `packages` to `stream` (standard error) at `level`; others stay at warnings."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in packages:
        logging.getLogger(name).setLevel(level.upper())
