"""Snapshots, rollbacks and forks on a real cluster, as kubectl sees them."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.cluster.console import wait_for
from tests.cluster.e2e.installation import Installation, condition, sandbox
from tests.cluster.e2e.life import FAST, shell, until_ready
from tests.cluster.e2e.snapshots import (
    READY_SECONDS,
    ask_back,
    blob_of,
    digest_of,
    events_about,
    imported,
    last_restore,
    roll_back,
    snapshot,
    take,
    tree,
    until_ended,
    until_kept,
    until_restored,
    until_snapshot_reason,
)
from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl, Object

FILES = """cd /workspace && mkdir -p empty dir 'sp ace/deep' locked && echo data > dir/file && ln -s dir/file link && ln -s nowhere gone && ln dir/file hard
printf '#!/bin/sh\\n' > run.sh && chmod 755 run.sh && : > zero && echo x > locked/in && chmod 500 locked
for i in $(seq 50); do echo $i > f$i; done"""
SPOIL = "cd /workspace && chmod -R u+w . && find . -mindepth 1 -delete; echo junk > junk; echo junk > /tmp/junk; sleep 1000 >/dev/null 2>&1 &"


@pytest.mark.parametrize("workspace", [{"ephemeral": True}, FAST], ids=["ephemeral", "volume"])
def test_a_rollback_brings_back_exactly_the_files_of_the_snapshot_and_nothing_else_lives(
    cluster: Cluster, namespace: Kubectl, installation: Installation, workspace: Object
) -> None:
    namespace.apply(sandbox("one", cluster.image("python"), workspace=workspace))
    before = until_ready(namespace, "one", seconds=READY_SECONDS)
    shell(namespace, "one", FILES)
    files = tree(namespace, "one")
    kept = take(namespace, "first", "one")
    status = kept["status"]
    assert status["fileCount"] == files.count("|f|") - 1, "a second name of a file is a link to it"
    assert status["digest"] == digest_of(blob_of(installation, kept))
    assert status["sizeBytes"] == blob_of(installation, kept).stat().st_size
    assert status["sandboxUid"] == before["metadata"]["uid"]
    shell(namespace, "one", SPOIL)
    after = roll_back(namespace, "one", "first", "r1")
    assert tree(namespace, "one") == files
    assert shell(namespace, "one", "ps | grep -c '[s]leep 1000' || true; ls /tmp").split() == ["0"]
    assert last_restore(after)["snapshotName"] == "first"
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["podName"] == before["status"]["podName"]
    assert "SnapshotReady" in events_about(namespace, "first")
    assert "RestoreSucceeded" in events_about(namespace, "one")


def test_one_request_is_carried_out_once_whatever_is_applied_again(cluster: Cluster, namespace: Kubectl, installation: Installation) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox"), workspace=FAST))
    until_ready(namespace, "one", seconds=READY_SECONDS)
    shell(namespace, "one", "echo v1 > /workspace/file")
    take(namespace, "first", "one")
    for request in ("r1", "r2"):
        shell(namespace, "one", "echo v2 > /workspace/file")
        roll_back(namespace, "one", "first", request)
        assert shell(namespace, "one", "cat /workspace/file") == "v1\n"
    shell(namespace, "one", "echo live > /workspace/file")
    # A manifest of before, and a status that was lost with a backup.
    ask_back(namespace, "one", "first", "r1")
    until_restored(namespace, "one", "r1", "Superseded")
    ask_back(namespace, "one", "first", "r2")
    namespace.run("patch", "sandbox", "one", "--subresource=status", "--type=merge", "--patch", '{"status":{"lastRestore":null}}')
    until_ready(namespace, "one", seconds=READY_SECONDS)
    ask_back(namespace, "one", "first", "r1")
    until_restored(namespace, "one", "r1", "Superseded")
    assert shell(namespace, "one", "cat /workspace/file") == "live\n"


def test_a_restore_that_is_there_at_the_creation_counts_as_done(cluster: Cluster, namespace: Kubectl, installation: Installation) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox")))
    until_ready(namespace, "one", seconds=READY_SECONDS)
    shell(namespace, "one", "echo v1 > /workspace/file")
    take(namespace, "first", "one")
    restore = {"snapshotName": "first", "requestID": "old"}
    namespace.apply(
        sandbox("two", cluster.image("busybox"), restore=restore),
        sandbox("three", cluster.image("busybox"), restore=restore, source={"snapshotName": "first"}),
    )
    until_ready(namespace, "two", seconds=READY_SECONDS)
    three = until_ready(namespace, "three", seconds=READY_SECONDS)
    assert shell(namespace, "two", "ls /workspace") == ""
    assert shell(namespace, "three", "cat /workspace/file") == "v1\n"
    assert last_restore(three)["requestID"] == f"source:{three['metadata']['uid']}"


def test_a_snapshot_outlives_its_sandbox_and_a_fork_of_it_is_ready_only_with_its_files(
    cluster: Cluster, namespace: Kubectl, installation: Installation
) -> None:
    env = [{"name": "TOKEN", "value": "s3cr3t-value"}]
    namespace.apply(sandbox("one", cluster.image("python"), env=env, workspace=FAST))
    until_ready(namespace, "one", seconds=READY_SECONDS)
    shell(namespace, "one", FILES)
    files = tree(namespace, "one")
    kept = take(namespace, "first", "one", displayName="Before the storm")
    namespace.delete("sandbox", "one")
    source = kept["status"]["sourceSpec"]
    assert source["envNames"] == ["TOKEN"]
    secret = namespace.get("secret", source["envSecretName"])
    assert list(secret["data"]) == ["TOKEN"]
    assert secret["metadata"]["ownerReferences"][0]["uid"] == kept["metadata"]["uid"]
    assert "s3cr3t-value" not in json.dumps(kept) + installation.log.read_text() + blob_of(installation, kept).with_name("archive.json").read_text()
    namespace.apply(
        sandbox("fork", cluster.image("python"), source={"snapshotName": "first"}),
        sandbox("late", cluster.image("python"), source={"snapshotName": "second"}),
    )
    fork = until_ready(namespace, "fork", seconds=READY_SECONDS)
    assert tree(namespace, "fork") == files
    assert last_restore(fork)["phase"] == "Succeeded"
    waiting = namespace.until("late waits", "sandbox", "late", lambda found: "second" in condition(found).get("message", ""))
    assert condition(waiting)["status"] == "False"
    shell(namespace, "fork", "echo more > /workspace/more")
    second = take(namespace, "second", "fork")
    assert second["status"]["parent"] == "first"
    until_ready(namespace, "late", seconds=READY_SECONDS)
    assert shell(namespace, "late", "cat /workspace/more") == "more\n"


def test_the_archive_goes_with_its_snapshot_unless_it_is_to_be_retained(cluster: Cluster, namespace: Kubectl, installation: Installation) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox")))
    until_ready(namespace, "one", seconds=READY_SECONDS)
    first = take(namespace, "first", "one")
    second = take(namespace, "second", "one", deletionPolicy="Retain")
    blobs = blob_of(installation, first), blob_of(installation, second)
    namespace.delete("snapshot", "first", "second")
    wait_for("the archive of the first is gone", lambda: not blobs[0].exists(), seconds=40)
    assert not blobs[0].parent.exists()
    assert blobs[1].exists()
    namespace.apply(imported("again", second["status"]["location"], second["status"]["digest"]))
    again = until_kept(namespace, "again")
    assert again["status"]["digest"] == second["status"]["digest"]
    assert again["status"]["takenAt"] == second["status"]["takenAt"]


def test_a_damaged_archive_is_refused_and_the_files_stay_as_they_are(cluster: Cluster, namespace: Kubectl, installation: Installation) -> None:
    namespace.apply(sandbox("one", cluster.image("python")))
    until_ready(namespace, "one", seconds=READY_SECONDS)
    shell(namespace, "one", "head -c 300000 /dev/urandom > /workspace/data")
    blob = blob_of(installation, take(namespace, "first", "one"))
    shell(namespace, "one", "echo newer > /workspace/data")
    raw = bytearray(blob.read_bytes())
    raw[len(raw) // 2] ^= 1
    blob.write_bytes(raw)
    ask_back(namespace, "one", "first", "r1")
    failed = until_restored(namespace, "one", "r1", "Failed")
    assert "damaged" in last_restore(failed)["message"]
    assert "new requestID" in last_restore(failed)["message"]
    assert shell(namespace, "one", "cat /workspace/data") == "newer\n"
    namespace.apply(sandbox("fork", cluster.image("python"), source={"snapshotName": "first"}))
    fork = namespace.until("the fork has failed", "sandbox", "fork", lambda found: condition(found).get("reason") == "SnapshotFailed")
    assert "damaged" in condition(fork)["message"]
    raw[len(raw) // 2] ^= 1
    blob.write_bytes(raw)
    roll_back(namespace, "one", "first", "r2")
    assert shell(namespace, "one", "stat -c %s /workspace/data") == "300000\n"


def test_a_rollback_to_what_is_not_there_fails_at_once_and_touches_nothing(cluster: Cluster, namespace: Kubectl, installation: Installation) -> None:
    namespace.apply(sandbox("one", cluster.image("busybox")), snapshot("broken", "nobody"))
    until_ready(namespace, "one", seconds=READY_SECONDS)
    shell(namespace, "one", "echo mine > /workspace/file")
    ask_back(namespace, "one", "missing", "r1")
    failed = until_restored(namespace, "one", "r1", "Failed", seconds=40)
    assert "there is no Snapshot missing" in last_restore(failed)["message"]
    assert shell(namespace, "one", "cat /workspace/file") == "mine\n"


def test_what_can_not_be_taken_says_why_and_what_may_come_is_waited_for(cluster: Cluster, namespace: Kubectl, installation: Installation) -> None:
    namespace.apply(snapshot("early", "one"))
    waiting = until_snapshot_reason(namespace, "early", "SandboxNotFound")
    assert waiting["status"]["phase"] == "Pending"
    namespace.apply(sandbox("one", cluster.image("busybox")))
    until_kept(namespace, "early")
    nobody = "sha256:" + "0" * 64
    refused = namespace.create(imported("outside", "../../etc/passwd", nobody))
    assert refused.returncode != 0 and "must be a path below the store's root" in refused.stderr
    folder = namespace.get("namespace", "kube-system")["metadata"]["uid"]
    namespace.apply(imported("stolen", f"{folder}/another/x.u/archive.tar.zst", nobody), imported("nowhere", "imports/none.tar.zst", nobody))
    assert "belongs to another namespace" in until_ended(namespace, "stolen")["status"]["message"]
    assert until_ended(namespace, "nowhere")["status"]["reason"] == "BlobMissing"


def test_a_snapshot_of_a_workspace_that_is_too_large_fails_and_the_sandbox_goes_on(
    cluster: Cluster, namespace: Kubectl, install: Callable[..., Installation]
) -> None:
    assert namespace.namespace is not None
    installation = install(namespace.namespace, settings={"AGENT_SANDBOX_MAX_SNAPSHOT_BYTES": str(1 << 20)})
    namespace.apply(sandbox("one", cluster.image("busybox")))
    until_ready(namespace, "one", seconds=READY_SECONDS)
    shell(
        namespace, "one", "head -c 2000000 /dev/zero > /workspace/zeros; (while true; do date +%s%N > /tmp/beat; sleep 0.05; done) >/dev/null 2>&1 &"
    )
    namespace.apply(snapshot("large", "one"))
    failed = until_ended(namespace, "large")
    assert failed["status"]["reason"] == "TooLarge"
    beat = shell(namespace, "one", "cat /tmp/beat")
    wait_for("the sandbox goes on", lambda: shell(namespace, "one", "cat /tmp/beat") != beat, seconds=20)
    assert [path for path in installation.store.rglob("*") if path.is_file() and path.name != "mover.lock"] == []
