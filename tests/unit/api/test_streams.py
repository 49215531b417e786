"""Streams and disconnects, over a real server on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest
from agent_sandbox_api import streams
from agent_sandbox_api.backends.memory import Call

from .worlds import HEADERS, World, make_settings, served, until


@pytest.fixture
async def server(world: World) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """A client and a sandbox."""
    world.engine._programs["forever"] = forever
    with world.opened() as backend:
        async with served(make_settings(max_file_bytes=1_000_000), backend) as client:
            yield client, (await client.post("/v1/sandboxes", json={})).json()["id"]


async def forever(call: Call) -> int:
    """Prints until it is cancelled; with an argument only once."""
    await call.print("begun\n")
    while True:
        await asyncio.sleep(0.01 if len(call.argv) == 1 else 3600)
        await call.print("tick\n")


def body(command: str, **more: object) -> dict[str, object]:
    return {"command": command, "timeout_seconds": 100} | more


async def test_small_writes_are_joined_and_nothing_is_lost(server: tuple[httpx.AsyncClient, str]) -> None:
    client, box = server
    answer = await client.post(f"/v1/sandboxes/{box}/exec/stream", json=body("burst 20000; echo end >&2"))
    assert answer.headers["content-type"] == "application/x-ndjson"
    events = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(event["data"] for event in events if event["type"] == "stdout") == "".join(f"{n}\n" for n in range(20_000))
    assert [event["type"] for event in events].count("exit") == 1 and events[-1] | {"duration_ms": 0} == {
        "type": "exit", "exit_code": 0, "timed_out": False, "duration_ms": 0,
    }  # fmt: skip
    assert events[-2] == {"type": "stderr", "data": "end\n"} and len(events) < 10_000


@pytest.mark.parametrize("endpoint", ["exec", "exec/stream"])
async def test_a_client_that_leaves_ends_its_command(server: tuple[httpx.AsyncClient, str], world: World, endpoint: str) -> None:
    client, box = server
    for script in ("forever", "forever quietly", "sleep 1000"):
        call = asyncio.create_task(client.post(f"/v1/sandboxes/{box}/{endpoint}", json=body(script)))
        await until(lambda: world.engine.machine(box).processes == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: world.engine.machine(box).processes == 0)


async def test_a_stream_without_a_reader_waits_and_then_ends_with_its_client(server: tuple[httpx.AsyncClient, str], world: World) -> None:
    client, box = server
    async with client.stream("POST", f"/v1/sandboxes/{box}/exec/stream", json=body("burst 100000000")) as answer:
        assert answer.status_code == 200
        assert (await client.post(f"/v1/sandboxes/{box}/exec", json=body("echo beside"))).json()["stdout"] == "beside\n"
    await until(lambda: world.engine.machine(box).processes == 0)


async def test_an_unknown_outcome_breaks_the_connection_off_without_an_exit_line(server: tuple[httpx.AsyncClient, str], world: World) -> None:
    client, box = server
    seen: list[str] = []
    following = asyncio.create_task(follow(client, box, seen))
    await until(lambda: seen)
    world.engine.crash(box)
    with pytest.raises(httpx.RemoteProtocolError):
        await following
    assert set(seen) == {"stdout"}


async def follow(client: httpx.AsyncClient, box: str, seen: list[str]) -> None:
    """Notes the types of an endless stream's events."""
    async with client.stream("POST", f"/v1/sandboxes/{box}/exec/stream", json=body("forever")) as answer:
        async for line in answer.aiter_lines():
            seen += [json.loads(line)["type"]]


async def test_what_keeps_a_command_from_starting_is_an_ordinary_error(server: tuple[httpx.AsyncClient, str]) -> None:
    client, box = server
    answer = await client.post(f"/v1/sandboxes/{box}/exec/stream", json=body("true", workdir="/no/such"))
    assert answer.status_code == 400 and "/no/such" in answer.json()["error"]["message"]


async def test_long_silence_has_a_heartbeat_and_the_headers_do_not_wait_for_output(
    server: tuple[httpx.AsyncClient, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "HEARTBEAT_SECONDS", 0.02)
    client, box = server
    answer = await client.post(f"/v1/sandboxes/{box}/exec/stream", json=body("sleep 0.4; echo done"))
    lines = answer.text.split("\n")[:-1]
    assert lines.count("") >= 2 and [json.loads(line)["type"] for line in lines if line] == ["stdout", "exit"]


async def test_a_stop_of_the_server_breaks_streams_off_after_its_grace(world: World) -> None:
    world.engine._programs["forever"] = forever
    seen: list[str] = []

    with world.opened() as backend:
        async with AsyncExitStack() as outlives:
            async with served(make_settings(), backend) as client:
                box = (await client.post("/v1/sandboxes", json={})).json()["id"]
                own = await outlives.enter_async_context(httpx.AsyncClient(base_url=client.base_url, headers=HEADERS))
                following = asyncio.create_task(follow(own, box, seen))
                await until(lambda: seen)
            with pytest.raises(httpx.RemoteProtocolError):
                await following
        await until(lambda: world.engine.machine(box).processes == 0)
        assert "exit" not in seen


async def test_an_upload_that_breaks_off_leaves_the_old_file(server: tuple[httpx.AsyncClient, str], world: World) -> None:
    client, box = server
    await client.put(f"/v1/sandboxes/{box}/files", params={"path": "f"}, content=b"old")
    halfway = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"new" * 1000
        halfway.set()
        await asyncio.sleep(3600)

    upload = asyncio.create_task(client.put(f"/v1/sandboxes/{box}/files", params={"path": "f"}, content=slow()))
    await halfway.wait()
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    assert (await client.get(f"/v1/sandboxes/{box}/files", params={"path": "f"})).content == b"old"


async def test_an_upload_over_the_limit_is_413_and_the_connection_can_be_used_again(server: tuple[httpx.AsyncClient, str]) -> None:
    client, box = server
    for content in (b"x" * 1_000_001, chunks(b"x" * 65_536, 40)):
        answer = await client.put(f"/v1/sandboxes/{box}/files", params={"path": "big"}, content=content)
        assert answer.status_code == 413 and "1000000" in answer.json()["error"]["message"]
    listing = await client.get(f"/v1/sandboxes/{box}/files/list")
    assert listing.json() == {"path": "/workspace", "entries": []}


async def chunks(part: bytes, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield part


async def test_a_create_whose_client_leaves_is_undone_or_listed(server: tuple[httpx.AsyncClient, str], world: World) -> None:
    client, box = server
    for _ in range(20):
        call = asyncio.create_task(client.post("/v1/sandboxes", json={}))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
    await until(lambda: not world.backend._making and not world.backend._leftovers)
    listed = {row["id"] for row in (await client.get("/v1/sandboxes")).json()["sandboxes"]}
    assert box in listed and listed == {instance.record.sandbox_id for instance in await world.engine.instances()}
