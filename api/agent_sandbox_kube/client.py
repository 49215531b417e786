"""The API server's objects as raw JSON: get, list, create, patch, delete and watch, each bounded in time, with errors that name verb and object.

Typed models cost ten times the CPU of raw JSON, and the hot paths (watch, list) are here. One `Kube` per process and event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Final, Literal

import aiohttp

from .config import ConfigError, Connection, load_connection
from .errors import Gone, KubeError, Unauthorized, Unreachable, error_of, error_of_status
from .resources import Resource

Object = dict[str, Any]
Objects = list[Object]
JsonPatch = list[Mapping[str, Any]]
Query = list[tuple[str, str]]

REQUEST_SECONDS: Final = 30.0
CONNECT_SECONDS: Final = 10.0
TRIES: Final = 4
"""Of a request that the server did not take up (429, no connection), and of a GET that met a broken connection or a 5xx."""
MAX_PAUSE_SECONDS: Final = 5.0
CONNECTIONS: Final = 64
"""At a time, watches and exec not counted: a burst must not open hundreds of TLS connections."""
PAGE: Final = 500
WATCH_SECONDS: Final = 240
"""After which the server ends a watch."""
SILENCE_SECONDS: Final = 90.0
"""In a watch that means a dead connection: the server sends a bookmark each minute."""
MAX_LINE_BYTES: Final = 16 << 20

_PATCHES: Final = {"merge": "application/merge-patch+json", "json": "application/json-patch+json"}
_REFUSED: Final = 401
_BUSY: Final = 429
_BROKEN: Final = frozenset({500, 502, 503, 504})


class Kube:
    """A client of one API server. Opened by `connect`."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._session = _open_session(connection, CONNECTIONS, REQUEST_SECONDS)
        self._streams = _open_session(connection, 0, None)
        """For what stays open: watches and channels."""
        self._route: Any = {"server_hostname": connection.tls_name} if connection.tls_name else {}

    async def close(self) -> None:
        """Closes all connections, those of watches and channels too."""
        await self._session.close()
        await self._streams.close()

    # Objects

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object:
        """One object; NotFound when it is not there."""
        return await self._call("GET", resource.path(namespace, name), f"getting {resource.describe(namespace, name)}")

    async def list(
        self, resource: Resource, namespace: str | None = None, *, label_selector: str = "", field_selector: str = ""
    ) -> tuple[Objects, int]:
        """All objects and the resourceVersion of the list, read in pages. When the pages' version is gone meanwhile, once more from the start."""
        doing = f"listing {resource.describe(namespace)}"
        for last in (False, True):
            items: Objects = []
            query: dict[str, str] = {"limit": str(PAGE)} | _selectors(label_selector, field_selector)
            try:
                while True:
                    page = await self._call("GET", resource.path(namespace), doing, query=query)
                    items += page["items"]
                    following = page["metadata"].get("continue")
                    if not following:
                        return items, int(page["metadata"]["resourceVersion"])
                    query["continue"] = following
            except Gone:
                if last:
                    raise
        raise AssertionError("unreachable")

    async def create(self, resource: Resource, body: Mapping[str, Any], namespace: str | None = None) -> Object:
        """A new object; AlreadyExists when its name is taken."""
        name = body["metadata"].get("name") or body["metadata"].get("generateName", "")
        return await self._call("POST", resource.path(namespace), f"creating {resource.describe(namespace, name)}", body=body)

    async def replace(self, resource: Resource, body: Mapping[str, Any], namespace: str | None = None, *, subresource: str | None = None) -> Object:
        """Puts an object in the place of the one it was read as; Conflict when that has changed since (its metadata.resourceVersion tells)."""
        name = body["metadata"]["name"]
        return await self._call("PUT", resource.path(namespace, name, subresource), f"replacing {resource.describe(namespace, name)}", body=body)

    async def patch(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        body: Mapping[str, Any] | JsonPatch,
        *,
        kind: Literal["merge", "json"] = "merge",
        subresource: str | None = None,
    ) -> Object:
        """Changes an object. A merge patch that holds metadata.resourceVersion is refused with Conflict when the object has another one."""
        path = resource.path(namespace, name, subresource)
        return await self._call("PATCH", path, f"changing {resource.describe(namespace, name)}", body=body, content_type=_PATCHES[kind])

    async def delete(self, resource: Resource, name: str, namespace: str | None, options: Mapping[str, Any] | None = None) -> Object:
        """Asks for its deletion (DeleteOptions in `options`: preconditions, propagationPolicy …); what is left of it, or a Status."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", **(options or {})}
        return await self._call("DELETE", resource.path(namespace, name), f"deleting {resource.describe(namespace, name)}", body=body)

    async def version(self) -> str:
        """The server's version, like v1.35.0."""
        return str((await self._call("GET", "/version", "asking the API server for its version")).get("gitVersion", ""))

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        version: int | str,
        label_selector: str = "",
        field_selector: str = "",
    ) -> AsyncGenerator[tuple[str, Object], None]:
        """(ADDED | MODIFIED | DELETED | BOOKMARK, object) after `version`, until the server ends the watch (about 4 minutes). Gone: list again."""
        doing = f"watching {resource.describe(namespace)}"
        query = {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": str(version), "timeoutSeconds": str(WATCH_SECONDS)}
        query |= _selectors(label_selector, field_selector)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        url = self.connection.server + resource.path(namespace)
        headers = await self._headers(doing)
        try:
            async with self._streams.get(url, params=query, headers=headers, timeout=timeout, **self._route) as answer:
                if answer.status >= 400:
                    if answer.status == _REFUSED:
                        # Whoever watches tries again, with these.
                        await self._renew(doing, headers)
                    raise error_of(doing, answer.status, await answer.read())
                async for line in _lines(answer.content):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise error_of_status(doing, event["object"])
                    yield event["type"], event["object"]
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise _unreachable(doing, self.connection.server, error) from error

    # Channels

    async def open_websocket(self, path: str, query: Query, protocols: Sequence[str]) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket to the API server; raises what aiohttp raises, and ConfigError."""
        for again in (True, False):
            headers = await self.connection.headers()
            try:
                opened: aiohttp.ClientWebSocketResponse = await self._streams.ws_connect(
                    self.connection.server + path,
                    params=query,
                    headers=headers,
                    protocols=protocols,
                    max_msg_size=0,
                    compress=0,
                    **self._route,
                )
            except aiohttp.WSServerHandshakeError as error:
                if error.status != _REFUSED or not again or not await self.connection.renew(headers.get("Authorization")):
                    raise
            else:
                return opened
        raise AssertionError("unreachable")

    async def _headers(self, doing: str) -> dict[str, str]:
        try:
            return await self.connection.headers()
        except ConfigError as error:
            raise Unauthorized(doing, _REFUSED, "Unauthorized", str(error)) from error

    async def _renew(self, doing: str, refused: Mapping[str, str]) -> bool:
        try:
            return await self.connection.renew(refused.get("Authorization"))
        except ConfigError as error:
            raise Unauthorized(doing, _REFUSED, "Unauthorized", str(error)) from error

    async def _call(
        self,
        method: str,
        path: str,
        doing: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
    ) -> Object:
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        url, pause, attempt = self.connection.server + path, 0.2, 0
        while True:
            attempt += 1
            headers = {"Content-Type": content_type, **await self._headers(doing)}
            try:
                async with self._session.request(method, url, params=query, data=data, headers=headers, **self._route) as answer:
                    raw = await answer.read()
                    if answer.status < 400:
                        found = json.loads(raw)
                        return found if isinstance(found, dict) else {}
                    error: KubeError = error_of(doing, answer.status, raw)
                    again = answer.status == _BUSY or (method == "GET" and answer.status in _BROKEN)
                    wait = _retry_after(answer.headers.get("Retry-After"), pause)
            except (aiohttp.ClientError, TimeoutError, ValueError) as cause:
                error, wait = _unreachable(doing, self.connection.server, cause), pause
                again = method == "GET" or isinstance(cause, aiohttp.ClientConnectorError)
            if error.status == _REFUSED and attempt == 1 and await self._renew(doing, headers):
                continue
            if not again or attempt >= TRIES:
                raise error
            await asyncio.sleep(wait)
            pause = min(pause * 2, MAX_PAUSE_SECONDS)


@contextlib.asynccontextmanager
async def connect(kubeconfig: str | None = None, context: str | None = None) -> AsyncIterator[Kube]:
    """A client for the configured cluster, closed at the end. ConfigError when there is none."""
    kube = Kube(await load_connection(kubeconfig, context))
    try:
        yield kube
    finally:
        await kube.close()


def _open_session(connection: Connection, limit: int, seconds: float | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=connection.tls or False, limit=limit, keepalive_timeout=60, socket_factory=_open_socket),
        timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        proxy=connection.proxy,
    )


def _open_socket(address: tuple[Any, ...]) -> socket.socket:
    """Lets the kernel notice within about a minute that the other machine is gone: a watch or a channel would wait for long."""
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return opened


def _selectors(label_selector: str, field_selector: str) -> dict[str, str]:
    return {key: value for key, value in (("labelSelector", label_selector), ("fieldSelector", field_selector)) if value}


def _retry_after(told: str | None, otherwise: float) -> float:
    return min(float(told), MAX_PAUSE_SECONDS) if told is not None and told.isdigit() else otherwise


def _unreachable(doing: str, server: str, cause: BaseException) -> Unreachable:
    text = " ".join(str(cause).split()) or ("no answer in time" if isinstance(cause, TimeoutError) else type(cause).__name__)
    return Unreachable(doing, 0, "Unreachable", f"the API server at {server} cannot be used ({text}): check that it is up and can be reached")


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Whole lines; aiohttp's own iterator refuses lines over 128 KiB, and a Pod can be larger."""
    held = bytearray()
    async for chunk in content.iter_any():
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            line = bytes(held) + chunk[start:end] if held else chunk[start:end]
            held.clear()
            start = end + 1
            if line.strip():
                yield line
        held += chunk[start:]
        if len(held) > MAX_LINE_BYTES:
            raise ValueError(f"a line over {MAX_LINE_BYTES} bytes")
