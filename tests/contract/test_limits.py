"""Quota (B24), policy, defaults from settings, and the identity of a create request (B25)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest

from tests.support.client import Api, expect, lifetime, refused
from tests.support.docker import Docker
from tests.support.server import Facade
from tests.support.target import Target
from tests.support.waiting import eventually

KEY = "Idempotency-Key"


@pytest.mark.behaviour("LIMIT-001", "B24")
def test_the_limit_holds_under_forty_creates_at_once(tight: Api, docker: Docker | None) -> None:
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while docker is not None and not done.is_set():
            known = list(tight.made)
            mine = [
                name
                for name in docker.client.api.containers(all=True, filters={"name": "agent-sandbox-sb_"})
                if any(one in str(name["Names"]) for one in known)
            ]
            peak = max(peak, len(mine), len(tight.sandboxes()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(lambda _: tight.create(), range(40)))
    finally:
        done.set()
        watcher.join()
    assert sorted(answer.status_code for answer in answers) == [201] * 5 + [429] * 35
    for answer in answers:
        if answer.status_code == 429:
            refused(answer, 429, says="5")
    assert peak <= 5 and len(tight.sandboxes()) == 5
    gone = [row["id"] for row in tight.sandboxes()][:2]
    for sandbox in gone:
        tight.delete(sandbox)
    with ThreadPoolExecutor(2) as pool:
        again = [pool.submit(eventually, lambda: tight.create().status_code == 201, within=5, why="two fit again") for _ in range(2)]
        assert all(future.result() for future in again)
    refused(tight.create(), 429)


@pytest.mark.behaviour("LIMIT-002", "B24")
@pytest.mark.needs("images")
def test_failed_creates_hold_no_slot(tight: Api) -> None:
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda _: tight.create({"image": "registry.invalid/none:1"}, timeout=60), range(10)))
    assert {answer.status_code for answer in answers} <= {400, 429, 502}, [answer.text for answer in answers]
    assert [tight.create().status_code for _ in range(5)] == [201] * 5


@pytest.mark.behaviour("LIMIT-003")
def test_images_outside_the_policy_are_403(small: Api) -> None:
    before = len(small.sandboxes())
    for image in ("ubuntu:24.04", "python:3.12", "docker.io/library/python:3.12-slim"):
        refused(small.create({"image": image}), 403, says="image")
    assert len(small.sandboxes()) == before


@pytest.mark.behaviour("LIMIT-004")
def test_network_is_403_where_the_policy_says_no(small: Api) -> None:
    refused(small.create({"network": True}), 403, says="network")
    assert small.new(network=False)["network"] is False


@pytest.mark.behaviour("LIMIT-005")
def test_defaults_come_from_the_settings(small: Api) -> None:
    row = small.new()
    assert (row["cpus"], row["memory_mb"], row["pids_limit"]) == (0.5, 100, 40) and abs(lifetime(row) - 77) < 5


@pytest.mark.behaviour("LIMIT-006", "B25")
def test_the_same_idempotency_key_gives_the_same_sandbox(api: Api) -> None:
    headers = {KEY: "7f3c0000-aaaa-bbbb-cccc-000000000001"}
    first = expect(api.create({"memory_mb": 64}, headers=headers), 201)
    again = api.create({"memory_mb": 64}, headers=headers)
    assert again.status_code in (200, 201) and again.json()["id"] == first["id"]
    refused(api.create({"memory_mb": 65}, headers=headers), 409, says="idempotency")
    headers = {KEY: "7f3c0000-aaaa-bbbb-cccc-000000000002"}
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: api.create({}, headers=headers), range(6)))
    assert {answer.status_code for answer in answers} <= {200, 201, 409}, [answer.text for answer in answers]
    ids = {answer.json()["id"] for answer in answers if answer.status_code in (200, 201)}
    assert len(ids) == 1 and first["id"] not in ids
    assert expect(api.create({}), 201)["id"] not in ids


@pytest.mark.behaviour("LIMIT-007")
@pytest.mark.parametrize("key", ["", "x" * 2000])
def test_an_unusable_idempotency_key_is_400(api: Api, key: str) -> None:
    refused(api.create({}, headers={KEY: key}), 400, says="idempotency")


@pytest.mark.behaviour("LIMIT-008", "B25")
def test_creates_whose_client_left_are_listed_or_leave_nothing(small_facade: Facade, small: Api, docker: Docker | None) -> None:
    before = {row["id"] for row in small.sandboxes()}

    def leave(_: int) -> None:
        headers = {"Authorization": f"Bearer {small.key}"}
        with suppress(httpx.ReadTimeout):
            httpx.post(f"{small.url}/v1/sandboxes", json={"timeout_seconds": 3}, headers=headers, timeout=httpx.Timeout(30, read=0.002))

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(leave, range(10)))
    eventually(lambda: {row["id"] for row in small.sandboxes()} <= before, within=30, why="what was made expires")
    if docker is not None:
        eventually(
            lambda: not docker.of_installation(small_facade.data),
            within=20,
            why=f"nothing unknown is left: {docker.of_installation(small_facade.data)}",
        )


@pytest.mark.behaviour("LIMIT-009")
@pytest.mark.needs("durable")
def test_the_idempotency_key_is_remembered_over_a_restart(start_facade: Callable[..., Facade], target: Target) -> None:
    facade = start_facade()
    headers = {KEY: "7f3c0000-aaaa-bbbb-cccc-000000000003"}
    first = expect(facade.api.create({"memory_mb": 64}, headers=headers), 201)
    facade.restart()
    again = facade.api.create({"memory_mb": 64}, headers=headers)
    assert again.status_code in (200, 201) and again.json()["id"] == first["id"]
    refused(facade.api.create({"memory_mb": 128}, headers=headers), 409)


@pytest.mark.behaviour("LIMIT-010")
def test_a_retry_with_its_key_gives_its_sandbox_also_at_the_limit(tight: Api) -> None:
    headers = {KEY: "7f3c0000-aaaa-bbbb-cccc-000000000004"}
    first = expect(tight.create({"memory_mb": 64}, headers=headers), 201)
    for _ in range(4):
        tight.new(memory_mb=64)
    again = tight.create({"memory_mb": 64}, headers=headers)
    assert again.status_code in (200, 201) and again.json()["id"] == first["id"]
    refused(tight.create({"memory_mb": 64}), 429)


@pytest.mark.behaviour("LIMIT-011")
def test_a_key_may_be_used_again_once_its_sandbox_is_deleted(api: Api) -> None:
    headers = {KEY: "7f3c0000-aaaa-bbbb-cccc-000000000005"}
    for value in ("first", "second"):
        made = expect(api.create({"env": {"TOKEN": value}}, headers=headers), 201)["id"]
        assert api.run(made, "echo $TOKEN")["stdout"] == f"{value}\n"
        api.delete(made)
