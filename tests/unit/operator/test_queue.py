"""The work queue: coalescing, one worker a key, delays, backoff. Its time is the event loop's, and runs as fast as the test wants."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from agent_sandbox_operator.queue import Closed, WorkQueue
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


async def take(queue: WorkQueue[str]) -> str:
    async with asyncio.timeout(5):
        return await queue.get()


async def test_a_key_added_twice_while_it_waits_is_one_piece_of_work() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    queue.add("a")
    assert await take(queue) == "a"
    assert queue.depth == 0


async def test_a_key_added_while_it_is_worked_on_is_offered_again_only_after_that() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    await take(queue)
    queue.add("a")
    queue.add("b")
    assert await take(queue) == "b"
    assert queue.depth == 0
    queue.done("a")
    assert await take(queue) == "a"


async def test_of_several_delayed_adds_of_a_key_the_soonest_counts_and_only_that() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", 30)
    queue.add_after("a", 0.02)
    queue.add_after("a", 60)
    assert queue.delayed == 1
    assert await take(queue) == "a"
    assert queue.delayed == 0


async def test_delayed_keys_come_in_the_order_of_their_time() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("late", 0.06)
    queue.add_after("early", 0.01)
    assert [await take(queue), await take(queue)] == ["early", "late"]


async def test_a_backoff_doubles_to_its_limit_and_begins_anew_when_it_went_well() -> None:
    queue: WorkQueue[str] = WorkQueue(base=1.0, limit=10.0, chance=lambda: 0.0)
    assert [queue.retry("a") for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    assert queue.failures("a") == 6
    queue.forget("a")
    assert queue.retry("a") == 1
    queue.close()


async def test_what_failed_together_does_not_come_back_together() -> None:
    queue: WorkQueue[str] = WorkQueue(base=1.0)
    delays = {queue.retry(f"key{number}") for number in range(20)}
    assert len(delays) > 15
    assert all(1.0 <= delay <= 1.5 for delay in delays)
    queue.close()


async def test_the_age_is_that_of_the_key_at_the_head() -> None:
    queue: WorkQueue[str] = WorkQueue()
    assert queue.age() == 0
    queue.add("a")
    first = queue.age()
    await asyncio.sleep(0)
    assert queue.age() >= first >= 0


async def test_a_closed_queue_gives_nothing_out_and_releases_who_waits() -> None:
    queue: WorkQueue[str] = WorkQueue()
    waiting = [asyncio.create_task(queue.get()) for _ in range(3)]
    await asyncio.sleep(0)
    queue.close()
    assert [type(result) for result in await asyncio.gather(*waiting, return_exceptions=True)] == [Closed] * 3
    queue.add("a")
    queue.add_after("b", 0.001)
    with pytest.raises(Closed):
        await queue.get()


async def test_a_worker_cancelled_at_the_moment_of_its_call_loses_no_key() -> None:
    queue: WorkQueue[str] = WorkQueue()
    first, second = asyncio.create_task(queue.get()), asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a")
    first.cancel()
    async with asyncio.timeout(5):
        assert await second == "a"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    adds=st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 3)), max_size=60),
    workers=st.integers(1, 4),
    failing=st.sets(st.sampled_from("abcde")),
)
def test_whatever_comes_no_key_is_worked_on_twice_at_once_and_every_add_is_seen_by_a_later_run(
    adds: list[tuple[str, int]], workers: int, failing: set[str]
) -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue(base=0.0001, limit=0.001)
        version: Counter[str] = Counter()
        seen: Counter[str] = Counter()
        running: Counter[str] = Counter()
        failed: set[str] = set()

        async def work() -> None:
            while True:
                try:
                    key = await queue.get()
                except Closed:
                    return
                running[key] += 1
                assert running[key] == 1
                looked = version[key]
                await asyncio.sleep(0)
                running[key] -= 1
                if key in failing - failed:
                    failed.add(key)
                    queue.retry(key)
                else:
                    seen[key] = max(seen[key], looked)
                    queue.forget(key)
                queue.done(key)

        tasks = [asyncio.create_task(work()) for _ in range(workers)]
        for key, turns in adds:
            version[key] += 1
            queue.add(key)
            for _ in range(turns):
                await asyncio.sleep(0)
        async with asyncio.timeout(10):
            while len(queue) or queue.processing or queue.delayed:
                await asyncio.sleep(0.0005)
        queue.close()
        await asyncio.gather(*tasks)
        assert seen == version

    asyncio.run(scenario())
