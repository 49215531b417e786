"""Thin helpers over httpx that speak the contract to the letter: no retries, no models of ours, answers as the wire has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import httpx

Json = dict[str, Any]
EXEC_KEYS = {"stdout", "stderr", "exit_code", "timed_out", "truncated", "duration_ms"}
FILE_KEYS = {"name", "path", "type", "size", "modified_at"}
OUTPUT_KEYS = {"type", "data"}
EXIT_KEYS = {"type", "exit_code", "timed_out", "duration_ms"}
SANDBOX_KEYS = {
    *("id", "status", "image", "cpus", "memory_mb", "pids_limit", "network", "read_only_rootfs", "created_at", "expires_at"),
    "source_snapshot_id",
}
SNAPSHOT_KEYS = {"id", "sandbox_id", "name", "image", "size_bytes", "created_at"}
CODES = {
    400: "invalid_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    413: "payload_too_large",
    429: "limit_exceeded",
    502: "backend_error",
    503: "unavailable",
}


TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)\Z")


def moment(text: str) -> datetime:
    """An RFC 3339 time in UTC."""
    assert TIME.match(text), text
    return datetime.fromisoformat(text)


def lifetime(row: Json) -> float:
    """Seconds from creation to expiry."""
    return (moment(row["expires_at"]) - moment(row["created_at"])).total_seconds()


def expect(answer: httpx.Response, status: int) -> Any:
    """The answer's JSON (None for an empty body) when it has this status; else a failure that shows the answer."""
    assert answer.status_code == status, (
        f"{answer.request.method} {answer.request.url.path}: {answer.status_code}, expected {status}: {answer.text[:600]}"
    )
    return answer.json() if answer.content and "json" in answer.headers.get("content-type", "") else None


def refused(answer: httpx.Response, status: int, *, code: str | None = None, says: str | Sequence[str] = ()) -> str:
    """Checks an error in our shape, exactly, and returns its message, which holds each text of `says`."""
    body = expect(answer, status)
    assert isinstance(body, dict) and set(body) == {"error"} and set(body["error"]) == {"code", "message"}, body
    assert body["error"]["code"] == (code or CODES[status]), body
    message = body["error"]["message"]
    assert isinstance(message, str) and message
    for text in [says] if isinstance(says, str) else says:
        assert text.lower() in message.lower(), f"{text!r} not in the message {message!r}"
    return message


