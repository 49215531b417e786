"""Folders as tar streams, both ways. What comes from a sandbox is hostile: it is written into a fresh folder that nobody else uses, links last."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Final

from .failures import Failure

BLOCK: Final = 1 << 18
ENCODING: Final = "utf-8"


@dataclass
class Tree:
    """A local folder that is to be sent: its entries below it, and how many bytes its files have."""

    root: Path
    entries: list[Path] = field(default_factory=list)
    size: int = 0
    skipped: list[str] = field(default_factory=list)

    @classmethod
    def scan(cls, root: Path) -> Tree:
        """Looks at everything below `root`; links are not followed."""
        tree = cls(root)

        def refuse(error: OSError) -> None:
            raise Failure(f"{error.filename} cannot be read ({error.strerror})") from None

        for folder, folders, files in os.walk(root, onerror=refuse):
            for name in sorted([*folders, *files]):
                path = Path(folder, name)
                if not (path.is_symlink() or path.is_file() or path.is_dir()):
                    tree.skipped.append(str(path))
                    continue
                tree.entries.append(path)
                tree.size += 0 if path.is_symlink() or path.is_dir() else path.stat().st_size
            folders.sort()
        return tree

    def stream(self) -> Iterator[bytes]:
        """The folder as a tar."""
        maker = tarfile.open(fileobj=io.BytesIO(), mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - makes headers and knows hard links; holds nothing
        for path in self.entries:
            try:
                info = maker.gettarinfo(path, str(path.relative_to(self.root)))
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                yield info.tobuf(tarfile.PAX_FORMAT, ENCODING, "surrogateescape")
                if info.isreg():
                    yield from _content(path, info.size)
            except OSError as error:
                raise Failure(f"{path} cannot be read ({error.strerror or error}): the copy is not complete") from None
        yield bytes(2 * tarfile.BLOCKSIZE)


def _content(path: Path, size: int) -> Iterator[bytes]:
    left = size
    with path.open("rb") as source:
        while left:
            block = source.read(min(BLOCK, left))
            if not block:
                raise Failure(f"{path} became shorter while it was read: the copy is not complete, try again")
            left -= len(block)
            yield block
    yield bytes(-size % tarfile.BLOCKSIZE)


class _Nowhere(IO[bytes]):
    """A file for a maker of headers that must be given one."""

    def write(self, data: object) -> int:
        return 0


class _Source:
    """A file over chunks that come."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._buffer = b""

    def read(self, count: int) -> bytes:
        while len(self._buffer) < count and (chunk := next(self._chunks, b"")):
            self._buffer += chunk
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return data


def unpack(chunks: Iterator[bytes], target: Path) -> list[str]:
    """Puts a tar's content into the folder `target`, beside what is there. Returns what was left out, and why."""
    left_out: list[str] = []
    place = Path(tempfile.mkdtemp(prefix=".sandboxctl-", dir=target.parent))
    try:
        try:
            with tarfile.open(fileobj=_Source(chunks), mode="r|", encoding=ENCODING, errors="surrogateescape") as archive:  # type: ignore[call-overload]
                _extract(archive, place, left_out)
        except tarfile.TarError as error:
            raise Failure(f"what came is no complete archive ({error}): nothing was kept, try again", code="damaged") from None
        _merge(place, target)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return left_out


def _extract(archive: tarfile.TarFile, place: Path, left_out: list[str]) -> None:
    links: list[tuple[Path, str]] = []
    folders: list[tuple[Path, tarfile.TarInfo]] = []
    for info in archive:
        parts = PurePosixPath(info.name).parts
        path = place.joinpath(*parts)
        if info.name.startswith("/") or ".." in parts:
            left_out.append(f"{info.name}: leads out of the folder")
        elif info.isdir():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            folders.append((path, info))
        elif info.issym():
            if _leads_out(parts, info.linkname):
                left_out.append(f"{info.name}: a link that leads out of the folder")
            else:
                links.append((path, info.linkname))
        elif info.islnk():
            if not _link(place, path, PurePosixPath(info.linkname)):
                left_out.append(f"{info.name}: a hard link to nothing that was copied")
        elif info.isreg():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = archive.extractfile(info)
            assert content is not None
            with path.open("xb") as sink:
                shutil.copyfileobj(content, sink, BLOCK)
            path.chmod(info.mode & 0o777)
            os.utime(path, (info.mtime, info.mtime))
        else:
            left_out.append(f"{info.name}: neither file, folder nor link")
    for path, aim in links:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.symlink_to(aim)
    for path, info in reversed(folders):
        path.chmod(info.mode & 0o777 | 0o700)
        os.utime(path, (info.mtime, info.mtime))


def _link(place: Path, path: Path, aim: PurePosixPath) -> bool:
    # No symbolic link exists yet, so this cannot go through one.
    source = place.joinpath(*aim.parts)
    if aim.is_absolute() or ".." in aim.parts or not source.is_file():
        return False
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.hardlink_to(source)
    return True


def _leads_out(parts: tuple[str, ...], aim: str) -> bool:
    if aim.startswith("/"):
        return True
    depth = len(parts) - 1
    for part in PurePosixPath(aim).parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return True
    return False


def _merge(source: Path, target: Path) -> None:
    """Moves what is in one folder into another. Folders are joined, files replaced."""
    target.mkdir(exist_ok=True)
    for path in sorted(source.iterdir()):
        there = target / path.name
        if path.is_dir() and not path.is_symlink() and there.is_dir():
            _merge(path, there)
        else:
            try:
                path.replace(there)
            except OSError as error:
                raise Failure(f"{there} cannot be replaced ({error.strerror or error}): move it away and copy again") from None


@contextlib.contextmanager
def replaced(target: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name when it is complete."""
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as sink:
            yield sink
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(target)
    finally:
        Path(name).unlink(missing_ok=True)
