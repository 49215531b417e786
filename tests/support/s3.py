"""A real S3 server for tests: moto's, as a process of its own, in memory.

It has an environment of its own too, made once and kept in the cache folder: what moto needs (python-dateutil below 3) and what the client of
Kubernetes needs (3 or newer) cannot be installed side by side.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.console import locked, run_logged
from tests.cluster.versions import cache_dir
from tests.support.waiting import eventually

REQUIREMENTS = Path(__file__).with_name("s3-requirements.txt")
INSTALL_SECONDS = 300


def interpreter() -> str:
    """The Python of that environment."""
    version = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()[:16]
    folder, log = cache_dir() / "s3-server" / version, cache_dir() / "logs" / "s3-server.log"
    done, python = folder / "done", folder / "bin" / "python"
    with locked(cache_dir() / "s3-server.lock", seconds=2 * INSTALL_SECONDS, what="the S3 server"):
        if not done.exists():
            venv.create(folder, clear=True, with_pip=True)
            command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement", str(REQUIREMENTS)]
            run_logged("the S3 server's packages", command, log, seconds=INSTALL_SECONDS)
            done.touch()
    return str(python)


@dataclass(slots=True)
class S3Server:
    """A server with one bucket, and the environment in which a client finds it."""

    port: int
    process: subprocess.Popen[bytes]
    bucket: str = "snapshots"

    @property
    def url(self) -> str:
        """A store in its bucket."""
        return f"s3://{self.bucket}/cluster-a"

    @property
    def environment(self) -> dict[str, str]:
        """As obstore reads it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nobody can connect for the block: its port is held by somebody who is silent; what it holds is kept."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Nobody answers any more; what it held is gone."""
        self.process.terminate()
        self.process.wait(20)

    def answers(self) -> bool:
        """Whether it is up; makes its bucket."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("PUT", f"/{self.bucket}")
            return connection.getresponse().status in {200, 409}
        except OSError:
            return False
        finally:
            connection.close()


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Runs one for the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [interpreter(), "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "PYTHON"))}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    server = S3Server(port, process)
    try:
        eventually(lambda: process.poll() is None and server.answers(), within=30, why="the S3 server answers")
        yield server
    finally:
        if process.poll() is None:
            server.stop()
