"""Operator and mover killed again and again while much is asked of them; and the store compared with what should be in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from agent_sandbox_operator.mover.vault import Place

from tests.cluster.console import ClusterError, wait_for
from tests.cluster.e2e.installation import Installation, condition, sandbox
from tests.cluster.e2e.life import shell, until_ready
from tests.cluster.e2e.snapshots import FINAL, READY_SECONDS, Mover, ask_back, blob_of, last_restore, snapshot, take, until_kept
from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl

pytestmark = pytest.mark.slow

COUNT = 10
ALIVE_SECONDS = 1.0
ROUNDS = 60


def kill_every_second(operator: Installation, mover: Mover, done: Callable[[], bool]) -> int:
    """Kills operator and mover one second after they were ready, until all is done; returns how often."""
    for number in range(ROUNDS):
        with contextlib.suppress(ClusterError):
            wait_for("all is done", done, seconds=ALIVE_SECONDS, every=0.3)
            return number
        mover.kill()
        operator.kill()
        operator.start(wait=False)
        mover.start()
        operator.until_ready()
    raise AssertionError(f"not done after {ROUNDS} kills")


@pytest.mark.timeout(900)
def test_ten_snapshots_rollbacks_and_forks_come_right_under_a_kill_every_second(
    cluster: Cluster, namespace: Kubectl, install: Callable[..., Installation]
) -> None:
    assert namespace.namespace is not None
    # Without the Lease: a killed operator would leave each next one waiting for its end, and nothing would be killed at work.
    operator = install(namespace.namespace, mover=False, settings={"AGENT_SANDBOX_OPERATOR_LEASE": "false"})
    # One after the other: what is cut is done again, and four that are cut together would never end on a slow machine.
    mover = Mover(operator, {"AGENT_SANDBOX_MOVER_TRANSFERS": "1"})
    mover.start()
    names = [f"box{number}" for number in range(COUNT)]
    namespace.apply(*(sandbox(name, cluster.image("busybox")) for name in names))
    for name in names:
        until_ready(namespace, name, seconds=READY_SECONDS)
        shell(
            namespace,
            name,
            f"echo {name} > /workspace/who; head -c 1000000 /dev/urandom > /workspace/data; sha256sum /workspace/data > /workspace/sum",
        )

    namespace.apply(*(snapshot(f"of-{name}", name) for name in names))

    def all_kept() -> bool:
        return all(condition(found).get("status") == "True" for found in namespace.list("snapshots"))

    kills = kill_every_second(operator, mover, all_kept)
    for name in names:
        shell(namespace, name, "rm -rf /workspace/*")
        ask_back(namespace, name, f"of-{name}", "r1")

    def all_back() -> bool:
        found = namespace.list("sandboxes")
        return all(last_restore(one).get("phase") in FINAL and condition(one).get("status") == "True" for one in found)

    kills += kill_every_second(operator, mover, all_back)
    for name in names:
        assert last_restore(namespace.get("sandbox", name))["phase"] == "Succeeded"
        assert shell(namespace, name, "cat /workspace/who; sha256sum -c /workspace/sum").split() == [name, "/workspace/data:", "OK"]
    namespace.delete("sandbox", *names, wait=False)
    forks = [f"fork{number}" for number in range(COUNT)]
    namespace.apply(
        *(sandbox(fork, cluster.image("busybox"), source={"snapshotName": f"of-{name}"}) for fork, name in zip(forks, names, strict=True))
    )

    def all_forked() -> bool:
        found = {one["metadata"]["name"]: one for one in namespace.list("sandboxes")}
        return all(fork in found and condition(found[fork]).get("status") == "True" for fork in forks)

    kills += kill_every_second(operator, mover, all_forked)
    for fork, name in zip(forks, names, strict=True):
        assert shell(namespace, fork, "cat /workspace/who; sha256sum -c /workspace/sum").split() == [name, "/workspace/data:", "OK"]
    assert kills
    mover.stop()
    assert list((operator.store / ".spool").iterdir()) == []


def test_what_belongs_to_no_snapshot_goes_by_way_of_the_trash_and_what_belongs_to_one_stays(
    cluster: Cluster, namespace: Kubectl, install: Callable[..., Installation]
) -> None:
    assert namespace.namespace is not None
    settings = {
        "AGENT_SANDBOX_INSTALLATION": "tested",
        "AGENT_SANDBOX_MOVER_STRAY_SECONDS": "0",
        "AGENT_SANDBOX_MOVER_SWEEP_SECONDS": "1",
        "AGENT_SANDBOX_MOVER_TRASH_SECONDS": "6",
    }
    installation = install(namespace.namespace, settings=settings)
    namespace.apply(sandbox("one", cluster.image("busybox")))
    until_ready(namespace, "one", seconds=READY_SECONDS)
    kept = take(namespace, "first", "one")
    lost = take(namespace, "second", "one")
    retained = take(namespace, "third", "one", deletionPolicy="Retain")
    installation.stop()
    # Deleted with nobody there to see it.
    namespace.delete("snapshot", "second", "third")
    foreign = installation.store / "tested" / str(Place("another-namespace", "x", "u"))
    foreign.mkdir(parents=True)
    (foreign / "archive.tar.zst").write_bytes(b"somebody else's")
    blob = blob_of(installation, lost)
    installation.start()
    wait_for("it is in the trash", blob.with_name("trash").exists, seconds=40)
    assert blob.exists()
    wait_for("it is gone after its grace", lambda: not blob.parent.exists(), seconds=60)
    for found in (kept, retained):
        assert blob_of(installation, found).exists()
    assert (foreign / "archive.tar.zst").exists()
    until_kept(namespace, "first")
