"""network=true reaches the internet (a stand-in that root can make), never other sandboxes, the host, private ranges or metadata."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.client import Api
from tests.support.docker import Docker
from tests.support.waiting import eventually

pytestmark = pytest.mark.needs("engine", "kernel", "root")

INTERNET, INTERNET_GATEWAY = "11.22.33.2", "11.22.33.1"
METADATA = "169.254.169.254"
TRY = """
import socket,sys
for a in sys.argv[1:]:
    host,port=a.rsplit(":",1)
    try: socket.create_connection((host,int(port)),3).close(); print(a)
    except OSError: pass
"""
SERVE = "import socket,sys\ns=socket.create_server((sys.argv[1],int(sys.argv[2])))\nprint('up',flush=True)\nwhile True: s.accept()[0].close()"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@contextmanager
def listener(host: str, port: int) -> Iterator[int]:
    """A TCP server on the machine itself."""
    server = socket.create_server((host, port))

    def accept() -> None:
        while True:
            try:
                server.accept()[0].close()
            except OSError:
                return

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield int(server.getsockname()[1])
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(5)


@pytest.fixture(scope="module")
def internet() -> Iterator[str]:
    """A host behind the machine with a public address, as the internet's stand-in: host:port."""
    name = f"asb{os.getpid()}"[:12]
    ip("netns", "add", name)
    try:
        ip("link", "add", f"{name}h", "type", "veth", "peer", "name", f"{name}n")
        ip("link", "set", f"{name}n", "netns", name)
        ip("addr", "add", f"{INTERNET_GATEWAY}/30", "dev", f"{name}h")
        ip("link", "set", f"{name}h", "up")
        ip("-n", name, "addr", "add", f"{INTERNET}/30", "dev", f"{name}n")
        for device in (f"{name}n", "lo"):
            ip("-n", name, "link", "set", device, "up")
        ip("-n", name, "route", "add", "default", "via", INTERNET_GATEWAY)
        server = subprocess.Popen(["ip", "netns", "exec", name, sys.executable, "-c", SERVE, INTERNET, "8000"], stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None and server.stdout.readline() == b"up\n"
            yield f"{INTERNET}:8000"
        finally:
            server.kill()
            server.communicate(timeout=10)
    finally:
        subprocess.run(["ip", "link", "del", f"{name}h"], check=False, capture_output=True, timeout=10)
        ip("netns", "del", name)


@pytest.mark.behaviour("NET-001")
def test_with_network_only_the_internet_answers(api: Api, docker: Docker, internet: str) -> None:
    one, two = api.new(network=True), api.new(network=True)["id"]
    assert one["network"] is True
    networks = docker.inspect(two)["NetworkSettings"]["Networks"]
    assert set(networks) == {"agent-sandbox-net"}
    facts = networks["agent-sandbox-net"]
    api.sh(
        two,
        "setsid python3 -c 'import socket\ns=socket.create_server((\"0.0.0.0\",8001))\nwhile True: s.accept()' >/dev/null 2>&1 & sleep 0.5",
    )
    assert api.sh(two, ["python3", "-c", TRY, "127.0.0.1:8001"]) == "127.0.0.1:8001\n"
    with ExitStack() as stack:
        ip("addr", "add", f"{METADATA}/32", "dev", "lo")
        stack.callback(ip, "addr", "del", f"{METADATA}/32", "dev", "lo")
        metadata = stack.enter_context(listener(METADATA, 0))
        everywhere = stack.enter_context(listener("0.0.0.0", 0))
        targets = [
            internet,
            f"{METADATA}:{metadata}",
            f"{facts['IPAddress']}:8001",
            f"{facts['Gateway']}:{everywhere}",
            f"172.17.0.1:{everywhere}",
            *(f"{address}:{everywhere}" for address in machine_addresses()),
            "100.100.100.200:80",
            "10.0.0.1:443",
            "192.168.0.1:80",
        ]
        assert api.sh(one["id"], ["python3", "-c", TRY, *targets], timeout_seconds=60).split() == [internet]


def machine_addresses() -> list[str]:
    """The machine's own non-loopback IPv4 addresses, by asking the routing table which it would use."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return []
        return [str(probe.getsockname()[0])]


@pytest.mark.behaviour("NET-002")
def test_without_network_not_even_the_internet_answers(api: Api, room: str, internet: str) -> None:
    assert api.sh(room, ["python3", "-c", TRY, internet]) == ""


@pytest.mark.behaviour("NET-003")
def test_the_rules_are_there_again_after_the_sandbox_came_back(api: Api, docker: Docker, internet: str) -> None:
    box = api.new(network=True)["id"]
    docker.container(box).kill()
    eventually(lambda: api.sandbox(box)["incarnation"] == 2 and api.sandbox(box)["status"] == "running", within=30, why="it is back")
    with listener("0.0.0.0", 0) as port:
        gateway = docker.inspect(box)["NetworkSettings"]["Networks"]["agent-sandbox-net"]["Gateway"]
        assert api.sh(box, ["python3", "-c", TRY, internet, f"{gateway}:{port}"]).split() == [internet]


@pytest.mark.behaviour("NET-004")
def test_a_fork_may_add_network_and_a_sandbox_with_it_has_no_more_rights(api: Api, room: str, internet: str) -> None:
    fork = api.fork(api.snap(room)["id"], network=True)
    assert fork["network"] is True
    assert api.sh(fork["id"], ["python3", "-c", TRY, internet]).split() == [internet]
    status = api.sh(fork["id"], "cat /proc/self/status /proc/1/status | grep -E 'CapEff|CapBnd' | sort -u")
    assert set(status.split()) == {"CapEff:", "CapBnd:", "0000000000000000"}
    assert api.run(fork["id"], "python3 -c 'import socket; socket.socket(socket.AF_INET,socket.SOCK_RAW,1)'")["exit_code"] != 0
