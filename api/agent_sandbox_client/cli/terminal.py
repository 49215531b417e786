"""A command in a terminal of its own in the sandbox, joined with ours: keys, window size, Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Any, Final

import websockets
from websockets.asyncio.client import ClientConnection, connect

from .failures import UNKNOWN, Failure
from .remote import CONNECT_SECONDS, Json, Remote

BLOCK: Final = 1 << 16
CLOSE_SECONDS: Final = 5.0


def run_in_terminal(remote: Remote, sandbox: str, body: Json) -> int:
    """Runs a command in a terminal until it ends; returns its exit code. It is ours, so it ends with us."""
    body = body | {"stdin": True, "pty": _window()}
    if (kind := os.environ.get("TERM")) and "TERM" not in body["env"]:
        body["env"] = body["env"] | {"TERM": kind}
    process = remote.call("POST", f"/v1/sandboxes/{sandbox}/processes", body=body)["id"]
    path = f"/v1/sandboxes/{sandbox}/processes/{process}"
    try:
        with _raw(sys.stdin.fileno()):
            ended = asyncio.run(_join(remote, path))
    finally:
        with contextlib.suppress(Failure):
            remote.call("DELETE", path)
    if ended is None:
        raise Failure(f"the connection to {remote.url} was lost: what ran in the terminal was ended, its outcome is unknown", UNKNOWN)
    code: int = ended["exit_code"]
    return code


def _window() -> Json:
    size = shutil.get_terminal_size()
    return {"rows": size.lines, "cols": size.columns}


@contextlib.contextmanager
def _raw(terminal: int) -> Iterator[None]:
    """Every key goes to the sandbox, Ctrl-C too."""
    before = termios.tcgetattr(terminal)
    tty.setraw(terminal)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


async def _join(remote: Remote, path: str) -> Json | None:
    """Joins our terminal with the process's. Its exit event; None when the connection or our terminal was lost."""
    address = "ws" + remote.url.removeprefix("http") + path + "/attach"
    try:
        async with connect(
            address,
            additional_headers=remote.headers,
            compression=None,
            max_size=None,
            open_timeout=CONNECT_SECONDS,
            close_timeout=CLOSE_SECONDS,
            proxy=True if remote.by_proxy else None,
        ) as socket:
            return await _carry(socket)
    except websockets.ConnectionClosed:
        return None
    except (OSError, websockets.InvalidHandshake, TimeoutError) as error:
        raise Failure(f"{remote.url} opened no terminal ({error}): is a proxy between that takes no WebSockets?", UNKNOWN) from None


async def _carry(socket: ClientConnection) -> Json | None:
    loop = asyncio.get_running_loop()
    lost = asyncio.Event()
    resized = asyncio.Event()
    for number in (signal.SIGHUP, signal.SIGTERM):
        loop.add_signal_handler(number, lost.set)
    loop.add_signal_handler(signal.SIGWINCH, resized.set)
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(_receive(socket)),
        asyncio.create_task(lost.wait()),
        asyncio.create_task(_send(socket)),
        asyncio.create_task(_tell_size(socket, resized)),
    ]
    try:
        # Input and sizes may end before the command does.
        await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _receive(socket: ClientConnection) -> Json | None:
    ended: Json | None = None
    async for message in socket:
        if isinstance(message, bytes):
            _write(message)
        elif (event := json.loads(message)).get("type") == "exit":
            ended = event
    return ended


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(sys.stdout.fileno(), view) :]


async def _send(socket: ClientConnection) -> None:
    terminal = sys.stdin.fileno()
    while data := await _read(terminal):
        await socket.send(data)
    await socket.send(json.dumps({"type": "eof"}))


async def _read(terminal: int) -> bytes:
    """What was typed; empty at the end."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(terminal, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(terminal)
    try:
        return os.read(terminal, BLOCK)
    except OSError:
        return b""


async def _tell_size(socket: ClientConnection, resized: asyncio.Event) -> None:
    while True:
        await resized.wait()
        resized.clear()
        await socket.send(json.dumps({"type": "resize"} | _window()))
