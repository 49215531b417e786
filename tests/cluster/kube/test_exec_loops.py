"""Channels on both event loops: the facade runs uvloop, operator and mover asyncio's own."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Coroutine

import pytest
import uvloop
from agent_sandbox_kube.client import Kube, connect

from tests.cluster.fixtures import Cluster
from tests.cluster.kube.commands import MUCH, command, send_all
from tests.cluster.kubectl import Kubectl
from tests.support.waiting import eventually

Run = Callable[[Callable[[Kube], Coroutine[None, None, None]]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, cluster: Cluster) -> Run:
    """Runs something with a client on an event loop of one kind."""

    def run(work: Callable[[Kube], Coroutine[None, None, None]]) -> None:
        async def main() -> None:
            async with connect(str(cluster.kubectl.kubeconfig), cluster.kubectl.context) as kube:
                await work(kube)

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main())

    return run


def test_fifty_megabytes_go_both_ways_at_once_and_arrive_whole(run: Run, worker: str) -> None:
    data = random.Random(1).randbytes(MUCH)

    async def work(kube: Kube) -> None:
        async with command(kube, worker, "cat") as stream:
            sending = asyncio.create_task(send_all(stream, data))
            digest, size = hashlib.sha256(), 0
            while size < MUCH:
                part = await stream.read(1 << 18, 20)
                digest.update(part)
                size += len(part)
            await sending
            assert (size, digest.digest()) == (MUCH, hashlib.sha256(data).digest())
            assert not stream.get_extra_info("is_readable")
            await stream.end_input()
            assert await stream.read(1, 20) == b""

    run(work)


def test_closing_in_the_middle_of_a_flood_ends_the_commands_input(run: Run, worker: str, namespace: Kubectl) -> None:
    """Its output nobody takes any more, and it is not told: a bridge must end by itself when its input has."""

    async def work(kube: Kube) -> None:
        async with command(kube, worker, "sh", "-c", "cat /dev/zero & read line; touch /tmp/ended; kill $!") as stream:
            assert await stream.read(1 << 18, 20)
        # With the loop still running: its end would close the connection in any case.
        await asyncio.to_thread(eventually, has_ended, within=20, why="its input has ended")

    def has_ended() -> bool:
        return namespace.execute("worker", "test", "-e", "/tmp/ended").returncode == 0

    run(work)
