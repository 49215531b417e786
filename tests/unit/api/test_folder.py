"""The data folder: one server at a time, an id that stays, a ledger that is whole or absent."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from agent_sandbox_api.backends.folder import LEDGER, DataFolder, Entry, FolderError, Ledger
from agent_sandbox_core.errors import BackendError

WHEN = datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=UTC)


def test_a_second_server_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    first = DataFolder.open(tmp_path / "data")
    with pytest.raises(FolderError, match=f"already in use by pid {os.getpid()}"):
        DataFolder.open(tmp_path / "data")
    first.close()
    again = DataFolder.open(tmp_path / "data")
    assert again.instance_id == first.instance_id
    again.close()


def test_the_folder_is_closed_to_others(tmp_path: Path) -> None:
    folder = DataFolder.open(tmp_path / "data")
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700 and (tmp_path / "data" / "instance-id").stat().st_mode & 0o077 == 0
    folder.close()


async def test_entries_come_back_after_a_restart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.load()
    await ledger.put("sb_1", Entry(WHEN, None))
    await ledger.put("sb_2", Entry(None, "snap_1"))
    again = Ledger(tmp_path)
    again.load()
    assert again.get("sb_1") == Entry(WHEN, None) and again.get("sb_2") == Entry(None, "snap_1") and again.get("sb_3") == Entry()
    await again.keep_only({"sb_2"})
    last = Ledger(tmp_path)
    last.load()
    assert last.get("sb_1") == Entry() and last.get("sb_2").parent == "snap_1"


async def test_a_ledger_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "gone")
    with pytest.raises(BackendError, match="cannot be written"):
        await ledger.put("sb_1", Entry(WHEN, None))
    assert ledger.get("sb_1") == Entry()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"sandboxes": {"sb_1": 5}}', b'{"sandboxes": {"sb_1": {"expires_at": "soon"}}}'])
def test_a_damaged_ledger_is_put_aside_not_fatal(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LEDGER).write_bytes(content)
    ledger = Ledger(tmp_path)
    ledger.load()
    assert ledger.get("sb_1") == Entry() and (tmp_path / "sandboxes.damaged").read_bytes() == content
