"""Channels through a real API server, kubelet and runtime."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from pathlib import Path

import httpcore
import pytest
from agent_sandbox_core.errors import ChannelError
from agent_sandbox_kube import exec as exec_module
from agent_sandbox_kube.client import Kube, connect
from agent_sandbox_kube.exec import ExecStream, open_channel

from tests.cluster.fixtures import Cluster
from tests.cluster.kube.commands import MUCH, command, read_all, send_all
from tests.cluster.kubectl import Kubectl
from tests.cluster.objects import FOREVER, pod
from tests.support.waiting import eventually, throughout


async def test_ending_the_input_ends_the_input_only_and_the_answer_still_comes(kube: Kube, worker: str) -> None:
    data = random.Random(2).randbytes(3_000_000)
    async with command(kube, worker, "sha256sum") as stream:
        await send_all(stream, data)
        await stream.end_input()
        assert (await read_all(stream)).split()[0].decode() == hashlib.sha256(data).hexdigest()


async def test_a_failed_command_gives_its_output_and_then_an_error_with_its_status_and_complaint(kube: Kube, worker: str) -> None:
    async with command(kube, worker, "sh", "-c", "echo out; echo bad thing >&2; exit 3") as stream:
        assert await stream.read(100, 20) == b"out\n"
        with pytest.raises(httpcore.ReadError, match=r"the bridge into pod .*/worker ended: bad thing command terminated .* exit code 3"):
            await stream.read(100, 20)


@pytest.mark.parametrize("direction", ["from it", "to it"])
async def test_a_pod_that_is_killed_in_the_middle_of_a_transfer_is_an_error_and_no_end(
    kube: Kube, worker: str, namespace: Kubectl, direction: str
) -> None:
    # The copy of stdout keeps containerd from ending the input of a command that has none (containerd#13934).
    argv = ("cat", "/dev/zero") if direction == "from it" else ("sh", "-c", "exec 3>&1; cat >/dev/null; :")

    async def transfer(stream: ExecStream) -> None:
        while True:
            if direction == "from it":
                assert await stream.read(1 << 18, 20)
            else:
                await stream.write(bytes(1 << 18), 20)

    async with command(kube, worker, *argv) as stream:
        transferring = asyncio.create_task(transfer(stream))
        await asyncio.to_thread(namespace.delete, "pod", "worker", now=True, wait=False)
        with pytest.raises((httpcore.ReadError, httpcore.WriteError), match=r"ended|was cut"):
            async with asyncio.timeout(60):
                await transferring


async def test_a_command_that_reads_nothing_for_long_is_not_harmed_and_holds_the_writer_up(
    kube: Kube, worker: str, namespace: Kubectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_module, "KEEP_SECONDS", 0.2)
    data = random.Random(3).randbytes(20_000_000)
    async with command(kube, worker, "sh", "-c", "until [ -e /tmp/go ]; do sleep 0.1; done; sha256sum") as stream:
        sending = asyncio.create_task(send_all(stream, data))
        await asyncio.to_thread(throughout, lambda: not sending.done(), seconds=4)
        assert namespace.execute("worker", "touch", "/tmp/go").returncode == 0
        await sending
        await stream.end_input()
        assert (await read_all(stream)).split()[0].decode() == hashlib.sha256(data).hexdigest()


async def test_output_that_nobody_reads_holds_the_command_up_and_is_whole_afterwards(kube: Kube, worker: str, namespace: Kubectl) -> None:
    async with command(kube, worker, "sh", "-c", "head -c 50000000 /dev/zero; touch /tmp/done") as stream:
        await asyncio.to_thread(throughout, lambda: namespace.execute("worker", "test", "-e", "/tmp/done").returncode == 1, seconds=3)
        assert len(await read_all(stream)) == MUCH


async def test_closing_ends_a_command_that_reads_its_input(kube: Kube, worker: str, namespace: Kubectl) -> None:
    async with command(kube, worker, "sh", "-c", "cat; touch /tmp/ended") as stream:
        await stream.write(b"x")
        assert await stream.read(1, 20) == b"x"
    await asyncio.to_thread(
        eventually, lambda: namespace.execute("worker", "test", "-e", "/tmp/ended").returncode == 0, within=20, why="its input is closed"
    )


async def test_a_fresh_channel_is_not_readable_and_an_ended_one_is(kube: Kube, worker: str) -> None:
    async with command(kube, worker, "sh", "-c", "read line; echo ready; read line") as stream:
        await asyncio.sleep(0.3)
        assert not stream.get_extra_info("is_readable")
        await stream.write(b"go\n")
        assert await stream.read(100, 20) == b"ready\n"
        assert not stream.get_extra_info("is_readable")
        await stream.write(b"go\n")
        async with asyncio.timeout(20):
            while not stream.get_extra_info("is_readable"):
                await asyncio.sleep(0.01)
        assert await stream.read(100, 20) == b""


async def test_a_pod_that_is_not_there_and_a_container_that_has_another_name_are_refused_at_once(kube: Kube, worker: str) -> None:
    with pytest.raises(ChannelError, match=f"pod {worker}/nobody is not there"):
        await open_channel(kube, worker, "nobody", "main", ["true"])
    with pytest.raises(ChannelError, match=r"HTTP 400.*no container other"):
        await open_channel(kube, worker, "worker", "other", ["true"])


async def test_a_container_that_has_ended_and_a_command_that_does_not_exist_are_told_as_never_begun(
    cluster: Cluster, kube: Kube, worker: str, namespace: Kubectl
) -> None:
    namespace.apply(pod("ended", cluster.image("busybox"), "true", restartPolicy="Never"))
    namespace.wait("jsonpath={.status.phase}=Succeeded", "pod/ended")
    async with command(kube, worker, "true", name="ended") as stream:
        with pytest.raises(ChannelError, match=r"container not found.*; look whether its container runs"):
            await stream.read(1, 20)
    async with command(kube, worker, "/no/such/program") as stream:
        with pytest.raises(ChannelError, match=r"could not be entered: .*/no/such/program"):
            await stream.read(1, 20)


async def test_an_account_without_the_right_is_told_which_one_it_lacks(cluster: Cluster, worker: str, namespace: Kubectl, tmp_path: Path) -> None:
    view = json.loads(cluster.kubectl.say("config", "view", "--raw", "--minify", "--flatten", "--output=json"))
    view["users"][0]["user"] = {"token": namespace.say("create", "token", "default").strip()}
    path = tmp_path / "config"
    path.write_text(json.dumps(view))
    async with connect(str(path)) as kube:
        with pytest.raises(ChannelError, match=f"the account needs the verbs get and create on pods/exec in namespace {worker}"):
            await open_channel(kube, worker, "worker", "main", ["true"])


@pytest.mark.slow
async def test_sixty_four_channels_work_side_by_side(kube: Kube, worker: str) -> None:
    async def once(number: int) -> bool:
        async with command(kube, worker, "cat") as stream:
            said = f"{number}\n".encode() * 100
            await stream.write(said, 20)
            got = b""
            while len(got) < len(said):
                got += await stream.read(1 << 16, 20)
            return got == said

    assert all(await asyncio.gather(*(once(number) for number in range(64))))


async def test_a_pod_that_waits_for_its_node_cannot_be_entered_yet(cluster: Cluster, kube: Kube, namespace: Kubectl) -> None:
    assert namespace.namespace is not None
    namespace.apply(pod("waiting", cluster.image("busybox"), *FOREVER, nodeSelector={"no": "where"}))
    with pytest.raises(ChannelError, match="it is not on a node yet"):
        await open_channel(kube, namespace.namespace, "waiting", "main", ["true"])
