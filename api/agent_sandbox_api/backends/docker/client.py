"""The engine's client: docker-py for the lifecycle, in threads of its own, and connections on the event loop for everything that is long.

docker-py blocks, so it never runs on the loop; a hanging engine can at most fill its eight threads, and every call here has a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, TypeVar

import docker
from docker.tls import TLSConfig

from .address import Address, find_address
from .faults import FAULTS, translate
from .http import EngineConnection
from .sockets import ClosingAdapter
from .threads import ThreadPool
from .tunnel import Tunnel
from .wire import connect

T = TypeVar("T")

THREADS: Final = 8
READ_SECONDS: Final = 60
"""How long docker-py waits for an answer on one connection."""
VERSION_SECONDS: Final = 10.0
CLOSE_SECONDS: Final = 2.0
CALL_SECONDS: Final = 75.0
"""How long one call may take, the wait for a thread included."""


class EngineClient:
    """One engine. Errors of all methods are those of faults.py; `doing` of each call says in a message what was tried, and on what."""

    def __init__(self, host: str | None = None) -> None:
        self.address: Address = find_address(os.environ, host)
        self._tls: ssl.SSLContext | None = None
        self._tunnel = Tunnel(self.address) if self.address.kind == "ssh" else None
        self._threads = ThreadPool(THREADS, "docker")
        self._version: str | None = None
        self._api: docker.APIClient | None = None

    async def open(self) -> None:
        """Reads the TLS files and starts the ssh tunnel; asks the engine nothing yet."""
        if self.address.tls is not None and self._tls is None:
            self._tls = self.address.tls.context()
        if self._tunnel is not None:
            await self._tunnel.open()

    async def close(self) -> None:
        """Closes everything. Calls that still run get a moment, then they are left to their own bounds."""
        await asyncio.to_thread(self._threads.close, CLOSE_SECONDS)
        if self._tunnel is not None:
            await self._tunnel.close()
        if self._api is not None:
            self._api.close()

    async def run(self, doing: str, function: Callable[[docker.APIClient], T], seconds: float = CALL_SECONDS) -> T:
        """Calls docker-py in a thread. A cancelled caller does not stop the call: whoever must know its end keeps the task."""
        try:
            async with asyncio.timeout(seconds):
                api = await self._docker_py()
                return await asyncio.wrap_future(self._threads.submit(lambda: function(api)))
        except FAULTS as error:
            raise translate(doing, self.address.text, error) from error

    async def _docker_py(self) -> docker.APIClient:
        """docker-py's client. It is made once the engine has told its version, so making it asks nothing and cannot fail half-way."""
        version = await self._known_version()
        if self._api is None:
            url, tls = self._docker_py_address()
            self._api = docker.APIClient(base_url=url, version=version, timeout=READ_SECONDS, tls=tls, max_pool_size=THREADS)
            # Not REQUESTS_CA_BUNDLE, which would replace the engine's authority, and no proxy: connections on the loop have none either.
            self._api.trust_env = False
            if url.startswith("unix://"):
                adapter = ClosingAdapter(f"http+{url}", READ_SECONDS, max_pool_size=THREADS)
                self._api.mount("http+docker://", adapter)
        return self._api

    async def _known_version(self) -> str:
        if self._version is None:
            doing = "asking the Docker engine for its version"
            async with asyncio.timeout(VERSION_SECONDS), self.connection(doing) as connection:
                self._version = await connection.ping(doing)
        return self._version

    def _docker_py_address(self) -> tuple[str, TLSConfig | bool]:
        address = self.address
        if self._tunnel is not None:
            return self._tunnel.url, False
        if address.kind == "unix":
            return f"unix://{address.path}", False
        if address.tls is None:
            return address.text, False
        pair = (str(address.tls.certificate), str(address.tls.key)) if address.tls.certificate and address.tls.key else None
        ca = str(address.tls.ca) if address.tls.ca else None
        return address.text, TLSConfig(client_cert=pair, ca_cert=ca, verify=address.tls.verify)

    @contextlib.asynccontextmanager
    async def connection(self, doing: str) -> AsyncIterator[EngineConnection]:
        """A connection on the event loop for one piece of work, closed at its end."""
        connection = await self.connect(doing)
        try:
            yield connection
        except FAULTS as error:
            raise translate(doing, self.address.text, error) from error
        finally:
            await connection.wire.aclose()

    async def connect(self, doing: str) -> EngineConnection:
        """A connection that the caller closes."""
        try:
            return EngineConnection(await connect(self.address, self._tls))
        except FAULTS as error:
            raise translate(doing, self.address.text, error) from error

    async def path(self, target: str) -> str:
        """`target` below the version of the API that the engine has."""
        try:
            return f"/v{await self._known_version()}{target}"
        except FAULTS as error:
            raise translate("asking the Docker engine for its version", self.address.text, error) from error

    async def call(self, doing: str, method: str, target: str, body: Any = None, *, seconds: float = CALL_SECONDS) -> Any:
        """One call on the event loop, for what must not wait for a thread."""
        target = await self.path(target)
        try:
            async with asyncio.timeout(seconds), self.connection(doing) as connection:
                return await connection.call(doing, method, target, body)
        except TimeoutError as error:
            raise translate(doing, self.address.text, error) from error

    async def ping(self, seconds: float) -> None:
        """Whether the engine answers now; needs no thread, so it is true also while all of them wait."""
        doing = "asking the Docker engine whether it is there"
        try:
            async with asyncio.timeout(seconds), self.connection(doing) as connection:
                await connection.ping(doing)
        except TimeoutError as error:
            raise translate(doing, self.address.text, error) from error
