"""Proves the cluster itself, on real pods: what every other suite on it relies on."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest

from tests.cluster import images, objects, own, versions
from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.objects import FOREVER, claim, pod, policy, service
from tests.cluster.websocket import PROTOCOL, exec_in
from tests.support.waiting import eventually, throughout

SERVE = ("python3", "-m", "http.server", "--directory", "/tmp", "8080")


def start(kubectl: Kubectl, *made: objects.Object, seconds: float = 60) -> None:
    """Creates objects and waits until the pods among them are ready."""
    kubectl.apply(*made)
    kubectl.wait("condition=Ready", *(f"pod/{item['metadata']['name']}" for item in made if item["kind"] == "Pod"), seconds=seconds)


def refused(kubectl: Kubectl, *made: objects.Object) -> str:
    """Why the API server refuses to create these."""
    done = kubectl.create(*made)
    assert done.returncode != 0, f"was accepted: {done.stdout}"
    return done.stderr


def run_in(kubectl: Kubectl, name: str, *argv: str) -> str:
    """What a command in a pod prints; it must succeed."""
    done = kubectl.execute(name, *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


def reaches(kubectl: Kubectl, client: str, host: str) -> bool:
    """Whether a pod gets an answer by HTTP from there."""
    code = f"import urllib.request; urllib.request.urlopen('http://{host}:8080/', timeout=2).read()"
    return kubectl.execute(client, "python3", "-c", code, seconds=30).returncode == 0


def test_every_node_reports_the_version_that_was_built(cluster: Cluster) -> None:
    cluster.needs_own()
    nodes = [node for node in cluster.kubectl.list("nodes") if node["metadata"]["name"].startswith("node")]
    assert len(nodes) == cluster.record.count
    told = {node["status"]["nodeInfo"]["kubeletVersion"] for node in nodes}
    assert told == {f"v{versions.load().kubernetes}"}
    server = json.loads(cluster.kubectl.say("version", "--output=json"))["serverVersion"]["gitVersion"]
    assert server == f"v{versions.load().kubernetes}"


@pytest.mark.parametrize("storage_class", [None, "fast", "disk"])
def test_a_pod_finds_its_file_again_after_a_restart(cluster: Cluster, namespace: Kubectl, storage_class: str | None) -> None:
    if storage_class:
        cluster.needs("storageclass", storage_class)
    worker = pod("worker", cluster.image("python"), *FOREVER, claim="work", securityContext={"fsGroup": 1000})
    start(namespace, claim("work", storage_class), worker)
    run_in(namespace, "worker", "sh", "-c", "echo kept > /data/file")
    namespace.delete("pod", "worker")
    start(namespace, worker)
    assert run_in(namespace, "worker", "cat", "/data/file") == "kept\n"


def test_volumes_of_the_fast_class_are_there_at_once_and_their_data_goes_with_them(cluster: Cluster, namespace: Kubectl) -> None:
    cluster.needs_own()
    began = time.monotonic()
    start(namespace, claim("work", "fast"), pod("worker", cluster.image("python"), *FOREVER, claim="work"))
    took = time.monotonic() - began
    volume = namespace.get("pvc", "work")["spec"]["volumeName"]
    folder = cluster.record.layout.volumes / "fast" / volume
    assert folder.is_dir()
    namespace.delete("pod", "worker")
    namespace.delete("pvc", "work")
    eventually(lambda: not folder.exists(), within=30, why=f"the data of {volume} is deleted with it")
    assert took < 15, f"{took:.1f} s for a pod with a fresh volume"


def test_a_disk_is_as_big_as_its_claim(cluster: Cluster, namespace: Kubectl) -> None:
    cluster.needs("storageclass", "disk")
    worker = pod("worker", cluster.image("python"), *FOREVER, claim="work", securityContext={"fsGroup": 1000})
    start(namespace, claim("work", "disk", "32Mi"), worker)
    done = namespace.execute("worker", "dd", "if=/dev/zero", "of=/data/big", "bs=1M", "count=64")
    assert done.returncode != 0
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_exec_over_websocket_v5_tells_exit_codes_and_keeps_outputs_apart(cluster: Cluster, namespace: Kubectl, script: str, code: int) -> None:
    start(namespace, pod("worker", cluster.image("busybox"), *FOREVER))
    with exec_in(namespace, "worker", "sh", "-c", f"echo out; echo err >&2; {script}") as command:
        assert command.protocol == PROTOCOL
        outcome = command.finish()
    assert (outcome.stdout, outcome.stderr, outcome.exit_code) == (b"out\n", b"err\n", code)


def test_exec_over_websocket_v5_ends_a_command_by_closing_its_stdin(cluster: Cluster, namespace: Kubectl) -> None:
    start(namespace, pod("worker", cluster.image("busybox"), *FOREVER))
    with exec_in(namespace, "worker", "sh", "-c", "cat; echo done", stdin=True) as command:
        command.send(b"hello\n")
        command.close_stdin()
        outcome = command.finish()
    assert (outcome.stdout, outcome.exit_code) == (b"hello\ndone\n", 0)


def test_a_default_deny_policy_blocks_and_an_allowance_allows(cluster: Cluster, namespace: Kubectl) -> None:
    python = cluster.image("python")
    friend, stranger = (pod(name, python, *FOREVER, labels={"role": name}) for name in ("friend", "stranger"))
    start(namespace, service("web", 8080, {"role": "web"}), pod("web", python, *SERVE, labels={"role": "web"}), friend, stranger)
    address = namespace.get("pod", "web")["status"]["podIP"]
    for client in ("friend", "stranger"):
        for host in (address, "web"):
            eventually(partial(reaches, namespace, client, host), within=30, why=f"{client} reaches {host} without any policy")

    namespace.apply(policy("deny-all", {}, "Ingress"))
    eventually(lambda: not reaches(namespace, "friend", address), within=30, why="the policy blocks")
    throughout(lambda: not reaches(namespace, "friend", "web"), seconds=3, why="the policy blocks the service too")

    ingress = [{"from": [{"podSelector": {"matchLabels": {"role": "friend"}}}], "ports": [{"port": 8080}]}]
    namespace.apply(policy("allow-friend", {"role": "web"}, "Ingress", ingress=ingress))
    eventually(lambda: reaches(namespace, "friend", address), within=30, why="the allowance allows")
    assert reaches(namespace, "friend", "web")
    assert not reaches(namespace, "stranger", address)


def test_a_policy_for_egress_blocks_names_and_addresses(cluster: Cluster, namespace: Kubectl) -> None:
    python = cluster.image("python")
    start(namespace, pod("web", python, *SERVE, labels={"role": "web"}), pod("client", python, *FOREVER, labels={"role": "client"}))
    address = namespace.get("pod", "web")["status"]["podIP"]
    look_up = ("python3", "-c", "import socket; socket.gethostbyname('kubernetes.default.svc.cluster.local')")
    eventually(lambda: reaches(namespace, "client", address), within=30, why="it is open without a policy")
    eventually(lambda: namespace.execute("client", *look_up).returncode == 0, within=30, why="names resolve without a policy")
    namespace.apply(policy("deny-egress", {"role": "client"}, "Egress"))
    eventually(lambda: not reaches(namespace, "client", address), within=30, why="the policy blocks addresses")
    assert namespace.execute("client", *look_up, seconds=60).returncode != 0


def test_names_outside_the_cluster_are_refused_at_once(cluster: Cluster, namespace: Kubectl) -> None:
    cluster.needs_own()
    start(namespace, pod("client", cluster.image("python"), *FOREVER))
    code = "import socket, time; t = time.monotonic()\ntry: socket.gethostbyname('example.com')\nexcept OSError: print(time.monotonic() - t)"
    assert float(run_in(namespace, "client", "python3", "-c", code)) < 3


def test_a_gvisor_pod_reports_gvisors_kernel(cluster: Cluster, namespace: Kubectl) -> None:
    cluster.needs("runtimeclass", "gvisor")
    start(namespace, pod("worker", cluster.image("python"), *FOREVER, runtimeClassName="gvisor"))
    assert "gvisor" in run_in(namespace, "worker", "cat", "/proc/version").lower()


def test_a_restricted_namespace_refuses_a_root_pod_and_takes_a_hardened_one(cluster: Cluster, namespace: Kubectl) -> None:
    assert namespace.namespace is not None
    namespace.run("label", "namespace", namespace.namespace, "pod-security.kubernetes.io/enforce=restricted")
    why = refused(namespace, pod("root", cluster.image("busybox"), *FOREVER))
    assert 'violates PodSecurity "restricted:latest"' in why
    assert "runAsNonRoot" in why
    start(namespace, pod("hardened", cluster.image("busybox"), *FOREVER, security=objects.HARDENED))


def test_a_quota_refuses_what_is_one_too_many(cluster: Cluster, namespace: Kubectl) -> None:
    namespace.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}, "spec": {"hard": {"pods": "1"}}})
    namespace.until("the quota is counted", "resourcequota", "small", lambda quota: quota.get("status", {}).get("used"))
    namespace.apply(pod("first", cluster.image("busybox"), *FOREVER))
    assert "exceeded quota: small" in refused(namespace, pod("second", cluster.image("busybox"), *FOREVER))


def test_an_image_volume_brings_another_images_files(cluster: Cluster, namespace: Kubectl) -> None:
    cluster.needs_own()
    tools = {"name": "tools", "image": {"reference": cluster.image("static"), "pullPolicy": "IfNotPresent"}}
    start(namespace, pod("worker", cluster.image("python"), *FOREVER, volumes=[tools], mounts=[{"name": "tools", "mountPath": "/tools"}]))
    assert run_in(namespace, "worker", "/tools/static", "once").startswith("static uid=1000")
    assert namespace.execute("worker", "touch", "/tools/new").returncode != 0


@pytest.mark.parametrize("storage_class", ["fast", "disk"])
def test_a_pod_with_a_user_namespace_is_nobody_on_the_node_and_owns_its_volume(cluster: Cluster, namespace: Kubectl, storage_class: str) -> None:
    cluster.needs_own()
    worker = pod("worker", cluster.image("python"), *FOREVER, claim="work", hostUsers=False, securityContext={"fsGroup": 1000})
    start(namespace, claim("work", storage_class), worker)
    inner, outer, count = map(int, run_in(namespace, "worker", "cat", "/proc/self/uid_map").split())
    assert (inner, count) == (0, 65536)
    assert outer >= 65536
    assert run_in(namespace, "worker", "sh", "-c", "touch /data/mine && stat -c %u:%g /data/mine") == "1000:1000\n"


def test_an_image_of_one_static_binary_runs_without_a_shell(cluster: Cluster, namespace: Kubectl) -> None:
    start(namespace, pod("static", cluster.image("static")))
    assert namespace.execute("static", "sh", "-c", "true").returncode != 0
    if cluster.provider != "existing":
        assert namespace.logs("static").startswith("static uid=65532 ")


def test_test_images_have_the_users_they_promise(cluster: Cluster, namespace: Kubectl) -> None:
    cluster.needs_own()
    start(namespace, pod("root", cluster.image("busybox"), *FOREVER), pod("user", cluster.image("python"), *FOREVER))
    assert run_in(namespace, "root", "id", "-u") == "0\n"
    assert run_in(namespace, "user", "id", "-u") == "1000\n"
    assert run_in(namespace, "user", "git", "--version").startswith("git version")


def test_a_loaded_image_runs_on_every_node_without_a_registry(cluster: Cluster, namespace: Kubectl, tmp_path: Path) -> None:
    cluster.needs_own()
    content = images.packed(("hello", images.binary("static"), 0o755))
    loaded = images.Image("localhost/loaded:1", lambda: content, {"Entrypoint": ["/hello"], "User": "4711"})
    images.write(loaded, tmp_path / "loaded.tar")
    own.load(cluster.record, str(tmp_path / "loaded.tar"))
    for node in cluster.record.layout.nodes(cluster.record.count):
        start(namespace, pod(node.name, loaded.name, nodeSelector={"kubernetes.io/hostname": node.name}))
        assert namespace.logs(node.name).startswith("static uid=4711 ")


def test_the_audit_log_tells_who_made_what(cluster: Cluster, namespace: Kubectl) -> None:
    cluster.needs_own()
    namespace.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hidden"}, "stringData": {"key": "do-not-write-this-down"}})

    def found() -> list[str]:
        lines = cluster.record.layout.audit_log.read_text().splitlines()
        return [line for line in lines if f'"namespace":"{namespace.namespace}"' in line and '"resource":"secrets"' in line]

    (line,) = [line for line in eventually(found, within=10) if json.loads(line)["verb"] == "create"]
    assert json.loads(line)["user"]["username"] == "admin"
    assert "do-not-write-this-down" not in cluster.record.layout.audit_log.read_text()


def test_kwok_plays_five_hundred_pods(cluster: Cluster, namespace: Kubectl) -> None:
    cluster.needs_own()
    cluster.kubectl.apply(objects.fake_node("fake"))
    try:
        # Before a node is Ready, the taint for that refuses everything.
        cluster.kubectl.wait("condition=Ready", "node/fake", seconds=30)
        namespace.apply(objects.deployment("crowd", "fake", 500, **objects.ON_FAKE_NODES))
        namespace.wait("jsonpath={.status.readyReplicas}=500", "deployment/crowd", seconds=120)
        namespace.delete("deployment", "crowd")
        eventually(lambda: not namespace.list("pods"), within=60, every=1, why="kwok lets the pods go")
    finally:
        cluster.kubectl.delete("node", "fake")
