"""A facade as users run it: a process of its own (`sandboxctl serve`), a free port, its own data folder, settings by environment."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from .client import Api
from .waiting import eventually

SERVE = (sys.executable, "-m", "agent_sandbox_client", "serve")
START_SECONDS = 60.0
STOP_SECONDS = 20.0
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agent-sandbox"
# The suite's own settings must not leak into a facade under test, nor may a developer's.
FOREIGN = re.compile(r"AGENT_SANDBOX_")


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def clean_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without settings of a facade, plus `settings` (names without their prefix)."""
    environment = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    root = Path(__file__).resolve().parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root / "api"), *filter(None, [environment.get("PYTHONPATH")])])
    environment["PYTHONUNBUFFERED"] = "1"
    # Compiled modules are kept whatever the machine says: the suites start a hundred facades, and compiling is most of a start.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = str(CACHE / "pycache")
    return environment | {f"AGENT_SANDBOX_{name}": value for name, value in settings.items()}


@dataclass(frozen=True)
class Figures:
    """What the facade's process holds: open files, threads, resident and peak memory in bytes."""

    files: int
    threads: int
    rss: int
    peak: int


class StartFailed(AssertionError):
    """The facade ended before it was ready; holds its exit code and what it printed."""

    def __init__(self, code: int, output: str) -> None:
        super().__init__(f"sandboxctl serve ended with {code}:\n{output[-4000:]}")
        self.code = code
        self.output = output


class Facade:
    """One facade: start, stop, kill, restart on the same data folder and port."""

    def __init__(self, backend: str, data: Path, settings: Mapping[str, str] | None = None, *, key: str | None = None) -> None:
        self.backend = backend
        self.data = data
        self.key = key or f"test-key-{secrets.token_hex(12)}"
        self.port = free_port()
        self.settings = {"API_KEYS": self.key, "HOST": "127.0.0.1", "DATA_DIR": str(data), "LOG_LEVEL": "debug"} | dict(settings or {})
        self.log = data.parent / f"{data.name}.log"
        self.environment: dict[str, str] = {}
        """More for the process's environment, names as they are."""
        self.process: subprocess.Popen[bytes] | None = None
        self.api = Api(self.url, self.key)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> subprocess.Popen[bytes]:
        """Starts the process without waiting for it to be ready."""
        assert self.process is None or self.process.poll() is not None, "this facade runs already"
        environment = clean_environment(self.settings | {"PORT": str(self.port)}) | self.environment
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen([*SERVE, "--backend", self.backend], env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
        return self.process

    def start(self, within: float = START_SECONDS) -> Facade:
        """Starts the process and returns when /healthz answers; StartFailed when it ended instead."""
        process = self.launch()

        def answers() -> bool:
            code = process.poll()
            if code is not None:
                raise StartFailed(code, self.logs())
            try:
                return httpx.get(f"{self.url}/healthz", timeout=2).status_code == 200
            except httpx.TransportError:
                return False

        try:
            eventually(answers, within=within, why="/healthz answers")
        except StartFailed:
            raise
        except AssertionError as error:
            self.kill()
            raise AssertionError(f"{error}\n{self.logs()[-4000:]}") from None
        return self

    def refuse(self, within: float = START_SECONDS) -> str:
        """Starts a facade that must not come up; returns what it printed, its exit code having been non-zero."""
        process = self.launch()
        try:
            code = process.wait(within)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError("the facade came up, or hung, where it had to refuse its settings") from None
        assert code != 0, "a refused start must not exit with 0"
        return self.logs()

    def stop(self, within: float = STOP_SECONDS) -> int:
        """SIGTERM and wait: a graceful stop. Returns its exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(within)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"the facade did not stop within {within} s of SIGTERM:\n{self.logs()[-3000:]}") from None
        return self.process.returncode

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self.api.forget_connections()

    def restart(self) -> Facade:
        """Stops in an orderly way when it runs, and starts again: same data, port and key."""
        self.stop()
        self.api.forget_connections()
        return self.start()

    def logs(self) -> str:
        """Everything that the process printed so far, over all its starts."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def figures(self) -> Figures:
        """Open files, threads and memory, read from /proc."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return Figures(
            files=sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir()),
            threads=int(fields["Threads"]),
            rss=int(fields["VmRSS"].split()[0]) * 1024,
            peak=int(fields["VmHWM"].split()[0]) * 1024,
        )

    def reset_peak(self) -> None:
        """Makes `figures().peak` count from now."""
        assert self.process is not None
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics by `name{labels}`."""
        text = self.api.http.get("/metrics").text
        samples = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                samples[name] = float(value)
        return samples


def health_latency(url: str) -> float:
    """Seconds that one /healthz takes on a fresh connection."""
    begun = time.monotonic()
    answer = httpx.get(f"{url}/healthz", timeout=30)
    assert answer.status_code == 200
    return time.monotonic() - begun
