"""The engine's API over a Wire: plain calls, endless answers, and the upgrade to a byte stream. HTTP/1.1 by h11."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

import h11

from .faults import refuse
from .wire import Wire

ERROR_STATUS: Final = 400
MAX_BODY_BYTES: Final = 8 << 20


class EngineConnection:
    """One connection to the engine, for one call after another. Faults are those of faults.FAULTS; an error status is an EngineRefusal."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._http = h11.Connection(h11.CLIENT)

    async def call(self, doing: str, method: str, target: str, body: Any = None) -> Any:
        """A plain call; the answer's JSON, or None when it has none."""
        await self._send(method, target, body, {})
        response = await self._response()
        content = bytearray()
        async for data in self._body():
            content += data
            if len(content) > MAX_BODY_BYTES:
                raise EOFError(f"the answer to {method} {target} is over {MAX_BODY_BYTES} bytes")
        if response.status_code >= ERROR_STATUS:
            raise refuse(doing, response.status_code, error_text(bytes(content)))
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        is_json = dict(response.headers).get(b"content-type", b"").startswith(b"application/json")
        return json.loads(content) if content and is_json else None

    async def ping(self, doing: str) -> str:
        """Asks whether the engine is there; the newest version of its API, which it says in a header."""
        await self._send("GET", "/_ping", None, {})
        response = await self._response()
        content = b"".join([data async for data in self._body()])
        if response.status_code >= ERROR_STATUS:
            raise refuse(doing, response.status_code, error_text(content))
        version = dict(response.headers).get(b"api-version", b"").decode("latin-1")
        if not version:
            raise EOFError("it names no version of its API: what answers there is no Docker engine")
        return version

    async def follow(self, doing: str, method: str, target: str, headers: dict[str, str] | None = None) -> AsyncGenerator[Any]:
        """An answer that is a stream of JSON lines, each as it comes; ends when the engine ends it."""
        await self._send(method, target, None, headers or {})
        response = await self._response()
        rest = b""
        failed = response.status_code >= ERROR_STATUS
        async for data in self._body():
            rest += data
            if len(rest) > MAX_BODY_BYTES:
                raise EOFError(f"a line of the answer to {method} {target} is over {MAX_BODY_BYTES} bytes")
            if failed:
                continue
            *lines, rest = rest.split(b"\n")
            for line in lines:
                if line.strip():
                    yield json.loads(line)
        if failed:
            raise refuse(doing, response.status_code, error_text(rest))
        if rest.strip():
            yield json.loads(rest)

    async def upgrade(self, doing: str, target: str, body: Any) -> bytes:
        """Turns the connection into a byte stream (`Upgrade: tcp`); gives what came of it already. From now on the wire is the caller's."""
        await self._send("POST", target, body, {"Connection": "Upgrade", "Upgrade": "tcp"})
        event = await self._next()
        if isinstance(event, h11.InformationalResponse) and event.status_code == 101:
            return bytes(self._http.trailing_data[0])
        status = event.status_code if isinstance(event, h11.Response) else 0
        content = b"".join([data async for data in self._body()]) if status else b""
        if status >= ERROR_STATUS:
            raise refuse(doing, status, error_text(content))
        raise EOFError(f"it answered {status} to an upgrade to a byte stream; a proxy before it must let `Upgrade: tcp` through")

    async def _send(self, method: str, target: str, body: Any, extra: dict[str, str]) -> None:
        content = b"" if body is None else json.dumps(body).encode()
        headers = {"Host": "docker", "User-Agent": "agent-sandbox", "Content-Length": str(len(content))} | extra
        if content:
            headers["Content-Type"] = "application/json"
        request = h11.Request(method=method, target=target, headers=list(headers.items()))
        sent = [self._http.send(request), self._http.send(h11.Data(data=content)) if content else b"", self._http.send(h11.EndOfMessage())]
        await self.wire.write(b"".join(part for part in sent if part))

    async def _response(self) -> h11.Response:
        event = await self._next()
        while isinstance(event, h11.InformationalResponse):
            event = await self._next()
        if isinstance(event, h11.Response):
            return event
        raise EOFError(self.wire.explain("the engine closed the connection before it had answered"))

    async def _body(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)
        whole = isinstance(event, h11.EndOfMessage)
        if not whole:
            raise EOFError(self.wire.explain("the engine closed the connection in the middle of an answer"))

    async def _next(self) -> h11.Event | type[h11.PAUSED]:
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self.wire.read())
            else:
                return event  # type: ignore[return-value]  # NEED_DATA was the other branch


def error_text(content: bytes) -> str:
    """The engine's words in the body of an error."""
    try:
        value = json.loads(content)
    except ValueError:
        return content[:500].decode(errors="replace")
    return str(value.get("message", value)) if isinstance(value, dict) else str(value)[:500]
