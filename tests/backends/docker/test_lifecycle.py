"""A sandbox's life on a real engine: made as it should be, looked at from outside and from inside, dying, coming back, going."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from agent_sandbox_api.backends.docker import DockerEngine, labels, specs
from agent_sandbox_api.backends.engine import Instance
from agent_sandbox_core import hardening
from agent_sandbox_core.errors import BackendError, InvalidRequest, OutcomeUnknown, SandboxDied
from agent_sandbox_core.hardening import GUEST_ALLOWANCE
from agent_sandbox_core.models import Command

from tests.support.docker import Docker

from .conftest import MakeEngine, make, new_record, run_in, stir

HARDENED: dict[str, Any] = {
    "ReadonlyRootfs": True,
    "CapDrop": ["ALL"],
    "CapAdd": None,
    "SecurityOpt": ["no-new-privileges"],
    "Privileged": False,
    "IpcMode": "private",
    "PidMode": "",
    "UTSMode": "",
    "UsernsMode": "",
    "NetworkMode": "none",
    "PortBindings": None,
    "PublishAllPorts": False,
    "Dns": ["127.0.0.1"],
    "Memory": (128 + GUEST_ALLOWANCE.memory_mb) << 20,
    "MemorySwap": (128 + GUEST_ALLOWANCE.memory_mb) << 20,
    "NanoCpus": 1_500_000_000,
    "PidsLimit": 64 + GUEST_ALLOWANCE.pids,
    "OomScoreAdj": 500,
    "OomKillDisable": False,
    "ShmSize": 32 << 20,
    "Tmpfs": {"/tmp": "rw,nosuid,nodev,mode=1777,exec,size=268435456"},
    "Ulimits": [{"Name": "core", "Hard": 0, "Soft": 0}],
    "LogConfig": {"Type": "none", "Config": {}},
    "Init": False,
    "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
    "AutoRemove": False,
    "Binds": None,
    "Devices": None,
    "VolumesFrom": None,
    "GroupAdd": None,
    "ExtraHosts": None,
    "Links": None,
    "Sysctls": None,
}
MASKED = {
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
}


async def state_of(engine: DockerEngine, sandbox_id: str) -> Instance:
    found = await engine.inspect(sandbox_id)
    assert found is not None
    return found


async def wait_for_state(engine: DockerEngine, sandbox_id: str, state: str) -> Instance:
    """The instance once the engine has noticed."""
    async with asyncio.timeout(10):
        while (found := await state_of(engine, sandbox_id)).state != state:
            await asyncio.sleep(0.05)
    return found


async def test_a_sandbox_is_hardened_as_docker_inspect_shows_it(box: DockerEngine, engine: Docker) -> None:
    record = await make(box, cpus=1.5, env={"TOKEN": "s3cret"})
    inspected = engine.inspect(record.sandbox_id)
    host = inspected["HostConfig"]
    assert {key: host.get(key) or (None if expected is None else host.get(key)) for key, expected in HARDENED.items()} == HARDENED
    assert set(host["MaskedPaths"]) >= MASKED and host["ReadonlyPaths"]
    mounts = {(row["Type"], row["Destination"], row["RW"], row["Name"].rsplit("-", 1)[0]) for row in inspected["Mounts"]}
    guest = "agent-sandbox-init-amd64"
    assert mounts == {("volume", "/workspace", True, "agent-sandbox"), ("volume", hardening.GUEST_FOLDER, False, guest)}
    config = inspected["Config"]
    assert (config["User"], config["WorkingDir"], config["Hostname"]) == ("1000:1000", "/workspace", "sandbox")
    assert [*config["Entrypoint"], *config["Cmd"]] == list(specs.SERVE)
    assert config["Healthcheck"] == {"Test": ["NONE"]}
    assert "TOKEN=s3cret" in config["Env"] and "HOME=/workspace" in config["Env"]
    assert "s3cret" not in str(config["Labels"])
    assert inspected["Name"] == f"/agent-sandbox-{record.sandbox_id}"


async def test_a_sandbox_is_hardened_as_its_own_code_sees_it(box: DockerEngine) -> None:
    record = await make(box, memory_mb=64)
    look = """
