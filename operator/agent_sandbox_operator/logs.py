"""The log: a line for each thing done to the cluster. Never a spec, an environment or a Secret."""

from __future__ import annotations

import json
import logging
from typing import Final, Literal

from agent_sandbox_core.logs import install, moment

PACKAGES: Final = ("agent_sandbox_operator", "agent_sandbox_kube", "agent_sandbox_core")


class _Formatter(logging.Formatter):
    def __init__(self, kind: Literal["text", "json"]) -> None:
        super().__init__()
        self._kind = kind

    def format(self, record: logging.LogRecord) -> str:
        said = moment(record)
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += "\n" + self.formatException(record.exc_info)
        if self._kind == "json":
            return json.dumps({"time": said, "level": record.levelname.lower(), "logger": record.name, "message": text}, ensure_ascii=True)
        return f"{said} {record.levelname.lower():<7} {text}"


def configure_logging(level: str, kind: Literal["text", "json"]) -> None:
    """Sends our loggers to standard error at `level`; libraries stay at warnings."""
    install(_Formatter(kind), level, PACKAGES)
