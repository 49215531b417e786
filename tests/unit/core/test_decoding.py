"""Output bytes to text: over the whole stream, cut by bytes."""

from __future__ import annotations

import itertools

from agent_sandbox_core.decoding import OutputCollector, TextDecoder
from hypothesis import given
from hypothesis import strategies as st

chunks = st.lists(st.one_of(st.binary(max_size=40), st.text(max_size=10).map(str.encode)), max_size=20)


@given(chunks)
def test_text_is_that_of_the_whole_stream_wherever_it_is_cut(parts: list[bytes]) -> None:
    decoder = TextDecoder()
    assert "".join(map(decoder.decode, parts)) + decoder.finish() == b"".join(parts).decode("utf-8", "replace")


@given(st.text(), st.lists(st.integers(0, 1000), max_size=10))
def test_valid_text_never_gets_a_replacement(text: str, places: list[int]) -> None:
    data = text.encode()
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    decoder = TextDecoder()
    found = "".join(decoder.decode(data[start:end]) for start, end in itertools.pairwise(edges)) + decoder.finish()
    assert found == text


@given(st.lists(st.tuples(st.booleans(), st.text(max_size=8)), max_size=20), st.integers(0, 60))
def test_the_limit_counts_both_streams_and_leaves_true_prefixes(parts: list[tuple[bool, str]], limit: int) -> None:
    collector = OutputCollector(limit)
    for error, text in parts:
        collector.add(text.encode(), error=error)
    whole = ["".join(text for error, text in parts if error is which) for which in (False, True)]
    total = sum(len(text.encode()) for text in whole)
    found = collector.text()
    assert collector.truncated is (total > limit)
    for text, full in zip(found, whole, strict=True):
        kept = text if full.startswith(text) else text.removesuffix("\ufffd")
        assert full.startswith(kept)
        assert len(text) - len(kept) <= 1
    if total <= limit:
        assert list(found) == whole


@given(st.integers(0, 30))
def test_a_cut_keeps_exactly_the_bytes_of_the_limit(limit: int) -> None:
    collector = OutputCollector(limit)
    for _ in range(5):
        collector.add(b"abc", error=False)
        collector.add(b"de", error=True)
    assert sum(map(len, collector.text())) == min(limit, 25)


def test_after_a_loss_nothing_more_is_kept() -> None:
    collector = OutputCollector(100)
    collector.add(b"one", error=False)
    collector.mark_lost()
    collector.add(b"three", error=False)
    assert collector.truncated
    assert collector.text() == ("one", "")
