"""The frame parser, with bytes cut anywhere and bytes that are no frames."""

from __future__ import annotations

import itertools

import pytest
from agent_sandbox_core.frames import EXIT, GAP, HEARTBEAT, STDERR, STDOUT, Frame, FrameError, FrameParser, encode_frame, gap_end
from hypothesis import given
from hypothesis import strategies as st

ids = st.binary(min_size=16, max_size=16)
numbers = st.integers(0, 2**64 - 1)
output = st.builds(Frame, st.sampled_from([STDOUT, STDERR, EXIT]), ids, numbers, st.binary(max_size=300))
gaps = st.builds(Frame, st.just(GAP), ids, numbers, st.binary(min_size=8, max_size=8))
beats = st.builds(Frame, st.just(HEARTBEAT), ids, numbers, st.just(b""))
frames = st.lists(st.one_of(output, gaps, beats), max_size=20)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@given(frames, st.lists(st.integers(0, 10**6), max_size=30))
def test_frames_come_out_as_they_went_in_wherever_the_bytes_are_cut(sent: list[Frame], places: list[int]) -> None:
    parser = FrameParser()
    data = b"".join(encode_frame(*frame) for frame in sent)
    found = [frame for piece in cut(data, places) for frame in parser.feed(piece)]
    assert found == sent
    assert parser.pending == 0


@given(frames, st.integers(0, 10**6))
def test_a_cut_stream_gives_whole_frames_only_and_shows_the_rest(sent: list[Frame], place: int) -> None:
    data = b"".join(encode_frame(*frame) for frame in sent)
    head = data[: place % (len(data) + 1)]
    parser = FrameParser()
    found = parser.feed(head)
    assert found == sent[: len(found)]
    assert parser.pending == len(head) - sum(len(encode_frame(*frame)) for frame in found)


@given(st.lists(st.binary(max_size=200), max_size=10))
def test_no_bytes_make_it_do_anything_but_give_frames_or_refuse(pieces: list[bytes]) -> None:
    parser = FrameParser()
    try:
        found = [frame for piece in pieces for frame in parser.feed(piece)]
    except FrameError:
        return
    assert all(STDOUT <= frame.type <= HEARTBEAT and len(frame.payload) <= 65536 for frame in found)


def test_a_frame_type_of_a_later_version_is_passed_over() -> None:
    data = encode_frame(9, bytes(16), 1, b"later") + encode_frame(STDOUT, bytes(16), 2, b"x")
    assert FrameParser().feed(data) == [Frame(STDOUT, bytes(16), 2, b"x")]


@pytest.mark.parametrize(
    "data",
    [encode_frame(STDOUT, bytes(16), 0, bytes(65537)), encode_frame(GAP, bytes(16), 0, b"short"), encode_frame(HEARTBEAT, bytes(16), 0, b"x")],
    ids=["too long", "gap without its number", "heartbeat with data"],
)
def test_a_frame_that_cannot_be_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        FrameParser().feed(data)


@given(numbers)
def test_a_gap_tells_the_next_frame_that_exists(seq: int) -> None:
    assert gap_end(Frame(GAP, bytes(16), 0, seq.to_bytes(8, "big"))) == seq
