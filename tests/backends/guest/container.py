"""A container whose PID 1 is the real sandbox-init, and channels to it through `docker exec -i`: no backend is involved."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpcore
from agent_sandbox_core.errors import ChannelError

ROOT = Path(__file__).resolve().parents[3]
INIT = "/opt/agent-sandbox/sandbox-init"


def guest_binary() -> Path:
    """The guest for the engine's machine, which is taken to be this one."""
    arch = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    folder = os.environ.get("AGENT_SANDBOX_INIT_DIR") or ROOT / "api/agent_sandbox_core/_guest"
    return Path(folder) / f"sandbox-init-linux-{arch}"


def docker(*arguments: str, check: bool = True) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=check, timeout=60).stdout.strip()


class PipeStream(httpcore.AsyncNetworkStream):
    """The pipes of `docker exec -i … connect` as one stream."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self._in, self._out = process, process.stdin, process.stdout

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return await self._out.read(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            self._in.write(buffer)
            await self._in.drain()
        except (ConnectionError, RuntimeError) as error:
            raise httpcore.WriteError(str(error)) from error

    async def aclose(self) -> None:
        # Ends `docker exec` too, which may be stuck in writing what nobody reads.
        self.process._transport.close()  # type: ignore[attr-defined]
        await self.process.wait()

    def get_extra_info(self, info: str) -> Any:
        if info != "is_readable":
            return None
        return self._out.at_eof() or bool(self._out._buffer) or self.process.returncode is not None  # type: ignore[attr-defined]


class GuestContainer:
    """One running container."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def open_channel(self) -> httpcore.AsyncNetworkStream:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "docker", "exec", "-i", self.name, INIT, "connect", stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, limit=1 << 20
        )
        await asyncio.sleep(0)
        if process.returncode is not None:
            raise ChannelError(f"{self.name} does not run")
        return PipeStream(process)

    def restart(self) -> None:
        docker("kill", self.name)
        docker("start", self.name)

    def kill(self) -> None:
        docker("kill", self.name)


@contextmanager
def running_guest(*options: str) -> Iterator[GuestContainer]:
    name = f"agent-sandbox-test-guest-{uuid.uuid4().hex[:8]}"
    hardening = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none", "--user=1000:1000", "--pids-limit=512"]
    room = [
        "--tmpfs=/tmp:exec,mode=1777",
        "--tmpfs=/workspace:exec,uid=1000,gid=1000,mode=755",
        f"--mount=type=bind,readonly,src={guest_binary()},dst={INIT}",
    ]
    image = os.environ["AGENT_SANDBOX_TEST_IMAGE"]
    docker(
        "run",
        "-d",
        "--name",
        name,
        "--label=agent-sandbox-test=guest",
        "--env=HOME=/workspace",
        *hardening,
        *room,
        *options,
        "--entrypoint",
        INIT,
        image,
        "serve",
    )
    try:
        yield GuestContainer(name)
    finally:
        docker("rm", "-f", "-v", name, check=False)
