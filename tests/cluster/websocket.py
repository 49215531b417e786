"""pods/exec over a WebSocket, protocol v5.channel.k8s.io: what kubectl and our own channel speak, with nothing between test and API server."""

from __future__ import annotations

import base64
import json
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from tests.cluster.console import ClusterError
from tests.cluster.kubectl import Kubectl

PROTOCOL = Subprotocol("v5.channel.k8s.io")
STDIN, STDOUT, STDERR, ERROR, CLOSE = 0, 1, 2, 3, 255


@dataclass
class Outcome:
    """What a command left: its two outputs, and its exit code once the server has told it."""

    stdout: bytes = b""
    stderr: bytes = b""
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0, or what the server says; anything else the server says is an error, never a code."""
        if self.status.get("status") == "Success":
            return 0
        for cause in self.status.get("details", {}).get("causes", []):
            if cause.get("reason") == "ExitCode":
                return int(cause["message"])
        raise ClusterError(f"no exit code is known; the server said {self.status or 'nothing'}")


class Exec:
    """One command in a pod."""

    def __init__(self, connection: ClientConnection, seconds: float) -> None:
        self.connection = connection
        self.seconds = seconds
        self.protocol = connection.subprotocol
        self.ended = False

    def send(self, data: bytes) -> None:
        """Writes to its standard input."""
        self.connection.send(bytes([STDIN]) + data)

    def close_stdin(self) -> None:
        """Ends its standard input and nothing else: what version 5 of the protocol is for."""
        self.connection.send(bytes([CLOSE, STDIN]))

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """(channel, data) as they come, until the server closes."""
        while True:
            try:
                message = self.connection.recv(self.seconds)
            except TimeoutError:
                raise ClusterError(f"the command was silent for {self.seconds:.0f} s") from None
            if isinstance(message, str):
                raise ClusterError(f"a text frame, which the protocol does not have: {message[:200]}")
            if not message:
                continue
            self.ended = message[0] == ERROR
            yield message[0], message[1:]
            if self.ended:
                return

    def finish(self) -> Outcome:
        """Reads everything until the command's end."""
        outcome = Outcome()
        for channel, data in self.frames():
            if channel == STDOUT:
                outcome.stdout += data
            elif channel == STDERR:
                outcome.stderr += data
            elif channel == ERROR:
                outcome.status = json.loads(data)
        return outcome


def tls_of(cluster: dict[str, Any], user: dict[str, Any]) -> ssl.SSLContext:
    """Trust and identity of a kubeconfig. Python reads certificates of clients from files only."""
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode() if "certificate-authority-data" in cluster else None
    context = ssl.create_default_context(cadata=authority)
    if "client-certificate-data" in user:
        with tempfile.TemporaryDirectory() as work:
            certificate, key = Path(work) / "crt", Path(work) / "key"
            key.touch(mode=0o600)
            certificate.write_bytes(base64.b64decode(user["client-certificate-data"]))
            key.write_bytes(base64.b64decode(user["client-key-data"]))
            context.load_cert_chain(certificate, key)
    return context


@contextmanager
def exec_in(kubectl: Kubectl, pod: str, *argv: str, stdin: bool = False, seconds: float = 20) -> Iterator[Exec]:
    """Runs a command in a pod of kubectl's namespace; `seconds` bounds every silence."""
    view = json.loads(kubectl.say("config", "view", "--raw", "--minify", "--flatten", "--output=json"))
    cluster, user = view["clusters"][0]["cluster"], view["users"][0]["user"]
    if not user.keys() & {"client-certificate-data", "token"}:
        raise ClusterError("tests of pods/exec log in by certificate or token, and this kubeconfig's user has neither")
    headers = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
    server = urlsplit(cluster["server"])
    query = urlencode([("stdout", "true"), ("stderr", "true"), ("stdin", str(stdin).lower()), *(("command", word) for word in argv)])
    url = f"wss://{server.netloc}{server.path.rstrip('/')}/api/v1/namespaces/{kubectl.namespace}/pods/{pod}/exec?{query}"
    command: Exec | None = None
    try:
        with connect(
            url, ssl=tls_of(cluster, user), subprotocols=[PROTOCOL], additional_headers=headers, proxy=None, open_timeout=seconds, max_size=None
        ) as connection:
            command = Exec(connection, seconds)
            yield command
    except ConnectionClosed:
        # The server may drop the connection right behind its last frame, without a closing handshake. Before that frame it is a failure.
        if command is None or not command.ended:
            raise
