"""The guest of the memory engine, and the machine behind it: files, running commands, a boot id."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

from agent_sandbox_core.decoding import OutputCollector, TextDecoder
from agent_sandbox_core.errors import BackendError, Conflict, InvalidRequest, OutcomeUnknown, PayloadTooLarge, SandboxError, Unavailable
from agent_sandbox_core.interfaces import FileBody, GuestFile, RestoreResult
from agent_sandbox_core.models import Command, ExecResult, ExitEvent, OutputEvent, StreamEvent
from agent_sandbox_core.names import new_guest_id
from agent_sandbox_core.paths import show_path
from agent_sandbox_core.snapshots import TarInspector

from .archive import read_archive, write_archive
from .programs import BUILT_IN, Call, Output, Program
from .shell import run_script, run_shell
from .tree import Tree, describe

CHUNK: Final = 1 << 16
KILLED: Final = 137


class Machine:
    """The inside of one sandbox. `dead` says why it is none any more."""

    def __init__(self, env: Mapping[str, str], programs: Mapping[str, Program]) -> None:
        self.tree = Tree()
        self.boot_id = new_guest_id()
        self.dead: str | None = None
        self.restoring = False
        self._env = {"HOME": "/workspace", "PATH": "/usr/bin:/bin", **env}
        self._programs = {**BUILT_IN, "sh": run_shell, **programs}
        self._running: dict[asyncio.Task[int], Callable[[SandboxError], None]] = {}

    def start(self, command: Command, out: Output, err: Output, on_lost: Callable[[SandboxError], None]) -> asyncio.Task[int]:
        """Starts a command as a task that gives its exit code; `on_lost` hears why when the machine ends it."""
        place, node = self._workdir(command.workdir)
        if node != "directory":
            raise InvalidRequest(f"the workdir {command.workdir} is no directory")
        argv = ["sh"] if isinstance(command.command, str) else command.command
        call = Call(argv, {**self._env, **command.env, "PWD": command.workdir}, place, self.tree, self._programs, out, err)
        work = run_script(call, command.command) if isinstance(command.command, str) else call.run(command.command)
        task = asyncio.create_task(work)
        self._running[task] = on_lost
        task.add_done_callback(lambda ended: self._running.pop(ended, None))
        return task

    def end_all(self, what: str) -> None:
        """Ends every command; their outcome is unknown."""
        for task, on_lost in [*self._running.items()]:
            on_lost(OutcomeUnknown(f"{what} while the command ran: it no longer runs, and how it ended is unknown"))
            task.cancel()

    def reboot(self) -> None:
        """A new boot: no command runs, /tmp is empty."""
        self.boot_id = new_guest_id()
        self.tree.replace(self.tree.workspace)

    @property
    def processes(self) -> int:
        """How many commands run."""
        return len(self._running)

    def _workdir(self, workdir: str) -> tuple[bytes, str]:
        try:
            place, node = self.tree.existing(workdir.encode())
        except SandboxError as error:
            raise InvalidRequest(f"the workdir {workdir} cannot be used: {error.message}") from error
        return place.path, node.type


class MemoryGuest:
    """A Guest over a Machine."""

    def __init__(self, machine: Callable[[], Machine]) -> None:
        self._find = machine
        self._closed = False

    def _machine(self) -> Machine:
        if self._closed:
            raise Unavailable("the connection to the sandbox is closed here: try again")
        machine = self._find()
        if machine.dead is not None:
            raise BackendError(f"the sandbox does not answer: {machine.dead}")
        if machine.restoring:
            raise Conflict("a restore holds the sandbox: try again when it is done")
        return machine

    async def run(self, command: Command, *, max_output_bytes: int) -> ExecResult:
        """Runs a command to its end; cancelling the call ends it."""
        collector = OutputCollector(max_output_bytes)

        async def out(data: bytes) -> None:
            collector.add(data, error=False)

        async def err(data: bytes) -> None:
            collector.add(data, error=True)

        code, timed_out, duration = await self._follow(command, out, err)
        stdout, stderr = collector.text()
        return ExecResult(stdout=stdout, stderr=stderr, exit_code=code, timed_out=timed_out, truncated=collector.truncated, duration_ms=duration)

    async def stream(self, command: Command, *, on_start: Callable[[], None] | None = None) -> AsyncGenerator[StreamEvent, None]:
        """Events as they come, the ExitEvent last; closing it ends the command."""
        queue: asyncio.Queue[tuple[bool, bytes] | None] = asyncio.Queue(16)
        decoders = {False: TextDecoder(), True: TextDecoder()}

        async def out(data: bytes) -> None:
            await queue.put((False, data))

        async def err(data: bytes) -> None:
            await queue.put((True, data))

        async def follow() -> tuple[int, bool, int]:
            try:
                return await self._follow(command, out, err, on_start)
            finally:
                await queue.put(None)

        task = asyncio.create_task(follow())
        try:
            while (item := await queue.get()) is not None:
                error, data = item
                if text := decoders[error].decode(data):
                    yield OutputEvent(type="stderr" if error else "stdout", data=text)
            code, timed_out, duration = await task
            for error, decoder in decoders.items():
                if tail := decoder.finish():
                    yield OutputEvent(type="stderr" if error else "stdout", data=tail)
            yield ExitEvent(exit_code=code, timed_out=timed_out, duration_ms=duration)
        finally:
            if not task.done():
                task.cancel()
                while not queue.empty():
                    queue.get_nowait()
                await asyncio.wait({task})

    async def _follow(self, command: Command, out: Output, err: Output, on_start: Callable[[], None] | None = None) -> tuple[int, bool, int]:
        """Exit code, whether it timed out, and milliseconds."""
        lost: list[SandboxError] = []
        begun = time.monotonic()
        task = self._machine().start(command, out, err, lost.append)
        if on_start is not None:
            on_start()
        try:
            done, _ = await asyncio.wait({task}, timeout=command.timeout_seconds)
        finally:
            if not task.done():
                task.cancel()
        duration = round((time.monotonic() - begun) * 1000)
        if not done:
            await asyncio.wait({task})
            return KILLED, True, duration
        if lost:
            raise lost[0]
        return task.result() & 0xFF, False, duration

    @contextlib.asynccontextmanager
    async def _read(self, path: bytes, start: int, end: int | None, max_bytes: int | None) -> AsyncIterator[FileBody]:
        place, node = self._machine().tree.read(path)
        size = node.size
        if max_bytes is not None and size > max_bytes:
            raise PayloadTooLarge(f"{show_path(path)} has {size} bytes; a file that is read here can have {max_bytes}")
        stop = size if end is None else min(end, size)
        if not 0 <= start <= stop:
            raise InvalidRequest(f"the range {start} to {end} is outside {show_path(path)}, which has {size} bytes")
        data = node.data

        async def chunks() -> AsyncIterator[bytes]:
            for at in range(start, stop, CHUNK):
                yield data[at : min(at + CHUNK, stop)]

        yield FileBody(describe(place.path, node), start, stop, chunks())

    def read_file(
        self, path: bytes, *, start: int = 0, end: int | None = None, max_bytes: int | None = None
    ) -> AbstractAsyncContextManager[FileBody]:
        """Opens a regular file."""
        return self._read(path, start, end, max_bytes)

    async def write_file(self, path: bytes, body: AsyncIterator[bytes], *, mode: int = 0o644, max_bytes: int | None = None) -> GuestFile:
        """Writes atomically, parents included; nothing is left when it fails."""
        self._machine()
        content = bytearray()
        async for chunk in body:
            content += chunk
            if max_bytes is not None and len(content) > max_bytes:
                raise PayloadTooLarge(f"the upload to {show_path(path)} is over {max_bytes} bytes")
        place = self._machine().tree.write(path, bytes(content), mode)
        assert place.node is not None
        return describe(place.path, place.node)

    async def stat(self, path: bytes) -> GuestFile:
        """The file, or the link, at `path`."""
        place, node = self._machine().tree.existing(path, follow=False)
        return describe(place.path, node)

    async def list_dir(self, path: bytes) -> Sequence[GuestFile]:
        """Entries in byte order of their names."""
        return self._machine().tree.list(path)

    async def make_dir(self, path: bytes, *, mode: int = 0o755) -> GuestFile:
        """Makes a directory, parents included."""
        place = self._machine().tree.make_dir(path, mode)
        assert place.node is not None
        return describe(place.path, place.node)

    async def remove(self, path: bytes, *, recursive: bool = False) -> None:
        """Removes a file, a link or a directory."""
        self._machine().tree.remove(path, recursive=recursive)

    async def move(self, source: bytes, target: bytes, *, overwrite: bool = False) -> GuestFile:
        """Renames."""
        place = self._machine().tree.move(source, target, overwrite=overwrite)
        assert place.node is not None
        return describe(place.path, place.node)

    async def archive(self, manifest: bytes) -> AsyncGenerator[bytes, None]:
        """The workspace as a tar, at one point in time."""
        for part in write_archive(self._machine().tree.workspace, manifest):
            yield part
            await asyncio.sleep(0)

    async def restore(
        self,
        body: AsyncIterator[bytes],
        *,
        bytes: int,  # noqa: A002 - the name of the guest API
        entries: int,
        max_bytes: int,
    ) -> RestoreResult:
        """Replaces the workspace and ends all commands; on any error nothing has changed."""
        machine = self._machine()
        machine.restoring = True
        try:
            inspector = TarInspector(max_bytes=max_bytes)
            content = bytearray()
            async for chunk in body:
                inspector.feed(chunk)
                content += chunk
            index = inspector.finish()
            workspace = read_archive(memoryview(content).tobytes())
        finally:
            machine.restoring = False
        machine.end_all("the sandbox was rolled back")
        machine.tree.replace(workspace)
        machine.reboot()
        return RestoreResult(machine.boot_id, index.entries, index.bytes)

    async def health(self) -> dict[str, object]:
        """What the guest API says, as far as there is any."""
        machine = self._machine()
        return {"version": "memory", "api": 1, "boot_id": machine.boot_id, "state": "ready", "processes": machine.processes}

    async def resources(self) -> dict[str, object]:
        """No figures: nothing is limited here."""
        return {"memory": None, "pids": None, "cpu": None, "workspace": None, "init": None}

    async def aclose(self) -> None:
        """Closes it; commands go on until their callers leave."""
        self._closed = True
