"""The guard of sandboxes with a network: there before any channel, again after each start, and without it nothing opens. What it lets through is contract."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from agent_sandbox_api.backends.docker import DockerEngine, DockerOptions, labels, network, specs
from agent_sandbox_api.backends.docker.network import Survey, blocked, encode
from agent_sandbox_core.errors import BackendError, InvalidRequest
from agent_sandbox_core.hardening import METADATA_ADDRESSES

from tests.support.docker import Docker

from .conftest import MakeEngine, make, new_record, run_in

KNOCK = "import socket,sys\ntry: socket.create_connection((sys.argv[1],9),2)\nexcept OSError as e: print(e.errno)"
REFUSED_BY_THE_HOST = "111"


@pytest.fixture
def network_name(engine: Docker) -> Iterator[str]:
    """A name that no network has; whatever gets it is removed at the end."""
    name = f"agent-sandbox-test-{secrets.token_hex(4)}"
    yield name
    for row in engine.client.api.networks(names=[name]):
        if row["Name"] == name:
            engine.client.api.remove_network(row["Id"])


def gateway_of(docker: Docker, sandbox_id: str) -> str:
    (facts,) = docker.inspect(sandbox_id)["NetworkSettings"]["Networks"].values()
    return str(facts["Gateway"])


async def knock(engine: DockerEngine, docker: Docker, sandbox_id: str) -> str:
    """The error number of a connection to the gateway, where nobody listens: without rules the host refuses it itself."""
    return (await run_in(engine, sandbox_id, ["python3", "-c", KNOCK, gateway_of(docker, sandbox_id)])).strip()


async def test_a_sandbox_with_a_network_is_hardened_like_any_other(engine: Docker, network_name: str, make_engine: MakeEngine) -> None:
    one = await make_engine(network_name=network_name)
    record = await make(one, network=True)
    host = engine.inspect(record.sandbox_id)["HostConfig"]
    assert (host["NetworkMode"], host["CapAdd"], host["CapDrop"], host["Privileged"], host["PortBindings"]) == (
        network_name,
        None,
        ["ALL"],
        False,
        None,
    )
    (row,) = engine.client.api.networks(names=[network_name])
    assert row["Options"][network.ICC] == "false" and row["Driver"] == "bridge" and not row["Internal"]
    assert await knock(one, engine, record.sandbox_id) not in ("", REFUSED_BY_THE_HOST)


async def test_a_start_from_outside_is_guarded_before_the_next_channel(engine: Docker, network_name: str, make_engine: MakeEngine) -> None:
    one = await make_engine(network_name=network_name)
    record = await make(one, network=True)
    for _ in range(2):
        engine.container(record.sandbox_id).restart(timeout=0)
        assert await knock(one, engine, record.sandbox_id) not in ("", REFUSED_BY_THE_HOST)


async def test_a_replaced_one_and_one_of_an_earlier_process_are_guarded(engine: Docker, network_name: str, make_engine: MakeEngine) -> None:
    one = await make_engine(network_name=network_name)
    record = await make(one, network=True)
    engine.container(record.sandbox_id).kill()
    await one.restart(record.sandbox_id)
    assert await knock(one, engine, record.sandbox_id) not in ("", REFUSED_BY_THE_HOST)
    other = await make_engine(instance_id=one._options.instance_id, network_name=network_name)
    assert await knock(other, engine, record.sandbox_id) not in ("", REFUSED_BY_THE_HOST)


async def test_without_its_guard_nothing_is_made_and_nothing_opens(
    engine: Docker, network_name: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await make_engine(network_name=network_name)
    record = await make(one, network=True)
    nothing = base64.b64encode(json.dumps({"block": [], "resolvers": []}).encode()).decode()
    monkeypatch.setattr(network, "encode", lambda survey: nothing)
    failed = new_record(network=True)
    with pytest.raises(BackendError, match=r"could not be closed.*blocks nothing"):
        await one.create(failed)
    assert [found.record.sandbox_id for found in await one.instances()] == [record.sandbox_id]
    engine.container(record.sandbox_id).restart(timeout=0)
    with pytest.raises(BackendError, match="could not be closed"):
        await run_in(one, record.sandbox_id, "true")
    monkeypatch.undo()
    assert await run_in(one, record.sandbox_id, "echo open") == "open\n"


@pytest.mark.parametrize("runtime", ["runsc", "kata-runtime"])
async def test_a_runtime_that_cannot_be_guarded_gets_no_network(make_engine: MakeEngine, runtime: str, network_name: str) -> None:
    one = await make_engine(docker_runtime=runtime, network_name=network_name)
    with pytest.raises(InvalidRequest, match=f"network=true is not possible with the runtime {runtime}"):
        await one.create(new_record(network=True))
    assert await one.instances() == []


async def test_a_foreign_network_of_that_name_is_not_used(engine: Docker, network_name: str, make_engine: MakeEngine) -> None:
    engine.client.api.create_network(network_name)
    one = await make_engine(network_name=network_name)
    with pytest.raises(BackendError, match=rf"{network_name} is not one of agent-sandbox.*docker network rm"):
        await one.create(new_record(network=True))
    engine.client.api.remove_network(network_name)
    record = await make(one, network=True)
    assert await run_in(one, record.sandbox_id, "echo mine") == "mine\n"


async def test_a_network_that_joins_its_containers_is_not_used(engine: Docker, network_name: str, make_engine: MakeEngine) -> None:
    config = network.network_config(network_name) | {"options": {}}
    engine.client.api.create_network(**config)
    one = await make_engine(network_name=network_name)
    with pytest.raises(BackendError, match="does not keep its containers apart"):
        await one.create(new_record(network=True))


async def test_two_installations_that_begin_at_once_share_one_network(engine: Docker, network_name: str, make_engine: MakeEngine) -> None:
    engines = [await make_engine(network_name=network_name) for _ in range(3)]
    records = await asyncio.gather(*(make(one, network=True) for one in engines))
    assert len(engine.client.api.networks(names=[network_name])) == 1
    await engines[0].remove(records[0].sandbox_id)
    await engines[0].sweep()
    assert await run_in(engines[1], records[1].sandbox_id, "echo there") == "there\n"


async def test_a_network_that_was_removed_is_made_again(engine: Docker, network_name: str, make_engine: MakeEngine) -> None:
    one = await make_engine(network_name=network_name)
    first = await make(one, network=True)
    await one.remove(first.sandbox_id)
    engine.client.api.remove_network(network_name)
    record = await make(one, network=True)
    assert await run_in(one, record.sandbox_id, "echo again") == "again\n"


async def test_names_are_resolved_by_the_engines_resolvers_alone(engine: Docker, network_name: str, make_engine: MakeEngine) -> None:
    one = await make_engine(network_name=network_name)
    record = await make(one, network=True)
    survey = one._shared.network._survey
    assert survey is not None
    config = json.loads(base64.b64decode(encode(survey)))
    assert config["resolvers"] == [text for text in survey.resolvers if not ipaddress.ip_address(text).is_loopback]
    assert await run_in(one, record.sandbox_id, "grep -c nameserver /etc/resolv.conf") == "1\n"


SURVEY = Survey(
    addresses=("127.0.0.1", "203.0.113.7", "2001:db8::7", "::1", "fe80::1"),
    subnets=("172.30.0.0/16", "198.51.100.0/24"),
    resolvers=("10.9.9.9", "127.0.0.53"),
)


def covered(address: str, networks: list[str]) -> bool:
    wanted = ipaddress.ip_address(address)
    return any(wanted.version == one.version and wanted in one for one in map(ipaddress.ip_network, networks))


@pytest.mark.parametrize(
    "address", [*METADATA_ADDRESSES, "10.1.2.3", "172.30.0.1", "192.168.9.9", "203.0.113.7", "198.51.100.9", "2001:db8::7", "fd00::1"]
)
def test_private_metadata_and_the_engines_own_addresses_are_blocked(address: str) -> None:
    assert covered(address, blocked(SURVEY))


@pytest.mark.parametrize("address", ["8.8.8.8", "203.0.113.8", "2606:4700::1111", "127.0.0.1", "::1"])
def test_the_internet_and_the_sandboxs_own_loopback_are_not_blocked(address: str) -> None:
    assert not covered(address, blocked(SURVEY))


def test_a_resolver_on_the_engines_loopback_opens_nothing() -> None:
    assert json.loads(base64.b64decode(encode(SURVEY)))["resolvers"] == ["10.9.9.9"]


def test_the_guards_container_has_one_capability_and_the_sandboxs_network() -> None:
    options = DockerOptions("instance", process_id="process")
    config: dict[str, Any] = specs.guard_config(specs.Helper(options, "image", "volume"), "sb_1", "container", ["--config", "x"])
    assert config == {
        "Image": "image",
        "Entrypoint": ["/opt/agent-sandbox/sandbox-init"],
        "Cmd": ["netguard", "--config", "x"],
        "User": "0:0",
        "Labels": labels.own_labels(labels.HELPER, options, "sb_1"),
        "HostConfig": {
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "CapAdd": ["NET_ADMIN"],
            "SecurityOpt": ["no-new-privileges"],
            "RestartPolicy": {"Name": "no"},
            "Memory": 128 << 20,
            "MemorySwap": 128 << 20,
            "PidsLimit": 64,
            "NetworkMode": "container:container",
            "Mounts": [specs.guest_mount("volume", read_only=True)],
        },
    }
