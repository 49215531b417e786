"""Local folders as tar streams, both ways. What comes from a sandbox is hostile: it is unpacked into a fresh folder that nobody else uses, links last."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Final

from .errors import TransferFailed

BLOCK: Final = 1 << 18
ENCODING: Final = "utf-8"


def pack(root: Path) -> Iterator[bytes]:
    """A folder's content as a tar. Links go as links; sockets and devices are left out. Raises TransferFailed."""
    maker = tarfile.open(fileobj=io.BytesIO(), mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - makes headers and knows hard links; holds nothing
    for path in _entries(root):
        try:
            info = maker.gettarinfo(path, str(path.relative_to(root)))
            if info is None:
                continue
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            yield info.tobuf(tarfile.PAX_FORMAT, ENCODING, "surrogateescape")
            if info.isreg():
                yield from _content(path, info.size)
        except OSError as error:
            raise TransferFailed(f"{path} cannot be read ({error.strerror or error}): not all of {root} was sent") from error
    yield bytes(2 * tarfile.BLOCKSIZE)


def _entries(root: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise TransferFailed(f"{error.filename} cannot be read ({error.strerror}): not all of {root} was sent") from error

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders.sort()
        for name in sorted([*folders, *files]):
            path = Path(folder, name)
            if path.is_symlink() or path.is_file() or path.is_dir():
                yield path


def _content(path: Path, size: int) -> Iterator[bytes]:
    left = size
    with path.open("rb") as source:
        while left:
            block = source.read(min(BLOCK, left))
            if not block:
                raise TransferFailed(f"{path} became shorter while it was read: not all was sent, try again")
            left -= len(block)
            yield block
    yield bytes(-size % tarfile.BLOCKSIZE)


def unpack(source: IO[bytes], target: Path) -> None:
    """Puts a tar's content into the folder `target`, beside what is there. On a hostile or damaged archive nothing is changed. Raises TransferFailed."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            with tarfile.open(fileobj=source, mode="r:", encoding=ENCODING, errors="surrogateescape") as archive:
                _extract(archive, place)
            _merge(place, target)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    except tarfile.TarError as error:
        raise TransferFailed(f"what came is no complete archive ({error}): nothing was kept, try again") from error
    except OSError as error:
        raise TransferFailed(f"{error.filename or target} cannot be written ({error.strerror or error}): not all of it arrived") from error


def _extract(archive: tarfile.TarFile, place: Path) -> None:
    links: list[tuple[Path, str]] = []
    folders: list[tuple[Path, tarfile.TarInfo]] = []
    for info in archive:
        parts = PurePosixPath(info.name).parts
        if info.name.startswith("/") or ".." in parts:
            raise _hostile(info, "leads out of the folder")
        path = place.joinpath(*parts)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if info.isdir():
            path.mkdir(mode=0o700, exist_ok=True)
            folders.append((path, info))
        elif info.issym():
            if _leads_out(parts, info.linkname):
                raise _hostile(info, f"is a link that leads out of the folder, to {info.linkname}")
            links.append((path, info.linkname))
        elif info.islnk():
            _link(place, path, info)
        elif info.isreg():
            content = archive.extractfile(info)
            assert content is not None
            with path.open("xb") as sink:
                shutil.copyfileobj(content, sink, BLOCK)
            path.chmod(info.mode & 0o777)
            os.utime(path, (info.mtime, info.mtime))
        else:
            raise _hostile(info, "is neither file, folder nor link")
    for path, aim in links:
        path.symlink_to(aim)
    for path, info in reversed(folders):
        path.chmod(info.mode & 0o777 | 0o700)
        os.utime(path, (info.mtime, info.mtime))


def _hostile(info: tarfile.TarInfo, why: str) -> TransferFailed:
    return TransferFailed(f"{info.name!r} {why}: nothing was kept; remove it in the sandbox, or download its folder's parts")


def _link(place: Path, path: Path, info: tarfile.TarInfo) -> None:
    # No symbolic link exists yet, so this cannot go through one.
    aim = PurePosixPath(info.linkname)
    source = place.joinpath(*aim.parts)
    if aim.is_absolute() or ".." in aim.parts or not source.is_file():
        raise _hostile(info, "is a hard link to nothing in the archive")
    path.hardlink_to(source)


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
        if path.is_dir() and not path.is_symlink() and there.is_dir() and not there.is_symlink():
            _merge(path, there)
        else:
            path.replace(there)


@contextmanager
def replaced(target: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name when it is complete; what was there stays until then. Raises TransferFailed."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
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
    except OSError as error:
        raise TransferFailed(f"{target} cannot be written ({error.strerror or error}): nothing was kept") from error
