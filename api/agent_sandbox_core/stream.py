"""What the streams of all channels have in common, whatever carries them: pieces that have come wait for a reader, who gets all of them at once."""

from __future__ import annotations

import ssl
from collections import deque

import httpcore


class PieceStream(httpcore.AsyncNetworkStream):
    """A stream whose bytes come in small pieces. Subclasses put them into `_ready`."""

    def __init__(self) -> None:
        self._ready: deque[bytes] = deque()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's signature
    ) -> httpcore.AsyncNetworkStream:
        """Channels carry plain HTTP inside the connection of the engine, or of the API server."""
        raise httpcore.ConnectError("a channel to a sandbox has no TLS of its own")

    def _poll(self) -> bool:
        """Takes in what has come and was not read yet, without waiting; False when there is nothing. It need not bring a piece."""
        raise NotImplementedError

    def _gather(self, most: int) -> bytes:
        """All that is here, up to so many bytes: each read costs its readers the same, whatever its size."""
        size, pieces = 0, []
        while size < most and (self._ready or self._poll()):
            if not self._ready:
                continue
            piece = self._ready.popleft()
            if size + len(piece) > most:
                self._ready.appendleft(piece[most - size :])
                piece = piece[: most - size]
            pieces.append(piece)
            size += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
