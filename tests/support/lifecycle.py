"""The life of a facade under test, and the checks at its end: whatever a test leaves behind fails it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .client import Api
from .docker import Docker
from .kubernetes import Ground
from .server import Facade, Figures
from .target import Target
from .waiting import eventually

FLAT_FILES, FLAT_THREADS = 10, 10


@contextmanager
def running_facade(target: Target, docker: Docker | None, data: Path, *, ground: Ground | None = None, **settings: str) -> Iterator[Facade]:
    """A facade of one's own. At the end all it has is deleted, it stops cleanly, and nothing of its installation is left in the engine."""
    if ground is not None:
        with ground.namespace() as namespace, running_facade(target, docker, data, NAMESPACE=namespace, **settings) as facade:
            yield facade
        return
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
    eventually(
        lambda: not docker.of_installation(facade.data),
        within=10,
        why=f"nothing is left in the engine: {docker.of_installation(facade.data)}",
    )


def warm_up(facade: Facade) -> None:
    """One sandbox through its life, so that pools and threads are made."""
    sandbox = facade.api.new()["id"]
    facade.api.write(sandbox, "warm", b"up")
    facade.api.snap(sandbox)
    facade.api.clean()


def assert_flat(facade: Facade, before: Figures, *, within: float = 75) -> None:
    """The facade's threads and open files are where they were. Its own idle channels may take a minute to close."""
    facade.api.forget_connections()

    def flat() -> bool:
        now = facade.figures()
        assert now.files <= before.files + FLAT_FILES and now.threads <= before.threads + FLAT_THREADS, f"{before} before, {now} now"
        return True

    eventually(flat, within=within, why="threads and open files are back where they were")


def assert_works(api: Api, sandbox: str, *, within: float = 30) -> None:
    """The sandbox takes a command, soon."""

    def takes() -> bool:
        answer = api.exec(sandbox, "echo alive")
        return answer.status_code == 200 and answer.json()["stdout"] == "alive\n"

    eventually(takes, within=within, why=f"{sandbox} takes a command")


def assert_moves(api: Api, sandbox: str, path: str, *, within: float = 15) -> None:
    """A background process of the sandbox goes on writing this file."""
    before = api.read(sandbox, path)
    eventually(lambda: api.read(sandbox, path) != before, within=within, why=f"{path} in {sandbox} is written on")


def strays(api: Api, sandbox: str) -> list[str]:
    """Command lines of all processes in a sandbox but init, its bridges, and the one that looks."""
    script = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline 2>/dev/null; echo; done"
    lines = [line.strip() for line in api.sh(sandbox, script).splitlines() if line.strip()]
    return [line for line in lines if "sandbox-init" not in line and "/proc/[0-9]*" not in line and not line.startswith("tr ")]


def assert_no_strays(api: Api, sandbox: str, *, within: float = 10) -> None:
    """No process of any command is left, soon."""

    def none() -> bool:
        found = strays(api, sandbox)
        assert not found, f"left in {sandbox}: {found}"
        return True

    eventually(none, within=within, why="no process is left")
