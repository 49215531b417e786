"""The few things that asynchronous and blocking code do differently. `sync/primitives.py` is its twin; everything else there is generated from here."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any, Final, TypeVar

import httpx

T = TypeVar("T")

CHUNK: Final = 1 << 16
AT_ONCE: Final = 8
Body = bytes | str | IO[bytes] | Iterable[bytes] | AsyncIterable[bytes]
"""What can be sent as a file's content."""

HttpClient = httpx.AsyncClient
HttpTransport = httpx.AsyncHTTPTransport


def current_place() -> object:
    """What kept connections belong to: the running event loop."""
    return asyncio.get_running_loop()


async def sleep(seconds: float) -> None:
    """Waits."""
    await asyncio.sleep(seconds)


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Does blocking work."""
    return await asyncio.to_thread(work, *arguments)


async def notify(callback: Callable[[str], object] | None, text: str) -> None:
    """Calls a callback, which may be a coroutine function."""
    if callback is not None:
        outcome = callback(text)
        if inspect.isawaitable(outcome):
            await outcome


async def together(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T | Exception]:
    """Does calls side by side, a few at once; what each gave or raised, in their order."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(call: Callable[[], Awaitable[T]]) -> T | Exception:
        async with room:
            try:
                return await call()
            except Exception as error:  # noqa: BLE001 - given back as the outcome of this call
                return error

    return await asyncio.gather(*map(one, calls))


def shielded(seconds: float) -> AbstractContextManager[object]:
    """What is done inside is done even when the task was cancelled, but takes no longer than this."""
    import anyio  # noqa: PLC0415 - most programs never get here

    return anyio.move_on_after(seconds, shield=True)


async def file_chunks(source: IO[bytes]) -> AsyncIterator[bytes]:
    """The content of an open file."""
    while chunk := await asyncio.to_thread(source.read, CHUNK):
        yield chunk


async def blocking_chunks(source: Iterable[bytes]) -> AsyncIterator[bytes]:
    """What an iterable gives that may block."""
    iterator: Iterator[bytes] = iter(source)
    while (chunk := await asyncio.to_thread(next, iterator, None)) is not None:
        yield chunk


async def as_given(source: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """What an asynchronous iterable gives."""
    async for chunk in source:
        yield chunk


def sendable(body: Body) -> bytes | AsyncIterator[bytes]:
    """A body as the HTTP client takes it. Bytes can be sent again, a stream cannot."""
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    if isinstance(body, AsyncIterable):
        return as_given(body)
    if hasattr(body, "read"):
        return file_chunks(body)
    return blocking_chunks(body)
