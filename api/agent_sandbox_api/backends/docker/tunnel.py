"""A local unix socket that leads to an engine behind ssh, for docker-py, which could do that only by a second ssh implementation."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile

from .address import Address
from .wire import Wire, connect


class Tunnel:
    """Each connection to the socket becomes an `ssh host docker system dial-stdio`. The socket lies in a folder that only we may enter."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._server: asyncio.Server | None = None
        self._bridges: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The socket, in the form of DOCKER_HOST."""
        assert self._folder is not None, "the tunnel is not open"
        return f"unix://{self._folder.name}/engine.sock"

    async def open(self) -> None:
        """Starts to listen; ssh runs only while somebody is connected."""
        if self._server is None:
            self._folder = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="agent-sandbox-ssh-")
            self._server = await asyncio.start_unix_server(self._accept, f"{self._folder.name}/engine.sock")

    async def close(self) -> None:
        """Ends all bridges and takes the socket away."""
        if self._server is not None:
            self._server.close()
        for bridge in self._bridges:
            bridge.cancel()
        await asyncio.gather(*self._bridges, return_exceptions=True)
        if self._folder is not None:
            await asyncio.to_thread(self._folder.cleanup)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bridge = asyncio.get_running_loop().create_task(self._bridge(reader, writer))
        self._bridges.add(bridge)
        bridge.add_done_callback(self._bridges.discard)

    async def _bridge(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copies both ways until either side ends. A failure of ssh closes the connection, which is what docker-py then reports."""
        try:
            with contextlib.suppress(OSError):
                wire = await connect(self._address)
                try:
                    up = asyncio.ensure_future(copy_up(reader, wire))
                    try:
                        while data := await wire.read():
                            writer.write(data)
                            await writer.drain()
                    finally:
                        up.cancel()
                        await asyncio.gather(up, return_exceptions=True)
                finally:
                    await wire.aclose()
        finally:
            writer.close()


async def copy_up(reader: asyncio.StreamReader, wire: Wire) -> None:
    """Copies what docker-py sends; its end closes the whole bridge, since an HTTP client that has closed wants no answer."""
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            await wire.write(data)
    wire.abort()
