"""The client against an API server that fails in the ways real ones do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
import sys
import time
from pathlib import Path

import pytest
from agent_sandbox_kube import client
from agent_sandbox_kube.client import Kube, connect
from agent_sandbox_kube.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    KubeError,
    NotFound,
    TooManyRequests,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from agent_sandbox_kube.resources import LEASES, NODES, PODS, SANDBOXES
from aiohttp import web

from tests.unit.kube.apiserver import ApiServer, Object, cut, kubeconfig, refusal

POD = {"metadata": {"name": "web"}}
RIGHTS = 'pods is forbidden: User "x" cannot create resource "pods" in API group "" in the namespace "one"'
QUOTA = 'pods "web" is forbidden: exceeded quota: small, requested: pods=1, used: pods=1, limited: pods=1'
SECURITY = 'pods "web" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'


def test_a_path_names_group_version_namespace_object_and_subresource() -> None:
    assert PODS.path() == "/api/v1/pods"
    assert PODS.path("one", "web", "exec") == "/api/v1/namespaces/one/pods/web/exec"
    assert NODES.path(None, "node1") == "/api/v1/nodes/node1"
    assert SANDBOXES.path("one", "web", "status") == "/apis/agentsandbox.dev/v1alpha1/namespaces/one/sandboxes/web/status"
    assert LEASES.path("one") == "/apis/coordination.k8s.io/v1/namespaces/one/leases"


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (400, "BadRequest", Invalid),
        (401, "Unauthorized", Unauthorized),
        (403, "Forbidden", Forbidden),
        (404, "NotFound", NotFound),
        (409, "Conflict", Conflict),
        (409, "AlreadyExists", AlreadyExists),
        (410, "Expired", Gone),
        (418, "Teapot", KubeError),
        (422, "Invalid", Invalid),
        (500, "InternalError", Unavailable),
        (503, "ServiceUnavailable", Unavailable),
        (504, "Timeout", Unavailable),
    ],
)
async def test_each_refusal_of_a_change_is_an_error_of_its_kind_with_the_servers_words(
    server: ApiServer, kube: Kube, code: int, reason: str, kind: type[KubeError]
) -> None:
    server.plays.append(refusal(code, reason, "these words"))
    with pytest.raises(KubeError) as caught:
        await kube.create(PODS, POD, "one")
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.reason, caught.value.message) == (code, reason, "these words")
    assert str(caught.value).startswith("creating pods one/web failed: these words")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("message", "quota", "security", "rights"), [(RIGHTS, False, False, True), (QUOTA, True, False, False), (SECURITY, False, True, False)]
)
async def test_a_403_tells_missing_rights_a_quota_and_pod_security_apart_and_what_to_do(
    server: ApiServer, kube: Kube, message: str, quota: bool, security: bool, rights: bool
) -> None:
    server.plays.append(refusal(403, "Forbidden", message))
    with pytest.raises(Forbidden) as caught:
        await kube.create(PODS, POD, "one")
    error = caught.value
    assert (error.by_quota, error.by_pod_security, error.by_rights) == (quota, security, rights)
    assert error.advice
    assert str(error).endswith(error.advice)


async def test_an_error_page_of_a_proxy_is_told_with_its_status_and_beginning(server: ApiServer, kube: Kube) -> None:
    async def page(_: web.Request) -> web.StreamResponse:
        return web.Response(status=502, text="<html>\nBad\ngateway" + " x" * 1000)

    server.plays.extend([page] * client.TRIES)
    with pytest.raises(Unavailable, match="HTTP 502: <html> Bad gateway x x") as caught:
        await kube.get(PODS, "web", "one")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("method", ["get", "create", "delete"])
async def test_a_busy_server_is_asked_again_when_it_says_so(server: ApiServer, kube: Kube, method: str) -> None:
    server.plays.append(refusal(429, "TooManyRequests", "later", {"Retry-After": "1"}))
    server.put("web", 1)
    began = time.monotonic()
    if method == "get":
        await kube.list(PODS, "one")
    elif method == "create":
        await kube.create(PODS, POD, "one")
    else:
        await kube.delete(PODS, "web", "one")
    assert len(server.requests) == 2
    assert time.monotonic() - began >= 0.9


async def test_a_server_that_stays_busy_is_given_up_with_what_to_do(server: ApiServer, kube: Kube) -> None:
    server.plays.extend([refusal(429, "TooManyRequests", "full", {"Retry-After": "0"})] * client.TRIES)
    with pytest.raises(TooManyRequests, match="creating pods one/web failed: full; try again later"):
        await kube.create(PODS, POD, "one")
    assert not server.plays


async def test_a_read_survives_a_broken_connection_and_a_failing_server(server: ApiServer, kube: Kube) -> None:
    server.put("web", 1)
    server.plays.extend([cut, refusal(503, "ServiceUnavailable", "no")])
    items, version = await kube.list(PODS, "one")
    assert ([item["metadata"]["name"] for item in items], version) == (["web"], server.version)


async def test_a_change_that_met_a_broken_connection_is_not_made_twice(server: ApiServer, kube: Kube) -> None:
    await kube.list(PODS)
    server.requests.clear()
    server.plays.append(cut)
    with pytest.raises(Unreachable, match=r"creating pods one/web failed: the API server at http://127\.0\.0\.1:.*: check that it is up"):
        await kube.create(PODS, POD, "one")
    assert len(server.requests) == 1


async def test_a_silent_server_is_given_up_in_time(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(client, "REQUEST_SECONDS", 0.3)
    server.plays.append(hang)
    async with connect(kubeconfig(tmp_path, server.url)) as kube:
        with pytest.raises(Unreachable, match="no answer in time"):
            await kube.create(PODS, POD, "one")


async def test_a_server_that_is_not_there_is_named(tmp_path: Path, unused_tcp_port: int) -> None:
    async with connect(kubeconfig(tmp_path, f"http://127.0.0.1:{unused_tcp_port}")) as kube:
        with pytest.raises(Unreachable, match=f"getting nodes node1 failed: the API server at http://127.0.0.1:{unused_tcp_port} cannot be used"):
            await kube.get(NODES, "node1")


async def test_a_long_list_is_read_in_pages(server: ApiServer, kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE", 3)
    for number in range(8):
        server.put(f"web-{number}", number)
    items, _ = await kube.list(PODS, label_selector="a=b", field_selector="c=d")
    assert [item["spec"]["value"] for item in items] == list(range(8))
    assert len(server.requests) == 3
    assert all("labelSelector=a%3Db" in path and "fieldSelector=c%3Dd" in path for _, path, _ in server.requests)


async def test_a_list_whose_version_goes_between_its_pages_is_read_from_the_start(
    server: ApiServer, kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PAGE", 3)
    for number in range(5):
        server.put(f"web-{number}", number)

    async def first(request: web.Request) -> web.StreamResponse:
        server.plays.append(refusal(410, "Expired", "the provided continue parameter is too old"))
        return server._list(request)

    server.plays.append(first)
    items, _ = await kube.list(PODS)
    assert [item["spec"]["value"] for item in items] == list(range(5))
    assert len(server.requests) == 4


async def test_a_watch_gives_what_happened_since_a_version_and_ends_with_its_reader(server: ApiServer, kube: Kube) -> None:
    version = server.version
    server.put("web", 1)
    server.delete("web")
    seen = []
    async with contextlib.aclosing(kube.watch(PODS, version=version)) as events:
        async for kind, found in events:
            seen.append((kind, found["metadata"]["name"]))
            if kind == "DELETED":
                break
    assert seen == [("ADDED", "web"), ("DELETED", "web")]


async def test_objects_of_any_size_come_through_a_watch_whole(server: ApiServer, kube: Kube) -> None:
    big = server.put("web", 1)
    big["spec"]["text"] = "€" * 1_000_000
    server.put("last", 2)
    async with contextlib.aclosing(kube.watch(PODS, version=0)) as events:
        assert [await anext(events), (await anext(events))[0]] == [("ADDED", big), "ADDED"]


@pytest.mark.parametrize("inside", [False, True])
async def test_a_watch_from_too_old_a_version_is_gone_however_the_server_says_it(server: ApiServer, kube: Kube, inside: bool) -> None:
    async def inside_stream(_: web.Request) -> web.StreamResponse:
        status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        return web.Response(body=json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")

    server.plays.append(inside_stream if inside else refusal(410, "Expired", "too old resource version"))
    with pytest.raises(Gone, match="watching pods in one failed: too old"):
        await anext(kube.watch(PODS, "one", version=1))


async def test_a_watch_that_is_cut_is_told_from_one_that_the_server_ended(server: ApiServer, kube: Kube) -> None:
    async def ended(_: web.Request) -> web.StreamResponse:
        return web.Response(body=b"")

    server.plays.append(ended)
    assert [event async for event in kube.watch(PODS, version=1)] == []
    server.put("web", 1)
    async with contextlib.aclosing(kube.watch(PODS, version=0)) as events:
        await anext(events)
        server.drop()
        with pytest.raises(Unreachable, match="watching pods failed"):
            await anext(events)


async def test_a_watch_that_is_silent_for_too_long_is_a_dead_one(server: ApiServer, kube: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SILENCE_SECONDS", 0.3)
    with pytest.raises(Unreachable, match="watching pods failed"):
        await anext(kube.watch(PODS, version=server.version))


async def test_watches_take_no_connection_from_calls(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONNECTIONS", 1)
    async with connect(kubeconfig(tmp_path, server.url)) as kube:
        server.put("web", 1)
        watches = [kube.watch(PODS, version=0) for _ in range(5)]
        for watch in watches:
            await anext(watch)
        async with asyncio.timeout(5):
            await kube.list(PODS)
        for watch in watches:
            await watch.aclose()


def plugin(folder: Path) -> Object:
    """A login plugin whose n-th call gives the token n, with no expiry."""
    script = folder / "plugin.py"
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, pathlib\n"
        f"count = pathlib.Path({str(folder / 'count')!r})\n"
        "number = int(count.read_text()) + 1 if count.exists() else 1\n"
        "count.write_text(str(number))\n"
        "print(json.dumps({'apiVersion': 'client.authentication.k8s.io/v1', 'kind': 'ExecCredential', 'status': {'token': f'token-{number}'}}))\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(script), "interactiveMode": "Never"}}


async def test_credentials_that_the_server_refuses_are_renewed_once_and_for_all_who_wait(server: ApiServer, tmp_path: Path) -> None:
    async def check(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer token-2":
            return await refusal(401, "Unauthorized", "Unauthorized")(request)
        return server._list(request)

    async with connect(kubeconfig(tmp_path, server.url, plugin(tmp_path))) as kube:
        server.plays.extend([check] * 20)
        await asyncio.gather(*(kube.list(PODS) for _ in range(10)))
        assert (tmp_path / "count").read_text() == "2"


async def test_credentials_that_cannot_be_renewed_are_an_error_with_what_to_do(server: ApiServer, tmp_path: Path) -> None:
    server.plays.append(refusal(401, "Unauthorized", "Unauthorized"))
    async with connect(kubeconfig(tmp_path, server.url, {"token": "secret-token"})) as kube:
        with pytest.raises(Unauthorized, match="getting pods one/web failed: Unauthorized; check the user of the kubeconfig") as caught:
            await kube.get(PODS, "web", "one")
    assert "secret-token" not in str(caught.value)
    assert len(server.requests) == 1


async def test_changes_go_out_as_their_kind(server: ApiServer, kube: Kube) -> None:
    await kube.patch(PODS, "web", "one", {"spec": {}}, subresource="status")
    await kube.patch(PODS, "web", "one", [{"op": "remove", "path": "/spec"}], kind="json")
    await kube.replace(PODS, POD, "one")
    await kube.delete(PODS, "web", "one", {"preconditions": {"uid": "u"}})
    told = [(method, path, headers["Content-Type"]) for method, path, headers in server.requests]
    path = "/api/v1/namespaces/one/pods/web"
    assert told == [
        ("PATCH", f"{path}/status", "application/merge-patch+json"),
        ("PATCH", path, "application/json-patch+json"),
        ("PUT", path, "application/json"),
        ("DELETE", path, "application/json"),
    ]
