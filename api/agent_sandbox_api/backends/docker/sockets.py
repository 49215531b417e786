"""docker-py's way to a unix socket, but a socket that cannot be connected is closed at once: docker-py leaves it to the garbage collector."""

from __future__ import annotations

import socket
from typing import Any

from docker.transport.unixconn import UnixHTTPAdapter, UnixHTTPConnection, UnixHTTPConnectionPool


class ClosingConnection(UnixHTTPConnection):
    """One connection."""

    def connect(self) -> None:
        """Connects within the timeout, or leaves nothing open."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self.timeout)
            connection.connect(self.unix_socket)
        except BaseException:
            connection.close()
            raise
        self.sock = connection


class ClosingPool(UnixHTTPConnectionPool):
    """The kept connections to one socket."""

    def _new_conn(self) -> Any:
        return ClosingConnection(self.base_url, self.socket_path, self.timeout)  # type: ignore[arg-type]  # urllib3 keeps the number as it is


class ClosingAdapter(UnixHTTPAdapter):
    """Mounted in the place of docker-py's own."""

    def get_connection(self, url: bytes | str, proxies: Any = None) -> ClosingPool:
        """The pool of the socket."""
        with self.pools.lock:
            pool: ClosingPool | None = self.pools.get(url)
            if pool is None:
                pool = self.pools[url] = ClosingPool(str(url), self.socket_path, self.timeout, maxsize=self.max_pool_size)
            return pool
