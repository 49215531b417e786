"""The cache against an API server that drops, forgets and lies by omission."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from agent_sandbox_kube import informer
from agent_sandbox_kube.client import Kube, connect
from agent_sandbox_kube.errors import Forbidden, Unreachable
from agent_sandbox_kube.informer import Informer, Key
from agent_sandbox_kube.resources import PODS
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.kube.apiserver import ApiServer, api_server, kubeconfig, refusal


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informer, "PAUSES", (0.01, 0.05))


async def until(condition: Callable[[], object], within: float = 10) -> None:
    """Returns when `condition` holds."""
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.005)


def value_of(pods: Informer, name: str) -> object:
    found = pods.get(("one", name))
    return None if found is None else found["spec"]["value"]


async def test_it_holds_what_was_there_and_what_comes(server: ApiServer, kube: Kube) -> None:
    server.put("old", 1)
    async with Informer(kube, PODS) as pods:
        await pods.wait_synced()
        server.put("new", 2)
        server.put("old", 3)
        await until(lambda: (value_of(pods, "old"), value_of(pods, "new")) == (3, 2))
        server.delete("old")
        await until(lambda: pods.items().keys() == {("one", "new")})


async def test_a_watch_that_breaks_goes_on_where_it_was_without_a_new_list(server: ApiServer, kube: Kube) -> None:
    async with Informer(kube, PODS) as pods:
        await pods.wait_synced()
        server.put("web", 1)
        await until(lambda: value_of(pods, "web") == 1)
        for number in range(2, 6):
            server.drop()
            server.put("web", number)
            await until(lambda number=number: value_of(pods, "web") == number)  # type: ignore[misc]
    lists = [path for _, path, _ in server.requests if "watch" not in path]
    assert len(lists) == 1


async def test_a_deletion_that_no_watch_tells_is_found_by_the_next_list_and_told(server: ApiServer, kube: Kube) -> None:
    server.put("web", 1)
    told: list[Key] = []
    async with Informer(kube, PODS) as pods:
        await pods.wait_synced()
        with pods.listen(told.append):
            server.lose("web")
            server.compact()
            server.drop()
            await until(lambda: not pods.items())
    assert told == [("one", "web")]


async def test_it_lists_again_from_time_to_time_even_when_nothing_is_wrong(server: ApiServer, kube: Kube) -> None:
    server.put("web", 1)
    async with Informer(kube, PODS, relist_seconds=0.2) as pods:
        await pods.wait_synced()
        server.lose("web")

        def is_healed() -> bool:
            server.put("other", 1)
            return pods.items().keys() == {("one", "other")}

        await until(is_healed)


async def test_an_own_change_is_seen_at_once_and_never_undone_by_an_older_event(server: ApiServer, kube: Kube) -> None:
    async with Informer(kube, PODS) as pods:
        await pods.wait_synced()
        seen: list[object] = []
        with pods.listen(lambda key: seen.append(value_of(pods, key[1]))):
            server.put("web", 1)
            pods.put(server.put("web", 2))
            assert value_of(pods, "web") == 2
            server.put("web", 3)
            await until(lambda: value_of(pods, "web") == 3)
    assert seen == [2, 2, 3]


async def test_an_answer_that_comes_late_does_not_bring_back_what_was_deleted(server: ApiServer, kube: Kube) -> None:
    async with Informer(kube, PODS) as pods:
        await pods.wait_synced()
        late = server.put("web", 1)
        server.delete("web")
        server.put("mark", 1)
        await until(lambda: value_of(pods, "mark") == 1)
        pods.put(late)
        assert value_of(pods, "web") is None


async def test_an_own_change_made_while_a_list_is_under_way_stays(server: ApiServer, kube: Kube) -> None:
    server.put("web", 1)
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = server._list(request)
        asked.set()
        await answer.wait()
        return response

    async with Informer(kube, PODS) as pods:
        await pods.wait_synced()
        server.plays.append(refusal(410, "Expired", "old"))
        server.plays.append(slow)
        server.drop()
        await asked.wait()
        pods.put(server.put("web", 2))
        answer.set()
        await until(lambda: any("watch" in path for _, path, _ in server.requests[-1:]))
        assert value_of(pods, "web") == 2


async def test_a_wait_ends_when_its_condition_holds_and_in_time_when_it_does_not(server: ApiServer, kube: Kube) -> None:
    async with Informer(kube, PODS) as pods:
        await pods.wait_synced()
        waiting = asyncio.create_task(pods.wait_for(("one", "web"), lambda found: found is not None and found["spec"]["value"] == 2, 10))
        gone = asyncio.create_task(pods.wait_for(("one", "web"), lambda found: found is None, 10))
        assert await gone is None
        server.put("web", 1)
        server.put("web", 2)
        found = await waiting
        assert found is not None and found["spec"]["value"] == 2
        with pytest.raises(TimeoutError):
            await pods.wait_for(("one", "web"), lambda found: found is None, 0.05)
        assert not pods._waiters


async def test_what_is_in_the_way_of_the_first_list_is_told(server: ApiServer, kube: Kube) -> None:
    server.plays.extend([refusal(403, "Forbidden", 'User "x" cannot list resource "pods"')] * 1000)
    async with Informer(kube, PODS, "one") as pods:
        with pytest.raises(Forbidden, match=r"listing pods in one failed: .* cannot list"):
            await pods.wait_synced(0.3)
        server.plays.clear()
        await pods.wait_synced()


async def test_a_server_that_does_not_answer_the_first_list_is_told(server: ApiServer, kube: Kube) -> None:
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    server.plays.append(hang)
    async with Informer(kube, PODS) as pods:
        with pytest.raises(Unreachable, match="listing pods failed: no answer within 0 s"):
            await pods.wait_synced(0.1)


async def test_its_age_grows_while_the_server_is_silent_and_falls_with_a_sign_of_life(server: ApiServer, kube: Kube) -> None:
    async with Informer(kube, PODS) as pods:
        await pods.wait_synced()
        await until(lambda: pods.age() > 0.2)
        server.put("web", 1)
        await until(lambda: pods.age() < 0.1)


async def test_a_listener_that_fails_is_logged_and_shows_in_the_age(server: ApiServer, kube: Kube, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Key) -> None:
        raise ZeroDivisionError

    async with Informer(kube, PODS) as pods:
        await pods.wait_synced()
        with pods.listen(fail):
            server.put("web", 1)
            await until(lambda: "a watch ended by an error of its own" in caplog.text)


async def test_it_ends_with_its_block_and_leaves_no_task(server: ApiServer, kube: Kube) -> None:
    def running() -> list[str]:
        return [str(task.get_coro()) for task in asyncio.all_tasks() if "Informer" in str(task.get_coro())]

    async with Informer(kube, PODS) as pods:
        await pods.wait_synced()
        assert len(running()) == 1
    assert running() == []


STEP = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("abc"), st.integers(0, 9)),
    st.tuples(st.just("delete"), st.sampled_from("abc"), st.just(0)),
    st.tuples(st.sampled_from(["drop", "compact", "fail", "rest"]), st.just(""), st.just(0)),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, max_size=25))
def test_whatever_happens_the_cache_ends_up_equal_to_the_server_and_listeners_know_the_last_of_each(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, int]]
) -> None:
    async def run() -> None:
        folder = tmp_path_factory.mktemp("cluster")
        async with api_server() as server, connect(kubeconfig(folder, server.url)) as kube, Informer(kube, PODS) as pods:
            known: dict[Key, object] = {}

            def note(key: Key) -> None:
                found = pods.get(key)
                known[key] = None if found is None else found["spec"]["value"]

            with pods.listen(note):
                for step, name, value in steps:
                    if step == "put":
                        server.put(name, value)
                    elif step == "delete":
                        server.delete(name)
                    elif step == "drop":
                        server.drop()
                    elif step == "compact":
                        server.compact()
                        server.drop()
                    elif step == "fail":
                        server.plays.append(refusal(500, "InternalError", "no"))
                    else:
                        await asyncio.sleep(0.005)
                server.plays.clear()
                await until(lambda: pods.items() == server.objects)
                assert {key: value for key, value in known.items() if value is not None} == {
                    key: found["spec"]["value"] for key, found in server.objects.items()
                }

    asyncio.run(run())