import json, os, re, socket, time
status = dict(line.split(':', 1) for line in open('/proc/self/status').read().splitlines())
mounts = {line.split()[1]: (line.split()[2], set(line.split()[3].split(','))) for line in open('/proc/self/mounts')}
begun = time.monotonic()
try:
    socket.getaddrinfo('example.org', 80)
    resolved = True
except OSError:
    resolved = False
looked = time.monotonic() - begun
def writable(path):
    try:
        open(path, 'w').close()
        return True
    except OSError:
        return False
print(json.dumps({
    'ids': [os.getuid(), os.getgid(), os.getgroups()], 'home': os.environ['HOME'], 'cwd': os.getcwd(), 'host': socket.gethostname(),
    'caps': {name: status[name].strip() for name in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb')},
    'nnp': status['NoNewPrivs'].strip(), 'seccomp': status['Seccomp'].strip(),
    'root': 'ro' in mounts['/'][1], 'tmp': [mounts['/tmp'][0], sorted(mounts['/tmp'][1] & {'nosuid', 'nodev', 'noexec'})],
    'size': os.statvfs('/tmp').f_blocks * os.statvfs('/tmp').f_frsize, 'shm': os.statvfs('/dev/shm').f_blocks * os.statvfs('/dev/shm').f_frsize,
    'interfaces': [name for _, name in socket.if_nameindex()], 'resolved': resolved, 'quick': looked < 2,
    'localhost': socket.gethostbyname('localhost'), 'one': open('/proc/1/cmdline').read().split(chr(0))[:2],
    'guest': [writable('/opt/agent-sandbox/x'), writable('/x'), writable('/workspace/x'), writable('/tmp/x')],
    'owner': [os.stat('/workspace').st_uid, os.stat('/workspace').st_gid, oct(os.stat('/workspace').st_mode & 0o7777)],
    'empty': os.listdir('/workspace'), 'init': oct(os.stat('/opt/agent-sandbox/sandbox-init').st_mode & 0o7777),
    'core': __import__('resource').getrlimit(__import__('resource').RLIMIT_CORE),
}))
"""
    seen = json.loads(await run_in(box, record.sandbox_id, ["python3", "-c", look]))
    zero = "0000000000000000"
    assert seen == {
        "ids": [1000, 1000, [1000]],
        "home": "/workspace",
        "cwd": "/workspace",
        "host": "sandbox",
        "caps": dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), zero),
        "nnp": "1",
        "seccomp": "2",
        "root": True,
        "tmp": ["tmpfs", ["nodev", "nosuid"]],
        "size": 256 << 20,
        "shm": 16 << 20,
        "interfaces": ["lo"],
        "resolved": False,
        "quick": True,
        "localhost": "127.0.0.1",
        "one": ["/opt/agent-sandbox/sandbox-init", "serve"],
        "guest": [False, False, True, True],
        "owner": [1000, 1000, "0o755"],
        "empty": ["x"],
        "init": "0o111",
        "core": [0, 0],
    }


async def test_a_writable_root_is_writable_and_the_guest_is_not(box: DockerEngine) -> None:
    record = await make(box, read_only_rootfs=False)
    assert (
        await run_in(box, record.sandbox_id, "mkdir -p /tmp/a && touch /tmp/a/b && ! touch /opt/agent-sandbox/x 2>/dev/null && echo fine") == "fine\n"
    )


async def test_another_user_owns_a_workspace_made_for_it(make_engine: MakeEngine) -> None:
    other = await make_engine(sandbox_user="4321:1234")
    record = await make(other)
    assert (
        await run_in(other, record.sandbox_id, "id -u; id -g; stat -c %u:%g /workspace; touch f; stat -c %u:%g f")
        == "4321\n1234\n4321:1234\n4321:1234\n"
    )


async def test_a_sandbox_is_uncommitted_until_its_commit(box: DockerEngine) -> None:
    record = new_record()
    await box.create(record)
    assert [(one.committed, one.state) for one in await box.instances()] == [(False, "running")]
    assert await run_in(box, record.sandbox_id, "echo hi") == "hi\n"
    await box.commit(record.sandbox_id)
    await box.commit(record.sandbox_id)
    assert [(one.committed, one.state) for one in await box.instances()] == [(True, "running")]


async def test_the_next_process_reads_the_whole_record_back(box: DockerEngine, make_engine: MakeEngine) -> None:
    awkward = {"A": "b=c\nd 'x' \"y\"", "EMPTY": "", "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    record = replace(
        new_record(env=awkward, labels={"team": "a b"}, cpus=0.5), source_snapshot_id="snap_0123456789abcdef", idempotency_key="k", request_digest="d"
    )
    await box.create(record)
    await box.commit(record.sandbox_id)
    other = await make_engine(instance_id=box._options.instance_id)
    (found,) = await other.instances()
    assert found == Instance(record, committed=True, state="running")
    assert await other.inspect(record.sandbox_id) == found
    assert await run_in(other, record.sandbox_id, 'printf %s "$A"') == awkward["A"]


async def test_a_create_that_fails_leaves_nothing_and_says_why(box: DockerEngine) -> None:
    with pytest.raises(InvalidRequest, match="CPUs"):
        await box.create(new_record(cpus=3999))
    assert await box.instances() == []


async def test_a_guest_that_cannot_serve_is_told_with_its_last_words(box: DockerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "SERVE", (hardening.GUEST_PATH, "serve", "--no-such-option"))
    with pytest.raises(BackendError, match=r"exit code 2; .*no-such-option"):
        await box.create(new_record())
    assert await box.instances() == []


async def test_a_guest_that_serves_and_says_nothing_is_found_by_its_channel(box: DockerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "SERVE", ("/bin/sh", "-c", f"exec {hardening.GUEST_PATH} serve >/dev/null"))
    record = await make(box)
    assert await run_in(box, record.sandbox_id, "echo quiet") == "quiet\n"


async def test_a_cancelled_create_leaves_nothing(box: DockerEngine, leftovers: Any) -> None:
    for delay in (0.0, 0.05, 0.2, 0.4):
        task = asyncio.create_task(box.create(new_record()))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with asyncio.timeout(30):
        while leftovers.rows():
            await asyncio.sleep(0.1)


async def test_a_repeated_create_takes_the_place_of_a_half_made_one(box: DockerEngine, engine: Docker) -> None:
    record = new_record()
    await box.create(record)
    engine.client.api.stop(specs.making_name(record.sandbox_id), timeout=0)
    await box.create(record)
    await box.commit(record.sandbox_id)
    assert await run_in(box, record.sandbox_id, "echo again") == "again\n"


async def test_a_removed_sandbox_is_gone_and_removing_it_again_is_fine(box: DockerEngine, leftovers: Any) -> None:
    record = await make(box)
    await asyncio.gather(box.remove(record.sandbox_id), box.remove(record.sandbox_id))
    assert leftovers.rows() == [] and await box.inspect(record.sandbox_id) is None
    await box.remove(record.sandbox_id)


async def test_a_killed_sandbox_says_so_and_comes_back_on_its_files_with_its_environment(box: DockerEngine, engine: Docker) -> None:
    record = await make(box, env={"A": "1"})
    await run_in(box, record.sandbox_id, "echo kept > file; echo gone > /tmp/file")
    engine.container(record.sandbox_id).kill()
    dead = await wait_for_state(box, record.sandbox_id, "exited")
    assert dead.termination is not None and dead.termination.reason == "Killed" and dead.termination.exit_code == 137
    await box.restart(record.sandbox_id)
    back = await state_of(box, record.sandbox_id)
    assert (back.state, back.incarnation, back.record) == ("running", 2, record)
    assert back.termination is not None and back.termination.reason == "Killed"
    assert await run_in(box, record.sandbox_id, "cat file; echo $A; ls /tmp") == "kept\n1\n"
    await box.restart(record.sandbox_id)
    assert (await state_of(box, record.sandbox_id)).incarnation == 2


async def test_an_out_of_memory_death_is_told_as_such(box: DockerEngine, engine: Docker) -> None:
    record = await make(box, memory_mb=64)
    guest = box.guest(record.sandbox_id)
    try:
        result = await guest.run(Command(command=["python3", "-c", "b=bytearray(400*1024*1024);print(1)"], timeout_seconds=20), max_output_bytes=100)
        assert (result.exit_code, result.stdout) == (137, "")
    finally:
        await guest.aclose()
    # On this cgroup version the kernel killed the command only; then PID 1 dies too and the engine remembers the cause.
    engine.container(record.sandbox_id).kill()
    dead = await wait_for_state(box, record.sandbox_id, "exited")
    assert dead.termination is not None and dead.termination.reason in ("OOMKilled", "Killed")


async def test_a_command_whose_sandbox_dies_is_an_error_that_names_the_death(box: DockerEngine, engine: Docker) -> None:
    record = await make(box)
    guest = box.guest(record.sandbox_id)
    try:
        running = asyncio.create_task(guest.run(Command(command="echo on; sleep 60", timeout_seconds=50), max_output_bytes=100))
        await asyncio.sleep(0.5)
        engine.container(record.sandbox_id).kill()
        with pytest.raises((SandboxDied, OutcomeUnknown), match="killed from outside"):
            await asyncio.wait_for(running, 15)
    finally:
        await guest.aclose()


async def test_a_paused_sandbox_is_not_running_and_is_resumed(box: DockerEngine, engine: Docker) -> None:
    record = await make(box)
    engine.container(record.sandbox_id).pause()
    paused = await state_of(box, record.sandbox_id)
    assert paused.state == "exited" and paused.termination is not None and paused.termination.reason == "Paused"
    await box.restart(record.sandbox_id)
    assert (await state_of(box, record.sandbox_id)).incarnation == 1
    assert await run_in(box, record.sandbox_id, "echo awake") == "awake\n"


async def test_a_sandbox_whose_container_was_removed_by_hand_is_lost_and_says_where_its_files_are(box: DockerEngine, engine: Docker) -> None:
    record = await make(box, env={"A": "1"})
    engine.container(record.sandbox_id).remove(force=True)
    (lost,) = await box.instances()
    assert lost.state == "lost" and lost.committed and lost.record.spec.env == {}
    assert lost.termination is not None and specs.volume_name(record.sandbox_id) in lost.termination.message
    with pytest.raises(BackendError, match="removed from outside"):
        await box.restart(record.sandbox_id)
    await box.sweep()
    assert (await state_of(box, record.sandbox_id)).state == "lost"
    await box.remove(record.sandbox_id)
    assert await box.instances() == []


async def test_renewing_gives_a_fresh_root_on_the_same_workspace(box: DockerEngine, engine: Docker) -> None:
    record = await make(box, read_only_rootfs=False, env={"A": "1"})
    engine.client.api.exec_start(engine.client.api.exec_create(f"agent-sandbox-{record.sandbox_id}", ["sh", "-c", "touch /var/tmp/mark"])["Id"])
    await run_in(box, record.sandbox_id, "ls /var/tmp/mark && echo kept > file")
    await box.renew(record.sandbox_id)
    assert await run_in(box, record.sandbox_id, "ls /var/tmp; cat file; echo $A") == "kept\n1\n"
    assert (await state_of(box, record.sandbox_id)).record == record
    assert len(await box.instances()) == 1


async def test_renewing_a_read_only_root_does_nothing(box: DockerEngine, engine: Docker) -> None:
    record = await make(box)
    before = engine.inspect(record.sandbox_id)["Id"]
    await box.renew(record.sandbox_id)
    assert engine.inspect(record.sandbox_id)["Id"] == before


@pytest.mark.parametrize("removed", [True, False])
async def test_a_replacement_that_was_cut_short_is_healed(box: DockerEngine, make_engine: MakeEngine, engine: Docker, removed: bool) -> None:
    record = await make(box, read_only_rootfs=False)
    await run_in(box, record.sandbox_id, "echo kept > file")
    place = await box._shared.place(record)
    config = specs.sandbox_config(box._options, record, place, incarnation=2, fresh=False)
    await box._lifecycle._create(record.sandbox_id, specs.next_name(record.sandbox_id), config)
    if removed:
        engine.container(record.sandbox_id).remove(force=True)
    other = await make_engine(instance_id=box._options.instance_id)
    (found,) = await other.instances()
    assert found.committed and found.state == ("exited" if removed else "running")
    await other.sweep()
    if removed:
        assert engine.inspect(record.sandbox_id)["State"]["Status"] == "created"
        await other.restart(record.sandbox_id)
    assert await run_in(other, record.sandbox_id, "cat file") == "kept\n"
    names = [row["Names"] for row in engine.client.api.containers(all=True, filters={"label": f"{labels.SANDBOX}={record.sandbox_id}"})]
    assert names == [[f"/agent-sandbox-{record.sandbox_id}"]]


async def test_a_removal_that_was_cut_short_is_finished_by_the_next_sweep(
    box: DockerEngine, make_engine: MakeEngine, leftovers: Any, engine: Docker
) -> None:
    record = await make(box)
    own = labels.own_labels(labels.TOMBSTONE, box._options, record.sandbox_id)
    engine.client.api.create_volume(specs.tombstone_name(record.sandbox_id), labels=own)
    other = await make_engine(instance_id=box._options.instance_id)
    assert await other.instances() == []
    await other.sweep()
    assert leftovers.rows() == []


async def test_changes_outside_are_heard_and_end_with_close(make_engine: MakeEngine, engine: Docker) -> None:
    mine, others = await make_engine(), await make_engine()
    record, foreign = await make(mine), await make(others)
    heard: list[str] = []

    async def listen(changes: AsyncIterator[str]) -> None:
        async for sandbox_id in changes:
            heard.append(sandbox_id)  # noqa: PERF401 - each is looked for as it comes

    task = asyncio.create_task(listen(mine.changes()))
    async with asyncio.timeout(10):
        # The stream says nothing before the first event, so there is one to wait for.
        while record.sandbox_id not in heard:
            stir(engine, record.sandbox_id)
            await asyncio.sleep(0.1)
    heard.clear()
    engine.container(foreign.sandbox_id).kill()
    engine.container(record.sandbox_id).kill()
    async with asyncio.timeout(10):
        while record.sandbox_id not in heard:
            await asyncio.sleep(0.05)
    await mine.remove(record.sandbox_id)
    await mine.close()
    await asyncio.wait_for(task, 5)
    assert set(heard) == {record.sandbox_id}


async def test_listing_takes_two_calls_however_many_there_are(box: DockerEngine) -> None:
    for _ in range(3):
        await make(box)
    calls: list[str] = []
    real = box._client.run

    async def counted(doing: str, *rest: Any) -> Any:
        calls.append(doing)
        return await real(doing, *rest)

    box._client.run = counted  # type: ignore[method-assign,assignment]
    begun = time.monotonic()
    assert len(await box.instances()) == 3
    assert len(calls) == 2 and time.monotonic() - begun < 2


async def test_the_number_of_cpus_is_known_once_it_is_open(box: DockerEngine, engine: Docker) -> None:
    assert box.max_cpus() == engine.client.info()["NCPU"]
