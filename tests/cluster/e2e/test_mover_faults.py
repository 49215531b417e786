"""The mover killed, and its store or its sandbox gone, in the middle of its work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_sandbox_core.snapshots import BlobStore

from tests.cluster.console import wait_for
from tests.cluster.e2e.installation import Installation, condition, sandbox
from tests.cluster.e2e.life import FAST, shell, until_ready
from tests.cluster.e2e.snapshots import (
    READY_SECONDS,
    Mover,
    ask_back,
    blob_of,
    imported,
    last_restore,
    roll_back,
    snapshot,
    take,
    until_kept,
    until_restored,
    until_restoring,
    until_snapshot_reason,
)
from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl
from tests.support.s3 import S3Server, s3_server
from tests.unit.core.archives import archive, manifest, member, pieces

pytestmark = pytest.mark.slow

ROOMY = {"size": "512Mi", "ephemeral": True}
HEAVY = "mkdir -p /workspace/d; for i in $(seq 60); do head -c 1000000 /dev/urandom > /workspace/d/$i; done; cat /workspace/d/* | sha256sum"
SUM = "cat /workspace/d/* | sha256sum"


@pytest.fixture
def mover(operator: Installation) -> Iterator[Mover]:
    """A mover beside the operator, on a directory store."""
    found = Mover(operator)
    found.start()
    yield found
    found.stop()


def test_a_mover_killed_in_a_rollback_is_healed_by_the_next_one(cluster: Cluster, namespace: Kubectl, mover: Mover) -> None:
    namespace.apply(
        sandbox(
            "one", cluster.image("busybox"), workspace=ROOMY, resources={"memory": "512Mi", "cpu": "1", "requests": {"cpu": "10m", "memory": "32Mi"}}
        )
    )
    until_ready(namespace, "one", seconds=READY_SECONDS)
    total = shell(namespace, "one", HEAVY)
    take(namespace, "first", "one")
    for round_ in range(3):
        shell(namespace, "one", "rm -rf /workspace/*; echo other > /workspace/other")
        ask_back(namespace, "one", "first", f"r{round_}")
        until_restoring(namespace, "one", f"r{round_}")
        mover.kill()
        during = namespace.get("sandbox", "one")
        mover.start()
        healed = until_restored(namespace, "one", f"r{round_}")
        assert shell(namespace, "one", f"{SUM}; ls /workspace") == f"{total}d\n"
        assert condition(during)["status"] == "False" or last_restore(during)["phase"] == "Succeeded"
        assert healed["status"]["incarnation"] == 1


def test_a_mover_killed_in_a_first_fill_is_healed_and_the_fork_is_ready_only_then(cluster: Cluster, namespace: Kubectl, mover: Mover) -> None:
    resources = {"memory": "512Mi", "cpu": "1", "requests": {"cpu": "10m", "memory": "32Mi"}}
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=ROOMY, resources=resources))
    until_ready(namespace, "one", seconds=READY_SECONDS)
    total = shell(namespace, "one", HEAVY)
    take(namespace, "first", "one")
    namespace.apply(sandbox("fork", cluster.image("busybox"), workspace=ROOMY, resources=resources, source={"snapshotName": "first"}))
    uid = namespace.get("sandbox", "fork")["metadata"]["uid"]
    until_restoring(namespace, "fork", f"source:{uid}")
    mover.kill()
    assert condition(namespace.get("sandbox", "fork")).get("status") != "True"
    mover.start()
    until_ready(namespace, "fork", seconds=READY_SECONDS)
    assert shell(namespace, "fork", SUM) == total


def test_a_mover_killed_while_it_takes_a_snapshot_leaves_one_that_is_whole_and_a_sandbox_that_goes_on(
    cluster: Cluster, namespace: Kubectl, mover: Mover
) -> None:
    namespace.apply(
        sandbox(
            "one", cluster.image("busybox"), workspace=ROOMY, resources={"memory": "512Mi", "cpu": "1", "requests": {"cpu": "10m", "memory": "32Mi"}}
        )
    )
    until_ready(namespace, "one", seconds=READY_SECONDS)
    total = shell(namespace, "one", HEAVY)
    for round_ in range(3):
        name = f"cut{round_}"
        namespace.apply(snapshot(name, "one"))
        namespace.until(f"{name} is being taken", "snapshot", name, lambda found: found.get("status", {}).get("phase") in {"Running", "Ready"})
        mover.kill()
        mover.start()
        until_kept(namespace, name)
        shell(namespace, "one", "rm -rf /workspace/*")
        roll_back(namespace, "one", name, f"r{round_}")
        assert shell(namespace, "one", SUM) == total
    spool = mover.installation.store / ".spool"
    assert [path.name for path in spool.iterdir()] == []


def test_a_replaced_request_is_given_up_for_the_next(cluster: Cluster, namespace: Kubectl, mover: Mover) -> None:
    resources = {"memory": "512Mi", "cpu": "1", "requests": {"cpu": "10m", "memory": "32Mi"}}
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=ROOMY, resources=resources))
    until_ready(namespace, "one", seconds=READY_SECONDS)
    shell(namespace, "one", "echo small > /workspace/small")
    take(namespace, "small", "one")
    shell(namespace, "one", HEAVY)
    take(namespace, "large", "one")
    shell(namespace, "one", "rm -rf /workspace/*")
    ask_back(namespace, "one", "large", "r1")
    until_restoring(namespace, "one", "r1")
    ask_back(namespace, "one", "small", "r2")
    until_restored(namespace, "one", "r2")
    assert shell(namespace, "one", "ls /workspace") == "small\n"
    assert "restore r1 of Sandbox" in mover.log.read_text(), "the first one was ended too, one way or the other"


def test_a_snapshot_whose_status_is_lost_takes_up_its_archive_and_is_never_taken_again(cluster: Cluster, namespace: Kubectl, mover: Mover) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST))
    until_ready(namespace, "one", seconds=READY_SECONDS)
    shell(namespace, "one", "echo v1 > /workspace/file")
    before = take(namespace, "first", "one")
    shell(namespace, "one", "echo v2 > /workspace/file")
    namespace.run("patch", "snapshot", "first", "--subresource=status", "--type=json", "--patch", '[{"op":"remove","path":"/status"}]')
    after = until_kept(namespace, "first")
    for key in ("digest", "location", "takenAt", "fileCount"):
        assert after["status"][key] == before["status"][key]
    # A backup gives a new uid too: the archive is found by its name.
    namespace.run("patch", "snapshot", "first", "--type=merge", "--patch", '{"spec":{"deletionPolicy":"Retain"}}')
    keep = blob_of(mover.installation, before).with_name("keep")
    wait_for("the archive is marked", keep.exists, seconds=30)
    namespace.delete("snapshot", "first")
    restored = snapshot("first", "one", deletionPolicy="Retain")
    restored["metadata"]["labels"] = {"velero.io/restore-name": "monday"}
    namespace.apply(restored)
    adopted = until_kept(namespace, "first")
    assert adopted["status"]["location"] == before["status"]["location"]
    roll_back(namespace, "one", "first", "r1")
    assert shell(namespace, "one", "cat /workspace/file") == "v1\n"
    lost = snapshot("lost", "one")
    lost["metadata"]["labels"] = {"velero.io/restore-name": "monday"}
    namespace.apply(lost)
    assert until_snapshot_reason(namespace, "lost", "BlobMissing")["status"]["phase"] == "Failed"


def test_a_sandbox_deleted_in_the_middle_of_its_snapshot_and_rollback_goes_at_once(cluster: Cluster, namespace: Kubectl, mover: Mover) -> None:
    resources = {"memory": "512Mi", "cpu": "1", "requests": {"cpu": "10m", "memory": "32Mi"}}
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=ROOMY, resources=resources))
    until_ready(namespace, "one", seconds=READY_SECONDS)
    shell(namespace, "one", HEAVY)
    take(namespace, "first", "one")
    ask_back(namespace, "one", "first", "r1")
    until_restoring(namespace, "one", "r1")
    namespace.delete("sandbox", "one", seconds=40)
    namespace.apply(sandbox("two", cluster.image("busybox"), workspace=ROOMY, resources=resources, source={"snapshotName": "first"}))
    until_ready(namespace, "two", seconds=READY_SECONDS)


async def test_a_snapshot_file_of_docker_mode_is_imported_and_forked(cluster: Cluster, namespace: Kubectl, mover: Mover, tmp_path: Path) -> None:
    store = BlobStore.open((tmp_path / "docker").as_uri(), spool=tmp_path / "spool")
    made = manifest(name="from the laptop")
    body = made.to_bytes()
    async with store.spool.received(pieces(archive([member("hello.txt", b"from docker\n")], head=body)), body, 1 << 20) as spooled:
        record = spooled.record(made)
        await store.commit(made.id, record, spooled)
    await store.aclose()
    target = mover.installation.store / "imports" / f"{made.id}.tar.zst"
    target.parent.mkdir()
    (tmp_path / "docker" / f"{made.id}.tar.zst").rename(target)
    namespace.apply(imported("laptop", f"imports/{target.name}", record.digest), imported("wrong", f"imports/{target.name}", "sha256:" + "0" * 64))
    kept = until_kept(namespace, "laptop")
    assert kept["status"]["sourceSpec"]["envNames"] == ["TOKEN"]
    assert kept["status"]["sourceSpec"]["memory"] == "256Mi"
    assert until_snapshot_reason(namespace, "wrong", "DigestMismatch")["status"]["phase"] == "Failed"
    namespace.apply(sandbox("fork", cluster.image("busybox"), source={"snapshotName": "laptop"}))
    until_ready(namespace, "fork", seconds=READY_SECONDS)
    assert shell(namespace, "fork", "cat /workspace/hello.txt") == "from docker\n"
    # And the other way round: the files of a cluster's snapshot are those of Docker mode, under its id.
    again = take(namespace, "back", "fork")
    folder = blob_of(mover.installation, again).parent
    found = json.loads((folder / "archive.json").read_text())
    docker = tmp_path / "other"
    docker.mkdir()
    for suffix in (".tar.zst", ".json"):
        (docker / f"{found['manifest']['id']}{suffix}").write_bytes((folder / f"archive{suffix}").read_bytes())
    laptop = BlobStore.open(docker.as_uri(), spool=tmp_path / "spool")
    key = found["manifest"]["id"]
    async with laptop.read(key, await laptop.record(key)) as opened:
        assert b"from docker\n" in b"".join([part async for part in opened.chunks])
    await laptop.aclose()


@pytest.fixture
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def test_snapshots_in_an_object_store_work_and_an_unreachable_store_is_told_retried_and_loses_nothing(
    cluster: Cluster, namespace: Kubectl, operator: Installation, s3: S3Server
) -> None:
    mover = Mover(operator, {**s3.environment, "AGENT_SANDBOX_STORE_URL": s3.url, "AGENT_SANDBOX_MOVER_PATIENCE_SECONDS": "60"})
    mover.start()
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST))
    until_ready(namespace, "one", seconds=READY_SECONDS)
    shell(namespace, "one", "echo v1 > /workspace/file")
    first = take(namespace, "first", "one")
    assert first["status"]["location"].endswith("/archive.tar.zst")
    shell(namespace, "one", "echo v2 > /workspace/file")
    roll_back(namespace, "one", "first", "r1")
    assert shell(namespace, "one", "cat /workspace/file") == "v1\n"
    with s3.paused():
        namespace.apply(snapshot("second", "one"))
        told = until_snapshot_reason(namespace, "second", "StoreUnreachable", seconds=90)
        assert "check that it can be reached" in told["status"]["message"]
        ask_back(namespace, "one", "first", "r2")
        namespace.until(
            "the restore tells of the store",
            "sandbox",
            "one",
            lambda found: "cannot be reached" in last_restore(found).get("message", "") or "can be reached" in last_restore(found).get("message", ""),
            seconds=90,
        )
    until_kept(namespace, "second", seconds=90)
    until_restored(namespace, "one", "r2", seconds=90)
    mover.stop()


def test_two_movers_on_one_object_store_do_each_thing_once(
    cluster: Cluster, namespace: Kubectl, operator: Installation, s3: S3Server, install: Callable[..., Installation]
) -> None:
    settings = {**s3.environment, "AGENT_SANDBOX_STORE_URL": s3.url}
    movers = [Mover(operator, settings), Mover(operator, settings)]
    for mover in movers:
        mover.start()
    namespace.apply(sandbox("one", cluster.image("busybox")))
    until_ready(namespace, "one", seconds=READY_SECONDS)
    names = [f"s{number}" for number in range(8)]
    namespace.apply(*(snapshot(name, "one") for name in names))
    for name in names:
        until_kept(namespace, name)
    said = movers[0].log.read_text()
    for name in names:
        assert said.count(f"/{name} is stored") == 1, name
    for mover in movers:
        mover.stop()
