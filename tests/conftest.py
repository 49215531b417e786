"""Options, markers and fixtures of the suites that run over backends. Nothing here is automatic for other suites: fixtures are taken by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support.client import Api
from support.docker import Docker, ensured_engine
from support.server import Facade
from support.target import CAPABILITIES, TARGETS, Target
from support.waiting import eventually

MARKERS = (
    "behaviour(*ids): the ids in tests/behaviours that the test covers",
    "needs(*capabilities): what a backend must be able to do for the test; see tests/support/target.py",
    "slow: takes more than ten seconds",
)
DESELECTED = pytest.StashKey[int]()
FLAT_FILES, FLAT_THREADS = 10, 10


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
    keep, drop = [], []
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    count = config.stash.get(DESELECTED, 0)
    if count:
        terminalreporter.write_line(f"{count} combinations of test and backend cannot be (the backend lacks what the test needs)")


@pytest.fixture(scope="session")
def engine() -> Iterator[Docker]:
    """A Docker engine that answers, with the test image; started for this session when there is none."""
    with ensured_engine() as docker:
        yield docker


@contextmanager
def running_facade(target: Target, docker: Docker | None, data: Path, **settings: str) -> Iterator[Facade]:
    """A facade of one's own. At the end everything of it is deleted, it stops cleanly, and nothing of its installation is left in the engine."""
    facade = Facade(target.name, data, target.settings | settings)
    try:
        facade.start()
        yield facade
        if facade.process is None or facade.process.poll() is not None:
            facade.start()
        clean(facade)
        facade.stop()
        if docker is not None:
            assert_nothing_left(docker, facade)
    finally:
        facade.kill()
        if docker is not None:
            docker.remove_installation(facade.data)


def clean(facade: Facade) -> None:
    """Deletes every sandbox and snapshot that the facade has, also those whose id no test learned."""
    for row in facade.api.sandboxes():
        assert facade.api.call("DELETE", f"/sandboxes/{row['id']}").status_code in (204, 404)
    for row in facade.api.snapshots():
        assert facade.api.call("DELETE", f"/snapshots/{row['id']}").status_code in (204, 404)


def assert_nothing_left(docker: Docker, facade: Facade) -> None:
    """No container and no volume of this installation is in the engine any more (what all instances share may stay)."""
    eventually(lambda: not docker.of_installation(facade.data), within=10, why=f"nothing is left in the engine: {docker.of_installation(facade.data)}")


@pytest.fixture(scope="session")
def docker(target: Target, request: pytest.FixtureRequest) -> Docker | None:
    """The engine where the backend has one, else None."""
    if "engine" not in target.can:
        return None
    found: Docker = request.getfixturevalue("engine")
    return found


@pytest.fixture(scope="session")
def facade(target: Target, docker: Docker | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facade]:
    """The facade that most tests share. At the session's end its threads and open files are where they were after the first sandbox."""
    with running_facade(target, docker, tmp_path_factory.mktemp(f"shared-{target.name}") / "data") as shared:
        warm_up(shared)
        before = shared.figures()
        yield shared
        clean(shared)
        # Idle connections of this client are not the facade's leak; its own channels have up to a minute to go idle.
        shared.api.forget_connections()

        def flat() -> bool:
            now = shared.figures()
            return now.files <= before.files + FLAT_FILES and now.threads <= before.threads + FLAT_THREADS

        eventually(flat, within=75, why=f"threads and open files are back: {before} before, {shared.figures()} now")


def warm_up(facade: Facade) -> None:
    """One sandbox through its life, so that pools and threads are made."""
    sandbox = facade.api.new()["id"]
    facade.api.write(sandbox, "warm", b"up")
    facade.api.snap(sandbox)
    facade.api.clean()


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
    made: str = facade.api.new()["id"]
    position = facade.api.made.index(made)
    del facade.api.made[position]
    yield made
    facade.api.delete(made)


@pytest.fixture
def room(api: Api, module_room: str, target: Target) -> Iterator[str]:
    """The module's shared sandbox, for tests that leave it as it was: a process that outlives its test fails it."""
    yield module_room
    if "processes" in target.can:
        eventually(lambda: not strays(api, module_room), within=10, why=f"no process is left in the shared sandbox: {strays(api, module_room)}")


def strays(api: Api, sandbox: str) -> list[str]:
    """Command lines of all processes in a sandbox but init, its bridges, and the one that looks."""
    script = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline 2>/dev/null; echo; done"
    lines = [line.strip() for line in api.sh(sandbox, script).splitlines() if line.strip()]
    return [line for line in lines if "sandbox-init" not in line and "/proc/[0-9]*" not in line and not line.startswith("tr ")]


@pytest.fixture
def start_facade(target: Target, docker: Docker | None, tmp_path: Path) -> Iterator[Callable[..., Facade]]:
    """Starts facades of the test's own with given settings; each is checked and stopped at the end."""
    with ExitStack() as stack:
        count = 0

        def start(**settings: str) -> Facade:
            nonlocal count
            count += 1
            return stack.enter_context(running_facade(target, docker, tmp_path / f"data{count}", **settings))

        yield start
