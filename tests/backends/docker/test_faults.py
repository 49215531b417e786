"""An engine that is away, slow or broken: every call ends in its time with an error that says what to do, and works again without a restart."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import docker.errors
import pytest
import requests.exceptions
from agent_sandbox_api.backends.docker.client import EngineClient
from agent_sandbox_api.backends.docker.faults import EngineRefusal, EngineUnreachable, translate
from agent_sandbox_core.errors import BackendError, ChannelError

from tests.support.docker import Docker

from .conftest import MakeEngine, make, new_record, run_in, stir
from .relay import Relay


@pytest.fixture
async def relay() -> AsyncIterator[Relay]:
    made = Relay()
    await made.start()
    yield made
    await made.stop()


async def test_an_engine_that_is_not_there_is_named_with_what_to_do(make_engine: MakeEngine) -> None:
    engine = await make_engine(host="unix:///no/such/engine.sock", opened=False)
    for call in (engine.open, engine.ping, engine.instances, lambda: engine.create(new_record())):
        with pytest.raises(EngineUnreachable, match=r"unix:///no/such/engine\.sock.*No such file.*start it") as caught:
            await call()
        assert caught.value.status == 502
    await engine.close()


async def test_an_engine_that_comes_back_is_used_again_without_a_restart(relay: Relay, make_engine: MakeEngine) -> None:
    engine = await make_engine(host=relay.host)
    record = await make(engine)
    await relay.refuse()
    with pytest.raises(BackendError, match="start it"):
        await engine.instances()
    with pytest.raises(BackendError):
        await engine.ping()
    with pytest.raises(BackendError):
        await engine.create(new_record())
    with pytest.raises(BackendError, match="start it") as caught:
        await run_in(engine, record.sandbox_id, "true")
    assert caught.value.message.count("failed") == 1
    await relay.start()
    await engine.ping()
    assert [one.record for one in await engine.instances()] == [record]
    assert await run_in(engine, record.sandbox_id, "echo back") == "back\n"


async def test_an_engine_that_was_away_at_the_start_is_prepared_when_it_is_needed(relay: Relay, make_engine: MakeEngine) -> None:
    await relay.refuse()
    engine = await make_engine(host=relay.host, opened=False)
    with pytest.raises(BackendError):
        await engine.open()
    assert engine.max_cpus() is None
    await relay.start()
    record = await make(engine)
    assert await run_in(engine, record.sandbox_id, "echo here") == "here\n"
    assert engine.max_cpus() is not None


async def test_a_hanging_engine_is_told_within_three_seconds_and_blocks_no_loop(relay: Relay, make_engine: MakeEngine) -> None:
    engine = await make_engine(host=relay.host)
    relay.hang()
    waiting = [asyncio.create_task(engine.instances()) for _ in range(30)]
    await asyncio.sleep(0.1)
    begun = time.perf_counter()
    with pytest.raises(EngineUnreachable, match="did not answer in time"):
        await engine.ping()
    assert time.perf_counter() - begun < 3.5
    assert sum(thread.name.startswith("docker-") for thread in threading.enumerate()) <= 8
    relay.resume()
    assert await asyncio.gather(*waiting) == [[]] * 30


async def test_closing_does_not_wait_for_an_engine_that_hangs(relay: Relay, make_engine: MakeEngine) -> None:
    engine = await make_engine(host=relay.host)
    relay.hang()
    waiting = asyncio.create_task(engine.instances())
    await asyncio.sleep(0.1)
    begun = time.perf_counter()
    await engine.close()
    assert time.perf_counter() - begun < 5
    relay.resume()
    await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize("size", [0, 1, 20, 200, 600])
async def test_an_answer_that_is_cut_anywhere_is_an_error(relay: Relay, size: int) -> None:
    client = EngineClient(relay.host)
    await client.open()
    await client.path("/x")
    relay.cut_after = size
    with pytest.raises(EngineUnreachable):
        await client.call("asking for a test", "GET", "/info")
    assert (await client.call("asking for a test", "GET", "/info"))["ID"]
    await client.close()


async def test_a_channel_that_breaks_is_an_error_and_the_next_one_works(relay: Relay, make_engine: MakeEngine) -> None:
    engine = await make_engine(host=relay.host)
    record = await make(engine)
    guest = engine.guest(record.sandbox_id)
    await guest.health()
    relay.cut()
    # The answer to a request that may be repeated comes over the next channel by itself.
    assert (await guest.health())["state"] == "ready"
    await guest.aclose()


async def test_events_are_followed_again_after_a_break(relay: Relay, make_engine: MakeEngine, engine: Docker) -> None:
    mine = await make_engine(host=relay.host)
    record = await make(mine)
    changes = mine.changes()
    heard = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0.3)
    relay.cut()
    async with asyncio.timeout(15):
        while not heard.done():
            stir(engine, record.sandbox_id)
            await asyncio.sleep(0.1)
    assert heard.result() == record.sandbox_id
    await changes.aclose()


async def test_errors_of_the_engine_are_its_own_words_with_the_object(engine: Docker) -> None:
    client = EngineClient()
    await client.open()
    for ask in (
        lambda: client.run("looking at x", lambda api: api.wait("no-such-container")),
        lambda: client.call("looking at x", "GET", "/containers/no-such-container/json"),
    ):
        with pytest.raises(EngineRefusal, match=r"looking at x failed.*No such container: no-such-container") as caught:
            await ask()
        assert caught.value.missing and not caught.value.conflicting
    await client.close()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (requests.exceptions.ConnectionError("boom"), "boom"),
        (requests.exceptions.ReadTimeout("late"), "in time"),
        (docker.errors.DockerException("odd"), "odd"),
        (ConnectionResetError(104, "Connection reset by peer"), "reset by peer"),
        (EOFError("cut"), "cut"),
        (TimeoutError(), "in time"),
    ],
)
def test_every_fault_becomes_an_error_of_ours(error: Exception, words: str) -> None:
    found = translate("doing it", "tcp://h:1", error)
    assert (
        isinstance(found, EngineUnreachable)
        and words in found.message
        and "tcp://h:1" in found.message
        and found.message.startswith("doing it failed")
    )


def test_an_error_of_ours_stays_what_it_is() -> None:
    error = ChannelError("as it was")
    assert translate("x", "y", error) is error
