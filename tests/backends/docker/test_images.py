"""Images: what cannot be used is said at once, what all share is made once and again when it is missing, and images cannot soften a sandbox."""

from __future__ import annotations

import asyncio
import io
import secrets
import tarfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
from agent_sandbox_api.backends.docker import DockerEngine, binary, images, specs
from agent_sandbox_core import hardening
from agent_sandbox_core.errors import BackendError, InvalidRequest, SandboxError

from tests.support.docker import Docker
from tests.support.target import sandbox_image

from .conftest import MakeEngine, make, new_record, run_in


@pytest.fixture
def build(engine: Docker) -> Iterator[Any]:
    """Makes images on top of the sandbox image by `docker commit` with changes; removed at the end."""
    made: list[str] = []

    def commit(*changes: str, archive: bytes | None = None) -> str:
        name = f"localhost/agent-sandbox-test-{secrets.token_hex(4)}"
        container = engine.client.api.create_container(sandbox_image(), ["true"])["Id"]
        if archive is not None:
            engine.client.api.put_archive(container, "/", archive)
        engine.client.api.commit(container, repository=name, tag="1", changes=list(changes))
        engine.client.api.remove_container(container)
        made.append(f"{name}:1")
        return f"{name}:1"

    yield commit
    for image in made:
        for row in engine.client.api.images(filters={"label": f"{images.BASE}={engine.client.api.inspect_image(image)['Id']}"}):
            engine.client.api.remove_image(row["Id"])
        engine.client.api.remove_image(image)


@pytest.mark.parametrize("image", ["UPPER/Case bad", "", "a b", "http://x/y", "-x", "x:", "x@sha256:1"])
async def test_a_bad_reference_is_refused_at_once(box: DockerEngine, image: str) -> None:
    begun = time.perf_counter()
    with pytest.raises(InvalidRequest, match="reference"):
        await box.create(new_record(image=image))
    assert time.perf_counter() - begun < 2


async def test_an_image_that_cannot_be_pulled_fails_in_time_and_names_it_and_the_cause(box: DockerEngine, leftovers: Any) -> None:
    begun = time.perf_counter()
    results = await asyncio.gather(*(box.create(new_record(image="registry.invalid/none:1")) for _ in range(3)), return_exceptions=True)
    assert time.perf_counter() - begun < 30
    for error in results:
        assert isinstance(error, SandboxError) and error.status in (400, 502)
        assert "registry.invalid/none:1" in error.message and "registry.invalid" in error.message.replace("registry.invalid/none:1", "", 1)
    assert leftovers.rows() == []


async def test_an_id_that_is_not_there_cannot_be_pulled(box: DockerEngine) -> None:
    with pytest.raises(InvalidRequest, match="cannot be pulled"):
        await box.create(new_record(image=f"sha256:{'0' * 64}"))


async def test_an_image_can_be_named_by_its_id(box: DockerEngine, engine: Docker) -> None:
    record = await make(box, image=engine.client.api.inspect_image(sandbox_image())["Id"])
    assert await run_in(box, record.sandbox_id, "echo x") == "x\n"


async def test_an_image_that_wants_more_gets_no_more(engine: Docker, build: Any, box: DockerEngine) -> None:
    image = build(
        "USER root",
        "VOLUME /data /tmp /workspace /var/lib/x",
        'ENTRYPOINT ["/bin/false"]',
        "ENV A=image B=image",
        "WORKDIR /etc",
        "HEALTHCHECK CMD touch /workspace/healthcheck",
        "LABEL agentsandbox.dev/sandbox=sb_ffffffffffffffff agentsandbox.dev/instance=x agentsandbox.dev/last-termination=x",
    )
    record = await make(box, image=image, env={"A": "mine"})
    assert await run_in(
        box, record.sandbox_id, "id -u; pwd; echo $A $B; for d in /data /var/lib/x; do touch $d/x 2>/dev/null && echo bad; done; touch /tmp/x; ls"
    ) == ("1000\n/workspace\nmine image\n")
    (found,) = await box.instances()
    assert found.record == record
    mounts = {row["Destination"]: row["RW"] for row in engine.inspect(record.sandbox_id)["Mounts"] if row["Type"] == "volume"}
    assert mounts == {"/workspace": True, hardening.GUEST_FOLDER: False, "/data": False, "/var/lib/x": False}
    assert "Health" not in engine.inspect(record.sandbox_id)["State"]


async def test_volumes_of_an_image_go_with_the_sandbox(build: Any, box: DockerEngine, leftovers: Any) -> None:
    image = build("VOLUME /data")
    record = await make(box, image=image, read_only_rootfs=False)
    for _ in range(2):
        assert sorted(row[0] for row in leftovers.rows()) == ["container", "volume", "volume"]
        await box.renew(record.sandbox_id)
    await box.remove(record.sandbox_id)
    assert leftovers.rows() == []


