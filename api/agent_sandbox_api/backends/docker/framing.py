"""Docker's multiplexed stream, parsed without input or output: frames of an 8-byte header (stream, three zero bytes, length) and a payload.

Reference: Docker Engine API, "Stream format" of `POST /containers/{id}/attach`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

HEADER_BYTES: Final = 8
STDOUT: Final = 1
STDERR: Final = 2
SYSTEM_ERROR: Final = 3
"""A message of the engine itself, for example that it could not start the command."""


class FrameError(Exception):
    """The bytes are no multiplexed stream: an engine, or a proxy before it, that speaks something else."""


class FrameParser:
    """Takes bytes as they come and gives payloads as they come: a frame is never held whole, whatever length its header claims."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._stream = 0
        self._left = 0

    @property
    def in_frame(self) -> bool:
        """Whether the bytes so far end inside a frame: an end of the stream here is a truncation."""
        return self._left > 0 or len(self._header) > 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """(stream, part of its payload) for each piece in `data`; FrameError on a malformed header."""
        position, end = 0, len(data)
        while position < end:
            if self._left == 0:
                take = min(HEADER_BYTES - len(self._header), end - position)
                self._header += data[position : position + take]
                position += take
                if len(self._header) == HEADER_BYTES:
                    self._open_frame()
                continue
            take = min(self._left, end - position)
            self._left -= take
            yield self._stream, data[position : position + take]
            position += take

    def _open_frame(self) -> None:
        header = bytes(self._header)
        if header[0] not in (STDOUT, STDERR, SYSTEM_ERROR) or header[1:4] != b"\0\0\0":
            raise FrameError(f"the engine sent {header!r} where the header of a stream frame belongs")
        self._header.clear()
        self._stream = header[0]
        self._left = int.from_bytes(header[4:], "big")
