"""Who may call: keys, schemes, and that the key is checked before anything else is said."""

from __future__ import annotations

import base64
from collections.abc import Callable

import httpx
import pytest

from tests.support.client import Api, refused
from tests.support.server import Facade

RIGHT, WRONG = "RIGHT", "wrong-key-0123456789"
BASIC = "Basic " + base64.b64encode(b"user:password").decode()


def bare(facade: Facade, method: str, path: str, **options: object) -> httpx.Response:
    """A call without the client's own key."""
    return httpx.request(method, f"{facade.url}{path}", timeout=30, **options)  # type: ignore[arg-type]  # options are httpx's


def unauthorized(answer: httpx.Response) -> None:
    refused(answer, 401)
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.behaviour("AUTH-001")
def test_health_needs_no_key_and_names_the_backend(facade: Facade) -> None:
    answer = bare(facade, "GET", "/healthz")
    assert answer.status_code == 200
    body = answer.json()
    assert set(body) == {"status", "backend", "version"}
    assert body["status"] == "ok" and body["backend"] == facade.backend and body["version"]


@pytest.mark.behaviour("AUTH-002")
@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"Authorization": "Bearer RIGHT"}, True),
        ({"Authorization": "bearer RIGHT"}, True),
        ({"Authorization": "BEARER RIGHT"}, True),
        ({"X-API-Key": "RIGHT"}, True),
        ({"x-api-key": "RIGHT"}, True),
        ({}, False),
        ({"Authorization": f"Bearer {WRONG}"}, False),
        ({"X-API-Key": WRONG}, False),
        ({"Authorization": "Bearer"}, False),
        ({"Authorization": "RIGHT"}, False),
        ({"X-API-Key": ""}, False),
        ({"X-API-Key": "Bearer RIGHT"}, False),
        ({"Authorization": f"Bearer {WRONG}", "X-API-Key": "RIGHT"}, False),
        ({"Authorization": "Bearer RIGHT", "X-API-Key": WRONG}, True),
        ({"Authorization": BASIC, "X-API-Key": "RIGHT"}, True),
        ({"Authorization": BASIC, "X-API-Key": WRONG}, False),
        ({"Authorization": BASIC}, False),
        ({"Authorization": "Digest RIGHT"}, False),
    ],
)
def test_the_matrix_of_schemes_and_keys(facade: Facade, headers: dict[str, str], allowed: bool) -> None:
    sent = {name: value.replace(RIGHT, facade.key) for name, value in headers.items()}
    answer = bare(facade, "GET", "/v1/sandboxes", headers=sent)
    if allowed:
        assert answer.status_code == 200, answer.text
    else:
        unauthorized(answer)
        assert WRONG not in answer.text


@pytest.mark.behaviour("AUTH-003")
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/sandboxes", b'{"no_such_field":1}'),
        ("POST", "/v1/sandboxes", b"{broken"),
        ("POST", "/v1/sandboxes", b"{}"),
        ("GET", "/v1/sandboxes/sb_0000000000000000", None),
        ("DELETE", "/v1/sandboxes/sb_0000000000000000", None),
        ("POST", "/v1/sandboxes/sb_0000000000000000/exec", b"{}"),
        ("POST", "/v1/sandboxes/sb_0000000000000000/exec/stream", b"{}"),
        ("GET", "/v1/sandboxes/sb_0000000000000000/files", None),
        ("PUT", "/v1/sandboxes/sb_0000000000000000/files?path=x&mode=9", b"x" * 100_000),
        ("GET", "/v1/snapshots", None),
        ("POST", "/v1/snapshots/snap_0000000000000000/fork", b"[]"),
        ("GET", "/v1/no-such-route", None),
        ("PATCH", "/v1/sandboxes", b"{}"),
        ("GET", "/metrics", None),
    ],
)
def test_the_key_is_checked_before_anything_else(facade: Facade, method: str, path: str, body: bytes | None) -> None:
    unauthorized(bare(facade, method, path, content=body, headers={"Content-Type": "application/json"}))


@pytest.mark.behaviour("AUTH-004")
def test_keys_of_strange_bytes_are_refused_not_a_fault(facade: Facade) -> None:
    for value in (b"Bearer \xff\xfe\xfd-0123456789abcdef", "Bearer ключ-ключ-ключ-ключ".encode(), b"Bearer " + b"k" * 7000):
        unauthorized(bare(facade, "GET", "/v1/sandboxes", headers={b"Authorization": value}))


@pytest.mark.behaviour("AUTH-005")
def test_each_of_several_keys_opens(start_facade: Callable[..., Facade]) -> None:
    keys = ("first-key-0123456789", "second-key-0123456789")
    facade = start_facade(API_KEYS=f"{keys[0]}, {keys[1]}")
    facade.api = Api(facade.url, keys[1])
    for key in keys:
        assert bare(facade, "GET", "/v1/sandboxes", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    for wrong in (f"{keys[0]}, {keys[1]}", ",", keys[0][:-1], keys[0] + "x"):
        unauthorized(bare(facade, "GET", "/v1/sandboxes", headers={"Authorization": f"Bearer {wrong}"}))


@pytest.mark.behaviour("AUTH-006")
def test_without_keys_it_serves_only_when_told_so(start_facade: Callable[..., Facade]) -> None:
    facade = start_facade(API_KEYS="", INSECURE_NO_AUTH="true")
    assert bare(facade, "GET", "/v1/sandboxes").status_code == 200
    assert bare(facade, "GET", "/v1/sandboxes", headers={"Authorization": "Bearer whatever"}).status_code == 200


@pytest.mark.behaviour("API-001")
def test_docs_and_schema_are_served(facade: Facade) -> None:
    headers = {"Authorization": f"Bearer {facade.key}"}
    assert "html" in bare(facade, "GET", "/docs", headers=headers).headers["content-type"]
    assert bare(facade, "GET", "/openapi.json", headers=headers).json()["openapi"].startswith("3.")
