"""ChannelGuest: what can be done in one running sandbox, over at most three channels to its sandbox-init."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from agent_sandbox_core.channel import ChannelBudget, Request
from agent_sandbox_core.interfaces import FileBody, GuestFile, OpenChannel, RestoreResult
from agent_sandbox_core.models import Command, ExecResult, StreamEvent

from .answers import parse_json
from .calls import Explain, GuestCalls
from .files import Files
from .processes import ExitReason, Processes


class ChannelGuest:
    """The Guest over a channel. Make it inside a running event loop; it opens nothing before the first call.

    `budget` is shared by all guests of a process: its cap and its figures. `explain` turns a dead channel into the truth (see Explain).
    `on_exit_reason(reason, message)` hears how each command ended, so that a backend can record an "oom".
    """

    def __init__(
        self,
        open_channel: OpenChannel,
        *,
        budget: ChannelBudget | None = None,
        explain: Explain | None = None,
        on_exit_reason: ExitReason | None = None,
    ) -> None:
        budget = budget or ChannelBudget()
        self._calls = GuestCalls(open_channel, budget, explain, self._boot_changed)
        self._processes = Processes(self._calls, open_channel, budget, on_exit_reason)
        self._files = Files(self._calls)

    @property
    def boot_id(self) -> str:
        """The boot that answered last, empty before the first call."""
        return self._calls.boot_id

    async def run(self, command: Command, *, max_output_bytes: int) -> ExecResult:
        """Runs a command to its end; cancelling the call kills its whole process tree."""
        return await self._processes.run(command, max_output_bytes=max_output_bytes)

    def stream(self, command: Command, *, on_start: Callable[[], None] | None = None) -> AsyncIterator[StreamEvent]:
        """Events as they come, the ExitEvent last; closing the iterator kills the tree. `on_start` is called once the command has started."""
        return self._processes.stream(command, on_start=on_start)

    def read_file(
        self, path: bytes, *, start: int = 0, end: int | None = None, max_bytes: int | None = None
    ) -> AbstractAsyncContextManager[FileBody]:
        """Opens a regular file; PayloadTooLarge over max_bytes, NotFound, InvalidRequest for a directory or a range outside it."""
        return self._files.read(path, start, end, max_bytes)

    async def write_file(self, path: bytes, body: AsyncIterator[bytes], *, mode: int = 0o644, max_bytes: int | None = None) -> GuestFile:
        """Writes atomically, parents included; when `body` raises or max_bytes is passed, nothing is left."""
        return await self._files.write(path, body, mode, max_bytes)

    async def stat(self, path: bytes) -> GuestFile:
        """The file, or the link, at `path`."""
        return await self._files.stat(path)

    async def list_dir(self, path: bytes) -> Sequence[GuestFile]:
        """Entries in byte order of their names."""
        return await self._files.list_dir(path)

    async def make_dir(self, path: bytes, *, mode: int = 0o755) -> GuestFile:
        """Makes a directory, parents included; one that exists is fine."""
        return await self._files.make_dir(path, mode)

    async def remove(self, path: bytes, *, recursive: bool = False) -> None:
        """Removes a file, a link or an empty directory; a whole tree with `recursive`."""
        await self._files.remove(path, recursive=recursive)

    async def move(self, source: bytes, target: bytes, *, overwrite: bool = False) -> GuestFile:
        """Renames `source`; Conflict when `target` exists and `overwrite` is not given."""
        return await self._files.move(source, target, overwrite=overwrite)

    def archive(self, manifest: bytes) -> AsyncIterator[bytes]:
        """The workspace as a plain tar; the sandbox is frozen until the iterator ends or is closed (use contextlib.aclosing)."""
        return self._files.archive(manifest)

    async def restore(
        self,
        body: AsyncIterator[bytes],
        *,
        bytes: int,  # noqa: A002 - the name of the guest API
        entries: int,
        max_bytes: int,
    ) -> RestoreResult:
        """Replaces the workspace by such a tar and ends all processes; on any error the old state is back."""
        return await self._files.restore(body, bytes, entries, max_bytes)

    async def health(self) -> dict[str, object]:
        """Version, boot id and state of the guest."""
        return await self._calls.health()

    async def resources(self) -> dict[str, object]:
        """Memory, pids, CPU and workspace figures; what cannot be read is None."""
        return parse_json((await self._calls.call(Request("GET", "/v1/resources", idempotent=True))).body)

    async def shutdown(self) -> None:
        """Ends everything in the sandbox, PID 1 last."""
        await self._calls.call(Request("POST", "/v1/shutdown", idempotent=True))

    async def aclose(self) -> None:
        """Closes all channels. Commands that still run are reported as OutcomeUnknown here and end by their lease there."""
        self._processes.disown()
        await self._calls.aclose()
        await self._processes.aclose()

    def _boot_changed(self, boot: str) -> None:
        self._processes.boot_changed(boot)
