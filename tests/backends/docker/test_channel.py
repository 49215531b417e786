"""Channels over the engine's exec: bytes whole both ways, ends told apart, nothing left behind, and no thread held by those that hang."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpcore
import pytest
from agent_sandbox_api.backends.docker import DockerEngine
from agent_sandbox_api.backends.docker.bridges import Bridges
from agent_sandbox_api.backends.docker.channel import ExecStream, exec_config
from agent_sandbox_api.backends.docker.client import EngineClient
from agent_sandbox_core.errors import ChannelError

from tests.support.docker import Docker
from tests.support.target import sandbox_image

from .conftest import make

OpenExec = Callable[..., "asyncio.Future[ExecStream]"]


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    made = EngineClient()
    await made.open()
    yield made
    await made.close()


@pytest.fixture
async def container(engine: Docker) -> AsyncIterator[str]:
    """A plain container of the test's own."""
    name = f"agent-sandbox-test-{secrets.token_hex(4)}"
    made = engine.client.containers.run(sandbox_image(), ["sleep", "600"], name=name, detach=True, network_mode="none", pids_limit=400)
    yield name
    made.remove(force=True)


async def open_exec(client: EngineClient, container: str, command: list[str], *, expect: bytes = b"") -> ExecStream:
    connection = await client.connect("testing")
    made = await connection.call("testing", "POST", await client.path(f"/containers/{container}/exec"), exec_config(command))
    first = await connection.upgrade("testing", await client.path(f"/exec/{made['Id']}/start"), {"Detach": False, "Tty": False})
    return ExecStream(connection.wire, first=first, expect=expect)


def processes(engine: Docker, container: str, program: str) -> int:
    rows = engine.client.api.top(container)["Processes"]
    return sum(program in row[-1] for row in rows)


