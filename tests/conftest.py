"""Options, markers and fixtures of the suites that run over backends. No fixture is automatic: other suites take none by accident."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.fixtures import cluster  # noqa: F401 - a fixture
from tests.support.client import Api
from tests.support.docker import Docker, ensured_engine
from tests.support.kubernetes import Ground, standing
from tests.support.lifecycle import assert_flat, assert_no_strays, clean, running_facade, warm_up
from tests.support.server import Facade
from tests.support.target import CAPABILITIES, TARGETS, Target
from tests.support.waiting import eventually

MARKERS = (
    "needs(*capabilities): what a backend must be able to do for the test; see tests/support/target.py",
    "slow: takes more than ten seconds",
)
DESELECTED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    default = os.environ.get("AGENT_SANDBOX_TEST_BACKENDS", "memory,docker")
    parser.addoption("--backends", default=default, help=f"backends to run the contract over, of {', '.join(TARGETS)} (default {default})")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames:
        names = [name.strip() for name in metafunc.config.getoption("--backends").split(",") if name.strip()]
        unknown = [name for name in names if name not in TARGETS]
        if unknown:
            raise pytest.UsageError(f"--backends: no backend is called {unknown}; there are {list(TARGETS)}")
        metafunc.parametrize("target", [TARGETS[name] for name in names], ids=names, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    keep: list[pytest.Item] = []
    drop: list[pytest.Item] = []
    for item in items:
        needs = {need for marker in item.iter_markers("needs") for need in marker.args}
        unknown = needs - set(CAPABILITIES)
        if unknown:
            raise pytest.UsageError(f"{item.nodeid} needs {unknown}, which no backend can be asked for")
        callspec = getattr(item, "callspec", None)
        target = callspec.params.get("target") if callspec else None
        (drop if isinstance(target, Target) and needs - target.can else keep).append(item)
    config.stash[DESELECTED] = len(drop)
    if drop:
        config.hook.pytest_deselected(items=drop)
        items[:] = keep


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each failure into the file that AGENT_SANDBOX_TEST_DIGEST names: CI prints it last, even when pytest itself dies."""
    digest = os.environ.get("AGENT_SANDBOX_TEST_DIGEST")
    if digest and report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = " ".join(str(crash.message if crash else report.longrepr).split())
        with Path(digest).open("a") as sink:
            sink.write(f"{report.nodeid} ({report.when}, {report.duration:.0f} s): {text[:400]}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count = config.stash.get(DESELECTED, 0)
    if count:
        terminalreporter.write_line(f"{count} combinations of test and backend cannot be (the backend lacks what the test needs)")


@pytest.fixture(scope="session")
def engine() -> Iterator[Docker]:
    """A Docker engine that answers, with the test image; started for this session when there is none."""
    with ensured_engine() as docker:
        yield docker


@pytest.fixture(scope="session")
def docker(target: Target, request: pytest.FixtureRequest) -> Docker | None:
    """The engine where the backend has one, else None."""
    if "engine" not in target.can:
        return None
    found: Docker = request.getfixturevalue("engine")
    return found


@pytest.fixture(scope="session")
def ground(target: Target, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground | None]:
    """Operator and mover on a cluster, where the backend is Kubernetes."""
    if target.name != "kubernetes":
        yield None
        return
    with standing(request.getfixturevalue("cluster"), tmp_path_factory.mktemp("operator")) as found:
        yield found


@pytest.fixture(scope="session")
def facade(target: Target, docker: Docker | None, ground: Ground | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facade]:
    """The facade that most tests share. At the session's end its threads and open files are where they were after the first sandbox."""
    with running_facade(target, docker, tmp_path_factory.mktemp(f"shared-{target.name}") / "data", ground=ground) as shared:
        warm_up(shared)
        before = shared.figures()
        yield shared
        clean(shared)
        assert_flat(shared, before)


@pytest.fixture
def api(facade: Facade, docker: Docker | None) -> Iterator[Api]:
    """The shared facade's client. What a test makes with it is deleted, and must then be gone from the engine too."""
    client = facade.api
    made, taken = len(client.made), len(client.taken)
    yield client
    mine = list(client.made[made:])
    client.clean(made, taken)
    if docker is not None and mine:
        eventually(lambda: not docker.of_sandboxes(mine), within=10, why=f"nothing is left of {mine}: {docker.of_sandboxes(mine)}")


@pytest.fixture
def box(api: Api) -> str:
    """A fresh sandbox of the test's own."""
    made: str = api.new()["id"]
    return made


@pytest.fixture(scope="module")
def module_room(facade: Facade) -> Iterator[str]:
    """One sandbox for a whole module; taken through `room`."""
    made: str = facade.api.new(timeout_seconds=7200)["id"]
    facade.api.made.remove(made)
    yield made
    facade.api.delete(made)


@pytest.fixture
def room(api: Api, module_room: str, target: Target) -> Iterator[str]:
    """The module's shared sandbox, for tests that leave it as it was: a process that outlives its test fails it."""
    yield module_room
    if "processes" in target.can:
        try:
            assert_no_strays(api, module_room)
        except AssertionError:
            # One failure, not one for every test after it. This ends the bridges too; they come back.
            api.exec(module_room, "kill -9 -1")
            raise


@pytest.fixture
def start_facade(target: Target, docker: Docker | None, ground: Ground | None, tmp_path: Path) -> Iterator[Callable[..., Facade]]:
    """Starts facades of the test's own with given settings; each is checked and stopped at the end."""
    with ExitStack() as stack:
        count = 0

        def start(**settings: str) -> Facade:
            nonlocal count
            count += 1
            return stack.enter_context(running_facade(target, docker, tmp_path / f"data{count}", ground=ground, **settings))

        yield start
