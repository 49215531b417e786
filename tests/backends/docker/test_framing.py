"""The multiplexed stream of the engine: whatever the cuts, the same payload; whatever is wrong, an error."""

from __future__ import annotations

import pytest
from agent_sandbox_api.backends.docker.framing import STDERR, STDOUT, SYSTEM_ERROR, FrameError, FrameParser
from hypothesis import given
from hypothesis import strategies as st


def frame(stream: int, payload: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(payload).to_bytes(4, "big") + payload


FRAMES = st.lists(st.tuples(st.sampled_from([STDOUT, STDERR, SYSTEM_ERROR]), st.binary(max_size=60)), max_size=12)


@given(FRAMES, st.lists(st.integers(min_value=1, max_value=40), max_size=60))
def test_any_cut_of_the_bytes_gives_the_same_streams(frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
    data = b"".join(frame(stream, payload) for stream, payload in frames)
    parser = FrameParser()
    got: dict[int, bytes] = {}
    rest = data
    for cut in [*cuts, len(data) or 1]:
        piece, rest = rest[:cut], rest[cut:]
        for stream, payload in parser.feed(piece):
            got[stream] = got.get(stream, b"") + payload
    expected: dict[int, bytes] = {}
    for stream, payload in frames:
        if payload:
            expected[stream] = expected.get(stream, b"") + payload
    assert got == expected and not parser.in_frame


@given(FRAMES.filter(bool), st.integers(min_value=1))
def test_a_stream_that_ends_inside_a_frame_is_known_to(frames: list[tuple[int, bytes]], missing: int) -> None:
    last = frame(STDOUT, b"payload")
    parser = FrameParser()
    data = b"".join(frame(stream, payload) for stream, payload in frames) + last[: -(missing % len(last)) or -1]
    list(parser.feed(data))
    assert parser.in_frame


@pytest.mark.parametrize("header", [b"\0\0\0\0\0\0\0\x01", b"\x04\0\0\0\0\0\0\x01", b"\x01\0\0\x01\0\0\0\x01", b"HTTP/1.1"])
def test_a_header_that_is_none_is_an_error(header: bytes) -> None:
    with pytest.raises(FrameError, match="frame"):
        list(FrameParser().feed(header + b"x"))


def test_a_huge_claimed_length_holds_no_memory() -> None:
    parser = FrameParser()
    pieces = list(parser.feed(bytes([STDOUT, 0, 0, 0]) + b"\xff\xff\xff\xff" + b"abc"))
    assert pieces == [(STDOUT, b"abc")] and parser.in_frame
