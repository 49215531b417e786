"""ChannelGuest where channels break, guests restart and readers are slow, over a guest in this process that breaks on demand."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest
from agent_sandbox_core.channel import ChannelBudget
from agent_sandbox_core.errors import BackendError, ChannelError, InvalidRequest, OutcomeUnknown, SandboxDied, SandboxError, Unavailable
from agent_sandbox_core.guest import ChannelGuest
from agent_sandbox_core.guest import events as events_module
from agent_sandbox_core.guest import processes as processes_module
from agent_sandbox_core.models import Command, ExitEvent, OutputEvent

from .scripted_guest import ScriptedGuest

MIB = 1 << 20


async def until(condition: Callable[[], object], within: float = 10) -> None:
    """Waits for a condition, bounded."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


def command(text: str, seconds: float = 30, **more: object) -> Command:
    return Command(command=text, timeout_seconds=seconds, workdir=str(more.pop("workdir", "/")), **more)


@pytest.fixture
async def far() -> AsyncIterator[ScriptedGuest]:
    guest = ScriptedGuest()
    yield guest
    await guest.aclose()


@pytest.fixture
async def guest(far: ScriptedGuest) -> AsyncIterator[ChannelGuest]:
    budget = ChannelBudget()
    near = ChannelGuest(far.open_channel, budget=budget)
    yield near
    await near.aclose()
    await until(lambda: budget.open == 0)
    assert [task for task in asyncio.all_tasks() if "agent_sandbox_core" in repr(task.get_coro())] == []


async def test_a_quick_command_is_one_round_trip_on_one_channel(guest: ChannelGuest, far: ScriptedGuest) -> None:
    await guest.run(command("true"), max_output_bytes=MIB)
    far.calls.clear()
    result = await guest.run(command("echo out; echo err >&2; exit 3"), max_output_bytes=MIB)
    assert (result.stdout, result.stderr, result.exit_code, result.timed_out, result.truncated) == ("out\n", "err\n", 3, False, False)
    assert far.calls == {"PUT processes": 1}
    assert far.opened == 1


async def test_the_next_start_tells_the_guest_to_forget_what_has_ended(guest: ChannelGuest, far: ScriptedGuest) -> None:
    for _ in range(5):
        await guest.run(command("true"), max_output_bytes=MIB)
    assert len(far.processes) == 1


async def test_a_longer_command_is_followed_over_the_event_stream(guest: ChannelGuest, far: ScriptedGuest) -> None:
    result = await guest.run(command("echo a; sleep 0.2; echo b; sleep 0.1; exit 7"), max_output_bytes=MIB)
    assert (result.stdout, result.exit_code) == ("a\nb\n", 7)
    assert far.calls["GET streams"] == 1
    again = await guest.run(command("sleep 0.2; echo c"), max_output_bytes=MIB)
    assert again.stdout == "c\n"
    assert far.calls["GET streams"] == 1


async def test_many_commands_at_once_share_two_channels(guest: ChannelGuest, far: ScriptedGuest) -> None:
    runs = [guest.run(command(f"sleep 0.{n % 4}; echo {n}; exit {n}"), max_output_bytes=MIB) for n in range(32)]
    results = await asyncio.gather(*runs)
    assert [(result.stdout, result.exit_code) for result in results] == [(f"{n}\n", n) for n in range(32)]
    assert far.most_open <= 2


async def test_stream_gives_output_as_it_comes_and_the_exit_last(guest: ChannelGuest) -> None:
    began = time.monotonic()
    found = [(event, time.monotonic() - began) async for event in guest.stream(command("echo a; sleep 0.5; echo b >&2; exit 9"))]
    kinds = [(event.type, getattr(event, "data", None)) for event, _ in found]
    assert kinds == [("stdout", "a\n"), ("stderr", "b\n"), ("exit", None)]
    assert found[0][1] < 0.4
    assert isinstance(found[-1][0], ExitEvent)
    assert found[-1][0].exit_code == 9


