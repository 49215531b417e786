"""cp: files and folders in and out."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from .failures import Failure
from .output import note, show, size
from .progress import Progress, progress
from .remote import CHUNK, Json, Remote
from .target import Command, connected, target_of
from .tree import Tree, replaced, unpack

app = typer.Typer(rich_markup_mode=None)
_PLACE: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*):(.*)\Z", re.DOTALL)


class Place(NamedTuple):
    """A path here (no sandbox) or in a sandbox."""

    sandbox: str | None
    path: str

    @classmethod
    def parse(cls, text: str) -> Place:
        """SANDBOX:PATH, or a path here; one with a colon in it is written ./a:b."""
        found = _PLACE.match(text)
        return cls(found[1], found[2] or "/workspace") if found else cls(None, text)


@app.command(cls=Command)
def cp(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A path here, or SANDBOX:PATH; - is standard input.", show_default=False)],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A path here, or SANDBOX:PATH; - is standard output.", show_default=False)],
) -> None:
    """Copy files and folders in and out.

    Exactly one side is SANDBOX:PATH, a path relative to /workspace. A folder goes with all that is in it. It becomes TARGET, or goes into it where that is a folder;
    with SOURCE/. its content goes into TARGET. Files that are there are replaced, others stay.
    """
    here, there = Place.parse(source), Place.parse(target)
    if (here.sandbox is None) == (there.sandbox is None):
        raise typer.BadParameter("exactly one of SOURCE and TARGET is in a sandbox: write it as SANDBOX:PATH")
    with connected(ctx) as remote:
        try:
            facts = _Upload(remote, there).run(here.path) if there.sandbox is not None else _Download(remote, here).run(there.path)
        except OSError as error:
            raise Failure(f"{error.filename or 'a file'}: {error.strerror or error}") from None
        for one in facts["left_out"]:
            note(f"sandboxctl: not copied: {one}")
        if target != "-":
            show(facts, target_of(ctx).as_json, lambda: note(f"{source} -> {facts['target']}  {size(facts['bytes'])}"))


class _Side:
    """One side of a copy: a path in a sandbox."""

    def __init__(self, remote: Remote, place: Place) -> None:
        self._remote = remote
        self._sandbox = place.sandbox
        self._path = place.path

    def _at(self, what: str) -> str:
        return f"/v1/sandboxes/{self._sandbox}/{what}"

    def _stat(self, path: str) -> Json | None:
        try:
            return self._remote.call("GET", self._at("files/stat"), path=path)
        except Failure as failure:
            # The sandbox itself may be what is missing.
            if failure.status == 404 and failure.message != f"sandbox {self._sandbox} not found":
                return None
            raise


class _Upload(_Side):
    """From here into a sandbox."""

    def run(self, source: str) -> dict[str, Any]:
        path = Path(source)
        if source == "-":
            return self._file(None, self._inside("stdin"))
        if path.is_dir():
            content_only = source.endswith("/.") or source in {".", "/"}
            return self._folder(path, self._path if content_only else self._inside(path.resolve().name))
        if not path.exists():
            raise Failure(f"{source} does not exist here")
        return self._file(path, self._inside(path.name))

    def _inside(self, name: str) -> str:
        """The target itself, or `name` in it when it is a folder."""
        found = self._stat(self._path)
        if self._path.endswith("/") or (found is not None and found["type"] == "directory"):
            return f"{self._path.rstrip('/')}/{name}"
        return self._path

    def _file(self, path: Path | None, target: str) -> dict[str, Any]:
        url = self._at("files")
        if path is None:
            written = self._remote.send("PUT", url, _blocks(sys.stdin.buffer, None), path=target)
        else:
            status = path.stat()
            with path.open("rb") as source, progress(str(path), status.st_size) as bar:
                headers = {"Content-Length": str(status.st_size)}
                written = self._remote.send("PUT", url, _blocks(source, bar), headers=headers, path=target, mode=f"{status.st_mode & 0o777:o}")
        return {"target": f"{self._sandbox}:{written['path']}", "bytes": written["size"], "left_out": []}

    def _folder(self, path: Path, target: str) -> dict[str, Any]:
        tree = Tree.scan(path)
        self._remote.call("POST", self._at("files/mkdir"), body={"path": target})
        with progress(str(path), tree.size) as bar:
            self._remote.send("PUT", self._at("archive"), _counted(tree.stream(), bar), headers={"Content-Type": "application/x-tar"}, path=target)
        left_out = [f"{one}: neither file, folder nor link" for one in tree.skipped]
        return {"target": f"{self._sandbox}:{target}", "bytes": tree.size, "left_out": left_out}


class _Download(_Side):
    """From a sandbox to here."""

    def run(self, target: str) -> dict[str, Any]:
        found = self._stat(self._path)
        if found is None:
            raise Failure(f"{self._path} does not exist in {self._sandbox}", code="not_found")
        if found["type"] == "directory":
            if target == "-":
                raise Failure(f"{self._path} is a folder: give a path here", 2)
            content_only = self._path.endswith("/.")
            return self._folder(Path(target) if content_only else _inside(target, found["name"] or "workspace"))
        if target == "-":
            return self._copy(sys.stdout.buffer, "-", found, None)
        path = _inside(target, found["name"])
        with replaced(path) as sink:
            return self._copy(sink, str(path), found, str(path))

    def _copy(self, sink: Any, target: str, found: Json, shown: str | None) -> dict[str, Any]:
        count = 0
        with self._remote.receive("GET", self._at("files"), path=self._path) as answer, progress(shown, found["size"]) as bar:
            for chunk in self._remote.chunks(answer):
                sink.write(chunk)
                bar.advance(len(chunk))
                count += len(chunk)
        sink.flush()
        return {"target": target, "bytes": count, "left_out": []}

    def _folder(self, target: Path) -> dict[str, Any]:
        count = 0

        def counted(chunks: Iterable[bytes]) -> Iterator[bytes]:
            nonlocal count
            for chunk in chunks:
                count += len(chunk)
                yield chunk

        with self._remote.receive("GET", self._at("archive"), path=self._path) as answer, progress(str(target), None) as bar:
            left_out = unpack(counted(_counted(self._remote.chunks(answer), bar)), target)
        return {"target": str(target), "bytes": count, "left_out": left_out}


def _inside(target: str, name: str) -> Path:
    """The target itself, or `name` in it when it is a folder."""
    path = Path(target)
    return path / name if target.endswith("/") or path.is_dir() else path


def _blocks(source: Any, bar: Progress | None) -> Iterator[bytes]:
    while block := source.read(CHUNK):
        if bar is not None:
            bar.advance(len(block))
        yield block


def _counted(chunks: Iterable[bytes], bar: Progress) -> Iterator[bytes]:
    for chunk in chunks:
        bar.advance(len(chunk))
        yield chunk
