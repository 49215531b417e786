"""Structured logs on standard error, a JSON object a line (or plain text). What is logged is said explicitly: never a header, a body, a query or a value."""

from __future__ import annotations

import json
import logging
import traceback
from contextvars import ContextVar
from typing import Any, Final, Literal, TextIO

from agent_sandbox_core.logs import install, moment

PACKAGES: Final = ("agent_sandbox_api", "agent_sandbox_core", "agent_sandbox_kube")
# Loggers of the libraries below us write headers and URLs at debug level; uvicorn prints tracebacks of errors that middleware.py has told already.
QUIET: Final = {"uvicorn": logging.CRITICAL}

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that the current task works for."""

Format = Literal["json", "text"]


class _Formatter(logging.Formatter):
    def __init__(self, kind: Format) -> None:
        super().__init__()
        self._kind = kind

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if current := request_id.get():
            fields["request_id"] = current
        fields |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            fields |= describe(record.exc_info[1])
        if self._kind == "json":
            return json.dumps(fields, ensure_ascii=True, default=str)
        more = " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("time", "level", "logger", "message"))
        return f"{fields['time']} {fields['level']:<7} {fields['message']} {more}".rstrip()


def describe(error: BaseException) -> dict[str, Any]:
    """A fault for the log: its type and where it came from. Its text only where it cannot hold a caller's data."""
    frames = traceback.extract_tb(error.__traceback__)
    told: dict[str, Any] = {"error": type(error).__name__, "stack": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]}
    if isinstance(error, OSError) and error.strerror:
        told["reason"] = error.strerror
    return told


def configure_logging(level: str, kind: Format, stream: TextIO | None = None) -> None:
    """Sends our loggers to `stream` (standard error) at `level`; others stay at warnings."""
    install(_Formatter(kind), level, PACKAGES, stream)
    for name, at in QUIET.items():
        logging.getLogger(name).setLevel(at)
