"""Channels into sandboxes: `sandbox-init connect` run by the engine's exec, its input and output carried on the event loop.

Opening one costs a process start (50-70 ms), so the first one of a new sandbox is opened while its create is being answered, and kept for
its first command. That the guest serves is known without it: PID 1 says so on its standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import httpcore
from agent_sandbox_core import hardening
from agent_sandbox_core.channel import CHANNEL_ERRORS, Channel, Request
from agent_sandbox_core.errors import BackendError, ChannelError, SandboxError

from .channel import ExecStream, exec_config
from .client import EngineClient
from .faults import FAULTS, translate

logger = logging.getLogger(__name__)

ANSWER: Final = b"HTTP/1."
"""How everything begins that a guest says; anything else is the engine's own error."""
READY: Final = b"ready\n"
"""What PID 1 prints when it serves."""
SAY_SECONDS: Final = 2.0
"""How long that is waited for before a channel is tried instead: an older sandbox-init says nothing."""
OPEN_SECONDS: Final = 10.0
HEALTH_SECONDS: Final = 5.0
READY_SECONDS: Final = 30.0
FIRST_PAUSE_SECONDS: Final = 0.01
LONGEST_PAUSE_SECONDS: Final = 0.5
WARM_SECONDS: Final = 60.0
HEALTH: Final = Request("GET", "/v1/health", idempotent=True, seconds=HEALTH_SECONDS)
OK: Final = 200


class Bridges:
    """Opens channels; holds those that wait for their first use."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._warm: dict[str, tuple[asyncio.Task[ExecStream], asyncio.TimerHandle]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Closes the channels that nobody took."""
        for sandbox_id in list(self._warm):
            self.drop_warm(sandbox_id)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def open(self, container: str) -> ExecStream:
        """A fresh channel into a container. ChannelError when there is none to be had."""
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                return await self._exec(container)
        except BackendError as error:
            raise ChannelError(error.message) from error
        except TimeoutError as error:
            raise ChannelError(translate("opening a channel to the sandbox", self._client.address.text, error).message) from error

    async def _exec(self, container: str) -> ExecStream:
        doing = "opening a channel to the sandbox"
        create = await self._client.path(f"/containers/{container}/exec")
        connection = await self._client.connect(doing)
        try:
            made = await connection.call(doing, "POST", create, exec_config(hardening.GUEST_CONNECT))
            start = await self._client.path(f"/exec/{made['Id']}/start")
            first = await connection.upgrade(doing, start, {"Detach": False, "Tty": False})
        except BaseException as error:
            await connection.wire.aclose()
            if isinstance(error, FAULTS):
                raise translate(doing, self._client.address.text, error) from error
            raise
        return ExecStream(connection.wire, first=first, expect=ANSWER)

    async def attach(self, container: str) -> ExecStream:
        """The output of a container's PID 1 from its first byte on, when it is called before the start."""
        doing = "attaching to the sandbox"
        target = await self._client.path(f"/containers/{container}/attach?stream=1&stdout=1&stderr=1")
        connection = await self._client.connect(doing)
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                first = await connection.upgrade(doing, target, None)
        except BaseException as error:
            await connection.wire.aclose()
            if isinstance(error, FAULTS):
                raise translate(doing, self._client.address.text, error) from error
            raise
        return ExecStream(connection.wire, first=first)

    async def wait_ready(self, container: str, why_dead: Callable[[], Awaitable[str | None]]) -> ExecStream:
        """The first channel over which the guest answers, within 30 s. `why_dead` says why the container has ended, None while it runs."""
        pause = FIRST_PAUSE_SECONDS
        problem = "it was not tried"
        try:
            async with asyncio.timeout(READY_SECONDS):
                while True:
                    try:
                        stream = await self.open(container)
                        if await answers(stream):
                            return stream
                        problem = "the guest did not answer as its API says"
                    except CHANNEL_ERRORS as error:
                        problem = str(error) or type(error).__name__
                    dead = await why_dead()
                    if dead is not None:
                        raise BackendError(f"the sandbox ended while it was started: {dead}")
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
        except TimeoutError as error:
            raise BackendError(f"the sandbox was started, but its guest did not answer within {READY_SECONDS:.0f} s: {problem}") from error

    async def is_alive(self, container: str) -> bool:
        """Whether the guest answers now over a channel of its own."""
        stream: ExecStream | None = None
        try:
            stream = await self.open(container)
            return await answers(stream)
        except CHANNEL_ERRORS:
            return False
        finally:
            if stream is not None:
                await stream.aclose()

    def keep_warm(self, sandbox_id: str, opening: Coroutine[Any, Any, ExecStream]) -> None:
        """Opens a channel for the sandbox's first user, and holds it for a minute."""
        self.drop_warm(sandbox_id)
        loop = asyncio.get_running_loop()
        self._warm[sandbox_id] = (loop.create_task(opening), loop.call_later(WARM_SECONDS, self.drop_warm, sandbox_id))

    async def take_warm(self, sandbox_id: str) -> ExecStream | None:
        """The held channel, when there is one that lives; waits while it is being opened."""
        task, timer = self._warm.pop(sandbox_id, (None, None))
        if task is None or timer is None:
            return None
        timer.cancel()
        try:
            stream = await task
        except (SandboxError, *FAULTS) as error:
            logger.debug("the first channel of the sandbox %s did not open: %s", sandbox_id, error)
            return None
        except asyncio.CancelledError:
            self._close_later(task)
            raise
        if stream.get_extra_info("is_readable"):
            await stream.aclose()
            return None
        return stream

    def drop_warm(self, sandbox_id: str) -> None:
        """Closes the held channel, when there is one."""
        task, timer = self._warm.pop(sandbox_id, (None, None))
        if task is not None and timer is not None:
            timer.cancel()
            self._close_later(task)

    def _close_later(self, task: asyncio.Task[ExecStream]) -> None:
        closing = asyncio.get_running_loop().create_task(close_when_open(task))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


async def close_when_open(task: asyncio.Task[ExecStream]) -> None:
    """Ends a channel that is open or being opened."""
    task.cancel()
    for opened in await asyncio.gather(task, return_exceptions=True):
        if isinstance(opened, ExecStream):
            await opened.aclose()


async def says_ready(output: ExecStream) -> bool:
    """Waits until PID 1 says that it serves; False when it ends instead, its complaint is in the stream then."""
    said = b""
    try:
        while READY not in said:
            data = await output.read(1024)
            if not data:
                return False
            said = (said + data)[-len(READY) * 2 :]
    except httpcore.ReadError:
        return False
    return True


async def answers(stream: ExecStream) -> bool:
    """Whether a guest is at the other end. The stream is closed when there is none, else it is idle and can be used."""
    try:
        answer = await Channel(stream).exchange(HEALTH)
    except BaseException:
        with contextlib.suppress(OSError):
            await stream.aclose()
        raise
    if answer.status != OK:
        await stream.aclose()
    return answer.status == OK
