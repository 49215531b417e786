"""Image references: the grammar of OCI distribution, and the globs of the policy. Pure; no engine is asked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

MAX_REFERENCE = 512
MAX_NAME = 255

_HOST = r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)*|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_DIGEST = r"[a-z0-9]+(?:[.+_-][a-z0-9]+)*:[0-9a-fA-F]{32,128}"
_REFERENCE = re.compile(rf"(?P<name>(?:{_HOST}/)?{_PART}(?:/{_PART})*)(?::{_TAG})?(?:@{_DIGEST})?\Z")


def is_reference(image: str) -> bool:
    """Whether an engine could understand this reference (`name`, `name:tag`, `host:5000/path/name@sha256:…`)."""
    if len(image) > MAX_REFERENCE:
        return False
    found = _REFERENCE.match(image)
    return found is not None and len(found["name"]) <= MAX_NAME


def is_allowed(image: str, globs: Sequence[str]) -> bool:
    """Whether one of the globs matches the reference as it was written; `*` also crosses slashes."""
    return any(fnmatchcase(image, glob) for glob in globs)
