"""What commands of the memory engine can be: a few built-in programs, the ones that you register, and a tiny shell (shell.py).

Built in: true, false, echo [-n], printf (%s, %d, \\n, \\t), cat, ls, pwd, env, sleep, seq, mkdir [-p], rm [-rf], sh -c.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from agent_sandbox_core.errors import SandboxError

from .tree import Tree

Output = Callable[[bytes], Awaitable[None]]
NOT_FOUND: Final = 127


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a program. `out` and `err` wait when the reader is slow."""

    argv: list[str]
    env: Mapping[str, str]
    cwd: bytes
    tree: Tree
    programs: Mapping[str, Program]
    out: Output
    err: Output

    async def print(self, text: str) -> None:
        """Text to standard output."""
        await self.out(text.encode(errors="surrogateescape"))

    async def complain(self, text: str) -> None:
        """A line to standard error, with the program's name."""
        await self.err(f"{self.argv[0]}: {text}\n".encode(errors="surrogateescape"))

    async def run(self, argv: list[str]) -> int:
        """Runs another program in place of this one. 127 when there is none."""
        program = self.programs.get(argv[0].rpartition("/")[2] if argv[0].startswith(("/bin/", "/usr/bin/")) else argv[0])
        if program is None:
            await self.err(f"{argv[0]}: not found\n".encode(errors="surrogateescape"))
            return NOT_FOUND
        call = replace(self, argv=argv)
        try:
            return await program(call)
        except SandboxError as error:
            await call.complain(error.message)
            return 1


Program = Callable[[Call], Awaitable[int]]
"""A coroutine function; what it returns is the exit code. It is cancelled when its command is."""

_ESCAPES: Final = {"n": "\n", "t": "\t", "\\": "\\", "0": "\0"}


async def _true(_: Call) -> int:
    return 0


async def _false(_: Call) -> int:
    return 1


async def _echo(call: Call) -> int:
    words = call.argv[1:]
    end = "\n"
    if words and words[0] == "-n":
        words, end = words[1:], ""
    await call.print(" ".join(words) + end)
    return 0


async def _printf(call: Call) -> int:
    if len(call.argv) < 2:
        await call.complain("a format is missing")
        return 2
    template = re.sub(r"\\([nt\\0])", lambda found: _ESCAPES[found[1]], call.argv[1])
    values = call.argv[2:]
    count = len(re.findall(r"%[sd]", template))
    while True:
        given = iter(values[:count])
        await call.print(re.sub(r"%([sd%])", lambda found, given=given: "%" if found[1] == "%" else next(given, ""), template))  # type: ignore[misc]
        values = values[count:]
        if not values or not count:
            return 0


async def _cat(call: Call) -> int:
    for path in call.argv[1:]:
        _, node = call.tree.read(_raw(path), cwd=call.cwd)
        await call.out(node.data)
    return 0


async def _ls(call: Call) -> int:
    for path in [word for word in call.argv[1:] if not word.startswith("-")] or ["."]:
        hidden = any(word in ("-a", "-A") for word in call.argv[1:])
        for entry in call.tree.list(_raw(path), cwd=call.cwd):
            if hidden or not entry.name.startswith(b"."):
                await call.out(entry.name + b"\n")
    return 0


async def _pwd(call: Call) -> int:
    await call.out(call.cwd + b"\n")
    return 0


async def _env(call: Call) -> int:
    for name, value in call.env.items():
        await call.print(f"{name}={value}\n")
    return 0


async def _sleep(call: Call) -> int:
    try:
        seconds = float(call.argv[1])
    except (IndexError, ValueError):
        await call.complain("a number of seconds is missing")
        return 1
    await asyncio.sleep(seconds)
    return 0


async def _seq(call: Call) -> int:
    try:
        first, last = (1, int(call.argv[1])) if len(call.argv) == 2 else (int(call.argv[1]), int(call.argv[2]))
    except (IndexError, ValueError):
        await call.complain("one or two numbers are needed")
        return 1
    for start in range(first, last + 1, 4096):
        await call.print("".join(f"{number}\n" for number in range(start, min(start + 4096, last + 1))))
        await asyncio.sleep(0)
    return 0


async def _mkdir(call: Call) -> int:
    for path in (word for word in call.argv[1:] if word != "-p"):
        call.tree.make_dir(_joined(call, path), 0o755)
    return 0


async def _rm(call: Call) -> int:
    flags = {letter for word in call.argv[1:] if word.startswith("-") for letter in word[1:]}
    for path in (word for word in call.argv[1:] if not word.startswith("-")):
        try:
            call.tree.remove(_joined(call, path), recursive="r" in flags)
        except SandboxError:
            if "f" not in flags:
                raise
    return 0


BUILT_IN: Final[dict[str, Program]] = {
    "true": _true,
    "false": _false,
    "echo": _echo,
    "printf": _printf,
    "cat": _cat,
    "ls": _ls,
    "pwd": _pwd,
    "env": _env,
    "sleep": _sleep,
    "seq": _seq,
    "mkdir": _mkdir,
    "rm": _rm,
}


def _raw(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _joined(call: Call, path: str) -> bytes:
    raw = _raw(path)
    return raw if raw.startswith(b"/") else call.cwd + b"/" + raw
