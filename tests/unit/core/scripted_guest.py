"""A guest in this process: it speaks init/API.md over in-memory channels, runs real commands, and breaks where a test says so.

For faults at exact moments only; what a sandbox really does is tested against the real sandbox-init.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

import h11
import httpcore
from agent_sandbox_core.errors import ChannelError
from agent_sandbox_core.frames import EXIT, HEARTBEAT, encode_frame
from agent_sandbox_core.names import new_guest_id

WINDOW = 1 << 20


class MemoryStream(httpcore.AsyncNetworkStream):
    """One end of a duplex byte stream in memory."""

    def __init__(self) -> None:
        self.incoming = asyncio.StreamReader(limit=1 << 20)
        self.peer: MemoryStream
        self.closed = False

    @classmethod
    def pair(cls) -> tuple[MemoryStream, MemoryStream]:
        one, other = cls(), cls()
        one.peer, other.peer = other, one
        return one, other

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self.incoming.read(max_bytes)
        if self.closed:
            raise httpcore.ReadError("closed")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self.closed or self.peer.closed:
            raise httpcore.WriteError("closed")
        self.peer.incoming.feed_data(buffer)
        await asyncio.sleep(0)

    async def aclose(self) -> None:
        self.cut()

    def cut(self) -> None:
        """Ends the stream for both ends, at once."""
        for end in (self, self.peer):
            if not end.closed:
                end.closed = True
                end.incoming.feed_eof()

    def get_extra_info(self, info: str) -> Any:
        return (self.closed or self.incoming.at_eof() or bool(self.incoming._buffer)) if info == "is_readable" else None  # type: ignore[attr-defined]


class Process:
    """A real process and its journal."""

    def __init__(self, guest: ScriptedGuest, process: str, body: dict[str, Any]) -> None:
        self.guest, self.id, self.body = guest, process, body
        self.frames: list[tuple[int, bytes]] = []
        self.acknowledged = 0
        self.held = 0
        self.exit: dict[str, Any] | None = None
        self.changed = asyncio.Event()
        self.room = asyncio.Event()
        self.cause = ""
        self.child: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        command = self.body.get("command")
        argv = ["/bin/sh", "-c", command] if command is not None else self.body["argv"]
        pipe = asyncio.subprocess.PIPE
        self.child = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True)
        if self.cause:
            self.kill(self.cause)
        timer = asyncio.get_running_loop().call_later(self.body["timeout_ms"] / 1000, self.kill, "timed_out")
        assert self.child.stdout is not None
        assert self.child.stderr is not None
        await asyncio.gather(self._pump(1, self.child.stdout), self._pump(2, self.child.stderr))
        status = await self.child.wait()
        timer.cancel()
        reason = self.cause or ("exited" if status >= 0 else "signaled")
        self.exit = {"reason": reason, "code": status if status >= 0 else 128 - status, "signal": max(-status, 0), "message": ""}
        self.add(EXIT, json.dumps(self.describe(extra=1)).encode())

    async def _pump(self, kind: int, pipe: asyncio.StreamReader) -> None:
        while data := await pipe.read(32768):
            while self.held + len(data) > WINDOW and not self.cause:
                self.room.clear()
                await self.room.wait()
            self.held += len(data)
            self.add(kind, data)

    def add(self, kind: int, payload: bytes) -> None:
        self.frames.append((kind, payload))
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def acknowledge(self, upto: int) -> None:
        self.held -= sum(len(payload) for kind, payload in self.frames[self.acknowledged : upto] if kind != EXIT)
        self.acknowledged = max(self.acknowledged, upto)
        self.room.set()

    def kill(self, cause: str) -> None:
        if self.exit is None:
            self.cause = self.cause or cause
            self.room.set()
            if self.child is not None:
                with suppress(ProcessLookupError):
                    os.killpg(self.child.pid, signal.SIGKILL)

    def describe(self, extra: int = 0) -> dict[str, Any]:
        return {
            "id": self.id,
            "pid": 7,
            "next_seq": len(self.frames) + extra,
            "first_seq": 0,
            "duration_ms": 1,
            "exit": self.exit,
            "new_key": "ignored",
        }


class ScriptedGuest:
    """`fault(method, path)` may return "drop" (the channel breaks before the request is seen), "mute" (after it was carried out), "refuse"."""

    def __init__(self) -> None:
        self.boot = new_guest_id()
        self.processes: dict[str, Process] = {}
        self.started: list[Process] = []
        self.streams: dict[str, dict[str, int]] = {}
        self.calls: Counter[str] = Counter()
        self.leases: Counter[str] = Counter()
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.refusing = False
        self.opened = 0
        self.most_open = 0
        self.ends: set[MemoryStream] = set()
        self.heartbeat = 15.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def open_channel(self) -> httpcore.AsyncNetworkStream:
        if self.refusing:
            raise ChannelError("the sandbox does not answer")
        here, there = MemoryStream.pair()
        self.opened += 1
        self.ends.add(there)
        self.most_open = max(self.most_open, len(self.ends))
        self.spawn(self._serve(there))
        return here

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cut_all(self) -> None:
        """Breaks all channels."""
        for end in list(self.ends):
            end.cut()

    def restart(self) -> None:
        """Everything is gone and the guest is another one."""
        for process in self.processes.values():
            process.kill("canceled")
        self.processes = {}
        self.streams = {}
        self.boot = new_guest_id()
        self.cut_all()

    async def aclose(self) -> None:
        self.cut_all()
        for process in self.started:
            process.kill("canceled")
        for _ in range(250):
            if all(process.exit for process in self.started):
                break
            await asyncio.sleep(0.02)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, end: MemoryStream) -> None:
        server = h11.Connection(h11.SERVER)
        try:
            while not end.closed:
                body = b""
                head: h11.Request | None = None
                while True:
                    event = server.next_event()
                    if event is h11.NEED_DATA:
                        server.receive_data(await end.read(65536))
                    elif isinstance(event, h11.Request):
                        head = event
                    elif isinstance(event, h11.Data):
                        body += event.data
                    elif isinstance(event, h11.EndOfMessage):
                        break
                    else:
                        return
                assert head is not None
                method, target = head.method.decode(), urlsplit(head.target.decode())
                self.calls[method + " " + "/".join(target.path.split("/")[2:3])] += 1
                fault = self.fault(method, target.path)
                if fault == "drop":
                    return
                if method == "GET" and target.path.startswith("/v1/streams/"):
                    await self._stream(end, server, target.path.split("/")[3])
                    return
                status, answer = await self._answer(method, target.path.split("/")[2:], {k: v[0] for k, v in parse_qs(target.query).items()}, body)
                if fault == "mute":
                    return
                await self._send(end, server, status, answer)
                server.start_next_cycle()
        except (httpcore.NetworkError, h11.RemoteProtocolError):
            return
        finally:
            end.cut()
            self.ends.discard(end)

    async def _send(self, end: MemoryStream, server: h11.Connection, status: int, answer: bytes) -> None:
        headers = [("Sandbox-Boot-Id", self.boot), ("Content-Length", str(len(answer)))]
        data = server.send(h11.Response(status_code=status, headers=headers)) or b""
        data += (server.send(h11.Data(data=answer)) if answer and status != 204 else b"") or b""
        await end.write(data + (server.send(h11.EndOfMessage()) or b""))

    async def _answer(self, method: str, path: list[str], query: dict[str, str], body: bytes) -> tuple[int, bytes]:
        def error(status: int, code: str, message: str = "") -> tuple[int, bytes]:
            return status, json.dumps({"error": {"code": code, "message": message or code}}).encode()

        match [method, *path]:
            case ["GET", "health"]:
                return 200, json.dumps({"version": "0", "api": 1, "boot_id": self.boot, "state": "ready"}).encode()
            case ["PUT", "processes", process]:
                start = json.loads(body)
                for forgotten in start.pop("forget", []):
                    self.processes.pop(forgotten, None)
                if start.get("cwd") == "/missing":
                    return error(400, "invalid_request", "/missing is no directory")
                if process in self.processes:
                    return 200, json.dumps(self.processes[process].describe()).encode()
                found = self.processes[process] = Process(self, process, start)
                self.started.append(found)
                self.spawn(found.run())
                await self._wait(found, int(query.get("wait_ms", 0)) / 1000, output=query.get("wait_for") == "output")
                frames = [(seq, *frame) for seq, frame in enumerate(found.frames) if frame[0] != EXIT][:8]
                answer = found.describe()
                answer["output"] = [{"seq": seq, "fd": kind, "data": base64.b64encode(data).decode()} for seq, kind, data in frames]
                stream = self.streams.get(query.get("stream", ""))
                answer["subscribed"] = stream is not None
                if stream is not None:
                    stream[process] = len(frames)
                return 201, json.dumps(answer).encode()
            case ["GET", "processes", process]:
                return (200, json.dumps(self.processes[process].describe()).encode()) if process in self.processes else error(404, "no_such_process")
            case ["GET", "processes", process, "output"]:
                frames = enumerate(self.processes[process].frames)
                raw = bytes.fromhex(process)
                return 200, b"".join(encode_frame(kind, raw, seq, data) for seq, (kind, data) in frames if seq >= int(query["from"]))
            case ["POST", "processes", process, "kill"]:
                if process not in self.processes:
                    return error(404, "no_such_process")
                self.processes[process].kill("canceled")
                await self._wait(self.processes[process], 2)
                return 200, json.dumps(self.processes[process].describe()).encode()
            case ["PUT", "streams", stream, "processes", process]:
                if stream not in self.streams:
                    return error(409, "conflict")
                if process not in self.processes:
                    return error(404, "no_such_process")
                self.streams[stream][process] = int(query["from"])
                return 204, b""
            case ["POST", "acks"]:
                for process, upto in json.loads(body).items():
                    if process in self.processes:
                        self.processes[process].acknowledge(upto)
                return 204, b""
            case ["POST", "leases", lease]:
                self.leases[lease] += 1
                return 200, b'{"processes":1}'
        return error(400, "invalid_request", f"{method} {path}")

    async def _wait(self, process: Process, seconds: float, *, output: bool = False) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while process.exit is None and not (output and process.frames):
                    await process.changed.wait()

    async def _stream(self, end: MemoryStream, server: h11.Connection, stream: str) -> None:
        subscribed = self.streams[stream] = {}
        await end.write(server.send(h11.Response(status_code=200, headers=[("Sandbox-Boot-Id", self.boot), ("Transfer-Encoding", "chunked")])) or b"")
        beat = asyncio.get_running_loop().time()
        try:
            while not end.closed:
                sent = False
                for process, at in list(subscribed.items()):
                    found = self.processes.get(process)
                    if found is None or at >= len(found.frames):
                        continue
                    kind, data = found.frames[at]
                    subscribed[process] = at + 1
                    await end.write(server.send(h11.Data(data=encode_frame(kind, bytes.fromhex(process), at, data))) or b"")
                    sent = True
                if not sent:
                    await asyncio.sleep(0.002)
                if asyncio.get_running_loop().time() - beat > self.heartbeat:
                    beat = asyncio.get_running_loop().time()
                    await end.write(server.send(h11.Data(data=encode_frame(HEARTBEAT, bytes(16), 0))) or b"")
        finally:
            if self.streams.get(stream) is subscribed:
                del self.streams[stream]
