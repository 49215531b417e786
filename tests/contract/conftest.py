"""Facades with settings of their own that several tests of this suite share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.client import Api
from tests.support.docker import Docker
from tests.support.kubernetes import Ground
from tests.support.lifecycle import running_facade
from tests.support.server import Facade
from tests.support.target import Target

SMALL = {
    "MAX_EXEC_OUTPUT_BYTES": "1000001",
    "MAX_FILE_BYTES": "300000",
    "MAX_SNAPSHOT_BYTES": "4000000",
    "MAX_EXEC_TIMEOUT_SECONDS": "7",
    "DEFAULT_EXEC_TIMEOUT_SECONDS": "2",
    "REAP_INTERVAL_SECONDS": "1",
    "MAX_CPUS": "1000",
    "ALLOW_NETWORK": "false",
    "ALLOWED_IMAGES": "*agent-sandbox*, *asb-*, python:3.*-slim, localhost/python:*",
    "DEFAULT_TIMEOUT_SECONDS": "77",
    "DEFAULT_CPUS": "0.5",
    "DEFAULT_MEMORY_MB": "100",
    "DEFAULT_PIDS_LIMIT": "40",
}
FacadeFactory = Callable[..., Facade]


@pytest.fixture(scope="session")
def small_facade(target: Target, docker: Docker | None, ground: Ground | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facade]:
    """A facade with small limits, a strict policy and a fast reaper."""
    with running_facade(target, docker, tmp_path_factory.mktemp(f"small-{target.name}") / "data", ground=ground, **SMALL) as facade:
        yield facade


@pytest.fixture
def small(small_facade: Facade) -> Iterator[Api]:
    """The client of the facade with small limits; cleans up like `api`."""
    client = small_facade.api
    made, taken = len(client.made), len(client.taken)
    yield client
    client.clean(made, taken)


@pytest.fixture
def fast_reaper(small: Api) -> Api:
    """A facade that looks for expired sandboxes every second."""
    return small


@pytest.fixture
def many_cpus(small: Api) -> Api:
    """A facade whose own CPU maximum is far above any machine's."""
    return small


@pytest.fixture(scope="session")
def tight_facade(target: Target, docker: Docker | None, ground: Ground | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facade]:
    """A facade with room for five sandboxes."""
    with running_facade(target, docker, tmp_path_factory.mktemp(f"tight-{target.name}") / "data", ground=ground, MAX_SANDBOXES="5") as facade:
        yield facade


@pytest.fixture
def tight(tight_facade: Facade) -> Iterator[Api]:
    """The client of the facade with room for five; empty before and after."""
    client = tight_facade.api
    assert client.sandboxes() == []
    yield client
    client.clean()
