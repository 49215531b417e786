"""The first channel to a sandbox: whether sandbox-init answers, which version it is, and the start of spec.command.

A sandbox that does not answer holds up nobody: probes run beside the workers, each bounded, a limited number at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import httpcore
from agent_sandbox_core.channel import CHANNEL_ERRORS, Answer, Channel, Request
from agent_sandbox_core.errors import SandboxError
from agent_sandbox_core.hardening import WORKSPACE

from .seen import Probe
from .store import Key

logger = logging.getLogger(__name__)

AT_ONCE: Final = 64
GUEST_API: Final = 1
ERROR_STATUS: Final = 400
FIRST_RETRY_SECONDS: Final = 0.1
LAST_RETRY_SECONDS: Final = 10.0
COMMAND_WAIT_MS: Final = 50


@dataclass(frozen=True, slots=True)
class Question:
    """What a probe is about: one start of one pod's container, with its files in one state. Another question has another answer."""

    pod_name: str
    pod_uid: str
    incarnation: int
    marker: str
    command: tuple[str, ...]


@dataclass(slots=True)
class _Asked:
    question: Question
    probe: Probe
    task: asyncio.Task[None] | None


class GuestRefused(Exception):
    """sandbox-init answered, but not with what was hoped for."""


PROBE_ERRORS: Final[tuple[type[Exception], ...]] = (*CHANNEL_ERRORS, SandboxError, GuestRefused)

OpenChannel = Callable[[Key, str], Awaitable[httpcore.AsyncNetworkStream]]
"""Opens a channel to the pod of that name; the key's first part is its namespace."""


class Prober:
    """Asks sandboxes, each until it has answered once. `on_change(key)` is called when there is something new."""

    def __init__(self, open_channel: OpenChannel, on_change: Callable[[Key], None], *, seconds: float) -> None:
        self._open = open_channel
        self._on_change = on_change
        self._seconds = seconds
        self._asked: dict[Key, _Asked] = {}
        self._room = asyncio.Semaphore(AT_ONCE)

    def find(self, key: Key, question: Question) -> Probe | None:
        """What is known of exactly this."""
        asked = self._asked.get(key)
        return asked.probe if asked is not None and asked.question == question else None

    def start(self, key: Key, question: Question) -> Probe:
        """Asks, unless exactly this is being asked or answered already."""
        asked = self._asked.get(key)
        if asked is not None and asked.question == question:
            return asked.probe
        self.forget(key)
        task = asyncio.get_running_loop().create_task(self._ask(key, question))
        entry = _Asked(question, Probe("asking"), task)
        self._asked[key] = entry
        return entry.probe

    def forget(self, key: Key) -> None:
        """Nobody wants to know any more."""
        asked = self._asked.pop(key, None)
        if asked is not None and asked.task is not None:
            asked.task.cancel()

    async def aclose(self) -> None:
        """Ends all probes and waits for them."""
        tasks = [asked.task for asked in self._asked.values() if asked.task is not None]
        self._asked.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, key: Key, question: Question) -> None:
        failures = 0
        while True:
            try:
                async with self._room, asyncio.timeout(self._seconds):
                    probe = await self._talk(key, question)
            except PROBE_ERRORS as error:
                failures += 1
                text = str(error) or f"no answer within {self._seconds:.0f} s"
                probe = Probe("failed", failures=failures, message=text)
                logger.debug("no answer of %s/%s yet (try %d): %s", *key, failures, text)
            self._note(key, question, probe)
            if probe.state == "answered":
                return
            await asyncio.sleep(min(LAST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(failures - 1, 10)))

    def _note(self, key: Key, question: Question, probe: Probe) -> None:
        asked = self._asked.get(key)
        if asked is not None and asked.question == question:
            asked.probe = probe
            if probe.state == "answered":
                asked.task = None
            self._on_change(key)

    async def _talk(self, key: Key, question: Question) -> Probe:
        channel = Channel(await self._open(key, question.pod_name))
        try:
            health = await channel.exchange(Request("GET", "/v1/health"))
            found = _read(health)
            if found.get("api") != GUEST_API:
                raise GuestRefused(f"it speaks guest API {found.get('api')!r}, this operator {GUEST_API}")
            resources = _read(await channel.exchange(Request("GET", "/v1/resources")))
            if question.command:
                await self._start_command(channel, question, health.boot_id)
        finally:
            await channel.aclose()
        limit = (resources.get("pids") or {}).get("limit")
        return Probe("answered", version=str(found.get("version") or "") or None, pids_limit=limit if isinstance(limit, int) else None)

    async def _start_command(self, channel: Channel, question: Question, boot_id: str) -> None:
        """spec.command, as a background process under an id of its own for each boot: asked twice, it runs once."""
        name = hashlib.sha256(f"{question.pod_uid}/{boot_id}/command".encode()).hexdigest()[:32]
        body = json.dumps({"argv": list(question.command), "cwd": WORKSPACE}).encode()
        answer = await channel.exchange(Request("PUT", f"/v1/processes/{name}?wait_ms={COMMAND_WAIT_MS}", body, idempotent=True))
        ended = _read(answer).get("exit")
        if isinstance(ended, dict) and ended.get("reason") == "start_failed":
            raise GuestRefused(f"spec.command {question.command[0]!r} could not be started: {ended.get('message') or 'not found or not executable'}")


def _read(answer: Answer) -> dict[str, Any]:
    """The JSON of a good answer. What comes out of a sandbox is not to be trusted."""
    try:
        found = json.loads(answer.body)
    except ValueError as error:
        raise GuestRefused("it answered something that is no JSON") from error
    if not isinstance(found, dict):
        raise GuestRefused("it answered something that is no JSON object")
    if answer.status >= ERROR_STATUS:
        told = found.get("error")
        raise GuestRefused(str(told.get("message") if isinstance(told, dict) else told)[:500])
    return found
