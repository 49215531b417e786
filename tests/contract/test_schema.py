"""What the API says about itself and about requests it cannot take: OpenAPI names, 422, 404, 405, and the order among refusals."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from tests.support.client import Api, expect, refused

NO_BOX, NO_SNAP = "sb_0123456789abcdef", "snap_0123456789abcdef"
ROUTES = {
    "/healthz": {"get"},
    "/v1/sandboxes": {"get", "post"},
    "/v1/sandboxes/{sandbox_id}": {"get", "delete"},
    "/v1/sandboxes/{sandbox_id}/timeout": {"post"},
    "/v1/sandboxes/{sandbox_id}/rollback": {"post"},
    "/v1/sandboxes/{sandbox_id}/exec": {"post"},
    "/v1/sandboxes/{sandbox_id}/exec/stream": {"post"},
    "/v1/sandboxes/{sandbox_id}/files": {"get", "put"},
    "/v1/sandboxes/{sandbox_id}/files/list": {"get"},
    "/v1/sandboxes/{sandbox_id}/snapshots": {"post"},
    "/v1/snapshots": {"get"},
    "/v1/snapshots/{snapshot_id}": {"get", "delete"},
    "/v1/snapshots/{snapshot_id}/fork": {"post"},
}


def schema_error(answer: httpx.Response) -> list[dict[str, Any]]:
    """FastAPI's own 422."""
    body = expect(answer, 422)
    assert set(body) == {"detail"} and isinstance(body["detail"], list) and body["detail"]
    assert all({"loc", "msg", "type"} <= set(entry) for entry in body["detail"])
    details: list[dict[str, Any]] = body["detail"]
    return details


@pytest.mark.behaviour("API-002")
def test_openapi_has_every_call_with_the_names_that_clients_compare(api: Api) -> None:
    document = api.http.get("/openapi.json").json()
    for path, methods in ROUTES.items():
        assert path in document["paths"], path
        assert methods <= set(document["paths"][path]), path
    for path in document["paths"]:
        assert set(re.findall(r"{(\w+)}", path)) <= {"sandbox_id", "snapshot_id"}, path
    schemes = document["components"]["securitySchemes"]
    assert schemes["HTTPBearer"]["type"] == "http" and schemes["HTTPBearer"]["scheme"].lower() == "bearer"
    assert schemes["APIKeyHeader"] == {"type": "apiKey", "in": "header", "name": "X-API-Key"} | {
        key: value for key, value in schemes["APIKeyHeader"].items() if key == "description"
    }


@pytest.mark.behaviour("API-003")
def test_openapi_gives_examples(api: Api) -> None:
    document = json.dumps(api.http.get("/openapi.json").json())
    assert '"example' in document


@pytest.mark.behaviour("API-010")
@pytest.mark.parametrize(
    ("method", "path", "options"),
    [
        ("GET", "", {}),
        ("DELETE", "", {}),
        ("POST", "/timeout", {"json": {"timeout_seconds": 5}}),
        ("POST", "/exec", {"json": {"command": "true"}}),
        ("POST", "/exec/stream", {"json": {"command": "true"}}),
        ("GET", "/files", {"params": {"path": "x"}}),
        ("PUT", "/files", {"params": {"path": "x"}, "content": b"x"}),
        ("GET", "/files/list", {}),
        ("POST", "/snapshots", {}),
    ],
)
@pytest.mark.parametrize("sandbox", [NO_BOX, "nope", "sb_ABCDEF0123456789", "1", "sb_0123456789abcdef0"])
def test_an_unknown_sandbox_is_404_with_the_exact_message(api: Api, method: str, path: str, options: dict[str, Any], sandbox: str) -> None:
    assert refused(api.call(method, f"/sandboxes/{sandbox}{path}", **options), 404) == f"sandbox {sandbox} not found"


@pytest.mark.behaviour("API-011")
@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("DELETE", ""), ("POST", "/fork")])
@pytest.mark.parametrize("snapshot", [NO_SNAP, "nope", "snap_", "snap_0123456789ABCDEF"])
def test_an_unknown_snapshot_is_404_with_the_exact_message(api: Api, method: str, path: str, snapshot: str) -> None:
    assert refused(api.call(method, f"/snapshots/{snapshot}{path}"), 404) == f"snapshot {snapshot} not found"