async def until(condition: Callable[[], object], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.05)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def read_exactly(stream: ExecStream, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        data = await stream.read(65536, 20)
        assert data, f"the stream ended after {len(got)} of {size} bytes"
        got += data
    return bytes(got)


async def test_bytes_come_back_whole_and_in_order(client: EngineClient, container: str) -> None:
    stream = await open_exec(client, container, ["cat"])
    data = os.urandom(20 << 20)
    sending = asyncio.create_task(stream.write(data, 60))
    back = await read_exactly(stream, len(data))
    await sending
    assert hashlib.sha256(back).digest() == hashlib.sha256(data).digest()
    await stream.aclose()


async def test_an_echo_takes_single_milliseconds(client: EngineClient, container: str) -> None:
    stream = await open_exec(client, container, ["cat"])
    times = []
    for _ in range(100):
        begun = time.perf_counter()
        await stream.write(b"x")
        assert await stream.read(10, 5) == b"x"
        times.append(time.perf_counter() - begun)
    assert sorted(times)[50] < 0.02
    await stream.aclose()


async def test_a_reader_that_waits_makes_the_writer_wait(client: EngineClient, container: str) -> None:
    stream = await open_exec(client, container, ["sh", "-c", "head -c 50000000 /dev/zero; echo done >/tmp/done; sleep 60"])
    assert await read_exactly(stream, 1000)
    await asyncio.sleep(1)
    assert stream._wire._held <= 4 << 20
    await read_exactly(stream, 50_000_000 - 65536)
    await stream.aclose()


async def test_the_end_of_a_command_is_the_end_of_its_stream(client: EngineClient, container: str) -> None:
    stream = await open_exec(client, container, ["echo", "hello"])
    assert await read_exactly(stream, 6) == b"hello\n"
    assert await stream.read(10, 5) == b""
    assert stream.get_extra_info("is_readable") is True
    await stream.aclose()


async def test_a_complaint_before_the_end_is_an_error_that_carries_it(client: EngineClient, container: str) -> None:
    stream = await open_exec(client, container, ["sh", "-c", "echo oh no >&2"])
    with pytest.raises(httpcore.ReadError, match="oh no"):
        await stream.read(10, 5)
    await stream.aclose()


async def test_a_command_that_cannot_be_started_is_the_engines_words(client: EngineClient, container: str) -> None:
    stream = await open_exec(client, container, ["/no/such/bridge", "connect"], expect=b"HTTP/1.")
    with pytest.raises(httpcore.ReadError, match="/no/such/bridge"):
        await stream.read(10, 5)
    await stream.aclose()


async def test_silence_is_a_timeout_and_the_channel_goes_on(client: EngineClient, container: str) -> None:
    stream = await open_exec(client, container, ["cat"])
    with pytest.raises(httpcore.ReadTimeout):
        await stream.read(10, 0.1)
    assert stream.get_extra_info("is_readable") is False
    await stream.write(b"x")
    assert await stream.read(10, 5) == b"x"
    await stream.aclose()


async def test_closing_a_channel_ends_its_bridge_and_nothing_else(client: EngineClient, container: str, engine: Docker) -> None:
    other = await open_exec(client, container, ["cat"])
    stream = await open_exec(client, container, ["tee", "/dev/null"])
    await until(lambda: processes(engine, container, "tee") == 1)
    await stream.aclose()
    await until(lambda: processes(engine, container, "tee") == 0)
    assert processes(engine, container, "cat") == 1 and processes(engine, container, "sleep 600") == 1
    await other.write(b"still")
    assert await read_exactly(other, 5) == b"still"
    await other.aclose()


async def test_a_container_killed_while_one_reads_ends_the_channel_within_seconds(client: EngineClient, container: str, engine: Docker) -> None:
    stream = await open_exec(client, container, ["cat"])
    reading = asyncio.create_task(stream.read(10, 20))
    await asyncio.sleep(0.1)
    engine.client.api.kill(container)
    done, _ = await asyncio.wait({reading}, timeout=10)
    assert done and (isinstance(reading.exception(), httpcore.ReadError) or reading.result() == b"")
    await until(lambda: stream.get_extra_info("is_readable"))
    with pytest.raises((httpcore.WriteError, httpcore.WriteTimeout)):
        await stream.write(bytes(20 << 20), 5)
    await stream.aclose()


async def test_no_channel_leads_into_a_container_that_does_not_run(client: EngineClient, container: str, engine: Docker) -> None:
    bridges = Bridges(client)
    engine.client.api.kill(container)
    await until(lambda: not engine.client.containers.get(container).attrs["State"]["Running"])
    with pytest.raises(ChannelError, match="not running"):
        await bridges.open(container)
    with pytest.raises(ChannelError, match="No such container"):
        await bridges.open("no-such-container")


async def test_64_hanging_channels_hold_no_thread_and_delay_nothing(client: EngineClient, container: str) -> None:
    await client.ping(3)
    await client.path("/x")
    threads, files = threading.active_count(), open_files()
    streams = []
    for _ in range(8):
        streams += await asyncio.gather(*(open_exec(client, container, ["cat"]) for _ in range(8)))
    waiting = [asyncio.create_task(stream.read(10)) for stream in streams]
    begun = time.perf_counter()
    await asyncio.sleep(0)
    await client.ping(3)
    await client.run("testing", lambda api: api.version())
    assert time.perf_counter() - begun < 1 and threading.active_count() <= threads + 1
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.gather(*(stream.aclose() for stream in streams))
    assert open_files() <= files + 1


async def test_the_channel_that_a_create_opens_carries_the_first_command(box: DockerEngine) -> None:
    record = await make(box)
    opened: list[str] = []
    real = box._bridges.open

    async def counted(container: str) -> ExecStream:
        opened.append(container)
        return await real(container)

    box._bridges.open = counted  # type: ignore[method-assign]
    guest = box.guest(record.sandbox_id)
    await guest.health()
    await guest.aclose()
    assert opened == []
    again = box.guest(record.sandbox_id)
    await again.health()
    await again.aclose()
    assert len(opened) == 1


async def test_a_closed_guest_leaves_no_bridge_in_the_sandbox(box: DockerEngine, engine: Docker) -> None:
    record = await make(box)
    name = f"agent-sandbox-{record.sandbox_id}"
    guest = box.guest(record.sandbox_id)
    await guest.health()
    assert processes(engine, name, "sandbox-init connect") == 1
    await guest.aclose()
    await until(lambda: processes(engine, name, "sandbox-init connect") == 0)


async def test_a_channel_closed_in_the_middle_of_an_answer_leaves_no_bridge(box: DockerEngine, engine: Docker) -> None:
    record = await make(box)
    name = f"agent-sandbox-{record.sandbox_id}"
    guest = box.guest(record.sandbox_id)
    box._bridges.drop_warm(record.sandbox_id)
    stream = await box._bridges.open(name)
    await stream.write(b"GET /v1/files?path=/proc/kallsyms HTTP/1.1\r\nHost: x\r\n\r\n")
    await stream.read(100, 5)
    await stream.aclose()
    await until(lambda: processes(engine, name, "sandbox-init connect") == 0)
    await guest.aclose()
