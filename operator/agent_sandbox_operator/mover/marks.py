"""What the annotations of a workspace (its PVC, or its pod when it is ephemeral) say about restores.

They are the memory that outlives a lost status: one requestID is carried out once, whatever manifest or backup is applied later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agent_sandbox_core.v1alpha1 import ANNOTATION_RESTORE_AT_CREATION, ANNOTATION_RESTORE_HISTORY, ANNOTATION_RESTORED

UNFILLED: Final = ""
MAX_DONE: Final = 64
"""Ids that are remembered: 64 of at most 64 characters are far below what annotations may hold."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The Snapshot that the files came from last: its name and its id in the API."""

    name: str
    api_id: str


@dataclass(frozen=True, slots=True)
class Marks:
    """Read from the annotations; all of them may have been edited by anybody who may edit a PVC."""

    restored: str | None
    """The last request that was carried out; UNFILLED: the first fill has to come; None: nobody has marked this workspace."""
    at_creation: str = ""
    done: tuple[str, ...] = ()
    """All requests before, newest last."""
    origin: Origin | None = None

    @classmethod
    def read(cls, annotations: Mapping[str, str]) -> Marks:
        """From an object's annotations."""
        done, origin = _read_history(annotations.get(ANNOTATION_RESTORE_HISTORY, ""))
        return cls(annotations.get(ANNOTATION_RESTORED), annotations.get(ANNOTATION_RESTORE_AT_CREATION, ""), done, origin)

    def carried_out(self, request_id: str) -> bool:
        """This request is what the files are from, or counts as that."""
        return request_id in {self.restored, self.at_creation} - {"", None}

    def after(self, request_id: str, origin: Origin) -> dict[str, str]:
        """The annotations once a request was carried out."""
        before = [one for one in (*self.done, self.restored) if one and one != request_id]
        done = list(dict.fromkeys(before))[-MAX_DONE:]
        history = {"done": done, "from": {"name": origin.name, "id": origin.api_id}}
        return {ANNOTATION_RESTORED: request_id, ANNOTATION_RESTORE_HISTORY: json.dumps(history, separators=(",", ":"))}


def _read_history(text: str) -> tuple[tuple[str, ...], Origin | None]:
    try:
        data = json.loads(text) if text else {}
        done = tuple(one for one in data.get("done", ()) if isinstance(one, str))
        origin = data.get("from")
        return done, None if origin is None else Origin(str(origin["name"]), str(origin["id"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return (), None
