"""The few things that blocking and asynchronous code do differently: the twin of `aio/primitives.py`, and the only module here that is written by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import IO, Any, Final, TypeVar

import httpx

T = TypeVar("T")

CHUNK: Final = 1 << 16
AT_ONCE: Final = 8
Body = bytes | str | IO[bytes] | Iterable[bytes]
"""What can be sent as a file's content."""

HttpClient = httpx.Client
HttpTransport = httpx.HTTPTransport


def current_place() -> object:
    """What kept connections belong to: the process, since they can be used from any thread."""
    return None


def sleep(seconds: float) -> None:
    """Waits."""
    time.sleep(seconds)


def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Does blocking work: here."""
    return work(*arguments)


def notify(callback: Callable[[str], object] | None, text: str) -> None:
    """Calls a callback."""
    if callback is not None:
        callback(text)


def together(calls: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """Does calls side by side, a few at once; what each gave or raised, in their order."""

    def one(call: Callable[[], T]) -> T | Exception:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - given back as the outcome of this call
            return error

    if len(calls) == 1:
        return [one(calls[0])]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, calls))


def shielded(_: float) -> AbstractContextManager[object]:
    """Blocking code is not cancelled."""
    return nullcontext()


def file_chunks(source: IO[bytes]) -> Iterator[bytes]:
    """The content of an open file."""
    while chunk := source.read(CHUNK):
        yield chunk


def blocking_chunks(source: Iterable[bytes]) -> Iterator[bytes]:
    """What an iterable gives."""
    yield from source


def sendable(body: Body) -> bytes | Iterator[bytes]:
    """A body as the HTTP client takes it. Bytes can be sent again, a stream cannot."""
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    if hasattr(body, "read"):
        return file_chunks(body)
    return blocking_chunks(body)
