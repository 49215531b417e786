"""The engine stops, hangs or restarts while the facade serves: 502 in our shape, then recovery. On an engine of the suite's own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.client import Api, refused
from tests.support.docker import PrivateEngine
from tests.support.server import Facade, health_latency
from tests.support.target import Target
from tests.support.waiting import eventually

pytestmark = [pytest.mark.needs("engine", "root"), pytest.mark.slow]


@pytest.fixture(scope="module")
def private() -> Iterator[PrivateEngine]:
    engine = PrivateEngine()
    try:
        engine.start()
        yield engine
    finally:
        engine.remove()


@pytest.fixture
def served(target: Target, private: PrivateEngine, tmp_path: object) -> Iterator[Facade]:
    """A facade on the private engine, with an image that has nothing in it."""
    assert private.docker is not None
    image = private.docker.scratch_image()
    facade = Facade(target.name, private.home / "data", {"DEFAULT_IMAGE": image, "REAP_INTERVAL_SECONDS": "1"})
    facade.environment = {"DOCKER_HOST": private.host}
    try:
        yield facade.start()
        for row in facade.api.sandboxes():
            facade.api.delete(row["id"])
        facade.stop()
    finally:
        facade.kill()


def works(api: Api, sandbox: str) -> bool:
    """A file goes in and out."""
    return api.put(sandbox, "probe", b"p").status_code == 200 and api.get(sandbox, "probe").content == b"p"


@pytest.mark.behaviour("FAULT-010")
def test_an_engine_that_stops_is_502_and_recovers_without_a_restart(served: Facade, private: PrivateEngine) -> None:
    api = served.api
    box = api.new()["id"]
    api.write(box, "f", b"kept")
    snapshot = api.snap(box)["id"]
    assert served.process is not None
    pid = served.process.pid
    private.stop()

    def down() -> bool:
        answers = [
            api.create(timeout=30),
            api.call("GET", "/sandboxes", timeout=30),
            api.get(box, "f"),
            api.exec(box, ["x"]),
            api.take(box),
            api.roll(box, snapshot),
        ]
        for answer in answers:
            assert answer.status_code in (502, 503, 400), answer.text
            if answer.status_code != 400:
                refused(answer, answer.status_code)
        refused(answers[0], 502)
        return True

    eventually(down, within=30, why="every call says that the engine is away")
    assert health_latency(served.url) < 1
    private.start()
    eventually(lambda: api.create().status_code == 201, within=30, why="creates work again")
    eventually(lambda: works(api, box), within=60, why=f"the sandbox came back on its workspace: {api.sandbox(box)}")
    assert api.read(box, "f") == b"kept"
    assert api.rollback(box, snapshot)["status"] == "running" and api.names(box) == ["f"]
    assert served.process.poll() is None and served.process.pid == pid


@pytest.mark.behaviour("FAULT-011")
def test_an_engine_that_is_killed_and_comes_back(served: Facade, private: PrivateEngine) -> None:
    api = served.api
    box = api.new()["id"]
    api.write(box, "f", b"kept")
    private.kill()
    refused(api.create(timeout=30), 502)
    private.start()
    eventually(lambda: api.create().status_code == 201, within=30, why="creates work again")
    eventually(lambda: works(api, box), within=60, why=f"the sandbox works again: {api.sandbox(box)}")
    assert api.read(box, "f") == b"kept"


@pytest.mark.behaviour("FAULT-012")
def test_an_engine_that_hangs_blocks_neither_health_nor_open_channels(served: Facade, private: PrivateEngine) -> None:
    api = served.api
    box = api.new()["id"]
    assert works(api, box)
    private.hang()
    try:
        with ThreadPoolExecutor(16) as pool:
            creates = [pool.submit(api.create, timeout=120) for _ in range(16)]
            latencies = [health_latency(served.url) for _ in range(10)]
            assert max(latencies) < 3.5 and sorted(latencies)[4] < 1, latencies
            private.resume()
            for create in creates:
                assert create.result(120).status_code in (201, 502, 503)
    finally:
        private.resume()
    eventually(lambda: works(api, box), within=30, why="all is well again")


@pytest.mark.behaviour("FAULT-013")
def test_without_an_engine_the_start_ends_or_waits_with_a_clear_word(target: Target, tmp_path_factory: pytest.TempPathFactory) -> None:
    facade = Facade(target.name, tmp_path_factory.mktemp("none") / "data")
    facade.environment = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}
    output = facade.refuse(within=60)
    assert "Traceback" not in output and "docker" in output.lower(), output
