"""Ids and names. `sb_` + 16 hex and `snap_` + 16 hex in the API; guest ids are 32 hex."""

from __future__ import annotations

import re
import secrets

SANDBOX_ID = re.compile(r"sb_[0-9a-f]{16}\Z")
SNAPSHOT_ID = re.compile(r"snap_[0-9a-f]{16}\Z")


def new_sandbox_id() -> str:
    """A fresh sandbox id (64 random bits)."""
    return f"sb_{secrets.token_hex(8)}"


def new_snapshot_id() -> str:
    """A fresh snapshot id (64 random bits)."""
    return f"snap_{secrets.token_hex(8)}"


def new_guest_id() -> str:
    """A fresh id for a process, lease or stream (128 random bits)."""
    return secrets.token_hex(16)
