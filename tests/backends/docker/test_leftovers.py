"""What processes leave that die, and what several installations on one engine leave each other: all of it is found, and only one's own is touched."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import sys
from typing import Any

import pytest
from agent_sandbox_api.backends.docker import DockerEngine, labels, specs
from agent_sandbox_api.backends.docker.helpers import ensure_helper_image

from tests.support.docker import ROOT, Docker

from .conftest import Leftovers, MakeEngine, make, new_record, run_in


async def die_while_making(instance_id: str, network: str, seconds: float) -> list[str]:
    """Starts dying.py and kills it `seconds` after its engine is open; the ids that it told as made."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/api{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.backends.docker.dying", instance_id, network]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"open\n"
        await asyncio.sleep(seconds)
    finally:
        process.kill()
        told = (await process.stdout.read()).decode().split()
        await process.wait()
    return told


async def heal(engine: DockerEngine) -> list[str]:
    """What LocalBackend does at its start: half-made ones go, leftovers are swept. The ids that stay."""
    stay = []
    for instance in await engine.instances():
        if instance.committed:
            stay.append(instance.record.sandbox_id)
        else:
            await engine.remove(instance.record.sandbox_id)
    await engine.sweep()
    return stay


@pytest.mark.parametrize("round_number", range(3))
@pytest.mark.parametrize("network", ["none", "network"])
async def test_a_process_killed_while_it_makes_sandboxes_leaves_none_half_made(
    make_engine: MakeEngine, leftovers: Leftovers, network: str, round_number: int
) -> None:
    instance_id = f"test-{secrets.token_hex(6)}"
    leftovers.instances.append(instance_id)
    told = await die_while_making(instance_id, network, random.uniform(round_number * 0.7, round_number * 0.7 + 0.7))
    engine = await make_engine(instance_id=instance_id)
    async with asyncio.timeout(60):
        # The engine may still be at work on what the dead process asked for last.
        while True:
            stay = await heal(engine)
            containers = {row[1].split(",")[0] for row in leftovers.rows() if row[0] == "container"}
            if containers == {f"/{specs.container_name(sandbox_id)}" for sandbox_id in stay}:
                break
            await asyncio.sleep(0.2)
    assert set(told) <= set(stay) and len(stay) <= len(told) + 1
    for sandbox_id in stay:
        assert await run_in(engine, sandbox_id, "echo alive") == "alive\n"
        await engine.remove(sandbox_id)
    assert leftovers.rows() == []


async def test_an_installation_sees_and_sweeps_only_its_own(make_engine: MakeEngine, engine: Docker) -> None:
    mine, other = await make_engine(), await make_engine()
    record, half = await make(mine), new_record()
    await mine.create(half)
    image = await ensure_helper_image(mine._client)
    helper = specs.filler_config(mine._options, image, await mine._shared.prepare())
    made = engine.client.api.create_container_from_config(helper, f"agent-sandbox-helper-{secrets.token_hex(6)}")
    tombstone = engine.client.api.create_volume("agent-sandbox-x.removing", labels=labels.own_labels(labels.TOMBSTONE, mine._options, "sb_x"))
    assert await other.instances() == [] and await other.inspect(record.sandbox_id) is None
    await other.sweep()
    await other.remove(record.sandbox_id)
    assert {one.record.sandbox_id for one in await mine.instances()} == {record.sandbox_id, half.sandbox_id}
    assert await run_in(mine, record.sandbox_id, "echo mine") == "mine\n"
    assert engine.client.api.inspect_container(made["Id"]) and engine.client.api.inspect_volume(tombstone["Name"])
    engine.client.api.remove_container(made["Id"])
    engine.client.api.remove_volume(tombstone["Name"])


async def test_a_sweep_leaves_alone_what_this_process_is_making(box: DockerEngine) -> None:
    record = new_record()
    making = asyncio.create_task(box.create(record))
    while not making.done():
        await box.sweep()
    await making
    await box.sweep()
    await box.commit(record.sandbox_id)
    assert await run_in(box, record.sandbox_id, "echo whole") == "whole\n"


async def test_what_a_dead_process_left_is_swept_by_the_next(make_engine: MakeEngine, leftovers: Leftovers, engine: Docker) -> None:
    dead = await make_engine()
    await dead.create(new_record())
    image = await ensure_helper_image(dead._client)
    helper = specs.filler_config(dead._options, image, await dead._shared.prepare())
    engine.client.api.create_container_from_config(helper, f"agent-sandbox-helper-{secrets.token_hex(6)}")
    await dead.close()
    after = await make_engine(instance_id=dead._options.instance_id)
    await after.sweep()
    assert leftovers.rows() == []


async def test_a_volume_that_somebody_else_holds_goes_once_it_is_free(box: DockerEngine, engine: Docker, leftovers: Leftovers) -> None:
    record = await make(box)
    volume = specs.volume_name(record.sandbox_id)
    name = f"agent-sandbox-test-{secrets.token_hex(4)}"
    holder = engine.client.containers.create(record.spec.image, ["true"], name=name, volumes={volume: {"bind": "/x"}})
    try:
        await box.remove(record.sandbox_id)
        assert await box.instances() == []
        await box.sweep()
        assert [row[0] for row in leftovers.rows()] == ["volume", "volume"]
    finally:
        holder.remove(force=True)
    await box.sweep()
    assert leftovers.rows() == []


async def test_foreign_containers_that_carry_our_names_are_not_touched(box: DockerEngine, engine: Docker) -> None:
    record = new_record()
    name = specs.container_name(record.sandbox_id)
    foreign = engine.client.containers.create(record.spec.image, ["true"], name=name)
    try:
        assert await box.inspect(record.sandbox_id) is None
        await box.remove(record.sandbox_id)
        await box.sweep()
        foreign.reload()
    finally:
        foreign.remove(force=True)


async def test_labels_that_cannot_be_read_hide_one_sandbox_and_no_other(box: DockerEngine, engine: Docker, caplog: Any) -> None:
    record = await make(box)
    odd = labels.own_labels(labels.CONTAINER, box._options, "sb_0000000000000000") | {labels.RECORD: "{"}
    made = engine.client.containers.create(record.spec.image, ["true"], name="agent-sandbox-sb_0000000000000000", labels=odd)
    try:
        assert [one.record for one in await box.instances()] == [record]
        assert "sb_0000000000000000" in caplog.text
        await box.sweep()
        made.reload()
    finally:
        made.remove(force=True)