async def test_large_output_arrives_whole_through_the_window(guest: ChannelGuest) -> None:
    result = await guest.run(command("seq 1 700000"), max_output_bytes=10 * MIB)
    assert result.stdout == "".join(f"{n}\n" for n in range(1, 700001))
    assert not result.truncated


async def test_output_over_the_limit_is_cut_to_the_byte_and_the_command_runs_to_its_end(guest: ChannelGuest) -> None:
    result = await guest.run(command("seq 1 700000; exit 4"), max_output_bytes=1_000_001)
    assert result.truncated
    assert result.exit_code == 4
    assert result.stdout == "".join(f"{n}\n" for n in range(1, 700001))[:1_000_001]


async def test_a_slow_reader_of_one_stream_does_not_hold_up_other_commands(guest: ChannelGuest, far: ScriptedGuest) -> None:
    slow = guest.stream(command("seq 1 1000000"))
    first = await anext(slow)
    assert isinstance(first, OutputEvent)
    await until(lambda: any(process.held > MIB - 65536 for process in far.processes.values()))
    result = await guest.run(command("sleep 0.2; seq 1 300000"), max_output_bytes=10 * MIB)
    assert len(result.stdout) == 1988895
    text = first.data + "".join([event.data async for event in slow if isinstance(event, OutputEvent)])
    assert text == "".join(f"{n}\n" for n in range(1, 1000001))


async def test_a_refused_start_is_the_guests_error(guest: ChannelGuest) -> None:
    with pytest.raises(InvalidRequest, match="/missing is no directory"):
        await guest.run(command("true", workdir="/missing"), max_output_bytes=MIB)


async def test_a_lone_surrogate_in_a_command_is_refused_here(guest: ChannelGuest) -> None:
    with pytest.raises(InvalidRequest, match="Unicode"):
        await guest.run(command("echo \ud800"), max_output_bytes=MIB)


async def test_a_timeout_keeps_the_output_and_is_no_success(guest: ChannelGuest) -> None:
    result = await guest.run(command("echo before; sleep 60", seconds=0.3), max_output_bytes=MIB)
    assert (result.stdout, result.exit_code, result.timed_out) == ("before\n", 137, True)


@pytest.mark.parametrize("fault", ["drop", "mute"])
async def test_a_channel_that_breaks_under_a_start_never_runs_it_twice(guest: ChannelGuest, far: ScriptedGuest, fault: str, tmp_path: object) -> None:
    await guest.run(command("true"), max_output_bytes=MIB)
    broken: list[str] = []

    def once(method: str, path: str) -> str | None:
        if method == "PUT" and path.startswith("/v1/processes") and not broken:
            broken.append(path)
            return fault
        return None

    far.fault = once
    result = await guest.run(command(f"echo run >> {tmp_path}/runs; sleep 0.1; cat {tmp_path}/runs"), max_output_bytes=MIB)
    assert result.stdout == "run\n"
    assert far.calls["PUT processes"] == (3 if fault == "drop" else 2)


async def test_a_restart_under_a_start_is_an_unknown_outcome_and_no_second_start(guest: ChannelGuest, far: ScriptedGuest) -> None:
    await guest.run(command("true"), max_output_bytes=MIB)

    def restart(method: str, path: str) -> str | None:
        if method == "PUT":
            far.fault = lambda method, path: None
            far.restart()
            return "mute"
        return None

    far.fault = restart
    with pytest.raises(OutcomeUnknown, match="restarted"):
        await guest.run(command("true"), max_output_bytes=MIB)
    assert far.processes.keys() <= {next(iter(far.processes), "")}
    assert (await guest.run(command("echo again"), max_output_bytes=MIB)).stdout == "again\n"


async def test_a_broken_event_stream_is_opened_again_and_goes_on_where_it_was(guest: ChannelGuest, far: ScriptedGuest) -> None:
    run = asyncio.create_task(guest.run(command("seq 1 100000; sleep 0.5; seq 1 100000; exit 5"), max_output_bytes=10 * MIB))
    await until(lambda: far.streams)
    for _ in range(3):
        await asyncio.sleep(0.05)
        far.cut_all()
    result = await run
    assert result.stdout == "".join(f"{n}\n" for n in range(1, 100001)) * 2
    assert (result.exit_code, result.truncated) == (5, False)


