"""A tiny shell: words, quotes, `$NAME`, `${NAME}` and `$?`, `;` and newlines, `&&`, `||`, `>`, `>>`, `>&2`, `exit` and `cd`. What else a
shell can do is refused with exit code 2 and a line that says so: a test must not pass because something was quietly left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from agent_sandbox_core.errors import SandboxError

from .programs import Call

SYNTAX_ERROR: Final = 2
_OPERATORS: Final = ("&&", "||", ">>", ";", "\n", ">")
_REFUSED: Final = "|&<()`{}*?[!#"
# `$?` and `${NAME}` belong to a word although their characters are refused elsewhere.
_PLAIN: Final = re.compile(r"(?:\$\?|\$\{[^}]*\}|[^\s;&|<>()`'\"\\{}*?\[!#]|\r)+")
_NAME: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_"


class _Syntax(Exception):
    """Something that this shell cannot do."""


class _Exit(Exception):
    """`exit` was called."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Operator(str):
    """A token that is no word."""

    __slots__ = ()


class _Parts(list[tuple[str, bool]]):
    """A word: pieces of text, and whether variables in them are to be replaced."""

    __slots__ = ()


async def run_shell(call: Call) -> int:
    """`sh -c SCRIPT`."""
    if len(call.argv) < 3 or call.argv[1] != "-c":
        await call.complain("only `sh -c SCRIPT` is supported by the memory engine")
        return SYNTAX_ERROR
    return await run_script(call, call.argv[2])


async def run_script(call: Call, script: str) -> int:
    """Runs a script; its exit code is that of its last command."""
    shell = _Shell(call)
    try:
        return await shell.run(list(_tokens(script)))
    except _Syntax as error:
        await call.err(f"sh: {error}, which the memory engine's shell does not support\n".encode(errors="surrogateescape"))
        return SYNTAX_ERROR
    except _Exit as end:
        return end.code


class _Shell:
    def __init__(self, call: Call) -> None:
        self._call = call
        self._status = 0

    async def run(self, tokens: list[_Operator | _Parts]) -> int:
        """Commands one after another, as their operators say."""
        words: list[_Parts] = []
        target: tuple[str, _Parts] | None = None
        skip = False
        at = 0
        while at <= len(tokens):
            token = tokens[at] if at < len(tokens) else _Operator(";")
            at += 1
            if isinstance(token, _Parts):
                words.append(token)
            elif token in (">", ">>"):
                if at >= len(tokens) or not isinstance(following := tokens[at], _Parts):
                    raise _Syntax("a redirection without a file name")
                target = (str(token), following)
                at += 1
            else:
                if not skip and words:
                    self._status = await self._simple([self._expand(word) for word in words], target)
                elif not words and token in ("&&", "||"):
                    raise _Syntax(f"'{token}' without a command before it")
                words, target = [], None
                skip = self._skips(token)
        return self._status

    def _skips(self, operator: str) -> bool:
        if operator == "&&":
            return self._status != 0
        if operator == "||":
            return self._status == 0
        return False

    async def _simple(self, argv: list[str], target: tuple[str, _Parts] | None) -> int:
        call = self._call
        if argv[0] == "exit":
            raise _Exit(int(argv[1]) & 0xFF if len(argv) > 1 and argv[1].isdigit() else self._status)
        if argv[0] == "cd":
            try:
                place, node = call.tree.existing((argv[1] if len(argv) > 1 else "/workspace").encode(), cwd=call.cwd)
                call.tree.list(place.path)
            except SandboxError as error:
                await call.err(f"cd: {error.message}\n".encode())
                return 1
            self._call = replace(call, cwd=place.path)
            return 0 if node else 1
        if target is None:
            return await call.run(argv)
        operator, name = target[0], self._expand(target[1])
        if name == "&2":
            return await replace(call, out=call.err).run(argv)
        written = bytearray()

        async def collect(data: bytes) -> None:
            written.extend(data)

        path = name.encode(errors="surrogateescape")
        try:
            before = call.tree.read(path, cwd=call.cwd)[1].data if operator == ">>" else b""
        except SandboxError:
            before = b""
        status = await replace(call, out=collect).run(argv)
        try:
            call.tree.write(path, before + bytes(written), None, cwd=call.cwd)
        except SandboxError as error:
            await call.err(f"sh: {error.message}\n".encode(errors="surrogateescape"))
            return 1
        return status

    def _expand(self, word: _Parts) -> str:
        return "".join(self._substitute(text) if active else text for text, active in word)

    def _substitute(self, text: str) -> str:
        done, at = [], 0
        while (dollar := text.find("$", at)) >= 0:
            done.append(text[at:dollar])
            at = dollar + 1
            if text.startswith("?", at):
                done.append(str(self._status))
                at += 1
                continue
            braced = text.startswith("{", at)
            start = at = at + braced
            while at < len(text) and text[at] in _NAME:
                at += 1
            name = text[start:at]
            if braced and not text.startswith("}", at):
                raise _Syntax("'${' with more than a name in it")
            if not name:
                if text.startswith("(", at):
                    raise _Syntax("'$('")
                done.append("$")
                continue
            at += braced
            done.append(self._call.env.get(name, ""))
        return "".join(done) + text[at:]


def _tokens(script: str) -> Iterator[_Operator | _Parts]:
    at, word = 0, _Parts()
    while at < len(script):
        operator = next((found for found in _OPERATORS if script.startswith(found, at)), "")
        if script[at] in " \t" or operator:
            if word:
                yield word
                word = _Parts()
            if operator:
                yield _Operator(operator)
            at += len(operator or " ")
            if operator == ">" and script.startswith("&2", at):
                yield _Parts([("&2", False)])
                at += 2
        else:
            at = _take_piece(script, at, word)
    if word:
        yield word


def _take_piece(script: str, at: int, word: _Parts) -> int:
    """Adds a quoted or a plain piece to a word; returns where it ends."""
    letter = script[at]
    if letter == "'":
        end = _closing(script, "'", at + 1)
        word.append((script[at + 1 : end], False))
        return end + 1
    if letter == '"':
        end = at + 1
        while end < len(script) and script[end] != '"':
            end += 2 if script[end] == "\\" else 1
        _closing(script, '"', end)
        for index, piece in enumerate(script[at + 1 : end].replace("\\\\", "\0").split('\\"')):
            word.extend([('"', False)] if index else [])
            word.append((piece.replace("\0", "\\"), True))
        return end + 1
    if letter == "\\" and at + 1 < len(script):
        word.append((script[at + 1], False))
        return at + 2
    if letter in _REFUSED:
        raise _Syntax(f"'{letter}'")
    found = _PLAIN.match(script, at)
    assert found is not None
    word.append((found[0], True))
    return found.end()


def _closing(script: str, quote: str, at: int) -> int:
    end = script.find(quote, at)
    if end < 0:
        raise _Syntax(f"an open {quote}")
    return end
