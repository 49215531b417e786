"""A channel: the input and output of a command in a container as one duplex stream, in the shape that httpcore wants.

The engine's exec is a hijacked connection: it has no exit status of its own, and its end says nothing but "the end". So nothing here
guesses: an end inside a frame, and an end after the command or the engine has complained, are read errors that carry the complaint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import httpcore
from agent_sandbox_core.stream import PieceStream

from .faults import root_cause
from .framing import STDOUT, FrameError, FrameParser
from .wire import Wire

COMPLAINT_BYTES: Final = 4096
"""How much of the command's error output is kept for messages."""


class ExecStream(PieceStream):
    """The stream of one exec. `expect`: how its output must begin; else that is the engine's own words (it could not start the command)."""

    def __init__(self, wire: Wire, *, first: bytes = b"", expect: bytes = b"") -> None:
        super().__init__()
        self._wire = wire
        self._parser = FrameParser()
        self._complaint = bytearray()
        self._expect = expect
        self._opening = bytearray()
        self._fault: str | None = None
        self._feed(first)

    @property
    def complaint(self) -> str:
        """What the command, or the engine, wrote to the error stream."""
        return " ".join(bytes(self._complaint).decode(errors="replace").split())

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - httpcore's signature
        """See httpcore. Empty only at a clean end."""
        with translated(httpcore.ReadTimeout, httpcore.ReadError):
            while not self._ready:
                if self._fault is not None:
                    raise ConnectionError(self._fault)
                data = await self._wire.read(timeout)
                if not data:
                    self._end()
                    return b""
                self._feed(data)
        return self._gather(max_bytes)

    def _poll(self) -> bool:
        data = self._wire.take() if self._fault is None else b""
        if data:
            self._feed(data)
        return bool(data)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109 - httpcore's signature
        """See httpcore."""
        with translated(httpcore.WriteTimeout, httpcore.WriteError):
            await self._wire.write(buffer, timeout)

    async def aclose(self) -> None:
        """Closes the connection; the engine then closes the command's input, which ends the bridge and nothing else."""
        await self._wire.aclose()

    def get_extra_info(self, info: str) -> Any:
        """`is_readable`: something came, or the end did, while nobody asked: httpcore then gives an idle connection up."""
        if info != "is_readable":
            return None
        while not self._ready and self._poll():
            pass
        return bool(self._ready) or self._fault is not None or self._wire.ended

    def _feed(self, data: bytes) -> None:
        try:
            for stream, piece in self._parser.feed(data):
                if stream != STDOUT:
                    self._complaint = (self._complaint + piece)[-COMPLAINT_BYTES:]
                elif self._expect:
                    self._open(piece)
                else:
                    self._ready.append(piece)
        except FrameError as error:
            self._fault = str(error)

    def _open(self, piece: bytes) -> None:
        """Holds the first bytes back until they show whose they are."""
        self._opening += piece
        known = min(len(self._opening), len(self._expect))
        if self._opening[:known] != self._expect[:known]:
            self._complaint += self._opening[:COMPLAINT_BYTES]
            self._opening.clear()
            self._fault = f"the bridge into the sandbox did not start: {self.complaint}"
        elif known == len(self._expect):
            self._expect = b""
            self._ready.append(bytes(self._opening))
            self._opening.clear()

    def _end(self) -> None:
        if self._parser.in_frame or self._opening:
            self._fault = "the engine cut the channel in the middle of its data"
        elif self.complaint:
            self._fault = f"the bridge into the sandbox ended: {self.complaint}"
        if self._fault is not None:
            raise ConnectionError(self._fault)


@contextlib.contextmanager
def translated(on_timeout: type[Exception], on_fault: type[Exception]) -> Iterator[None]:
    """Faults of the wire as the errors that httpcore knows."""
    try:
        yield
    except TimeoutError as error:
        raise on_timeout("nothing came over the channel in time") from error
    except OSError as error:
        raise on_fault(root_cause(error)) from error


def exec_config(command: Iterable[str]) -> dict[str, Any]:
    """The engine's description of an exec whose input and output a channel carries."""
    return {"AttachStdin": True, "AttachStdout": True, "AttachStderr": True, "Tty": False, "Cmd": list(command)}
