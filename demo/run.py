"""The main job on real input: a small Python project in a sandbox, tested, broken, rolled back, and forked into two variants.

Starts a facade of its own on a free port, works only through the HTTP API, prints what happened, and removes everything it made.
Exits with 1 as soon as something is not as it should be.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).resolve().parent
TESTS = ["python3", "-m", "unittest", "discover", "-v"]
MEASURE = (
    "import time, textstats; text = open('sample.txt').read() * 200; start = time.perf_counter(); "
    "top = textstats.most_common(text); print(f'{(time.perf_counter() - start) * 1000:.0f} ms', top)"
)
SAMPLE = "The quick brown fox doesn't jump; the lazy dog doesn't either. The end.\n" * 50


def say(text: str) -> None:
    """One line of the story."""
    print(text, flush=True)


class Story:
    """One client of the API; every call is timed and checked."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def call(self, method: str, path: str, **request: Any) -> tuple[httpx.Response, float]:
        """The answer and its milliseconds; ends the demo with the error's own message when the call fails."""
        start = time.perf_counter()
        answer = self.client.request(method, f"/v1{path}", **request)
        if answer.is_error:
            raise SystemExit(f"{method} {path} failed with {answer.status_code}: {answer.text}")
        return answer, (time.perf_counter() - start) * 1000

    def create(self) -> str:
        """A fresh sandbox with the server's defaults."""
        answer, took = self.call("POST", "/sandboxes", json={})
        sandbox = answer.json()
        say(f"created      {sandbox['id']} from {sandbox['image']} in {took:.0f} ms")
        return str(sandbox["id"])

    def upload(self, sandbox: str) -> None:
        """Writes the project, file by file."""
        files = sorted((HERE / "project").rglob("*.py"))
        start = time.perf_counter()
        for path in files:
            self.put(sandbox, path.relative_to(HERE / "project").as_posix(), path.read_bytes())
        self.put(sandbox, "sample.txt", SAMPLE.encode())
        say(f"wrote        {len(files) + 1} files in {(time.perf_counter() - start) * 1000:.0f} ms")

    def put(self, sandbox: str, path: str, content: bytes) -> None:
        """Writes one file."""
        self.call("PUT", f"/sandboxes/{sandbox}/files", params={"path": path}, content=content)

    def run(self, sandbox: str, command: str | list[str]) -> tuple[dict[str, Any], float]:
        """Runs a command to its end."""
        answer, took = self.call("POST", f"/sandboxes/{sandbox}/exec", json={"command": command})
        return answer.json(), took

    def test(self, sandbox: str, *, passes: bool) -> None:
        """Runs the project's tests, which must pass, or must fail."""
        result, took = self.run(sandbox, TESTS)
        summary = result["stderr"].strip().splitlines()[-1] if result["stderr"].strip() else "no output"
        if (result["exit_code"] == 0) != passes:
            raise SystemExit(f"the tests in {sandbox} ended with {result['exit_code']}, which was not expected:\n{result['stderr']}")
        say(f"tested       {sandbox}: {summary} in {took:.0f} ms")

    def snapshot(self, sandbox: str) -> str:
        """Keeps the workspace."""
        answer, took = self.call("POST", f"/sandboxes/{sandbox}/snapshots", json={"name": "tests pass"})
        snapshot = answer.json()
        say(f"snapshot     {snapshot['id']}: {snapshot['size_bytes']} bytes in {took:.0f} ms")
        return str(snapshot["id"])

    def rollback(self, sandbox: str, snapshot: str) -> None:
        """Brings the workspace back."""
        _, took = self.call("POST", f"/sandboxes/{sandbox}/rollback", json={"snapshot_id": snapshot})
        say(f"rolled back  {sandbox} in {took:.0f} ms")

    def fork(self, snapshot: str) -> str:
        """A new sandbox that starts with the snapshot's files."""
        answer, took = self.call("POST", f"/snapshots/{snapshot}/fork")
        sandbox = str(answer.json()["id"])
        say(f"forked       {sandbox} in {took:.0f} ms")
        return sandbox

    def delete(self, sandbox: str) -> None:
        """Removes a sandbox."""
        self.call("DELETE", f"/sandboxes/{sandbox}")


def free_port() -> int:
    """A loopback port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def facade() -> Iterator[httpx.Client]:
    """A facade of the demo's own, and a client of it."""
    port, key = free_port(), secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="agent-sandbox-demo-") as data:
        settings = {"AGENT_SANDBOX_PORT": str(port), "AGENT_SANDBOX_API_KEYS": key, "AGENT_SANDBOX_DATA_DIR": data}
        log_path = Path(data) / "serve.log"
        with log_path.open("wb") as log:
            command = [str(Path(sys.executable).parent / "sandboxctl"), "serve", "--backend", "docker"]
            server = subprocess.Popen(command, env=os.environ | settings, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {key}"}, timeout=120)
        try:
            wait_until_healthy(client, server, log_path)
            yield client
        finally:
            client.close()
            server.terminate()
            server.wait(30)


def wait_until_healthy(client: httpx.Client, server: subprocess.Popen[bytes], log: Path) -> None:
    """Waits at most 60 s for /healthz; shows the server's log when it does not come."""
    deadline = time.monotonic() + 60
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if client.get("/healthz").is_success:
                return
        time.sleep(0.1)
    raise SystemExit(f"the facade did not come up; its log:\n{log.read_text(errors='replace')[-4000:]}")


def main() -> None:
    """The story, from the first sandbox to the last."""
    with facade() as client, contextlib.ExitStack() as cleanup:
        story = Story(client)
        sandbox = story.create()
        cleanup.callback(story.delete, sandbox)
        story.upload(sandbox)
        story.test(sandbox, passes=True)
        snapshot = story.snapshot(sandbox)
        cleanup.callback(story.call, "DELETE", f"/snapshots/{snapshot}")

        story.run(sandbox, "sed -i 's/word.lower()/word/' textstats/count.py && rm textstats/__main__.py && echo junk > notes.txt")
        say(f"broke        {sandbox}: an edit that looked harmless")
        story.test(sandbox, passes=False)
        story.rollback(sandbox, snapshot)
        story.test(sandbox, passes=True)

        for variant in ("variant_split.py", "variant_lower_first.py"):
            fork = story.fork(snapshot)
            cleanup.callback(story.delete, fork)
            story.put(fork, "textstats/count.py", (HERE / variant).read_bytes())
            story.test(fork, passes=True)
            result, _ = story.run(fork, ["python3", "-c", MEASURE])
            say(f"measured     {variant}: {result['stdout'].strip()}")
        result, _ = story.run(sandbox, ["python3", "-c", MEASURE])
        say(f"measured     the original: {result['stdout'].strip()}")
        _, took = story.run(sandbox, ["true"])
        say(f"for scale    one exec of `true`: {took:.1f} ms")
    say("removed      every sandbox and the snapshot")


if __name__ == "__main__":
    main()
