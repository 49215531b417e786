"""An engine that is reached over TCP, TLS or ssh does everything that one on a local socket does."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from agent_sandbox_api.backends.docker import DockerEngine
from agent_sandbox_api.backends.docker.faults import EngineUnreachable
from agent_sandbox_core.errors import BackendError

from tests.support.docker import Docker
from tests.support.server import free_port
from tests.support.waiting import eventually

from .conftest import MakeEngine, make, run_in, stir
from .relay import Relay


def ensure_program(name: str, package: str) -> str:
    """A program of the machine; installed by apt when it is missing and we may."""
    found = shutil.which(name)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", package]
        subprocess.run(command, capture_output=True, timeout=600, check=True, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
        found = shutil.which(name)
    assert found, f"{name} is missing: install {package}"
    return found


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as DOCKER_CERT_PATH wants it, and the server's pair beside it; all of one authority."""
    ensure_program("openssl", "openssl")
    folder = tmp_path_factory.mktemp("certificates")
    ca = [str(folder / "ca.pem"), str(folder / "ca-key.pem")]
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test-authority", "-out", ca[0], "-keyout", ca[1])
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name, prefix in (("localhost", "server-"), ("client", "")):
        key, request, certificate = str(folder / f"{prefix}key.pem"), str(folder / "request"), str(folder / f"{prefix}cert.pem")
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-out", request, "-keyout", key)
        signed = ["x509", "-req", "-in", request, "-CA", ca[0], "-CAkey", ca[1], "-CAcreateserial", "-days", "2", "-out", certificate]
        openssl(*signed, *(["-extfile", str(folder / "names")] if prefix else []))
    return folder


async def use_everything(engine: DockerEngine, docker: Docker) -> None:
    """One sandbox through its life: lifecycle calls, channels with bulk data, events, a restart."""
    record = await make(engine, env={"A": "1"})
    assert await run_in(engine, record.sandbox_id, "echo $A") == "1\n"
    guest = engine.guest(record.sandbox_id)

    async def body() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 65536

    assert (await guest.write_file(b"big", body())).size == 64 * 65536
    async with guest.read_file(b"big") as opened:
        assert sum([len(chunk) async for chunk in opened.chunks]) == 64 * 65536
    await guest.aclose()
    changes = engine.changes()
    heard = asyncio.ensure_future(anext(changes))
    async with asyncio.timeout(20):
        while not heard.done():
            stir(docker, record.sandbox_id)
            await asyncio.sleep(0.1)
    await changes.aclose()
    docker.container(record.sandbox_id).kill()
    await engine.restart(record.sandbox_id)
    assert [(one.state, one.incarnation) for one in await engine.instances()] == [("running", 2)]
    await engine.remove(record.sandbox_id)


@contextlib.asynccontextmanager
async def running(relay: Relay) -> AsyncIterator[Relay]:
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop()


async def test_an_engine_over_tcp(make_engine: MakeEngine, engine: Docker) -> None:
    async with running(Relay("tcp")) as relay:
        one = await make_engine(host=relay.host)
        await use_everything(one, engine)
        assert relay.accepted > 5
        await one.close()


async def test_an_engine_over_tls_with_certificates_on_both_sides(
    make_engine: MakeEngine, engine: Docker, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / "ca.pem"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificates / "server-cert.pem", certificates / "server-key.pem")
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(certificates))
    async with running(Relay("tcp", context)) as relay:
        one = await make_engine(host=relay.host)
        await use_everything(one, engine)
        await one.close()


async def test_an_engine_whose_certificate_is_not_trusted_is_not_used(
    make_engine: MakeEngine, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "server-cert.pem", certificates / "server-key.pem")
    openssl(
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=other",
        "-out",
        str(tmp_path / "ca.pem"),
        "-keyout",
        str(tmp_path / "k"),
    )
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    async with running(Relay("tcp", context)) as relay:
        one = await make_engine(host=relay.host, opened=False)
        with pytest.raises(EngineUnreachable, match="certificate"):
            await one.open()
        await one.close()


@pytest.fixture(scope="module")
def ssh_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A real sshd for this user alone on a loopback port, and a `ssh` on PATH that knows its key."""
    server = ensure_program("sshd", "openssh-server")
    client = ensure_program("ssh", "openssh-client")
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True, timeout=60)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    port = free_port()
    settings = {
        "ListenAddress": f"127.0.0.1:{port}",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "authorized_keys",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "MaxStartups": "100",
        "SetEnv": f"PATH={os.environ['PATH']} DOCKER_HOST={os.environ.get('DOCKER_HOST', 'unix:///var/run/docker.sock')}",
    }
    (folder / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    Path("/run/sshd").mkdir(exist_ok=True)
    programs = folder / "bin"
    programs.mkdir()
    options = f"-i {folder}/user -o IdentitiesOnly=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    (programs / "ssh").write_text(f'#!/bin/sh\nexec {client} {options} "$@"\n')
    (programs / "ssh").chmod(0o755)
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{programs}:{before}"
    daemon = subprocess.Popen([server, "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "log")])
    try:
        login = ["ssh", "-p", str(port), "127.0.0.1", "true"]
        eventually(lambda: subprocess.run(login, capture_output=True, timeout=20, check=False).returncode == 0, within=20, why="sshd lets us in")
        yield port
    finally:
        os.environ["PATH"] = before
        daemon.terminate()
        daemon.wait(10)


def bridges() -> int:
    """Processes of ssh clients that carry an engine connection."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            count += b"dial-stdio" in (folder / "cmdline").read_bytes() and b"ssh\0" in (folder / "cmdline").read_bytes()
    return count


@pytest.mark.skipif(os.geteuid() != 0, reason="sshd is started as root")
async def test_an_engine_over_ssh_and_nothing_of_it_is_left(make_engine: MakeEngine, engine: Docker, ssh_port: int) -> None:
    before = bridges()
    one = await make_engine(host=f"ssh://{getpass.getuser()}@127.0.0.1:{ssh_port}")
    await use_everything(one, engine)
    assert bridges() > before
    await one.close()
    async with asyncio.timeout(10):
        while bridges() > before:
            await asyncio.sleep(0.05)


@pytest.mark.skipif(os.geteuid() != 0, reason="sshd is started as root")
async def test_what_ssh_says_is_in_the_error(make_engine: MakeEngine, ssh_port: int) -> None:
    one = await make_engine(host=f"ssh://nobody-here@127.0.0.1:{ssh_port}", opened=False)
    with pytest.raises(BackendError, match="Permission denied"):
        await one.open()
    await one.close()