@pytest.mark.behaviour("API-012", "B09")
@pytest.mark.parametrize("path", ["..%2f..%2fetc%2fpasswd", "..", "%2e%2e", "snap_0123456789abcdef%00", "a%2fb", "..%5c..%5cx"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_ids_that_are_paths_find_nothing(api: Api, method: str, path: str) -> None:
    answer = api.call(method, f"/snapshots/{path}")
    assert answer.status_code in (404, 405, 307), answer.text
    assert "root:" not in answer.text


@pytest.mark.behaviour("API-013")
def test_an_unknown_route_is_an_http_error_in_our_shape(api: Api) -> None:
    refused(api.call("GET", "/no-such-route"), 404, code="http_error")


@pytest.mark.behaviour("API-014")
@pytest.mark.parametrize(
    ("method", "path"),
    [("PATCH", "/sandboxes"), ("PUT", f"/sandboxes/{NO_BOX}"), ("GET", f"/sandboxes/{NO_BOX}/exec"), ("POST", "/snapshots")],
)
def test_a_wrong_method_is_405_in_our_shape(api: Api, method: str, path: str) -> None:
    refused(api.call(method, path), 405)


@pytest.mark.behaviour("API-020")
@pytest.mark.parametrize(
    "body",
    [
        {"cpus": 0},
        {"cpus": -1},
        {"cpus": "many"},
        {"cpus": "nan"},
        {"memory_mb": 15},
        {"memory_mb": 64.5},
        {"pids_limit": 7},
        {"timeout_seconds": 0},
        {"timeout_seconds": -5},
        {"network": "perhaps"},
        {"env": {"A": 1}},
        {"env": ["A=1"]},
        {"env": None},
        {"image": 5},
        {"no_such_field": 1},
        {"memory": 512},
        [],
        "text",
        None,
    ],
    ids=repr,
)
def test_a_create_off_the_schema_is_422(api: Api, body: Any) -> None:
    schema_error(api.call("POST", "/sandboxes", content=json.dumps(body), headers={"Content-Type": "application/json"}))


@pytest.mark.behaviour("API-021")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("timeout", {}),
        ("timeout", {"timeout_seconds": 0}),
        ("timeout", {"timeout_seconds": 1, "x": 1}),
        ("rollback", {}),
        ("rollback", {"snapshot_id": 5}),
        ("rollback", {"snapshot_id": NO_SNAP, "x": 1}),
        ("exec", {}),
        ("exec", {"command": 5}),
        ("exec", {"command": [1]}),
        ("exec", {"command": None}),
        ("exec", {"command": "true", "timeout_seconds": 0}),
        ("exec", {"command": "true", "timeout_seconds": -1}),
        ("exec", {"command": "true", "env": {"A": 1}}),
        ("exec", {"command": "true", "cwd": "/"}),
        ("exec/stream", {"command": {}}),
        ("exec/stream", {"command": "true", "stdin": ""}),
        ("snapshots", {"name": "n" * 129}),
        ("snapshots", {"name": 5}),
        ("snapshots", {"label": "x"}),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:40],
)
def test_other_bodies_off_the_schema_are_422_even_for_an_unknown_sandbox(api: Api, path: str, body: dict[str, Any]) -> None:
    schema_error(api.call("POST", f"/sandboxes/{NO_BOX}/{path}", json=body))


@pytest.mark.behaviour("API-022")
@pytest.mark.parametrize(
    "body",
    [{"timeout_seconds": 0}, {"cpus": 0}, {"memory_mb": 15}, {"network": "perhaps"}, {"image": "x"}, {"pids_limit": 64}],
    ids=json.dumps,
)
def test_a_fork_off_the_schema_is_422_even_for_an_unknown_snapshot(api: Api, body: dict[str, Any]) -> None:
    schema_error(api.call("POST", f"/snapshots/{NO_SNAP}/fork", json=body))


@pytest.mark.behaviour("API-023")
def test_bodies_of_create_exec_timeout_and_rollback_may_not_be_absent(api: Api) -> None:
    for path in (
        "/sandboxes",
        f"/sandboxes/{NO_BOX}/exec",
        f"/sandboxes/{NO_BOX}/exec/stream",
        f"/sandboxes/{NO_BOX}/timeout",
        f"/sandboxes/{NO_BOX}/rollback",
    ):
        schema_error(api.call("POST", path))


@pytest.mark.behaviour("API-024")
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_json_needs_its_content_type(api: Api, kind: str | None) -> None:
    schema_error(api.call("POST", "/sandboxes", content=b"{}", headers={"Content-Type": kind} if kind else {}))


@pytest.mark.behaviour("API-025")
def test_broken_json_is_422(api: Api) -> None:
    schema_error(api.call("POST", "/sandboxes", content=b'{"env": {', headers={"Content-Type": "application/json"}))


@pytest.mark.behaviour("API-026")
@pytest.mark.parametrize(
    "query",
    [
        {},
        {"path": "x", "mode": "8"},
        {"path": "x", "mode": "77"},
        {"path": "x", "mode": "rw"},
        {"path": "x", "mode": "0o644"},
        {"path": "x", "mode": "00644"},
    ],
)
def test_queries_off_the_schema_are_422_even_for_an_unknown_sandbox(api: Api, query: dict[str, str]) -> None:
    schema_error(api.call("PUT", f"/sandboxes/{NO_BOX}/files", params=query, content=b"x"))


