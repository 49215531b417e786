"""Whose claims count, and what ends a piece of work."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from agent_sandbox_core.errors import BackendError, ChannelError
from agent_sandbox_operator.mover import claims as module
from agent_sandbox_operator.mover.claims import ClaimLost, Claims, Slots, Withdrawn, Work
from agent_sandbox_operator.mover.context import patiently
from agent_sandbox_operator.mover.lock import held

from .objects import NOW


async def nothing() -> None:
    return None


class Now:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_claim_of_another_counts_until_it_stood_still_for_a_minute_by_the_own_clock() -> None:
    now = Now()
    claims = Claims("me", exclusive=False, clock=now)
    assert claims.wait_for("s", None, None) == 0
    assert claims.wait_for("s", "me", NOW) == 0
    assert claims.wait_for("s", "other", NOW) == 60
    now.seconds = 40
    assert claims.wait_for("s", "other", NOW) == 20
    assert claims.wait_for("s", "other", NOW.replace(minute=30)) == 60, "it was renewed"
    now.seconds = 101
    assert claims.wait_for("s", "other", NOW.replace(minute=30)) == 0


def test_the_only_mover_of_a_store_takes_up_what_a_dead_one_claimed_at_once() -> None:
    assert Claims("me", exclusive=True).wait_for("s", "other", NOW) == 0


async def test_work_that_is_withdrawn_ends_as_withdrawn() -> None:
    work, begun = Work(), asyncio.Event()

    async def forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(work.run("key", "r1", forever(), nothing))
    await begun.wait()
    assert work.running("key") == "r1"
    work.withdraw("key")
    with pytest.raises(Withdrawn):
        await running
    assert work.running("key") is None


async def test_work_whose_claim_is_lost_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.01)
    stopped = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def lost() -> None:
        raise ClaimLost

    with pytest.raises(ClaimLost):
        await Work().run("key", "r1", forever(), lost)
    assert stopped.is_set()


async def test_work_goes_on_over_renewals_that_fail_for_a_while_and_tells_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.01)
    tries = 0
    enough = asyncio.Event()

    async def unreachable() -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            enough.set()
        raise module.RENEWAL_ERRORS[0]("the API server does not answer")

    async def work() -> None:
        await enough.wait()
        raise BackendError("its own")

    with pytest.raises(BackendError, match="its own"):
        await Work().run("key", "r1", work(), unreachable)


async def test_a_sandbox_has_one_transfer_at_a_time_and_all_have_a_bounded_number() -> None:
    slots, running, most = Slots(2), 0, 0
    per_sandbox: dict[str, int] = {}

    async def transfer(name: str) -> None:
        nonlocal running, most
        async with slots.transfer(name):
            running += 1
            per_sandbox[name] = per_sandbox.get(name, 0) + 1
            most = max(most, running)
            assert per_sandbox[name] == 1
            await asyncio.sleep(0)
            per_sandbox[name] -= 1
            running -= 1

    await asyncio.gather(*(transfer(f"box{number % 3}") for number in range(30)))
    assert most == 2
    assert slots._locks == {}


async def test_what_may_pass_is_tried_again_for_a_while_and_told_once() -> None:
    tries, told = 0, []

    async def attempt() -> str:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ChannelError("not yet")
        return "done"

    async def tell(error: BaseException) -> None:
        told.append(str(error))

    assert await patiently(attempt, 10, tell) == "done"
    assert (tries, told) == (3, ["not yet"])


async def test_what_does_not_pass_is_raised_at_once_and_what_does_not_pass_in_time_then() -> None:
    tries = 0

    async def broken() -> None:
        nonlocal tries
        tries += 1
        raise BackendError("never")

    with pytest.raises(BackendError, match="never"):
        await patiently(broken, 10)
    assert tries == 1

    async def late() -> None:
        raise ChannelError("not yet")

    with pytest.raises(ChannelError):
        await patiently(late, 0)


async def test_the_lock_of_a_store_is_held_by_one_and_given_back_by_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "installation" / "mover.lock"
    path.parent.mkdir()
    script = f"import fcntl, sys; f = open({str(path)!r}, 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), held(path):
                pass
        other.kill()
        other.wait()
        async with asyncio.timeout(5), held(path):
            pass
    finally:
        other.kill()
        other.communicate()
