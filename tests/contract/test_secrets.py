"""Nothing secret in logs, errors, metrics or state on disk (B23), at the most talkative log level."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from tests.support.client import Api
from tests.support.docker import Docker
from tests.support.server import Facade
from tests.support.target import Target

WRONG = "wrong-key-CCCC3333-xx"
SECRETS = ("s3cr3t-AAAA1111", "s3cr3t-BBBB2222", WRONG, "s3cr3t-DDDD4444", "s3cr3t-EEEE5555")


@pytest.mark.behaviour("SEC-001", "B23")
def test_no_secret_reaches_a_log_an_error_a_metric_or_the_data_folder(
    start_facade: Callable[..., Facade], target: Target, docker: Docker | None
) -> None:
    facade = start_facade(LOG_LEVEL="debug")
    api: Api = facade.api
    said: list[str] = []

    def call(method: str, path: str, **options: object) -> None:
        said.append(api.call(method, path, **options).text)

    sandbox = api.new(env={"TOK": SECRETS[0]})["id"]
    exec_path, stream_path, files = f"/sandboxes/{sandbox}/exec", f"/sandboxes/{sandbox}/exec/stream", f"/sandboxes/{sandbox}/files"
    if "processes" in target.can:
        assert api.sh(sandbox, "echo $TOK $P", env={"P": SECRETS[1]}) == f"{SECRETS[0]} {SECRETS[1]}\n"
        assert SECRETS[1] in api.stream(sandbox, "echo $P", env={"P": SECRETS[1]}).text("stdout")
    for path in (exec_path, stream_path):
        call("POST", path, json={"command": "true", "workdir": "/no/such", "env": {"P": SECRETS[1]}})
        call("POST", path, json={"command": "true", "env": {"P": SECRETS[1] + "\0"}})
        call("POST", path, json={"command": "true", "env": {"BAD NAME": SECRETS[1]}})
        call("POST", path, json={"command": "true", "env": {"P": [SECRETS[1]]}})
        call("POST", path, json={"command": "true", "timeout_seconds": 10**9, "env": {"P": SECRETS[1]}})
        call("POST", path, json={"command": ["no-such-program"], "env": {"P": SECRETS[1]}})
    call("POST", "/sandboxes", json={"env": {"TOK": SECRETS[0] + "\0"}})
    call("POST", "/sandboxes", json={"env": {"TOK": SECRETS[0]}, "image": "UPPER bad"})
    call("POST", "/sandboxes", json={"env": {"TOK": SECRETS[0]}, "cpus": 1000})
    call("POST", "/sandboxes", json={"env": {"TOK": SECRETS[0]}, "nonsense": 1})
    if "images" in target.can:
        call("POST", "/sandboxes", json={"env": {"TOK": SECRETS[0]}, "image": "registry.invalid/none:1"})
    wrong = ({"Authorization": f"Bearer {WRONG}"}, {"X-API-Key": WRONG}, {"Authorization": f"Basic {WRONG}"})
    said += [httpx.get(f"{facade.url}/v1/sandboxes", headers=headers).text for headers in wrong]
    said.append(httpx.get(f"{facade.url}/v1/sandboxes?key={WRONG}").text)
    api.write(sandbox, "upload", SECRETS[3])
    call("PUT", files, params={"path": "/etc/x"}, content=SECRETS[3].encode())
    call("PUT", files, params={"path": "x", "mode": "9"}, content=SECRETS[3].encode())
    snapshot = api.snap(sandbox)["id"]
    call("POST", f"/snapshots/{snapshot}/fork", json={"memory_mb": 10**6})
    call("POST", f"/snapshots/{snapshot}/fork", json={"env": {"TOK": SECRETS[4]}})
    api.fork(snapshot)
    api.rollback(sandbox, snapshot)
    said.append(api.http.get("/metrics").text)
    said.append(json.dumps(api.sandboxes()) + json.dumps(api.snapshots()))
    facade.restart()
    said.append(json.dumps(facade.api.sandboxes()))
    forbidden = (*SECRETS, facade.key)
    for secret in forbidden:
        assert not [text for text in said if secret in text], f"{secret} in an answer"
        assert secret not in facade.logs(), f"{secret} in the log"
    # A key is configuration, not state: it has no business in the data folder. Env values may be kept there for forks, closed to others.
    for file in facade.data.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert facade.key.encode() not in content and WRONG.encode() not in content, file
            if SECRETS[0].encode() in content:
                assert file.stat().st_mode & 0o077 == 0, f"{file} holds env values and is open to others"


@pytest.mark.behaviour("SEC-002")
def test_logs_are_structured_and_carry_request_ids(start_facade: Callable[..., Facade]) -> None:
    facade = start_facade()
    answer = facade.api.call("GET", "/sandboxes")
    request = answer.headers.get("x-request-id")
    assert request
    lines = [line for line in facade.logs().splitlines() if request in line]
    assert lines and all(isinstance(json.loads(line), dict) for line in lines)
    mine = facade.api.call("GET", "/sandboxes", headers={"X-Request-Id": "mine-123"})
    assert mine.headers["x-request-id"]
