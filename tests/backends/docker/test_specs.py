"""What the engine is asked to make, compared whole: a change here is a change of what a sandbox is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from agent_sandbox_api.backends.docker import DockerOptions, labels, specs
from agent_sandbox_api.backends.docker.state import read_termination, sort_out
from agent_sandbox_api.backends.engine import InstanceRecord
from agent_sandbox_core.hardening import GUEST_ALLOWANCE
from agent_sandbox_core.models import SandboxSpec

NOW = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
OPTIONS = DockerOptions("instance-1", docker_runtime="runc", tmp_size_mb=7, process_id="process-1")
MEMORY = (512 + GUEST_ALLOWANCE.memory_mb) << 20


def record(**changes: Any) -> InstanceRecord:
    spec = {"image": "python:3.12-slim", "cpus": 0.25, "memory_mb": 512, "pids_limit": 100, "env": {"TOKEN": "s3cret"}} | changes
    return InstanceRecord("sb_1", SandboxSpec.model_validate(spec), NOW, NOW + timedelta(seconds=60))


def test_a_sandbox_is_exactly_this() -> None:
    place = specs.Placement(specs.Image("sha256:derived"), "guest-volume", None)
    text = (
        '{"created_at":"2026-01-02T03:04:05.000006Z","expires_at":"2026-01-02T03:05:05.000006Z","idempotency_key":null,"request_digest":null,'
        '"source":null,"spec":{"cpus":0.25,"env_names":["TOKEN"],"image":"python:3.12-slim","labels":{},"memory_mb":512,"network":false,'
        '"pids_limit":100,"read_only_rootfs":true}}'
    )
    own = {
        "agentsandbox.dev/product": "agent-sandbox",
        "agentsandbox.dev/instance": "instance-1",
        "agentsandbox.dev/process": "process-1",
        "agentsandbox.dev/sandbox": "sb_1",
        "agentsandbox.dev/record": text,
        "agentsandbox.dev/last-termination": "",
    }
    shared = dict.fromkeys(own, "") | {"agentsandbox.dev/product": "agent-sandbox", "agentsandbox.dev/incarnation": ""}
    assert specs.sandbox_config(OPTIONS, record(), place) == {
        "Image": "sha256:derived",
        "Entrypoint": ["/opt/agent-sandbox/sandbox-init"],
        "Cmd": ["serve"],
        "User": "1000:1000",
        "WorkingDir": "/workspace",
        "Hostname": "sandbox",
        "Env": ["HOME=/workspace", "TOKEN=s3cret"],
        "Healthcheck": {"Test": ["NONE"]},
        "Labels": own | {"agentsandbox.dev/role": "sandbox", "agentsandbox.dev/incarnation": "1"},
        "HostConfig": {
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "Privileged": False,
            "IpcMode": "private",
            "NetworkMode": "none",
            "Dns": ["127.0.0.1"],
            "DnsOptions": ["timeout:1", "attempts:1"],
            "Memory": MEMORY,
            "MemorySwap": MEMORY,
            "NanoCpus": 250_000_000,
            "PidsLimit": 100 + GUEST_ALLOWANCE.pids,
            "OomScoreAdj": 500,
            "ShmSize": 64 << 20,
            "Tmpfs": {"/tmp": "rw,nosuid,nodev,mode=1777,exec,size=7340032"},
            "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
            "Mounts": [
                {
                    "Type": "volume",
                    "Source": "agent-sandbox-sb_1",
                    "Target": "/workspace",
                    "VolumeOptions": {"NoCopy": False, "Labels": own | {"agentsandbox.dev/role": "workspace", "agentsandbox.dev/incarnation": ""}},
                },
                {
                    "Type": "volume",
                    "Source": "guest-volume",
                    "Target": "/opt/agent-sandbox",
                    "ReadOnly": True,
                    "VolumeOptions": {"NoCopy": True, "Labels": shared | {"agentsandbox.dev/role": "guest"}},
                },
            ],
            "LogConfig": {"Type": "none"},
            "Init": False,
            "RestartPolicy": {"Name": "no"},
            "AutoRemove": False,
            "Runtime": "runc",
        },
    }


def test_a_network_changes_the_network_and_nothing_else() -> None:
    closed = specs.sandbox_config(OPTIONS, record(), specs.Placement(specs.Image("i"), "g", None))["HostConfig"]
    opened = specs.sandbox_config(OPTIONS, record(), specs.Placement(specs.Image("i"), "g", "net"))["HostConfig"]
    assert {key for key in closed.keys() | opened.keys() if closed.get(key) != opened.get(key)} == {"NetworkMode", "Dns", "DnsOptions"}
    assert opened["NetworkMode"] == "net"


def test_a_later_container_copies_nothing_into_the_workspace_and_tells_how_the_one_before_ended() -> None:
    place = specs.Placement(specs.Image("i"), "g", None)
    ended = read_termination(record(), inspected(ExitCode=137, OOMKilled=True))
    config = specs.sandbox_config(OPTIONS, record(), place, incarnation=3, termination=ended, fresh=False)
    assert config["HostConfig"]["Mounts"][0]["VolumeOptions"]["NoCopy"] is True
    assert labels.read_incarnation(config["Labels"]) == 3 and labels.read_termination(config["Labels"]) == ended


@pytest.mark.parametrize(("memory", "shm"), [(16, 4), (100, 25), (4096, 64)])
def test_shared_memory_stays_well_inside_the_memory_limit(memory: int, shm: int) -> None:
    config = specs.sandbox_config(OPTIONS, record(memory_mb=memory), specs.Placement(specs.Image("i"), "g", None))
    assert config["HostConfig"]["ShmSize"] == shm << 20


@pytest.mark.parametrize("read_only", [True, False])
def test_volumes_of_an_image_are_as_writable_as_the_root(read_only: bool) -> None:
    image = specs.Image("i", ("/data/", "/workspace", "/tmp", "/", "/opt/agent-sandbox", "/data"))
    mounts = specs.image_mounts(OPTIONS, record(read_only_rootfs=read_only), image)
    assert [(mount["Target"], mount.get("ReadOnly", False), "Source" in mount) for mount in mounts] == [("/data", read_only, read_only)]


def inspected(**state: Any) -> dict[str, Any]:
    base = {
        "Status": "exited",
        "Running": False,
        "Paused": False,
        "OOMKilled": False,
        "ExitCode": 0,
        "Error": "",
        "FinishedAt": "2026-01-02T03:04:05.123456789Z",
    }
    return {"State": base | state, "Created": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ({"ExitCode": 137, "OOMKilled": True}, "OOMKilled", "limit 512 MB"),
        ({"ExitCode": 0, "OOMKilled": True}, "Exited", "exit code 0"),
        ({"ExitCode": 137}, "Killed", "signal 9"),
        ({"ExitCode": 3}, "Exited", "exit code 3"),
        ({"ExitCode": 128, "Error": "no such network"}, "StartFailed", "no such network"),
        ({"Status": "paused", "Running": True, "Paused": True}, "Paused", "paused"),
        ({"Status": "created", "FinishedAt": "0001-01-01T00:00:00Z"}, "NotStarted", "not started"),
    ],
)
def test_each_way_to_end_has_its_reason_and_its_words(state: dict[str, Any], reason: str, words: str) -> None:
    ended = read_termination(record(), inspected(**state))
    assert ended.reason == reason and words in ended.message and ended.time.year == 2026


def test_rows_are_sorted_by_sandbox_and_foreign_names_are_left_alone() -> None:
    own = labels.own_labels(labels.CONTAINER, OPTIONS, "sb_1")
    rows = [{"Names": [f"/agent-sandbox-sb_1{suffix}"], "Labels": own} for suffix in ("", ".next", ".creating", ".mine")]
    volumes = [{"Name": "v", "Labels": labels.own_labels(role, OPTIONS, "sb_1")} for role in (labels.WORKSPACE, labels.TOMBSTONE, labels.GUEST)]
    found = sort_out([*rows, {"Names": ["/x"], "Labels": None}], volumes)["sb_1"]
    assert (found.committed, found.replacing, found.making, found.workspace, found.removing) == (*rows[:3], volumes[0], True)
    assert found.container is rows[0]
