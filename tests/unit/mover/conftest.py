"""Stores to test with: a directory, and a real S3 server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from agent_sandbox_core.snapshots import BlobStore

from tests.support.s3 import S3Server, s3_server


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["directory", "s3"])
async def blobs(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BlobStore]:
    if request.param == "directory":
        url = (tmp_path / "store").as_uri()
    else:
        server: S3Server = request.getfixturevalue("s3")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        url = f"{server.url}/{tmp_path.name}"
    store = BlobStore.open(url, spool=tmp_path / "spool")
    yield store
    await store.aclose()
