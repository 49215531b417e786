"""Frames of the guest's event stream (init/API.md, "Event stream and frames"): a parser without I/O, strict about untrusted bytes."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

STDOUT: Final = 1
STDERR: Final = 2
EXIT: Final = 3
GAP: Final = 4
HEARTBEAT: Final = 5

MAX_PAYLOAD: Final = 65536
_HEAD = struct.Struct(">B16sQI")
_SEQ = struct.Struct(">Q")


class FrameError(ValueError):
    """The bytes are no frames: the stream cannot be trusted from here on."""


class Frame(NamedTuple):
    """One frame. `process` is the raw id (16 bytes)."""

    type: int
    process: bytes
    seq: int
    payload: bytes


class FrameParser:
    """Turns bytes, cut anywhere, into frames. Types that are not known are passed over: the API may grow."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not whole yet; above 0 at the end of a body means that it was cut."""
        return len(self._rest)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are whole now."""
        if self._rest:
            data = self._rest + data
        frames: list[Frame] = []
        at, end = 0, len(data)
        while end - at >= _HEAD.size:
            kind, process, seq, length = _HEAD.unpack_from(data, at)
            if length > MAX_PAYLOAD:
                raise FrameError(f"a frame of {length} bytes; {MAX_PAYLOAD} are allowed")
            body = at + _HEAD.size
            if end - body < length:
                break
            at = body + length
            if STDOUT <= kind <= HEARTBEAT:
                if (kind == GAP and length != _SEQ.size) or (kind == HEARTBEAT and length):
                    raise FrameError(f"a frame of type {kind} with {length} bytes")
                frames.append(Frame(kind, process, seq, data[body:at]))
        self._rest = data[at:]
        return frames


def gap_end(frame: Frame) -> int:
    """The number of the next frame that exists, for a gap frame."""
    (seq,) = _SEQ.unpack(frame.payload)
    return int(seq)


def encode_frame(kind: int, process: bytes, seq: int, payload: bytes = b"") -> bytes:
    """The bytes of one frame; `process` is the raw id (16 bytes)."""
    return _HEAD.pack(kind, process, seq, len(payload)) + payload