@pytest.mark.behaviour("API-027")
def test_reading_without_a_path_is_422(api: Api) -> None:
    schema_error(api.call("GET", f"/sandboxes/{NO_BOX}/files"))


@pytest.mark.behaviour("API-028")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/sandboxes", {"env": {"A": "s3cr3t-0001", "B": 5}}),
        ("/sandboxes", {"env": {"A": "s3cr3t-0001"}, "cpus": 0}),
        ("/sandboxes", {"env": {"A": "s3cr3t-0001"}, "no_such_field": {"A": "s3cr3t-0001"}}),
        ("/sandboxes", {"env": "s3cr3t-0001"}),
        ("/sandboxes", {"env": ["s3cr3t-0001"]}),
        ("/sandboxes", [{"env": {"A": "s3cr3t-0001"}}]),
        (f"/sandboxes/{NO_BOX}/exec", {"env": {"A": "s3cr3t-0001"}}),
        (f"/sandboxes/{NO_BOX}/exec", {"command": "true", "env": {"A": ["s3cr3t-0001"]}}),
        (f"/sandboxes/{NO_BOX}/exec/stream", {"command": "true", "env": {"A": {"B": "s3cr3t-0001"}}}),
        (f"/sandboxes/{NO_BOX}/exec", {"command": "true", "environment": {"A": "s3cr3t-0001"}}),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:60],
)
def test_a_422_never_echoes_env_values(api: Api, path: str, body: Any) -> None:
    answer = api.call("POST", path, json=body)
    schema_error(answer)
    assert "s3cr3t-0001" not in answer.text


@pytest.mark.behaviour("API-029")
def test_a_broken_json_body_with_env_is_not_echoed(api: Api) -> None:
    answer = api.call("POST", "/sandboxes", content=b'{"env": {"A": "s3cr3t-0001"', headers={"Content-Type": "application/json"})
    assert "s3cr3t-0001" not in answer.text
    schema_error(answer)
    answer = api.call("POST", "/sandboxes", content=b'{"env": {"A": "s3cr3t-0001"}}', headers={"Content-Type": "text/plain"})
    assert "s3cr3t-0001" not in answer.text
    schema_error(answer)


@pytest.mark.behaviour("API-030")
@pytest.mark.parametrize(
    ("method", "path", "options"),
    [
        ("POST", "timeout", {"json": {"timeout_seconds": 10**9}}),
        ("POST", "exec", {"json": {"command": ""}}),
        ("POST", "exec", {"json": {"command": []}}),
        ("POST", "exec", {"json": {"command": "true", "timeout_seconds": 10**9}}),
        ("POST", "exec", {"json": {"command": "true", "env": {"BAD NAME": "x"}}}),
        ("POST", "exec/stream", {"json": {"command": "true", "workdir": ""}}),
        ("GET", "files", {"params": {"path": ""}}),
        ("PUT", "files", {"params": {"path": "x", "mode": "7777"}, "content": b"x"}),
        ("PUT", "files", {"params": {"path": "/etc/x"}, "content": b"x"}),
        ("GET", "files/list", {"params": {"path": ""}}),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value, default=repr)[:60],
)
def test_existence_comes_before_rules(api: Api, method: str, path: str, options: dict[str, Any]) -> None:
    refused(api.call(method, f"/sandboxes/{NO_BOX}/{path}", **options), 404)


@pytest.mark.behaviour("API-031")
def test_existence_comes_before_rules_for_forks_too(api: Api) -> None:
    refused(api.call("POST", f"/snapshots/{NO_SNAP}/fork", json={"cpus": 10_000}), 404)
    refused(api.call("POST", f"/snapshots/{NO_SNAP}/fork", json={"timeout_seconds": 10**9}), 404)


@pytest.mark.behaviour("API-032")
def test_rollback_looks_for_the_snapshot_first(api: Api, box: str) -> None:
    assert refused(api.roll(NO_BOX, NO_SNAP), 404) == f"snapshot {NO_SNAP} not found"
    assert refused(api.roll(box, NO_SNAP), 404) == f"snapshot {NO_SNAP} not found"
    snapshot = api.snap(box)["id"]
    assert refused(api.roll(NO_BOX, snapshot), 404) == f"sandbox {NO_BOX} not found"


@pytest.mark.behaviour("API-033")
def test_metrics_count_requests_in_the_prometheus_format(api: Api) -> None:
    answer = api.http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    families = set(re.findall(r"^# TYPE (\S+) \S+$", answer.text, re.MULTILINE))
    for word in ("request", "exec", "sandboxes", "snapshot"):
        assert any(word in family for family in families), f"no metric about {word} in {sorted(families)}"
