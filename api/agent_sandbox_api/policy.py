"""From requests to complete specs and commands: defaults filled in, every rule of the installation checked. Pure: no engine, no clock."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from agent_sandbox_core.errors import Forbidden, InvalidRequest
from agent_sandbox_core.models import Command, SandboxSpec

from .images import is_allowed, is_reference
from .schemas import CreateSandbox, ForkSnapshot, RunCommand
from .settings import PREFIX, Settings

MIN_CPUS = 0.01
"""The smallest share that the kernel's scheduler can enforce (1 ms in 100 ms)."""
MAX_ARGUMENT_BYTES = 131_071
"""One argument or environment entry: the kernel's MAX_ARG_STRLEN without the NUL."""
MAX_ARGUMENTS_BYTES = 3 << 20
"""More than any usual kernel takes for arguments and environment; below it the sandbox itself answers exactly."""
MAX_ENV_BYTES = 1 << 20
MAX_MODE = 0o777
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of one installation. `engine_cpus` gives the engine's CPUs, None when they are unknown."""

    settings: Settings
    engine_cpus: Callable[[], float | None]

    def spec(self, body: CreateSandbox) -> SandboxSpec:
        """The complete spec of a new sandbox."""
        settings = self.settings
        check_env(body.env)
        if (size := _env_bytes(body.env)) > MAX_ENV_BYTES:
            raise InvalidRequest(f"env has {size} bytes; a sandbox can have {MAX_ENV_BYTES}: write large values to a file")
        return self._check(
            SandboxSpec(
                image=body.image or settings.default_image,
                cpus=settings.default_cpus if body.cpus is None else body.cpus,
                memory_mb=body.memory_mb or settings.default_memory_mb,
                pids_limit=body.pids_limit or settings.default_pids_limit,
                network=body.network,
                read_only_rootfs=body.read_only_rootfs,
                env=body.env,
            )
        )

    def fork(self, source: SandboxSpec, body: ForkSnapshot) -> SandboxSpec:
        """The source's spec with the given changes; today's rules apply to all of it."""
        return self._check(source.model_copy(update=body.model_dump(exclude={"timeout_seconds"}, exclude_none=True)))

    def lifetime(self, seconds: int | None) -> timedelta:
        """How long a sandbox lives from now."""
        seconds = self.settings.default_timeout_seconds if seconds is None else seconds
        _at_most("timeout_seconds", seconds, self.settings.max_timeout_seconds)
        return timedelta(seconds=seconds)

    def command(self, body: RunCommand) -> Command:
        """A command as the guest takes it."""
        settings = self.settings
        seconds = settings.default_exec_timeout_seconds if body.timeout_seconds is None else body.timeout_seconds
        _at_most("timeout_seconds", seconds, settings.max_exec_timeout_seconds)
        _check_arguments(body.command, body.env)
        workdir = "/workspace" if body.workdir is None else body.workdir
        if not workdir or "\0" in workdir:
            raise InvalidRequest(f"the workdir {'holds a NUL' if workdir else 'is empty'}: name a directory, or leave it out for /workspace")
        return Command(command=body.command, env=body.env, workdir=workdir, timeout_seconds=seconds)

    def _check(self, spec: SandboxSpec) -> SandboxSpec:
        settings = self.settings
        if not is_reference(spec.image):
            raise InvalidRequest(f"the image {spec.image[:200]!r} is no image reference: write it like {settings.default_image}")
        if not is_allowed(spec.image, settings.allowed_images):
            raise Forbidden(f"the image {spec.image} is not allowed here; allowed: {', '.join(settings.allowed_images)} ({PREFIX}ALLOWED_IMAGES)")
        if spec.network and not settings.allow_network:
            raise Forbidden(f"network access is not allowed here ({PREFIX}ALLOW_NETWORK): create the sandbox with network=false")
        _at_most("cpus", spec.cpus, settings.max_cpus)
        _at_most("memory_mb", spec.memory_mb, settings.max_memory_mb)
        _at_most("pids_limit", spec.pids_limit, settings.max_pids_limit)
        if spec.cpus < MIN_CPUS:
            raise InvalidRequest(f"cpus {spec.cpus:g} is less than {MIN_CPUS}, the smallest share that can be enforced")
        have = self.engine_cpus()
        if have is not None and spec.cpus > have:
            raise InvalidRequest(f"cpus {spec.cpus:g} is more than the engine has ({have:g})")
        return spec


def check_env(env: Mapping[str, str]) -> None:
    """Refuses names that are none and values that cannot be; never shows a value."""
    for name, value in env.items():
        if not _ENV_NAME.match(name):
            raise InvalidRequest(f"{name[:100]!r} is no name of an environment variable: letters, digits and _, no digit first")
        if "\0" in value:
            raise InvalidRequest(f"the value of the environment variable {name[:100]} holds a NUL, which no variable can")
        if (size := len(name) + 1 + len(value.encode())) > MAX_ARGUMENT_BYTES:
            raise InvalidRequest(f"the environment variable {name[:100]} has {size} bytes; one can have {MAX_ARGUMENT_BYTES}: pass a file")


def parse_mode(text: str) -> int:
    """Permission bits from octal digits; InvalidRequest over 0777."""
    mode = int(text, 8)
    if mode > MAX_MODE:
        raise InvalidRequest(f"the mode {text} is over 0777: set-id and sticky bits cannot be set here")
    return mode


def _check_arguments(command: str | list[str], env: Mapping[str, str]) -> None:
    arguments = [command] if isinstance(command, str) else command
    if not arguments or not arguments[0].strip():
        raise InvalidRequest("the command is empty: give a string for /bin/sh -c, or a list whose first item is the program")
    check_env(env)
    total = _env_bytes(env)
    for argument in arguments:
        if "\0" in argument:
            raise InvalidRequest("an argument of the command holds a NUL, which no argument can: pass such data as a file")
        size = len(argument.encode())
        if size > MAX_ARGUMENT_BYTES:
            raise InvalidRequest(f"an argument of the command has {size} bytes; one can have {MAX_ARGUMENT_BYTES}: pass the data as a file")
        total += size + 1
    if total > MAX_ARGUMENTS_BYTES:
        raise InvalidRequest(f"arguments and env have {total} bytes together, over the kernel's limit (usually 2 MiB): pass the data as a file")


def _env_bytes(env: Mapping[str, str]) -> int:
    return sum(len(name) + len(value.encode()) + 2 for name, value in env.items())


def _at_most(name: str, value: float, most: float) -> None:
    if value > most:
        raise InvalidRequest(f"{name} {_number(value)} is over the maximum of {_number(most)}")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
