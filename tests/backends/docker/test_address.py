"""Where the engine is looked for, in the order of the docker command line; and what a bad address is answered."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from agent_sandbox_api.backends.docker.address import Address, find_address
from agent_sandbox_core.errors import BackendError


def write_context(home: Path, name: str, host: str, *, tls: bool = False) -> None:
    digest = hashlib.sha256(name.encode()).hexdigest()
    meta = home / ".docker" / "contexts" / "meta" / digest
    meta.mkdir(parents=True)
    (meta / "meta.json").write_text(json.dumps({"Name": name, "Endpoints": {"docker": {"Host": host, "SkipTLSVerify": False}}}))
    if tls:
        files = home / ".docker" / "contexts" / "tls" / digest / "docker"
        files.mkdir(parents=True)
        for file in ("ca", "cert", "key"):
            (files / f"{file}.pem").write_text("x")


def test_without_any_word_it_is_the_default_socket(tmp_path: Path) -> None:
    assert find_address({"HOME": str(tmp_path)}) == Address("unix", "unix:///var/run/docker.sock", path="/var/run/docker.sock")


def test_docker_host_beats_a_context(tmp_path: Path) -> None:
    write_context(tmp_path, "far", "tcp://far:2375")
    assert find_address({"HOME": str(tmp_path), "DOCKER_CONTEXT": "far", "DOCKER_HOST": "unix:///x"}).path == "/x"


def test_the_current_context_is_followed_with_its_tls_files(tmp_path: Path) -> None:
    write_context(tmp_path, "far", "tcp://far.example:2376", tls=True)
    (tmp_path / ".docker" / "config.json").write_text('{"currentContext":"far"}')
    address = find_address({"HOME": str(tmp_path)})
    assert (address.kind, address.host, address.port) == ("tcp", "far.example", 2376)
    assert address.tls is not None and address.tls.verify and address.tls.key is not None


def test_a_context_that_does_not_exist_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="gone"):
        find_address({"HOME": str(tmp_path), "DOCKER_CONTEXT": "gone"})


@pytest.mark.parametrize(("verify", "port"), [("1", 2376), ("", 2375)])
def test_tls_has_its_own_port(tmp_path: Path, verify: str, port: int) -> None:
    address = find_address({"HOME": str(tmp_path), "DOCKER_HOST": "tcp://h", "DOCKER_TLS_VERIFY": verify})
    assert address.port == port and (address.tls is not None) == bool(verify)


def test_tls_files_that_do_not_work_are_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    address = find_address({"DOCKER_HOST": "tcp://h", "DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": str(tmp_path)})
    assert address.tls is not None
    with pytest.raises(BackendError, match=r"ca\.pem"):
        address.tls.context()


def test_ssh_runs_the_docker_command_line_over_there() -> None:
    command = find_address({"DOCKER_HOST": "ssh://me@far:2222/run/d.sock"}).ssh_command()
    assert command[0] == "ssh" and command[-2:] == ["system", "dial-stdio"]
    assert command[-11:-2] == ["-l", "me", "-p", "2222", "--", "far", "docker", "--host", "unix:///run/d.sock"]


def test_the_text_of_an_address_holds_no_credentials() -> None:
    assert "secret" not in find_address({"DOCKER_HOST": "ssh://me:secret@far"}).text
    assert "secret" not in find_address({"DOCKER_HOST": "tcp://me:secret@far"}).text


@pytest.mark.parametrize("host", ["http://x", "npipe:////./pipe/docker", "unix://", "tcp://h:99999", "nonsense", "ssh://"])
def test_an_address_that_cannot_be_used_is_an_error_that_shows_it(host: str) -> None:
    with pytest.raises(BackendError, match="address"):
        find_address({"DOCKER_HOST": host})
