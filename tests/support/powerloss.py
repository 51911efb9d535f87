"""A disk that loses what was not synced: for tests of what is believed after the lights go out.

The store runs on a real directory; this watches which files and directories it syncs, and can cut
the power after any call that changes something. What remains is then built as a crash may leave it:
a file has its bytes as of its last sync, with any of the later ones (in blocks, by chance); a
directory has its entries as of its last sync, with any later change made or not, one by one.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

BLOCK = 4096
CHANGES = (
    "pwrite",
    "write",
    "ftruncate",
    "rename",
    "replace",
    "link",
    "symlink",
    "unlink",
    "mkdir",
    "rmdir",
    "fsync",
    "fdatasync",
    "copy_file_range",
)


Node = tuple[int, int]  # inode, and which life of that number
Entries = dict[str, "Node | str"]  # a symlink is its target


class PowerCut(BaseException):
    """The power went; nothing that runs after this counts."""


@dataclass
class Disk:
    """What of the tree below ``root`` is durable by now."""

    root: Path
    cut_after: int | None = None  # changing calls
    calls: int = 0
    dead: bool = False
    files: dict[Node, bytes] = field(default_factory=dict)  # durable bytes
    names: dict[Node, Entries] = field(default_factory=dict)  # durable entries of directories
    lives: Counter[int] = field(default_factory=Counter)  # inode numbers are used again

    @contextmanager
    def watching(self) -> Iterator[Disk]:
        """Count every change and note every sync inside; ends with PowerCut where it is due."""
        with mock.patch.multiple(os, **{name: self._watched(name) for name in CHANGES}):
            yield self

    def _watched(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if self.dead:
                raise PowerCut
            gone = self._last_link(name, arguments, options)
            done = real(*arguments, **options)
            if gone is not None:
                self.lives[gone] += 1
            if name in ("fsync", "fdatasync"):
                self._synced(arguments[0])
            self.calls += 1
            if self.calls == self.cut_after:
                self.dead = True
                raise PowerCut
            return done

        return call

    def _last_link(self, name: str, arguments: Any, options: Any) -> int | None:
        if name not in ("unlink", "rmdir"):
            return None
        try:
            status = os.stat(arguments[0], follow_symlinks=False, **options)  # noqa: PTH116 (dir_fd)
        except FileNotFoundError:
            return None
        return status.st_ino if name == "rmdir" or status.st_nlink == 1 else None

    def _node(self, inode: int) -> Node:
        return inode, self.lives[inode]

    def _synced(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        path, node = Path(f"/proc/self/fd/{descriptor}"), self._node(status.st_ino)
        if stat.S_ISDIR(status.st_mode):
            self.names[node] = self._entries(path)
        else:
            self.files[node] = path.read_bytes()

    def _entries(self, directory: Path) -> Entries:
        found: Entries = {}
        with os.scandir(directory) as entries:
            for entry in entries:
                linked = entry.is_symlink()
                path = Path(directory, entry.name)
                found[entry.name] = str(path.readlink()) if linked else self._node(entry.inode())
        return found

    def after(self, target: Path, seed: int) -> None:
        """Build below ``target`` what a disk may show after the power came back."""
        draw = Random(seed)
        everything = {self._node(path.lstat().st_ino): path for path in self.root.rglob("*")}
        everything[self._node(self.root.lstat().st_ino)] = self.root
        contents = {node: path for node, path in everything.items() if path.is_file()}
        directories = {node: path for node, path in everything.items() if path.is_dir()}

        def build(node: Node, where: Path, *, top: bool = False) -> None:
            where.mkdir(exist_ok=True)
            now = self._entries(directories[node]) if node in directories else {}
            durable = self.names.get(node, dict(now) if top else {})
            for name in sorted({*now, *durable}):
                # a change that was not synced may have reached the disk, or not
                entry = (now if draw.random() < 0.5 else durable).get(name)
                if entry is None:
                    continue
                if isinstance(entry, str):
                    (where / name).symlink_to(entry)
                elif entry in directories or entry in self.names:
                    build(entry, where / name)
                else:
                    path = where / name
                    path.write_bytes(self._bytes_after(entry, contents.get(entry), draw))
                    if (known := contents.get(entry)) is not None:
                        status = known.lstat()
                        path.chmod(stat.S_IMODE(status.st_mode))
                        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

        build(self._node(self.root.lstat().st_ino), target, top=True)

    def _bytes_after(self, node: Node, path: Path | None, draw: Random) -> bytes:
        durable = self.files.get(node, b"")
        now = path.read_bytes() if path else durable
        if now == durable:
            return now
        size = len(now) if draw.random() < 0.5 else len(durable)
        mixed = bytearray(size)
        for at in range(0, size, BLOCK):
            part = (now if draw.random() < 0.5 else durable)[at : min(size, at + BLOCK)]
            mixed[at : at + len(part)] = part
        return bytes(mixed)
