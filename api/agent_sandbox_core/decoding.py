"""From output bytes to text: decoded over the whole of a stream, never per chunk, and cut by bytes, never inside the decoding."""

from __future__ import annotations

import codecs

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TextDecoder:
    """One stream's bytes, cut anywhere, to text; what is not UTF-8 becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = _utf8_decoder("replace")

    def decode(self, data: bytes) -> str:
        """The text that is complete now."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left at the end of the stream: a character cut short, as U+FFFD, or nothing."""
        return self._decoder.decode(b"", True)


class OutputCollector:
    """Both output streams of one command, together at most `limit` bytes; what comes later is counted out and sets `truncated`."""

    __slots__ = ("_err", "_out", "_room", "truncated")

    def __init__(self, limit: int) -> None:
        self._out: list[bytes] = []
        self._err: list[bytes] = []
        self._room = limit
        self.truncated = False

    def add(self, data: bytes, *, error: bool) -> None:
        """Keeps what there is room for."""
        if len(data) > self._room:
            data = data[: self._room]
            self.truncated = True
        if data:
            self._room -= len(data)
            (self._err if error else self._out).append(data)

    def mark_lost(self) -> None:
        """Says that output is missing, and keeps nothing of what follows: the text stays a true prefix."""
        self.truncated = True
        self._room = 0

    def text(self) -> tuple[str, str]:
        """stdout and stderr. A character cut by the limit is one U+FFFD at the end."""
        return b"".join(self._out).decode("utf-8", "replace"), b"".join(self._err).decode("utf-8", "replace")