class StreamRefused(AssertionError):
    """A stream that did not begin, where a test expected one."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:600]}")
        self.status = status


@dataclass
class Stream:
    """The lines of one exec/stream, read to its end."""

    events: list[Json] = field(default_factory=list)
    blanks: int = 0

    def text(self, kind: str) -> str:
        """The joined data of stdout or stderr."""
        return "".join(event["data"] for event in self.events if event["type"] == kind)

    @property
    def exit(self) -> Json | None:
        """The exit line when there is one; it is the last line and the only one."""
        exits = [event for event in self.events if event["type"] == "exit"]
        assert len(exits) <= 1 and (not exits or self.events[-1] is exits[0]), "an exit line is the last line, once"
        return exits[0] if exits else None

    @property
    def finished(self) -> Json:
        """The exit line, which must be there."""
        assert self.exit is not None, f"the stream has no exit line; last events: {self.events[-3:]}"
        return self.exit


def parse_line(line: str) -> Json:
    """One stream line, its keys checked: strict readers exist."""
    event: Json = json.loads(line)
    keys = EXIT_KEYS if event["type"] == "exit" else OUTPUT_KEYS
    assert set(event) == keys, event
    assert event["type"] in ("stdout", "stderr", "exit"), event
    return event


class Api:
    """One client of one facade. Remembers the sandboxes and snapshots that it made, for the clean-up."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key
        self.made: list[str] = []
        self.taken: list[str] = []
        self.http = self._client()

    def _client(self) -> httpx.Client:
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=64)
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=120, limits=limits)

    def forget_connections(self) -> None:
        """Fresh connections from now on: the server went away."""
        self.http.close()
        self.http = self._client()

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Any call below /v1."""
        return self.http.request(method, f"/v1{path}", **options)

    # Sandboxes
    def create(self, body: Json | None = None, **options: Any) -> httpx.Response:
        """POST /v1/sandboxes; a sandbox that comes of it is remembered."""
        answer = self.call("POST", "/sandboxes", json={} if body is None else body, **options)
        if answer.status_code == 201:
            self.made.append(answer.json()["id"])
        return answer

    def new(self, **body: Any) -> Json:
        """A fresh sandbox."""
        made: Json = expect(self.create(body), 201)
        return made

    def sandbox(self, sandbox: str) -> Json:
        got: Json = expect(self.call("GET", f"/sandboxes/{sandbox}"), 200)
        return got

    def sandboxes(self) -> list[Json]:
        body = expect(self.call("GET", "/sandboxes"), 200)
        assert set(body) == {"sandboxes"}
        rows: list[Json] = body["sandboxes"]
        return rows

    def delete(self, sandbox: str) -> None:
        answer = self.call("DELETE", f"/sandboxes/{sandbox}")
        expect(answer, 204)
        assert answer.content == b""

    def expire(self, sandbox: str, seconds: int) -> Json:
        got: Json = expect(self.call("POST", f"/sandboxes/{sandbox}/timeout", json={"timeout_seconds": seconds}), 200)
        return got

    # Commands
    def exec(self, sandbox: str, command: str | list[str] | None = None, **body: Any) -> httpx.Response:
        """POST exec with whatever body."""
        return self.call("POST", f"/sandboxes/{sandbox}/exec", json=({} if command is None else {"command": command}) | body)

    def run(self, sandbox: str, command: str | list[str], **body: Any) -> Json:
        """The answer of exec, its keys checked."""
        result: Json = expect(self.exec(sandbox, command, **body), 200)
        assert set(result) == EXEC_KEYS, result.keys()
        return result

    def sh(self, sandbox: str, command: str | list[str], **body: Any) -> str:
        """The stdout of a command that must succeed."""
        result = self.run(sandbox, command, **body)
        assert result["exit_code"] == 0 and not result["timed_out"] and not result["truncated"], result
        out: str = result["stdout"]
        return out

    @contextmanager
    def streaming(self, sandbox: str, command: str | list[str], **body: Any) -> Iterator[httpx.Response]:
        """An open exec/stream, its body unread."""
        with self.http.stream("POST", f"/v1/sandboxes/{sandbox}/exec/stream", json={"command": command} | body) as answer:
            if answer.status_code == 200:
                assert answer.headers["content-type"].split(";")[0] == "application/x-ndjson"
            yield answer

    def stream(self, sandbox: str, command: str | list[str], **body: Any) -> Stream:
        """exec/stream read to its end; an end without an exit line is no error here (`finished` makes it one)."""
        result = Stream()
        with self.streaming(sandbox, command, **body) as answer:
            if answer.status_code != 200:
                answer.read()
                raise StreamRefused(answer.status_code, answer.text)
            try:
                for line in answer.iter_lines():
                    if line.strip():
                        result.events.append(parse_line(line))
                    else:
                        result.blanks += 1
            except httpx.RemoteProtocolError:
                assert result.exit is None, "the connection broke after the exit line"
        return result

    # Files
    def put(self, sandbox: str, path: str, content: Any = b"", **query: Any) -> httpx.Response:
        return self.call("PUT", f"/sandboxes/{sandbox}/files", params={"path": path} | query, content=content)

    def write(self, sandbox: str, path: str, content: bytes | str = b"", **query: Any) -> Json:
        """A PUT that must succeed; the FileInfo, its keys checked."""
        info: Json = expect(self.put(sandbox, path, content.encode() if isinstance(content, str) else content, **query), 200)
        assert set(info) == FILE_KEYS, info.keys()
        return info

    def get(self, sandbox: str, path: str) -> httpx.Response:
        return self.call("GET", f"/sandboxes/{sandbox}/files", params={"path": path})

    def read(self, sandbox: str, path: str) -> bytes:
        """A GET that must succeed."""
        answer = self.get(sandbox, path)
        expect(answer, 200)
        assert answer.headers["content-type"].split(";")[0] == "application/octet-stream"
        return answer.content

    def ls(self, sandbox: str, path: str | None = None) -> list[Json]:
        """The entries of a folder, their keys checked."""
        body = expect(self.call("GET", f"/sandboxes/{sandbox}/files/list", params={} if path is None else {"path": path}), 200)
        assert set(body) == {"path", "entries"}
        entries: list[Json] = body["entries"]
        assert all(set(entry) == FILE_KEYS for entry in entries)
        return entries

    def names(self, sandbox: str, path: str | None = None) -> list[str]:
        return [entry["name"] for entry in self.ls(sandbox, path)]

    # Snapshots
    def take(self, sandbox: str, **options: Any) -> httpx.Response:
        """POST snapshots; a snapshot that comes of it is remembered."""
        answer = self.call("POST", f"/sandboxes/{sandbox}/snapshots", **options)
        if answer.status_code == 201:
            self.taken.append(answer.json()["id"])
        return answer

    def snap(self, sandbox: str, name: str | None = None) -> Json:
        got: Json = expect(self.take(sandbox, json={} if name is None else {"name": name}), 201)
        return got

    def snapshots(self, sandbox: str | None = None) -> list[Json]:
        body = expect(self.call("GET", "/snapshots", params={} if sandbox is None else {"sandbox_id": sandbox}), 200)
        assert set(body) == {"snapshots"}
        rows: list[Json] = body["snapshots"]
        return rows

    def roll(self, sandbox: str, snapshot: str) -> httpx.Response:
        return self.call("POST", f"/sandboxes/{sandbox}/rollback", json={"snapshot_id": snapshot})

    def rollback(self, sandbox: str, snapshot: str) -> Json:
        got: Json = expect(self.roll(sandbox, snapshot), 200)
        return got

    def branch(self, snapshot: str, **options: Any) -> httpx.Response:
        """POST fork; a sandbox that comes of it is remembered."""
        answer = self.call("POST", f"/snapshots/{snapshot}/fork", **options)
        if answer.status_code == 201:
            self.made.append(answer.json()["id"])
        return answer

    def fork(self, snapshot: str, **body: Any) -> Json:
        got: Json = expect(self.branch(snapshot, json=body), 201)
        return got

    def drop(self, snapshot: str) -> None:
        expect(self.call("DELETE", f"/snapshots/{snapshot}"), 204)

    def clean(self, since_made: int = 0, since_taken: int = 0) -> None:
        """Deletes what this client made after the given marks and what is still there."""

        def gone(path: str) -> None:
            assert self.call("DELETE", path).status_code in (204, 404), f"clean-up of {path}"

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda sandbox: gone(f"/sandboxes/{sandbox}"), self.made[since_made:]))
            list(pool.map(lambda snapshot: gone(f"/snapshots/{snapshot}"), self.taken[since_taken:]))
        del self.made[since_made:], self.taken[since_taken:]
