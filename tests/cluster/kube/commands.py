"""Commands in a pod, their input and output."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from agent_sandbox_kube.client import Kube
from agent_sandbox_kube.exec import ExecStream, open_channel

MUCH = 50_000_000


@contextlib.asynccontextmanager
async def command(kube: Kube, namespace: str, *argv: str, name: str = "worker") -> AsyncIterator[ExecStream]:
    """A command in a pod."""
    stream = await open_channel(kube, namespace, name, "main", argv)
    try:
        yield stream
    finally:
        await stream.aclose()


async def read_all(stream: ExecStream) -> bytes:
    found = bytearray()
    while part := await stream.read(1 << 18, 20):
        found += part
    return bytes(found)


async def send_all(stream: ExecStream, data: bytes, piece: int = 1 << 18) -> None:
    for at in range(0, len(data), piece):
        await stream.write(data[at : at + piece], 20)
