"""Files and archives of one guest. What is small goes over the control lane in one round trip, what is not over the bulk lane."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator

from agent_sandbox_core.channel import Answer, Broken, Request
from agent_sandbox_core.errors import ChannelError, NotFound, PayloadTooLarge, SandboxError
from agent_sandbox_core.interfaces import FileBody, GuestFile, RestoreResult
from agent_sandbox_core.paths import check_path, quote_path

from .answers import ERROR_STATUS, GuestProtocolError, parse_file, parse_file_header, parse_json, raise_error
from .calls import GuestCalls

SMALL_BYTES = 128 * 1024
"""A file up to this size travels on the control lane: about a millisecond of it."""
TREE_SECONDS = 120.0
"""For removing a tree."""
UNDO_SECONDS = 10.0
MAX_LINE_BYTES = 64 * 1024
MAX_ENTRIES = 1_000_000
MAX_LIST_BYTES = 64 * 1024 * 1024
"""Of a list on the control lane: some 400,000 entries."""
JSON = (("Content-Type", "application/json"),)


class Files:
    """The file calls of one guest."""

    def __init__(self, calls: GuestCalls) -> None:
        self._calls = calls

    @contextlib.asynccontextmanager
    async def read(self, path: bytes, start: int, end: int | None, max_bytes: int | None) -> AsyncIterator[FileBody]:
        """Opens a file: small ones come whole at once, others while the caller reads."""
        target = f"/v1/files?path={quote_path(check_path(path))}"
        headers = () if start == 0 and end is None else (("Range", f"bytes={start}-{'' if end is None else end - 1}"),)
        if end is not None and end <= start:
            yield await self._nothing_of(path, start, max_bytes)
            return
        small = await self._read_small(target, headers, start, end, max_bytes)
        if small is not None:
            yield small
            return
        if max_bytes is not None:
            target += f"&max_bytes={max_bytes}"
        async with self._calls.transfer(Request("GET", target, headers=headers, idempotent=True)) as transfer:
            yield _file_body(transfer.answer, start, transfer.chunks())

    async def write(self, path: bytes, body: AsyncIterator[bytes], mode: int, max_bytes: int | None) -> GuestFile:
        """Writes a file atomically; nothing is left of it when `body` raises or is too large."""
        target = f"/v1/files?path={quote_path(check_path(path))}&mode={mode:03o}"
        if max_bytes is not None:
            target += f"&max_bytes={max_bytes}"
        try:
            head, whole = await _first_bytes(body)
            if whole:
                return parse_file(parse_json((await self._calls.call(Request("PUT", target, head, idempotent=True))).body))
            async with self._calls.transfer(Request("PUT", target), _chained(head, body)) as transfer:
                return parse_file(await transfer.json())
        finally:
            if isinstance(body, AsyncGenerator):
                await body.aclose()

    async def stat(self, path: bytes) -> GuestFile:
        """The file itself, or the link itself."""
        return await self._file_call(Request("GET", f"/v1/stat?path={quote_path(check_path(path))}", idempotent=True))

    async def list_dir(self, path: bytes) -> list[GuestFile]:
        """All entries, or an error: never a part of them."""
        request = Request("GET", f"/v1/list?path={quote_path(check_path(path))}", idempotent=True, seconds=TREE_SECONDS, max_answer=MAX_LIST_BYTES)
        if self._calls.bulk.busy:
            # A transfer may last long; a list of usual size costs the control lane a few milliseconds.
            return _parse_list((await self._calls.call(request)).body.splitlines())
        lines: list[bytes] = []
        async with self._calls.transfer(request) as transfer:
            rest = b""
            async for part in transfer.chunks():
                *whole, rest = (rest + part).split(b"\n")
                lines += whole
                if len(rest) > MAX_LINE_BYTES or len(lines) > MAX_ENTRIES:
                    raise PayloadTooLarge(f"the directory has more than {MAX_ENTRIES} entries: list it with a command")
            if rest:
                lines.append(rest)
        return _parse_list(lines)

    async def make_dir(self, path: bytes, mode: int) -> GuestFile:
        """Makes a directory and its parents."""
        return await self._file_call(Request("POST", f"/v1/mkdir?path={quote_path(check_path(path))}&mode={mode:03o}", idempotent=True))

    async def remove(self, path: bytes, *, recursive: bool) -> None:
        """Removes a file or a directory. What is gone when it is asked for once more, after a broken channel, was removed."""
        target = f"/v1/files?path={quote_path(check_path(path))}&recursive={int(recursive)}"
        if recursive and not self._calls.bulk.busy:
            async with self._calls.transfer(Request("DELETE", target, seconds=TREE_SECONDS)):
                return
        request = Request("DELETE", target, seconds=TREE_SECONDS)
        try:
            answer = await self._calls.exchange(request)
        except Broken:
            with contextlib.suppress(NotFound):
                await self._calls.call(request)
            return
        except ChannelError as error:
            raise await self._calls.explained(error, "DELETE", idempotent=True) from error
        if answer.status >= ERROR_STATUS:
            raise_error(answer)

    async def move(self, source: bytes, target: bytes, *, overwrite: bool) -> GuestFile:
        """Renames; not repeated by itself, since a second attempt could not tell what the first did."""
        query = f"from={quote_path(check_path(source))}&to={quote_path(check_path(target))}&overwrite={int(overwrite)}"
        return await self._file_call(Request("POST", f"/v1/move?{query}"))

    async def archive(self, manifest: bytes) -> AsyncIterator[bytes]:
        """The tar, while everything in the sandbox is stopped."""
        request = Request("POST", "/v1/archive", manifest, headers=JSON, idempotent=True)
        async with self._calls.transfer(request) as transfer:
            async for part in transfer.chunks():
                yield part

    async def restore(self, body: AsyncIterator[bytes], size: int, entries: int, max_bytes: int) -> RestoreResult:
        """Replaces the workspace."""
        target = f"/v1/restore?bytes={size}&entries={entries}&max_bytes={max_bytes}"
        try:
            async with self._calls.transfer(Request("POST", target), body) as transfer:
                data = await transfer.json()
        except SandboxError:
            await self._until_ready()
            raise
        try:
            return RestoreResult(boot_id=str(data["boot_id"]), entries=int(data["entries"]), bytes=int(data["bytes"]))
        except (KeyError, TypeError, ValueError) as error:
            raise GuestProtocolError("the sandbox answered a restore not as its API says: look at its files before you go on") from error

    async def _until_ready(self) -> None:
        """Waits, bounded, until a guest whose restore was broken off has its old state back: until then it answers "busy" to everything."""
        with contextlib.suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(UNDO_SECONDS):
                while (await self._calls.health()).get("state") == "restoring":  # noqa: ASYNC110 - the state is the guest's, over there
                    await asyncio.sleep(0.02)

    async def _file_call(self, request: Request) -> GuestFile:
        return parse_file(parse_json((await self._calls.call(request)).body))

    async def _read_small(
        self, target: str, headers: tuple[tuple[str, str], ...], start: int, end: int | None, max_bytes: int | None
    ) -> FileBody | None:
        """The file when it, or the part that is wanted, is small; None when it is not."""
        ranged = end is not None and end - start <= SMALL_BYTES
        limit = max_bytes if ranged or (max_bytes is not None and max_bytes <= SMALL_BYTES) else SMALL_BYTES
        if limit is not None:
            target += f"&max_bytes={limit}"
        try:
            answer = await self._calls.call(Request("GET", target, headers=headers, idempotent=True))
        except PayloadTooLarge:
            if limit == max_bytes:
                raise
            return None
        return _file_body(answer, start, _one(answer.body), size=len(answer.body))

    async def _nothing_of(self, path: bytes, start: int, max_bytes: int | None) -> FileBody:
        """An empty range of a file that must be there and readable all the same."""
        async with self.read(path, 0, None, max_bytes) as body:
            return FileBody(info=body.info, start=min(start, body.info.size), end=min(start, body.info.size), chunks=_one(b""))


def _file_body(answer: Answer, start: int, chunks: AsyncIterator[bytes], size: int | None = None) -> FileBody:
    info = parse_file_header(answer)
    try:
        length = int(answer.headers[b"content-length"])
    except (KeyError, ValueError) as error:
        raise GuestProtocolError("the sandbox sent a file without its length") from error
    if size is not None and size != length:
        raise GuestProtocolError(f"the sandbox sent {size} bytes of a file and said {length}")
    first = start if answer.status == 206 else 0
    return FileBody(info=info, start=first, end=first + length, chunks=chunks)


def _parse_list(lines: list[bytes]) -> list[GuestFile]:
    if not lines:
        raise GuestProtocolError("the sandbox ended a list before its last line: try again")
    try:
        entries = [json.loads(line) for line in lines]
        last = entries.pop()
        whole = last.get("end") is True and last.get("count") == len(entries)
    except (ValueError, AttributeError) as error:
        raise GuestProtocolError("the sandbox sent a list that is not as its API says") from error
    if not whole:
        raise GuestProtocolError("the sandbox ended a list before its last line: try again")
    return [parse_file(entry) for entry in entries]


async def _first_bytes(body: AsyncIterator[bytes]) -> tuple[bytes, bool]:
    """Up to a little over SMALL_BYTES of `body`, and whether that is all of it."""
    head = bytearray()
    async for part in body:
        head += part
        if len(head) > SMALL_BYTES:
            return bytes(head), False
    return bytes(head), True


async def _chained(head: bytes, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield head
    async for part in body:
        yield part


async def _one(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data
