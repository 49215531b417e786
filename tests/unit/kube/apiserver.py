"""A small API server in this process: one kind of object with LIST, WATCH and writes as the real one does them, and faults on demand."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

Object = dict[str, Any]
Play = Callable[[web.Request], Awaitable[web.StreamResponse]]


def refusal(code: int, reason: str, message: str, headers: dict[str, str] | None = None) -> Play:
    """Answers with a v1.Status."""

    async def play(_: web.Request) -> web.StreamResponse:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message}
        return web.json_response(status, status=code, headers=headers)

    return play


async def cut(request: web.Request) -> web.StreamResponse:
    """Drops the connection without a word."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@dataclass
class ApiServer:
    """Pods of any namespace. `plays`: what the next requests meet instead, one after another."""

    port: int = 0
    version: int = 100
    oldest: int = 0
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    history: list[tuple[int, str, Object]] = field(default_factory=list)
    plays: deque[Play] = field(default_factory=deque)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """Method, path with query and headers of each."""
    watches: list[web.Request] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # What a test does to it.

    def put(self, name: str, value: int, namespace: str = "one") -> Object:
        """Creates or changes an object."""
        key = (namespace, name)
        self.version += 1
        kind = "MODIFIED" if key in self.objects else "ADDED"
        meta = {"namespace": namespace, "name": name, "resourceVersion": str(self.version), "uid": f"{namespace}-{name}"}
        found: Object = {"metadata": meta, "spec": {"value": value}}
        self.objects[key] = found
        self._tell(kind, found)
        return found

    def delete(self, name: str, namespace: str = "one") -> None:
        """Deletes an object, if it is there."""
        found = self.objects.pop((namespace, name), None)
        if found is not None:
            self.version += 1
            self._tell("DELETED", {**found, "metadata": {**found["metadata"], "resourceVersion": str(self.version)}})

    def lose(self, name: str, namespace: str = "one") -> None:
        """Deletes an object, and no watch ever hears of it."""
        self.version += 1
        del self.objects[namespace, name]

    def compact(self) -> None:
        """Forgets all history: a watch from before is gone."""
        self.version += 1
        self.oldest = self.version
        self.history.clear()

    def drop(self) -> None:
        """Cuts all watches."""
        for request in self.watches:
            if request.transport is not None:
                request.transport.abort()

    def _tell(self, kind: str, found: Object) -> None:
        self.history.append((self.version, kind, found))
        self.changed.set()
        self.changed = asyncio.Event()

    # What it answers.

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Any request."""
        self.requests.append((request.method, request.path_qs, dict(request.headers)))
        if self.plays:
            return await self.plays.popleft()(request)
        if request.query.get("watch"):
            return await self._watch(request)
        if request.method == "GET":
            return self._list(request)
        return web.json_response({"kind": "Pod", "metadata": {"name": "made", "resourceVersion": "1"}}, status=201)

    def _list(self, request: web.Request) -> web.StreamResponse:
        start = int(request.query.get("continue", "0"))
        end = start + int(request.query["limit"])
        items = list(self.objects.values())
        meta: Object = {"resourceVersion": str(self.version)}
        if end < len(items):
            meta["continue"] = str(end)
        return web.json_response({"kind": "PodList", "metadata": meta, "items": items[start:end]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        if seen < self.oldest:
            return await refusal(410, "Expired", f"too old resource version: {seen} ({self.oldest})")(request)
        response = web.StreamResponse()
        await response.prepare(request)
        self.watches.append(request)
        try:
            while True:
                changed = self.changed
                for version, kind, found in [entry for entry in self.history if entry[0] > seen]:
                    await response.write(json.dumps({"type": kind, "object": found}).encode() + b"\n")
                    seen = version
                await changed.wait()
        except ConnectionError:
            return response
        finally:
            self.watches.remove(request)


@asynccontextmanager
async def serving(handler: Play) -> AsyncIterator[int]:
    """A port of this machine on which `handler` answers everything."""
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    """One that answers."""
    server = ApiServer()
    async with serving(server.handle) as port:
        server.port = port
        yield server


def kubeconfig(folder: Path, server: str, user: Object | None = None, name: str = "config") -> str:
    """A kubeconfig for it."""
    path = folder / name
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "it", "cluster": {"server": server}}],
                "users": [{"name": "me", "user": user or {}}],
                "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me", "namespace": "team"}}],
                "current-context": "it",
            }
        )
    )
    return str(path)
