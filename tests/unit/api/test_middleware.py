"""What happens around requests: keys, sizes, ids, faults, the stop."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence

import httpx
import pytest
from agent_sandbox_api.app import create_app
from agent_sandbox_api.backends.memory import MemoryEngine
from agent_sandbox_api.logs import configure_logging
from agent_sandbox_api.middleware import MAX_JSON_BYTES
from agent_sandbox_core.errors import BackendError
from agent_sandbox_core.models import Sandbox
from fastapi import FastAPI

from .worlds import HEADERS, KEY, World, client_of, make_settings

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def app(world: World) -> Iterator[FastAPI]:
    with world.opened() as backend:
        yield create_app(make_settings(), backend)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as made:
        yield made


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Authorization", "Basic x"), ("Authorization", f"Bearer {KEY}")], 200),
        ([("X-API-Key", KEY), ("Authorization", "Bearer wrong-key-0123456789")], 401),
        ([("X-API-Key", "wrong"), ("X-API-Key", KEY)], 401),
        ([("Authorization", "Bearer"), ("X-API-Key", KEY)], 200),
        ([("Authorization", f"Bearer  {KEY}")], 200),
        ([("Authorization", f"Bearer {KEY} {KEY}")], 401),
        ([("Authorization", f"bearer\t{KEY}")], 401),
    ],
)
async def test_several_headers_are_read_in_a_fixed_order(app: FastAPI, headers: Sequence[tuple[str, str]], status: int) -> None:
    async with client_of(app, **{"X-Request-Id": "no-key-of-its-own"}) as client:
        assert (await client.get("/v1/sandboxes", headers=list(headers))).status_code == status


async def test_the_documentation_needs_no_key_and_says_nothing_of_the_installation(app: FastAPI) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://facade") as client:
        schema = (await client.get("/openapi.json")).json()
        assert "html" in (await client.get("/docs")).headers["content-type"]
        assert schema["paths"]["/v1/sandboxes"]["post"]["security"] == [{"HTTPBearer": []}, {"APIKeyHeader": []}]
        assert "security" not in schema["paths"]["/healthz"]["get"] and KEY not in json.dumps(schema)
        assert (await client.get("/docs/x")).status_code == 401 and (await client.get("/metrics")).status_code == 401


async def test_a_json_body_over_the_limit_is_413_with_and_without_a_length(client: httpx.AsyncClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(MAX_JSON_BYTES // 65536 + 2):
            yield b" " * 65536

    for content in (b" " * (MAX_JSON_BYTES + 1), endless()):
        answer = await client.post("/v1/sandboxes", content=content, headers=JSON)
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "payload_too_large"


async def test_a_body_that_cannot_be_parsed_is_400_or_422_never_a_fault(client: httpx.AsyncClient) -> None:
    for content in (b"[" * 200_000, b'{"cpus": 1' + b"0" * 5000 + b"}", b"\xff\xfe", b'{"env": {"\\ud800": "x"}, "\\udfff": 1}', b"nan"):
        answer = await client.post("/v1/sandboxes", content=content, headers=JSON)
        assert answer.status_code in (400, 422), (content[:20], answer.text)
        body = answer.json()
        assert set(body) == {"detail"} or set(body["error"]) == {"code", "message"}


@pytest.mark.parametrize(
    ("given", "kept"), [("mine-123", True), ("a/b:c=d@e+f.g_h", True), ("", False), ("x" * 129, False), ("two words", False), ('"', False)]
)
async def test_a_sane_request_id_is_kept_and_another_is_replaced(client: httpx.AsyncClient, given: str, kept: bool) -> None:
    answer = await client.get("/healthz", headers={"X-Request-Id": given})
    assert (answer.headers["x-request-id"] == given) is kept and answer.headers["x-request-id"]


async def test_a_fault_is_internal_error_in_our_shape_and_the_log_holds_no_data_of_the_caller(app: FastAPI, client: httpx.AsyncClient) -> None:
    async def faulty() -> list[Sandbox]:
        raise ValueError("s3cr3t-0001")

    app.state.context.backend.list = faulty
    log = io.StringIO()
    before = logging.getLogger().handlers[:]
    configure_logging("debug", "json", log)
    try:
        answer = await client.get("/v1/sandboxes?s3cr3t-0002", headers={"X-Request-Id": "fault-1"})
    finally:
        logging.getLogger().handlers[:] = before
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error" and "fault-1" in answer.text
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [line["message"] for line in lines] == ["a request met an unexpected fault", "request"]
    assert lines[0]["error"] == "ValueError" and any("faulty" in frame for frame in lines[0]["stack"])
    assert all(line["request_id"] == "fault-1" for line in lines) and "s3cr3t" not in log.getvalue() + answer.text and KEY not in log.getvalue()


async def test_a_server_that_stops_refuses_new_work_and_still_says_that_it_lives(app: FastAPI, client: httpx.AsyncClient) -> None:
    app.state.context.lifecycle.draining = True
    answer = await client.get("/v1/sandboxes")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "unavailable" and answer.headers["connection"] == "close"
    assert (await client.get("/healthz")).status_code == 200


async def test_metrics_count_by_route_and_survive_an_engine_that_is_away(app: FastAPI, client: httpx.AsyncClient, world: World) -> None:
    box = (await client.post("/v1/sandboxes", json={})).json()["id"]
    await client.post(f"/v1/sandboxes/{box}/exec", json={"command": "true"})
    await client.get("/v1/sandboxes/sb_0000000000000000")
    await client.get("/nowhere/at/all")
    text = (await client.get("/metrics")).text
    for sample in (
        'agent_sandbox_requests_total{method="POST",route="/v1/sandboxes/{sandbox_id}/exec",status="200"} 1.0',
        'agent_sandbox_requests_total{method="GET",route="/v1/sandboxes/{sandbox_id}",status="404"} 1.0',
        'agent_sandbox_requests_total{method="any",route="none",status="404"} 1.0',
        'agent_sandbox_exec_seconds_count{kind="exec"} 1.0',
        'agent_sandbox_sandboxes{phase="Running"} 1.0',
        "agent_sandbox_channels_open 0.0",
    ):
        assert sample in text, sample
    assert box not in text
    world.engine.unplug()
    assert "agent_sandbox_sandboxes{" not in (await client.get("/metrics")).text
    world.engine.plug_in()


async def test_two_apps_share_nothing(app: FastAPI) -> None:
    other = create_app(make_settings(api_keys="another-key-0123456789"), app.state.context.backend)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(other), base_url="http://facade") as client:
        assert (await client.get("/v1/sandboxes", headers=HEADERS)).status_code == 401
    assert other.state.context.metrics.registry is not app.state.context.metrics.registry


async def test_a_start_that_fails_closes_what_was_opened(world: World) -> None:
    engine = MemoryEngine()
    engine.unplug("nobody is there")
    with pytest.raises(BackendError, match="nobody is there"):
        async with world.running(engine):
            raise AssertionError("it must not start")
    async with world.running():
        assert await world.backend.list() == []