async def test_silence_of_the_event_stream_is_a_broken_one(guest: ChannelGuest, far: ScriptedGuest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "SILENCE_SECONDS", 0.3)
    result = await guest.run(command("sleep 1; echo late"), max_output_bytes=MIB)
    assert result.stdout == "late\n"
    assert far.calls["GET streams"] >= 3


async def test_a_restart_while_a_command_runs_is_an_unknown_outcome_at_once(guest: ChannelGuest, far: ScriptedGuest) -> None:
    run = asyncio.create_task(guest.run(command("sleep 60", seconds=100), max_output_bytes=MIB))
    await until(lambda: far.streams)
    far.restart()
    with pytest.raises(OutcomeUnknown, match="restarted or was rolled back"):
        await asyncio.wait_for(run, 5)


async def test_a_restart_while_a_stream_is_read_gives_no_exit(guest: ChannelGuest, far: ScriptedGuest) -> None:
    events = guest.stream(command("echo a; sleep 60", seconds=100))
    assert await anext(events) == OutputEvent(type="stdout", data="a\n")
    await until(lambda: far.streams)
    far.restart()
    with pytest.raises(OutcomeUnknown):
        await asyncio.wait_for(anext(events), 5)


async def test_a_sandbox_that_cannot_be_reached_any_more_is_given_up_after_a_bounded_time(
    guest: ChannelGuest, far: ScriptedGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "RETRY_SECONDS", 0.5)
    monkeypatch.setattr(processes_module, "RETRY_SECONDS", 0.5)
    run = asyncio.create_task(guest.run(command("sleep 60", seconds=100), max_output_bytes=MIB))
    await until(lambda: far.streams)
    lease = next(iter(far.processes.values())).body["lease"]
    far.refusing = True
    far.cut_all()
    with pytest.raises(OutcomeUnknown, match=r"may still run; .* ends within 30 s"):
        await asyncio.wait_for(run, 5)
    far.refusing = False
    await until(lambda: not guest._processes._condemned or guest._processes._renewing)
    assert far.leases[lease] == 0


@pytest.mark.parametrize("oom", [True, False])
async def test_a_death_that_the_engine_confirms_as_out_of_memory_is_137_with_the_output_so_far(far: ScriptedGuest, oom: bool) -> None:
    reasons: list[str] = []

    async def explain() -> SandboxError:
        return SandboxDied("the sandbox ran out of memory (limit 64 MiB)" if oom else "the sandbox was killed", out_of_memory=oom)

    guest = ChannelGuest(far.open_channel, explain=explain, on_exit_reason=lambda reason, message: reasons.append(reason))
    try:
        run = asyncio.create_task(guest.run(command("echo before; sleep 60", seconds=100), max_output_bytes=MIB))
        await until(lambda: far.streams)
        far.refusing = True
        far.cut_all()
        if oom:
            result = await asyncio.wait_for(run, 5)
            assert (result.stdout, result.exit_code, result.timed_out) == ("before\n", 137, False)
            assert reasons == ["oom"]
        else:
            with pytest.raises(OutcomeUnknown, match="the sandbox was killed"):
                await asyncio.wait_for(run, 5)
    finally:
        await guest.aclose()


async def test_a_sandbox_that_does_not_open_a_channel_is_a_channel_error_or_what_the_backend_knows(far: ScriptedGuest) -> None:
    far.refusing = True
    guest = ChannelGuest(far.open_channel)
    with pytest.raises(ChannelError):
        await guest.run(command("true"), max_output_bytes=MIB)
    await guest.aclose()

    async def explain() -> SandboxError:
        return InvalidRequest("sandbox is stopped")

    guest = ChannelGuest(far.open_channel, explain=explain)
    with pytest.raises(InvalidRequest, match="stopped"):
        await guest.run(command("true"), max_output_bytes=MIB)
    await guest.aclose()


