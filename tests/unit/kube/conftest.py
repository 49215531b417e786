from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from agent_sandbox_kube.client import Kube, connect

from tests.unit.kube.apiserver import ApiServer, api_server, kubeconfig


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as running:
        yield running


@pytest_asyncio.fixture
async def kube(server: ApiServer, tmp_path: Path) -> AsyncIterator[Kube]:
    async with connect(kubeconfig(tmp_path, server.url)) as client:
        yield client
