"""A file tree in memory: files, directories, symlinks, hard links; modes and times are kept, permissions are not enforced."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from agent_sandbox_core.errors import Conflict, Forbidden, InvalidRequest, NotFound
from agent_sandbox_core.interfaces import GuestFile
from agent_sandbox_core.paths import show_path

WORKSPACE: Final = b"/workspace"
RESERVED: Final = b".sandbox-init"
MAX_NAME: Final = 255
MAX_LINKS: Final = 40


@dataclass(eq=False, slots=True)
class Node:
    """An inode. A file's `data` is replaced, never changed, so a reference to it is a snapshot."""

    type: str
    mode: int
    mtime_ns: int = field(default_factory=time.time_ns)
    data: bytes = b""
    """Content of a file, target of a symlink."""
    entries: dict[bytes, Node] = field(default_factory=dict)
    xattrs: dict[bytes, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of content; directories have none."""
        return len(self.data)

    def link(self, name: bytes, node: Node) -> None:
        """Puts a node under a name, in place of what is there."""
        self.entries[name] = node
        self.mtime_ns = time.time_ns()

    def unlink(self, name: bytes) -> None:
        """Takes a name away."""
        del self.entries[name]
        self.mtime_ns = time.time_ns()


def directory(mode: int = 0o755) -> Node:
    """An empty directory."""
    return Node("directory", mode)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a path leads: the chain of directories from / (names and nodes), the last name, and what is there. `name` is empty for / itself."""

    chain: tuple[tuple[bytes, Node], ...]
    name: bytes
    node: Node | None
    missing: tuple[tuple[Node, bytes, Node], ...] = ()
    """Directories on the way that are not there yet, to be linked by make_parents."""

    def make_parents(self) -> None:
        """Makes the directories that are missing, once the whole path was found good."""
        for parent, name, node in self.missing:
            parent.link(name, node)

    @property
    def parent(self) -> Node:
        """The directory that has, or would have, the name."""
        return self.chain[-1][1]

    @property
    def folder(self) -> bytes:
        """The real path of the parent."""
        return b"/" + b"/".join(name for name, _ in self.chain[1:])

    @property
    def path(self) -> bytes:
        """The real path."""
        return (self.folder.rstrip(b"/") + b"/" + self.name) if self.name else b"/"


class Tree:
    """The files of one sandbox: /workspace, /tmp, and nothing else."""

    def __init__(self) -> None:
        self.root = directory()
        self.root.entries = {b"workspace": directory(), b"tmp": directory(0o1777)}

    @property
    def workspace(self) -> Node:
        """The workspace's directory."""
        return self.root.entries[b"workspace"]

    def replace(self, workspace: Node) -> None:
        """Exchanges the workspace in one step, and empties /tmp."""
        self.root.entries = {b"workspace": workspace, b"tmp": directory(0o1777)}

    def find(self, path: bytes, *, follow: bool = True, make: bool = False, cwd: bytes = WORKSPACE) -> Place:
        """Resolves a path, links on the way included; `make` plans missing directories, only under the workspace."""
        parts = [part for part in (path if path.startswith(b"/") else cwd + b"/" + path).split(b"/") if part not in (b"", b".")]
        must_be_directory = path.endswith((b"/", b"/.", b"/.."))
        chain: list[tuple[bytes, Node]] = [(b"", self.root)]
        parts.reverse()
        missing: list[tuple[Node, bytes, Node]] = []
        links = 0
        while parts:
            name = parts.pop()
            if name == b"..":
                if len(chain) > 1:
                    chain.pop()
                continue
            if len(name) > MAX_NAME:
                raise InvalidRequest(f"a name in the path has {len(name)} bytes; a name can have {MAX_NAME}")
            node = chain[-1][1].entries.get(name)
            if node is not None and node.type == "symlink" and (parts or follow or must_be_directory):
                links += 1
                if links > MAX_LINKS:
                    raise InvalidRequest(f"{show_path(path)} leads through more than {MAX_LINKS} links, perhaps in a circle")
                if node.data.startswith(b"/"):
                    del chain[1:]
                parts.extend(part for part in reversed(node.data.split(b"/")) if part not in (b"", b"."))
                continue
            if not parts and not must_be_directory:
                return Place(tuple(chain), name, node, tuple(missing))
            if node is None and make:
                check_writable(Place(tuple(chain), name, None), path)
                node = directory()
                missing.append((chain[-1][1], name, node))
            if node is None:
                raise NotFound(f"{show_path(path)} does not exist: {show_path(Place(tuple(chain), name, None).path)} is missing")
            if node.type != "directory":
                raise InvalidRequest(f"{show_path(Place(tuple(chain), name, node).path)} is no directory")
            chain.append((name, node))
        if len(chain) == 1:
            return Place(tuple(chain), b"", self.root)
        return Place(tuple(chain[:-1]), chain[-1][0], chain[-1][1], tuple(missing))

    def existing(self, path: bytes, *, follow: bool = True, cwd: bytes = WORKSPACE) -> tuple[Place, Node]:
        """Like find, for what must be there."""
        place = self.find(path, follow=follow, cwd=cwd)
        if place.node is None or (place.folder == WORKSPACE and place.name == RESERVED):
            raise NotFound(f"{show_path(path)} does not exist: list its directory to see what does")
        return place, place.node

    def read(self, path: bytes, *, cwd: bytes = WORKSPACE) -> tuple[Place, Node]:
        """A regular file."""
        place, node = self.existing(path, cwd=cwd)
        if node.type == "directory":
            raise InvalidRequest(f"{show_path(path)} is a directory: list it instead")
        return place, node

    def write(self, path: bytes, data: bytes, mode: int | None, *, cwd: bytes = WORKSPACE) -> Place:
        """Replaces a file, or a link, in one step; parents are made. None keeps the mode of what is there."""
        place = self.find(path, follow=False, make=True, cwd=cwd)
        check_writable(place, path)
        if path.endswith(b"/") or (place.node is not None and place.node.type == "directory"):
            raise InvalidRequest(f"{show_path(path)} is a directory: name a file")
        if mode is None:
            mode = place.node.mode if place.node is not None and place.node.type == "file" else 0o644
        place.make_parents()
        place.parent.link(place.name, Node("file", mode, data=data))
        return self.find(place.path, follow=False)

    def list(self, path: bytes, *, cwd: bytes = WORKSPACE) -> list[GuestFile]:
        """Entries in byte order of their names."""
        place, node = self.existing(path, cwd=cwd)
        if node.type != "directory":
            raise InvalidRequest(f"{show_path(path)} is no directory: read it instead")
        base = place.path.rstrip(b"/")
        hidden = RESERVED if place.path == WORKSPACE else None
        return [describe(base + b"/" + name, entry) for name, entry in sorted(node.entries.items()) if name != hidden]

    def make_dir(self, path: bytes, mode: int) -> Place:
        """A directory, parents included; one that exists is fine."""
        place = self.find(path, make=True)
        if place.node is None or place.missing:
            check_writable(place, path)
            place.make_parents()
        if place.node is None:
            place.parent.link(place.name, directory(mode))
            return self.find(place.path)
        if place.node.type != "directory":
            raise InvalidRequest(f"{show_path(path)} exists and is no directory")
        return place

    def remove(self, path: bytes, *, recursive: bool) -> None:
        """A file, a link or an empty directory; a whole tree with `recursive`."""
        place, node = self.existing(path, follow=False)
        check_writable(place, path)
        if node.entries and not recursive:
            raise Conflict(f"the directory {show_path(path)} is not empty: remove it with recursive=true")
        place.parent.unlink(place.name)

    def move(self, source: bytes, target: bytes, *, overwrite: bool) -> Place:
        """Renames."""
        old, node = self.existing(source, follow=False)
        check_writable(old, source)
        new = self.find(target, follow=False, make=True)
        check_writable(new, target)
        if new.node is not None and not overwrite:
            raise Conflict(f"{show_path(target)} exists: move with overwrite=true to replace it")
        if node.type == "directory" and any(entry is node for _, entry in new.chain):
            raise InvalidRequest(f"{show_path(source)} cannot be moved into itself")
        if new.node is not None and new.node.entries:
            raise Conflict(f"the directory {show_path(target)} is not empty")
        new.make_parents()
        old.parent.unlink(old.name)
        new.parent.link(new.name, node)
        return self.find(new.path, follow=False)


def check_writable(place: Place, path: bytes) -> None:
    """Writes only go below the workspace, and never to the reserved name at its top."""
    folder = place.folder
    if folder != WORKSPACE and not folder.startswith(WORKSPACE + b"/"):
        if place.path == WORKSPACE:
            raise InvalidRequest("/workspace itself cannot be replaced: name something in it")
        raise Forbidden(f"{show_path(path)} is outside /workspace, where files can be written")
    if (folder == WORKSPACE and place.name == RESERVED) or folder.startswith(WORKSPACE + b"/" + RESERVED):
        raise InvalidRequest(f"the name {RESERVED.decode()} at the top of the workspace is reserved: choose another")


def describe(path: bytes, node: Node) -> GuestFile:
    """A node as the guest shows it."""
    return GuestFile(path.rpartition(b"/")[2], path, node.type, node.size, node.mode & 0o7777, node.mtime_ns)


def walk(node: Node, prefix: bytes = b"") -> Iterator[tuple[bytes, Node]]:
    """Everything below a directory, a directory before what is in it, by name."""
    for name, entry in sorted(node.entries.items()):
        yield prefix + name, entry
        if entry.type == "directory":
            yield from walk(entry, prefix + name + b"/")