async def test_cancelling_a_command_kills_it_and_costs_no_channel(guest: ChannelGuest, far: ScriptedGuest, tmp_path: object) -> None:
    await guest.run(command("sleep 0.1"), max_output_bytes=MIB)
    opened = far.opened
    runs = [asyncio.create_task(guest.run(command(f"while :; do date >> {tmp_path}/tick; sleep 0.05; done"), max_output_bytes=MIB)) for _ in range(5)]
    await until(lambda: sum(process.exit is None for process in far.processes.values()) == 5)
    for run in runs:
        run.cancel()
    await asyncio.gather(*runs, return_exceptions=True)
    await until(lambda: all(process.exit for process in far.processes.values()))
    assert {process.exit["reason"] for process in far.processes.values() if process.exit} <= {"canceled", "exited"}
    assert far.opened == opened
    assert (await guest.run(command("echo fine"), max_output_bytes=MIB)).stdout == "fine\n"


async def test_a_start_that_is_cancelled_while_it_is_under_way_is_killed(guest: ChannelGuest, far: ScriptedGuest) -> None:
    await guest.run(command("true"), max_output_bytes=MIB)
    for delay in (0, 0.001, 0.003, 0.01, 0.03):
        run = asyncio.create_task(guest.run(command("sleep 61"), max_output_bytes=MIB))
        await asyncio.sleep(delay)
        run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run
    await until(lambda: not guest._calls.control.busy and all(process.exit for process in far.processes.values()))


async def test_closing_a_stream_early_kills_its_command(guest: ChannelGuest, far: ScriptedGuest) -> None:
    async with contextlib.aclosing(guest.stream(command("while :; do echo x; sleep 0.05; done"))) as events:  # type: ignore[type-var]
        async for _ in events:
            break
    await until(lambda: all(process.exit for process in far.processes.values()))


async def test_attached_commands_are_kept_alive_by_their_lease(guest: ChannelGuest, far: ScriptedGuest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_module, "RENEW_SECONDS", 0.05)
    await asyncio.gather(*(guest.run(command("sleep 0.5"), max_output_bytes=MIB) for _ in range(4)))
    assert len(far.leases) == 1
    assert far.leases.total() >= 4


async def test_closing_the_guest_fails_what_runs_and_closes_every_channel(far: ScriptedGuest) -> None:
    budget = ChannelBudget()
    guest = ChannelGuest(far.open_channel, budget=budget)
    run = asyncio.create_task(guest.run(command("sleep 60"), max_output_bytes=MIB))
    await until(lambda: far.streams)
    await guest.aclose()
    with pytest.raises(OutcomeUnknown, match="closed here"):
        await run
    assert budget.open == 0
    with pytest.raises(Unavailable):
        await guest.run(command("true"), max_output_bytes=MIB)


async def test_a_command_killed_from_outside_is_an_error_and_no_exit_code(guest: ChannelGuest, far: ScriptedGuest) -> None:
    run = asyncio.create_task(guest.run(command("sleep 60"), max_output_bytes=MIB))
    await until(lambda: far.streams and far.processes)
    next(iter(far.processes.values())).kill("canceled")
    with pytest.raises(BackendError, match="ended from outside"):
        await run


async def test_the_cap_on_channels_evicts_the_one_that_is_idle_longest(far: ScriptedGuest) -> None:
    budget = ChannelBudget(limit=2)
    guests = [ChannelGuest(far.open_channel, budget=budget) for _ in range(4)]
    try:
        for guest in guests:
            assert (await guest.run(command("echo x"), max_output_bytes=MIB)).stdout == "x\n"
            assert budget.open <= 2
        # A command that takes over 50 ms, on a busy machine, has a second channel for its output.
        assert budget.evicted_total >= 2
        assert budget.opened_total >= 4
        assert budget.failed_total == 0
    finally:
        for guest in guests:
            await guest.aclose()
    assert budget.open == 0
