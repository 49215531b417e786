"""Paths between text and bytes."""

from __future__ import annotations

from urllib.parse import quote_from_bytes, unquote_to_bytes

import pytest
from agent_sandbox_core.errors import InvalidRequest
from agent_sandbox_core.interfaces import GuestFile
from agent_sandbox_core.paths import check_path, file_info, parse_path, quote_path, show_path
from hypothesis import assume, given
from hypothesis import strategies as st

raw_paths = st.binary(min_size=1, max_size=300).filter(lambda raw: b"\0" not in raw and not raw.startswith(b"//"))


@given(raw_paths)
def test_any_name_can_be_addressed_in_the_percent_form(raw: bytes) -> None:
    assert parse_path(quote_from_bytes(raw, safe=""), "percent") == raw


@given(raw_paths)
def test_a_shown_name_without_a_literal_percent_addresses_itself(raw: bytes) -> None:
    assume(b"%" not in raw)
    assert parse_path(show_path(raw), "percent") == raw


@given(st.text(min_size=1, max_size=200))
def test_text_is_taken_and_shown_literally(text: str) -> None:
    assume("\0" not in text and not text.startswith("//"))
    try:
        raw = parse_path(text)
    except InvalidRequest:
        with pytest.raises(UnicodeEncodeError):
            text.encode()
        return
    assert raw == text.encode()
    assert show_path(raw) == text


@given(raw_paths)
def test_a_path_survives_the_query_of_the_guest_api(raw: bytes) -> None:
    quoted = quote_path(raw)
    assert unquote_to_bytes(quoted) == raw
    assert quoted.isascii()
    assert not set(quoted) & set("&?#=+ \r\n")


@pytest.mark.parametrize(
    ("raw", "shown"), [(b"caf\xe9.txt", "caf%E9.txt"), ("é".encode(), "é"), (b"100%.txt", "100%.txt"), (b"a\xff\xc3\xa9", "a%FFé")]
)
def test_bytes_that_are_not_utf8_are_shown_as_percent_and_two_digits(raw: bytes, shown: str) -> None:
    assert show_path(raw) == shown


@pytest.mark.parametrize("bad", ["", "a\0b", "//workspace/x", "x" * 4096, "\ud800"])
def test_what_can_name_no_file_is_refused(bad: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_path(bad)


@pytest.mark.parametrize("bad", ["%", "a%4", "%zz", "%00", "%2F%2Fworkspace"])
def test_a_percent_form_that_is_none_or_hides_a_bad_path_is_refused(bad: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_path(bad, "percent")


def test_a_single_slash_and_dots_are_the_guests_business() -> None:
    assert check_path(b"/workspace/../x") == b"/workspace/../x"


@given(st.integers(-(2**70), 2**70))
def test_every_time_can_be_shown(mtime: int) -> None:
    info = file_info(GuestFile(name=b"n", path=b"/workspace/n", type="file", size=1, mode=0o644, mtime_ns=mtime))
    assert 1 <= info.modified_at.year <= 9999


def test_a_file_is_shown_with_exactly_the_keys_of_the_contract() -> None:
    info = file_info(GuestFile(name=b"\xff", path=b"/workspace/\xff", type="socket", size=3, mode=0o644, mtime_ns=1_700_000_000_123_456_789))
    assert info.model_dump(mode="json") == {
        "name": "%FF",
        "path": "/workspace/%FF",
        "type": "other",
        "size": 3,
        "modified_at": "2023-11-14T22:13:20.123456Z",
    }
