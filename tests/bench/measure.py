"""Timing of calls and the figures made of them: medians and tails, never means."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """Durations of one kind of call, in seconds."""

    seconds: Sequence[float]

    def quantile(self, part: float) -> float:
        """The nearest-rank quantile, in milliseconds."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(len(ordered) * part))] * 1000

    @property
    def p50(self) -> float:
        """The median in milliseconds."""
        return self.quantile(0.5)

    @property
    def p99(self) -> float:
        """The 99th percentile in milliseconds; of fewer than 100 calls it is the slowest."""
        return self.quantile(0.99)

    def __str__(self) -> str:
        return f"{self.p50:.1f} / {self.p99:.1f} ms (n={len(self.seconds)})"


def time_calls(call: Callable[[], object], count: int, *, warm: int = 0) -> Sample:
    """Times `count` calls, one after another, after `warm` that do not count."""
    for _ in range(warm):
        call()
    seconds = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return Sample(seconds)


def time_parallel(makers: Sequence[Callable[[], Callable[[], object]]], count: int) -> tuple[Sample, float]:
    """Runs one thread a maker, each with `count` calls of what its maker gives; returns the latencies and the calls a second of all."""

    def work(make: Callable[[], Callable[[], object]]) -> Sequence[float]:
        return time_calls(make(), count, warm=1).seconds

    begun = time.perf_counter()
    with ThreadPoolExecutor(len(makers)) as pool:
        seconds = [one for many in pool.map(work, makers) for one in many]
    return Sample(seconds), len(seconds) / (time.perf_counter() - begun)


class Line:
    """One kept HTTP connection with as little client as possible, so that the figures are the server's."""

    def __init__(self, port: int, key: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's JSON (None without a body); an error status ends the benchmark with the error's text."""
        self.connection.request(method, f"/v1{path}", None if body is None else json.dumps(body), self.headers)
        answer = self.connection.getresponse()
        data = answer.read()
        if answer.status >= 400:
            raise SystemExit(f"{method} {path}: {answer.status} {data[:500]!r}")
        return json.loads(data) if data else None

    def exec(self, sandbox: str, command: str | list[str], timeout: float = 300) -> dict[str, Any]:
        """The result of a command that must exit with 0."""
        result: dict[str, Any] = self.call("POST", f"/sandboxes/{sandbox}/exec", {"command": command, "timeout_seconds": timeout})
        if result["exit_code"] != 0:
            raise SystemExit(f"{command!r} ended with {result['exit_code']}: {result['stderr'][-500:]}")
        return result
