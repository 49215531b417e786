"""Channels over an API server that breaks the protocol, or just breaks. What a real one does is in tests/cluster/kube."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpcore
import pytest
from agent_sandbox_core.errors import ChannelError
from agent_sandbox_kube import exec as exec_module
from agent_sandbox_kube.client import connect
from agent_sandbox_kube.exec import ExecStream, open_channel
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.kube.apiserver import Object, cut, kubeconfig, refusal, serving

Act = Callable[[web.WebSocketResponse], Awaitable[None]]
SUCCESS: Object = {"metadata": {}, "status": "Success"}
EXITED_3: Object = {
    "status": "Failure",
    "reason": "NonZeroExitCode",
    "message": "command terminated with exit code 3",
    "details": {"causes": [{"reason": "ExitCode", "message": "3"}]},
}


def status(told: Object) -> bytes:
    return b"\x03" + json.dumps(told).encode()


@contextlib.asynccontextmanager
async def channel(folder: Path, act: Act, *protocols: str) -> AsyncIterator[ExecStream]:
    """A channel whose other end does `act` after the handshake, and then closes."""

    async def handle(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=protocols or ("v5.channel.k8s.io",), max_msg_size=0, autoping=False)
        await socket.prepare(request)
        await act(socket)
        return socket

    async with refusing(folder, handle) as enter:
        stream = await enter()
        try:
            yield stream
        finally:
            await stream.aclose()


@contextlib.asynccontextmanager
async def refusing(
    folder: Path, handle: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> AsyncIterator[Callable[[], Awaitable[ExecStream]]]:
    """Opens channels to a server that answers so."""
    async with serving(handle) as port, connect(kubeconfig(folder, f"http://127.0.0.1:{port}")) as kube:
        yield lambda: open_channel(kube, "one", "web", "main", ["cat"])


async def read_all(stream: ExecStream, most: int = 1 << 20) -> bytes:
    found = bytearray()
    while part := await stream.read(most, 5):
        assert len(part) <= most
        found += part
    return bytes(found)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    frames=st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 4, 9]), st.binary(max_size=60) | st.binary(min_size=5000, max_size=6000)), max_size=12),
    most=st.sampled_from([1, 7, 4096, 1 << 18]),
)
def test_output_arrives_whole_and_in_order_however_it_is_cut_and_mixed(tmp_path: Path, frames: list[tuple[int, bytes]], most: int) -> None:
    async def act(socket: web.WebSocketResponse) -> None:
        await socket.send_bytes(b"\x01")
        for number, data in frames:
            await socket.send_bytes(bytes([number]) + data)
        await socket.send_bytes(status(SUCCESS))
        await socket.close()

    async def run() -> None:
        async with channel(tmp_path, act) as stream:
            assert await read_all(stream, most) == b"".join(data for number, data in frames if number == 1)
            assert stream.get_extra_info("is_readable")

    asyncio.run(run())


async def test_output_that_comes_after_the_status_is_not_lost(tmp_path: Path) -> None:
    async def act(socket: web.WebSocketResponse) -> None:
        await socket.send_bytes(status(SUCCESS))
        await socket.send_bytes(b"\x01late")
        await socket.close()

    async with channel(tmp_path, act) as stream:
        assert await read_all(stream) == b"late"


async def test_the_end_of_a_failed_command_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    async def act(socket: web.WebSocketResponse) -> None:
        await socket.send_bytes(b"\x01out")
        await socket.send_bytes(b"\x02" + b"x" * 10_000 + b" bad\n thing")
        await socket.send_bytes(status(EXITED_3))
        await socket.close()

    async with channel(tmp_path, act) as stream:
        assert await stream.read(100) == b"out"
        for _ in range(2):
            with pytest.raises(httpcore.ReadError, match=r"the bridge into pod one/web ended: x+ bad thing command terminated with exit code 3"):
                await stream.read(100)
        assert len(stream.complaint) < 5000
        with pytest.raises(httpcore.WriteError, match="exit code 3"):
            await stream.write(b"more")


async def nothing(_: web.WebSocketResponse) -> None:
    """Closes at once, politely."""


async def abort(socket: web.WebSocketResponse) -> None:
    await socket.send_bytes(b"\x01half")
    transport = socket._req.transport if socket._req else None
    assert transport is not None
    transport.close()


async def text(socket: web.WebSocketResponse) -> None:
    await socket.send_str("\x03" + json.dumps(SUCCESS))


async def half_status(socket: web.WebSocketResponse) -> None:
    await socket.send_bytes(b'\x03{"status": "Succ')


async def odd_status(socket: web.WebSocketResponse) -> None:
    await socket.send_bytes(b'\x03["Success"]')


@pytest.mark.parametrize("act", [nothing, abort, text, half_status, odd_status])
async def test_an_end_without_a_status_is_never_a_success(tmp_path: Path, act: Act) -> None:
    async with channel(tmp_path, act) as stream:
        with pytest.raises(httpcore.ReadError, match="the channel to pod one/web was cut"):
            await read_all(stream)


@pytest.mark.parametrize(
    "message",
    [
        'Internal error occurred: unable to upgrade connection: container not found ("main")',
        "Internal error occurred: error dialing backend: dial tcp 10.0.0.1:10250: connect: connection refused",
        'Internal error occurred: failed to exec in container: failed to start exec "1f": OCI runtime exec failed: no such file',
    ],
)
async def test_a_command_that_never_began_is_told_as_such_so_that_it_is_safe_to_try_again(tmp_path: Path, message: str) -> None:
    async def act(socket: web.WebSocketResponse) -> None:
        await socket.send_bytes(status({"status": "Failure", "reason": "InternalError", "message": message, "code": 500}))

    async with channel(tmp_path, act) as stream:
        with pytest.raises(ChannelError, match=r"pod one/web could not be entered: .*; look whether its container runs"):
            await stream.read(1)


async def test_a_failure_while_it_ran_is_not_taken_for_one_that_never_began(tmp_path: Path) -> None:
    async def act(socket: web.WebSocketResponse) -> None:
        told = "Internal error occurred: error executing command in container: unexpected EOF"
        await socket.send_bytes(status({"status": "Failure", "reason": "InternalError", "message": told, "code": 500}))

    async with channel(tmp_path, act) as stream:
        with pytest.raises(httpcore.ReadError, match="unexpected EOF"):
            await stream.read(1)


async def test_readable_means_output_or_the_end_and_nothing_else(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def act(socket: web.WebSocketResponse) -> None:
        for frame in (b"\x01", b"\x02", b"\x02warning"):
            await socket.send_bytes(frame)
        await socket.ping()
        await go.wait()
        await socket.send_bytes(b"\x01out")
        go.clear()
        await go.wait()
        await socket.send_bytes(status(SUCCESS))

    async def becomes_readable() -> None:
        async with asyncio.timeout(5):
            while not stream.get_extra_info("is_readable"):
                await asyncio.sleep(0.01)

    async with channel(tmp_path, act) as stream:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await becomes_readable()
        assert stream.complaint == "warning"
        go.set()
        await becomes_readable()
        assert await stream.read(100) == b"out"
        assert not stream.get_extra_info("is_readable")
        go.set()
        await becomes_readable()
        assert await stream.read(100) == b""
        assert stream.get_extra_info("server_addr") is None


async def test_a_read_that_ran_out_of_time_loses_nothing(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def act(socket: web.WebSocketResponse) -> None:
        await go.wait()
        await socket.send_bytes(b"\x01out")
        await asyncio.Event().wait()

    async with channel(tmp_path, act) as stream:
        for _ in range(3):
            with pytest.raises(httpcore.ReadTimeout, match="nothing came over the channel to pod one/web in time"):
                await stream.read(100, 0.02)
        go.set()
        assert await stream.read(100, 5) == b"out"


async def test_what_is_written_arrives_in_frames_for_stdin_and_the_end_of_input_as_such(tmp_path: Path) -> None:
    frames: list[bytes] = []

    async def act(socket: web.WebSocketResponse) -> None:
        async for message in socket:
            frames.append(message.data)
            if message.data[0] == 255:
                break
        await socket.send_bytes(status(SUCCESS))

    data = bytes(range(256)) * 1000
    async with channel(tmp_path, act) as stream:
        await stream.write(b"")
        await stream.write(b"small")
        await stream.write(data)
        await stream.end_input()
        assert await stream.read(1) == b""
    assert frames[0] == b"\0small" and frames[-1] == b"\xff\0"
    assert b"".join(frame[1:] for frame in frames[1:-1]) == data
    assert all(frame[0] == 0 and len(frame) <= exec_module.WRITE_BYTES + 1 for frame in frames[:-1])


async def test_a_reader_that_takes_nothing_stops_the_writer_and_its_time_runs_out_without_ending_the_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_module, "KEEP_SECONDS", 0.05)
    go = asyncio.Event()

    async def act(socket: web.WebSocketResponse) -> None:
        transport = socket._req.transport if socket._req else None
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        await go.wait()
        transport.resume_reading()
        async for message in socket:
            if message.data == b"\0last":
                break
        await socket.send_bytes(b"\x01taken")
        await asyncio.Event().wait()

    async with channel(tmp_path, act) as stream:
        with pytest.raises(httpcore.WriteTimeout, match="the channel to pod one/web took nothing in time"):
            await stream.write(b"x" * (64 << 20), 1)
        go.set()
        await stream.write(b"last", 20)
        assert await stream.read(100, 20) == b"taken"


async def test_a_writer_that_is_not_read_from_is_stopped(tmp_path: Path) -> None:
    sent = 0

    async def act(socket: web.WebSocketResponse) -> None:
        nonlocal sent
        for _ in range(2000):
            await socket.send_bytes(b"\x01" + b"x" * 32768)
            sent += 32768
        await socket.send_bytes(status(SUCCESS))

    async with channel(tmp_path, act) as stream:
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.3)
        assert sent < 32 << 20
        assert len(await read_all(stream)) == 2000 * 32768


async def test_an_idle_channel_shows_life_from_time_to_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_module, "KEEP_SECONDS", 0.02)
    kinds: list[web.WSMsgType] = []

    async def act(socket: web.WebSocketResponse) -> None:
        for _ in range(3):
            message = await socket.receive()
            kinds.append(message.type)
            await socket.pong(message.data)
        await socket.send_bytes(b"\x01alive")
        await asyncio.Event().wait()

    async with channel(tmp_path, act) as stream:
        assert await stream.read(100, 5) == b"alive"
    assert kinds == [web.WSMsgType.PING] * 3


async def test_closing_is_bounded_and_leaves_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_module, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(exec_module, "KEEP_SECONDS", 0.01)

    async def act(_: web.WebSocketResponse) -> None:
        await asyncio.Event().wait()

    async with channel(tmp_path, act) as stream:
        reading = asyncio.create_task(stream.read(1))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(2):
            await stream.aclose()
            with pytest.raises(httpcore.ReadError):
                await reading
        with pytest.raises(httpcore.WriteError):
            await stream.write(b"x")
        assert [task for task in asyncio.all_tasks() if "ExecStream" in str(task.get_coro())] == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (401, "does not accept our credentials for an exec in pod one/web: check"),
        (403, "no right to exec in pod one/web: the account needs the verbs get and create on pods/exec in namespace one"),
        (404, "pod one/web is not there"),
        (400, "HTTP 400.*no container main"),
    ],
)
async def test_each_refusal_says_what_to_do(tmp_path: Path, code: int, words: str) -> None:
    async with refusing(tmp_path, refusal(code, "No", "no")) as enter:
        with pytest.raises(ChannelError, match=words):
            await enter()


async def test_a_server_that_only_speaks_the_old_protocol_is_refused_clearly(tmp_path: Path) -> None:
    with pytest.raises(ChannelError, match=r"does not speak v5\.channel\.k8s\.io: Kubernetes 1\.30 or newer is needed"):
        async with channel(tmp_path, nothing, "v4.channel.k8s.io"):
            pass


async def test_a_handshake_that_hangs_is_given_up_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec_module, "OPEN_SECONDS", 0.2)

    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async with refusing(tmp_path, hang) as enter:
        with pytest.raises(ChannelError, match="pod one/web let nobody in within"):
            await enter()


async def test_a_connection_that_breaks_in_the_handshake_is_told(tmp_path: Path) -> None:
    async with refusing(tmp_path, cut) as enter:
        with pytest.raises(ChannelError, match="pod one/web cannot be reached through the API server"):
            await enter()


async def test_a_channel_has_no_tls_of_its_own(tmp_path: Path) -> None:
    async def act(_: web.WebSocketResponse) -> None:
        await asyncio.Event().wait()

    async with channel(tmp_path, act) as stream:
        with pytest.raises(httpcore.ConnectError):
            await stream.start_tls(ssl.create_default_context())
