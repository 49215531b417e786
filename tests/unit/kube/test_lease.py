"""What a holder does when it cannot renew. The election itself is proved on a real cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_sandbox_kube.lease import Lease
from aiohttp import web

from tests.unit.kube.apiserver import Object, kubeconfig, serving

LEASE_SECONDS = 3


class LeaseServer:
    """Holds one Lease; `silent` and `broken` are its faults."""

    def __init__(self) -> None:
        self.lease: Object | None = None
        self.version = 0
        self.silent = self.broken = False
        self.renewals: list[float] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.silent:
            await asyncio.Event().wait()
        if self.broken:
            return web.json_response({"kind": "Status", "code": 500, "message": "etcd is away"}, status=500)
        if request.method == "GET":
            if self.lease is None:
                return web.json_response({"kind": "Status", "code": 404, "reason": "NotFound", "message": "no lease"}, status=404)
            return web.json_response(self.lease)
        body = await request.json()
        told = body.get("metadata", {}).get("resourceVersion")
        if self.lease is not None and told != self.lease["metadata"]["resourceVersion"]:
            return web.json_response({"kind": "Status", "code": 409, "reason": "Conflict", "message": "changed"}, status=409)
        self.take(body["spec"])
        return web.json_response(self.lease)

    def take(self, spec: Object) -> None:
        """Writes the Lease."""
        self.version += 1
        self.renewals.append(time.monotonic())
        self.lease = {"metadata": {"name": "it", "resourceVersion": str(self.version)}, "spec": {**(self.lease or {}).get("spec", {}), **spec}}


class Candidate:
    """A Lease and what it has told."""

    def __init__(self, identity: str = "me") -> None:
        self.acquired: list[float] = []
        self.lost: list[tuple[float, str]] = []
        self.lease = Lease(
            "one",
            "it",
            identity,
            on_acquired=lambda: self.acquired.append(time.monotonic()),
            on_lost=lambda why: self.lost.append((time.monotonic(), why)),
            lease_seconds=LEASE_SECONDS,
        )


@pytest.fixture
def candidate() -> Iterator[Candidate]:
    made = Candidate()
    yield made
    made.lease.close()


async def until(condition: object, within: float = 10) -> None:
    assert callable(condition)
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("fault", ["silent", "broken"])
async def test_a_holder_that_cannot_renew_knows_it_before_another_may_take_over(
    candidate: Candidate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    server = LeaseServer()
    async with serving(server.handle) as port:
        monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
        candidate.lease.start()
        await until(lambda: len(server.renewals) >= 3)
        assert candidate.lease.held
        setattr(server, fault, True)
        await until(lambda: candidate.lost)
        moment, why = candidate.lost[0]
        assert moment - server.renewals[-1] < LEASE_SECONDS - 0.3
        assert why == "lease one/it is lost: it could not be renewed for 2 s"
        assert not candidate.lease.held
        assert len(candidate.lost) == len(candidate.acquired) == 1


async def test_a_short_fault_costs_a_holder_nothing(candidate: Candidate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = LeaseServer()
    async with serving(server.handle) as port:
        monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
        candidate.lease.start()
        await until(lambda: candidate.acquired)
        server.broken = True
        await asyncio.sleep(0.7)
        server.broken = False
        count = len(server.renewals)
        await until(lambda: len(server.renewals) > count + 2)
        assert candidate.lease.held and not candidate.lost


async def test_a_touch_of_the_lease_by_somebody_else_is_no_loss_but_another_holder_is(
    candidate: Candidate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LeaseServer()
    async with serving(server.handle) as port:
        monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
        candidate.lease.start()
        await until(lambda: candidate.acquired)
        server.take({})
        count = len(server.renewals)
        await until(lambda: len(server.renewals) > count + 1)
        assert not candidate.lost
        server.take({"holderIdentity": "other"})
        await until(lambda: candidate.lost)
        assert candidate.lost[0][1] == "lease one/it is lost: another process holds it"


async def test_a_dead_holders_lease_is_taken_after_its_time_whatever_its_clock_said(
    candidate: Candidate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LeaseServer()
    server.take({"holderIdentity": "dead", "leaseDurationSeconds": 2, "renewTime": "2099-01-01T00:00:00.000000Z", "leaseTransitions": 6})
    async with serving(server.handle) as port:
        monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
        began = time.monotonic()
        candidate.lease.start()
        await until(lambda: candidate.acquired)
        assert candidate.acquired[0] - began >= 2
        assert server.lease is not None
        assert (server.lease["spec"]["holderIdentity"], server.lease["spec"]["leaseTransitions"]) == ("me", 7)


async def test_the_lease_is_given_back_at_the_end(candidate: Candidate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = LeaseServer()
    async with serving(server.handle) as port:
        monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
        candidate.lease.start()
        await until(lambda: candidate.acquired)
        await asyncio.to_thread(candidate.lease.close)
        assert server.lease is not None and server.lease["spec"]["holderIdentity"] is None
        assert not candidate.lost and not candidate.lease.held


async def test_a_holder_whose_thread_fails_has_lost_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, made = LeaseServer(), Candidate()
    failures: list[object] = []
    monkeypatch.setattr("threading.excepthook", failures.append)
    async with serving(server.handle) as port:
        monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, f"http://127.0.0.1:{port}"))
        made.lease.start()
        await until(lambda: made.acquired)
        server.lease = {"metadata": {"resourceVersion": "x"}, "spec": {"holderIdentity": "other", "leaseDurationSeconds": "no number"}}
        await until(lambda: made.lost)
        assert made.lost[0][1] == "lease one/it is lost: its thread failed"
        await asyncio.to_thread(made.lease.close)
        assert len(failures) == 1


async def test_a_candidate_without_a_cluster_says_so(candidate: Candidate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    candidate.lease.start()
    await until(lambda: candidate.lost)
    assert candidate.lost[0][1].startswith("lease one/it cannot be had: no kubeconfig at")
