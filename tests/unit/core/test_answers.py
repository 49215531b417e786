"""What the guest answers, translated: every code, and nothing that is not as the API says."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from agent_sandbox_core.channel import Answer
from agent_sandbox_core.errors import BackendError, SandboxError
from agent_sandbox_core.guest.answers import (
    ERRORS,
    GuestProtocolError,
    parse_file,
    parse_file_header,
    parse_json,
    parse_output,
    parse_process,
    raise_error,
)
from hypothesis import given
from hypothesis import strategies as st

API = Path(__file__).resolve().parents[3] / "init" / "API.md"
GO = Path(__file__).resolve().parents[3] / "init"

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.floats(allow_nan=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


def failure(status: int, body: bytes) -> SandboxError:
    with pytest.raises(SandboxError) as caught:
        raise_error(Answer(status, {}, body))
    return caught.value


def test_every_code_of_the_guest_api_has_an_error() -> None:
    documented = set(re.findall(r"\b[45]\d\d `([a-z_]+)`", API.read_text()))
    made = {code for path in GO.rglob("internal/**/*.go") for code in re.findall(r'"((?:no|in|not)_[a-z_]+|conflict|busy)"', path.read_text())}
    assert len(documented) >= 11
    assert documented - ERRORS.keys() == set()
    assert {code for code in made if code in documented} - ERRORS.keys() == set()


def test_an_unknown_code_is_a_backend_error_that_names_it() -> None:
    error = failure(418, b'{"error":{"code":"teapot","message":"short and stout"}}')
    assert type(error) is BackendError
    assert error.message == "short and stout (teapot)"


def test_a_message_is_bounded_and_holds_no_control_characters() -> None:
    error = failure(400, json.dumps({"error": {"code": "busy", "message": "\x1b[31m" + "x" * 10**6}}).encode())
    assert "\x1b" not in error.message
    assert len(error.message) <= 2000


@pytest.mark.parametrize("body", [b"", b"no json", b"[]", b"{}", b'{"error":null}', b'{"error":{"code":"busy"}}', b"\xff"])
def test_an_error_that_is_none_is_a_protocol_error(body: bytes) -> None:
    assert isinstance(failure(500, body), GuestProtocolError)


@given(st.dictionaries(st.sampled_from(["next_seq", "duration_ms", "exit"]), values))
def test_no_process_makes_it_do_anything_but_refuse_or_give_checked_numbers(data: dict[str, Any]) -> None:
    try:
        state = parse_process(data)
    except GuestProtocolError:
        return
    assert state.next_seq >= 0
    assert state.exit is None or 0 <= state.exit.code <= 255


@given(values)
def test_no_file_makes_it_do_anything_but_refuse_or_give_a_checked_one(data: Any) -> None:
    try:
        parse_file(data)
    except GuestProtocolError:
        return
    raise AssertionError("random data was taken for a file")


@given(st.dictionaries(st.sampled_from(["output"]), st.lists(st.dictionaries(st.sampled_from(["seq", "fd", "data"]), values), max_size=3)))
def test_no_output_makes_it_do_anything_but_refuse_or_give_frames(data: dict[str, Any]) -> None:
    try:
        frames = parse_output(data)
    except GuestProtocolError:
        return
    assert all(fd in (1, 2) for _, fd, _ in frames)


@given(st.binary(max_size=60))
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    try:
        assert isinstance(parse_json(body), dict)
    except GuestProtocolError:
        return


def test_a_file_header_is_read() -> None:
    name, path = (base64.b64encode(raw).decode() for raw in (b"\xff", b"/workspace/\xff"))
    info = {"name": name, "path": path, "type": "file", "size": 3, "mode": "0644", "mtime_ns": 5, "later": 1}
    file = parse_file_header(Answer(200, {b"file-info": base64.b64encode(json.dumps(info).encode())}))
    assert (file.name, file.path, file.mode, file.size) == (b"\xff", b"/workspace/\xff", 0o644, 3)
    with pytest.raises(GuestProtocolError):
        parse_file_header(Answer(200, {b"file-info": b"%%"}))
    with pytest.raises(GuestProtocolError):
        parse_file_header(Answer(200, {}))