async def test_a_workspace_begins_empty_and_owned_whatever_the_image_has_there(build: Any, box: DockerEngine) -> None:
    for kind, change in (("folder", "ENV X=1"), ("link", "ENV X=1"), ("folder", "VOLUME /workspace")):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            member = tarfile.TarInfo("workspace/deep/file" if kind == "folder" else "workspace")
            if kind == "link":
                member.type, member.linkname = tarfile.SYMTYPE, "/etc"
            tar.addfile(member)
        record = await make(box, image=build(change, archive=packed.getvalue()))
        assert await run_in(box, record.sandbox_id, "ls -A; stat -c %u:%g:%a:%F /workspace") == "1000:1000:755:directory\n"
        await box.remove(record.sandbox_id)


async def test_two_installations_share_the_image_and_the_guest_volume(make_engine: MakeEngine, engine: Docker) -> None:
    one, two = await make_engine(), await make_engine()
    first, second = await make(one), await make(two)
    assert engine.inspect(first.sandbox_id)["Image"] == engine.inspect(second.sandbox_id)["Image"]
    assert await one._shared.prepare() == await two._shared.prepare()


async def test_what_all_share_is_made_again_when_it_was_removed(engine: Docker, build: Any, box: DockerEngine) -> None:
    image = build("ENV D=1")
    record = await make(box, image=image)
    derived = engine.inspect(record.sandbox_id)["Image"]
    await box.remove(record.sandbox_id)
    engine.client.api.remove_image(derived, force=True)
    record = await make(box, image=image)
    assert await run_in(box, record.sandbox_id, "echo again") == "again\n"


async def test_a_guest_volume_with_something_else_in_it_is_never_used(
    make_engine: MakeEngine, engine: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await make_engine()
    real = binary.guest_binary("amd64")
    # Another content, so another volume than the one that everybody here uses.
    mine = real + secrets.token_bytes(8)
    monkeypatch.setattr(binary, "guest_binary", lambda arch: mine)
    volume = binary.guest_volume(mine, "amd64", readable=False)
    engine.client.api.create_volume(volume.name)
    config = {"Image": sandbox_image(), "HostConfig": {"Mounts": [specs.guest_mount(volume.name, read_only=False)]}}
    filler = engine.client.api.create_container_from_config(config, f"agent-sandbox-test-{secrets.token_hex(4)}")["Id"]
    try:
        for content, mode in ((real, 0o111), (mine[:-1], 0o111), (mine, 0o755)):
            engine.client.api.put_archive(filler, hardening.GUEST_FOLDER, binary.pack(binary.GuestVolume(volume.name, content, mode)))
            assert not binary.holds(engine.client.api, filler, volume)
            two = await make_engine(instance_id=one._options.instance_id)
            assert binary.holds(engine.client.api, filler, volume)
            await two.close()
        three = await make_engine(instance_id=one._options.instance_id)
        record = await make(three)
        await three.remove(record.sandbox_id)
    finally:
        engine.client.api.remove_container(filler)
        engine.client.api.remove_volume(volume.name)
    # Removed while the process believes in it: the next create makes it again.
    record = await make(three)
    assert await run_in(three, record.sandbox_id, "echo refilled") == "refilled\n"
    await three.remove(record.sandbox_id)
    engine.client.api.remove_volume(volume.name)


async def test_an_unused_image_goes_with_its_base_and_a_used_one_stays(engine: Docker, build: Any, box: DockerEngine) -> None:
    image = build("ENV C=1")
    record = await make(box, image=image)
    base = engine.client.api.inspect_image(image)["Id"]

    def derived() -> list[Any]:
        return list(engine.client.api.images(filters={"label": f"{images.BASE}={base}"}))

    await box._shared.images.sweep(unused_seconds=0, now=time.time() + 10)
    assert len(derived()) == 1
    await box.remove(record.sandbox_id)
    await box._shared.images.sweep(unused_seconds=1000, now=time.time() + 10)
    assert len(derived()) == 1
    engine.client.api.tag(image, "localhost/agent-sandbox-test-kept", "1")
    engine.client.api.remove_image("localhost/agent-sandbox-test-kept:1")
    await box._shared.images.sweep(unused_seconds=0, now=time.time() + 10)
    assert derived() == []


async def test_a_missing_binary_says_what_to_do(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("AGENT_SANDBOX_INIT_DIR", str(tmp_path))
    engine = await make_engine(opened=False)
    with pytest.raises(BackendError, match=r"has no sandbox-init-linux-amd64.*build_guest"):
        await engine.open()
    await engine.close()


async def test_a_sandbox_needs_no_shell_and_no_libc_in_its_image(box: DockerEngine, engine: Docker) -> None:
    record = await make(box, image=engine.scratch_image())
    guest = box.guest(record.sandbox_id)
    assert (await guest.health())["state"] == "ready"
    assert [entry.name for entry in await guest.list_dir(b"/workspace")] == []
    await guest.aclose()
