"""The log: a line for each thing done to the cluster. Never a spec, an environment or a Secret."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final, Literal

PACKAGES: Final = ("agent_sandbox_operator", "agent_sandbox_kube", "agent_sandbox_core")


class _Formatter(logging.Formatter):
    def __init__(self, kind: Literal["text", "json"]) -> None:
        super().__init__()
        self._kind = kind

    def format(self, record: logging.LogRecord) -> str:
        moment = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += "\n" + self.formatException(record.exc_info)
        if self._kind == "json":
            return json.dumps({"time": moment, "level": record.levelname.lower(), "logger": record.name, "message": text}, ensure_ascii=True)
        return f"{moment} {record.levelname.lower():<7} {text}"


def configure_logging(level: str, kind: Literal["text", "json"]) -> None:
    """Sends our loggers to standard error at `level`; libraries stay at warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(kind))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in PACKAGES:
        logging.getLogger(name).setLevel(level.upper())
