"""Objects, watches, events and leases of a real API server."""

from __future__ import annotations

import asyncio
import time

import pytest
from agent_sandbox_kube import client
from agent_sandbox_kube.client import Kube
from agent_sandbox_kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, NotFound
from agent_sandbox_kube.events import EventPoster
from agent_sandbox_kube.informer import Informer, Key
from agent_sandbox_kube.lease import Lease
from agent_sandbox_kube.resources import CLAIMS, EVENTS, LEASES, NAMESPACES, NODES, PODS, SECRETS

from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.objects import FOREVER, claim, pod


@pytest.fixture
def home(namespace: Kubectl) -> str:
    assert namespace.namespace is not None
    return namespace.namespace


async def test_the_server_tells_its_version_and_its_nodes(kube: Kube) -> None:
    assert (await kube.version()).startswith("v1.")
    nodes, version = await kube.list(NODES)
    assert nodes and version > 0


async def test_an_object_is_made_changed_replaced_and_deleted_and_each_step_checks_what_it_saw(kube: Kube, home: str) -> None:
    made = await kube.create(SECRETS, {"metadata": {"name": "it"}, "stringData": {"a": "1"}}, home)
    with pytest.raises(AlreadyExists, match=f"creating secrets {home}/it failed: .*already exists"):
        await kube.create(SECRETS, {"metadata": {"name": "it"}}, home)
    changed = await kube.patch(SECRETS, "it", home, {"metadata": {"labels": {"x": "y"}}})
    assert changed["metadata"]["labels"] == {"x": "y"}
    with pytest.raises(Conflict) as caught:
        await kube.patch(SECRETS, "it", home, {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}})
    assert not caught.value.exists
    with pytest.raises(Conflict, match=f"replacing secrets {home}/it failed"):
        await kube.replace(SECRETS, made, home)
    replaced = await kube.replace(SECRETS, {**changed, "data": {}}, home)
    assert "data" not in replaced or not replaced["data"]
    with pytest.raises(Conflict):
        await kube.delete(SECRETS, "it", home, {"preconditions": {"uid": "another"}})
    await kube.delete(SECRETS, "it", home, {"preconditions": {"uid": made["metadata"]["uid"]}})
    with pytest.raises(NotFound, match=f"getting secrets {home}/it failed: .*not found"):
        await kube.get(SECRETS, "it", home)


async def test_a_list_longer_than_a_page_is_whole(kube: Kube, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE", 3)
    names = [f"it-{number}" for number in range(8)]
    await asyncio.gather(*(kube.create(SECRETS, {"metadata": {"name": name, "labels": {"of": "test"}}}, home) for name in names))
    found, _ = await kube.list(SECRETS, home, label_selector="of=test")
    assert [item["metadata"]["name"] for item in found] == names
    one, _ = await kube.list(SECRETS, home, field_selector="metadata.name=it-3")
    assert len(one) == 1


async def test_refusals_are_told_apart(cluster: Cluster, kube: Kube, home: str, namespace: Kubectl) -> None:
    with pytest.raises(Invalid, match=f"creating persistentvolumeclaims {home}/it failed"):
        await kube.create(CLAIMS, {**claim("it"), "spec": {}}, home)
    with pytest.raises(NotFound, match=r"namespaces .*nowhere.* not found"):
        await kube.create(SECRETS, {"metadata": {"name": "it"}}, "nowhere")
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"count/secrets": "0"}}}
    namespace.apply(quota)
    namespace.until("quota", "resourcequota", "none", lambda found: found.get("status", {}).get("used") is not None, seconds=30)
    with pytest.raises(Forbidden) as caught:
        await kube.create(SECRETS, {"metadata": {"name": "it"}}, home)
    assert caught.value.by_quota and not caught.value.by_pod_security
    await kube.patch(NAMESPACES, home, None, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}})
    with pytest.raises(Forbidden) as caught:
        await kube.create(PODS, pod("it", cluster.image("busybox"), *FOREVER), home)
    assert caught.value.by_pod_security and not caught.value.by_quota


async def test_an_informer_follows_a_pod_through_its_life(cluster: Cluster, kube: Kube, home: str) -> None:
    told: list[Key] = []
    async with Informer(kube, PODS, home, label_selector="app=it") as pods:
        await pods.wait_synced()
        with pods.listen(told.append):
            for name, labels in (("it", {"app": "it"}), ("other", {"app": "other"})):
                await kube.create(PODS, pod(name, cluster.image("busybox"), *FOREVER, labels=labels), home)
            ready = await pods.wait_for((home, "it"), lambda found: found is not None and found["status"].get("phase") == "Running", 60)
            assert ready is not None
            assert pods.items().keys() == {(home, "it")}
            await kube.delete(PODS, "it", home, {"gracePeriodSeconds": 1})
            assert await pods.wait_for((home, "it"), lambda found: found is None, 60) is None
        assert set(told) == {(home, "it")}
        assert pods.age() < 60


@pytest.mark.slow
async def test_the_server_shows_life_to_an_idle_watch_before_that_counts_as_dead(kube: Kube, home: str) -> None:
    _, version = await kube.list(SECRETS, home)
    async with asyncio.timeout(client.SILENCE_SECONDS - 10):
        assert (await anext(kube.watch(SECRETS, home, version=version)))[0] == "BOOKMARK"


async def test_an_event_shows_at_its_object_once_and_counts(kube: Kube, home: str, namespace: Kubectl) -> None:
    made = await kube.create(SECRETS, {"metadata": {"name": "it"}}, home)
    about = {"apiVersion": "v1", "kind": "Secret", "namespace": home, "name": "it", "uid": made["metadata"]["uid"]}
    poster = EventPoster(kube, "tester", "one")
    for _ in range(3):
        assert await poster.post(about, "Tried", "it was tried", warning=True)
    found, _ = await kube.list(EVENTS, home, field_selector="involvedObject.name=it")
    assert [(item["count"], item["type"], item["message"]) for item in found] == [(3, "Warning", "it was tried")]
    assert "it was tried" in namespace.say("describe", "secret", "it") or namespace.say("events", "--for", "secret/it")


async def test_one_of_two_candidates_leads_and_the_other_follows_at_once_when_it_leaves(
    cluster: Cluster, kube: Kube, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubectl.kubeconfig))
    acquired: dict[str, float] = {}
    lost: list[str] = []

    def candidate(name: str) -> Lease:
        return Lease(home, "it", name, on_acquired=lambda: acquired.__setitem__(name, time.monotonic()), on_lost=lost.append, lease_seconds=6)

    async def until_acquired(name: str) -> None:
        async with asyncio.timeout(30):
            while name not in acquired:
                await asyncio.sleep(0.02)

    first, second = candidate("first"), candidate("second")
    try:
        first.start()
        await until_acquired("first")
        second.start()
        async with asyncio.timeout(30):
            version = (await kube.get(LEASES, "it", home))["metadata"]["resourceVersion"]
            while (await kube.get(LEASES, "it", home))["metadata"]["resourceVersion"] == version:
                await asyncio.sleep(0.1)
        assert first.held and not second.held
        left = time.monotonic()
        await asyncio.to_thread(first.close)
        await until_acquired("second")
        assert acquired["second"] - left < 3
        assert (await kube.get(LEASES, "it", home))["spec"]["leaseTransitions"] == 1
    finally:
        await asyncio.to_thread(first.close)
        await asyncio.to_thread(second.close)
    assert lost == []
