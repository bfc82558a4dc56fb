"""The contents of one image layer, and folding of layers over each other. Pure.

A layer is read into its own tree, as if unpacked into an empty directory: the last entry of a name wins, and links
to the layer's own directories are followed within the root. Whiteouts are kept separately, as they hide lower
layers only. Then layers are folded from the top down, as overlayfs shows them.

Source: image-spec/layer.md; containerd's archive/tar.go and overlayfs for what the specification leaves open.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bootseer.errors import IntegrityError
from bootseer.tree.index import MAX_DEPTH, MAX_NAME_BYTES
from bootseer.tree.inodes import Inode

OPAQUE = b".wh..wh..opq"
WHITEOUT = b".wh."
AUFS = b".wh..wh."  # other metadata of aufs
MAX_FOLLOWED = 40  # links on the path to one name, as in the kernel

Path = tuple[bytes, ...]


class Body(Inode):
    """A file of a layer; `member` locates its data."""

    __slots__ = ("is_taken", "layer", "member")

    def __init__(self, mode: int, layer: int, member: int) -> None:
        super().__init__(mode)
        self.layer = layer  # 0 is the lowest
        self.member = member  # number in the layer's archive
        self.is_taken = False  # whether its data is


class Pending:
    """An additional name of a file in a lower layer; one object for all such names."""

    __slots__ = ("layer", "target")

    def __init__(self, layer: int, target: Path) -> None:
        self.layer = layer  # the layer with this name
        self.target = target


class LayerDirectory:
    """A directory of a layer, or of several folded ones."""

    __slots__ = ("children", "inode", "is_opaque", "whiteouts")

    def __init__(self) -> None:
        self.inode: Inode | None = None  # None: the archive names only its contents
        self.children: dict[bytes, LayerDirectory | Inode | Pending] = {}
        self.whiteouts: set[bytes] = set()  # names that are hidden in lower layers
        self.is_opaque = False  # whether all names of lower layers are hidden


class Member(NamedTuple):
    """A name in a layer's archive."""

    path: Path
    inode: Body  # also its type
    link: Path | None = None  # this is another name of `link`


class LayerTree:
    """One layer. `where` names it in errors."""

    def __init__(self, layer: int, where: str) -> None:
        self._layer = layer
        self._where = where
        self.root = LayerDirectory()
        self.pending: list[Pending] = []
        self.skipped = 0  # names of aufs

    def add(self, member: Member) -> Path | None:
        """Add the next name of the archive; return the visible path of the member's own data, if it has some.

        Raises: IntegrityError for an impossible name.
        """
        if not member.path:
            if stat.S_ISDIR(member.inode.mode):
                self.root.inode = member.inode
            return None
        *above, name = member.path
        if any(part.startswith(AUFS) for part in above) or (name.startswith(AUFS) and name != OPAQUE):
            self.skipped += 1
            return None
        reached = self._reach(above, member.path, makes=True)
        assert reached is not None
        names, directory = reached
        if name == OPAQUE:
            directory.is_opaque = True
        elif name.startswith(WHITEOUT):
            hidden = name[len(WHITEOUT) :]
            if hidden in (b"", b".", b".."):
                raise self._wrong(member.path, "hides nothing that can exist")
            directory.whiteouts.add(hidden)
        elif member.link is not None:
            directory.children[name] = self._link(member.path, member.link)
        elif member.inode.rdev == (0, 0) and stat.S_ISCHR(member.inode.mode):  # as overlayfs writes it
            directory.children.pop(name, None)
            directory.whiteouts.add(name)
        elif stat.S_ISDIR(member.inode.mode):
            child = directory.children.get(name)
            if not isinstance(child, LayerDirectory):
                child = directory.children[name] = LayerDirectory()
            child.inode = member.inode
        else:
            directory.children[name] = member.inode
            return (*names, name)
        return None

    def _reach(
        self, names: Sequence[bytes], path: Path, *, makes: bool
    ) -> tuple[list[bytes], LayerDirectory] | None:
        """Return the directory of these names, and its link-free path; None if it is missing and not made."""
        walked: list[tuple[bytes, LayerDirectory]] = []
        directory = self.root
        todo = list(reversed(names))
        followed = 0
        while todo:
            name = todo.pop()
            if name in (b"", b"."):
                continue
            if name == b"..":
                if walked:
                    walked.pop()
                directory = walked[-1][1] if walked else self.root
                continue
            child = directory.children.get(name)
            if child is None and not makes:
                return None
            if child is None:
                if len(name) > MAX_NAME_BYTES or len(walked) >= MAX_DEPTH:
                    raise self._wrong(path, "is too long a path")
                child = directory.children[name] = LayerDirectory()
            if isinstance(child, LayerDirectory):
                walked.append((name, child))
                directory = child
                continue
            if isinstance(child, Pending) or not stat.S_ISLNK(child.mode):
                raise self._wrong(path, "lies below a file")
            followed += 1
            if followed > MAX_FOLLOWED:
                raise self._wrong(path, "is reached by too many links")
            if child.target.startswith(b"/"):
                walked, directory = [], self.root
            todo += reversed(child.target.split(b"/"))
        return [name for name, _ in walked], directory

    def _link(self, path: Path, target: Path) -> Inode | Pending:
        """Resolve a hard link: to a file of this layer, or to one expected in lower layers."""
        if not target:
            raise self._wrong(path, "is a hard link to the root")
        reached = self._reach(target[:-1], path, makes=False)
        found = None if reached is None else reached[1].children.get(target[-1])
        if isinstance(found, LayerDirectory):
            raise self._wrong(path, "is a hard link to a directory")
        if found is None:
            found = Pending(self._layer, target)
            self.pending.append(found)
        return found

    def _wrong(self, path: Path, reason: str) -> IntegrityError:
        return IntegrityError(f"{self._where}: {show(path)} {reason}")


def show(path: Path) -> str:
    return repr(b"/".join(path)[:200])[1:]


def split_path(raw: bytes, where: str) -> Path:
    """Split a path from an archive into names below the root. Raises: IntegrityError if it leads elsewhere."""
    names = tuple(name for name in raw.split(b"/") if name not in (b"", b"."))
    if (
        b".." in names
        or b"\0" in raw
        or len(names) > MAX_DEPTH
        or any(len(name) > MAX_NAME_BYTES for name in names)
    ):
        raise IntegrityError(f"{where}: {show((raw,))} is not a path below the root: the image is rejected")
    return names


def fold(upper: LayerDirectory, lower: LayerDirectory) -> None:
    """Put a layer below the folded ones; `lower` stays unchanged."""
    todo = [(upper, lower)]
    while todo:
        upper, lower = todo.pop()
        if upper.inode is None:
            upper.inode = lower.inode
        if upper.is_opaque:
            continue
        hidden: list[bytes] = []
        for name, child in lower.children.items():
            if name in upper.whiteouts:
                continue
            mine = upper.children.get(name)
            if not isinstance(child, LayerDirectory):
                if mine is None:
                    upper.children[name] = child
                else:
                    hidden.append(name)  # files below a file stay hidden, even if it is replaced
            elif mine is None or isinstance(mine, LayerDirectory):
                if mine is None:
                    mine = upper.children[name] = LayerDirectory()
                todo.append((mine, child))
        upper.whiteouts |= lower.whiteouts
        upper.whiteouts.update(hidden)
        upper.is_opaque = lower.is_opaque


def is_hidden(upper: LayerDirectory, path: Path) -> bool:
    """Return whether the folded layers hide a file at this path of a lower layer."""
    for name in path:
        if upper.is_opaque or name in upper.whiteouts:
            return True
        child = upper.children.get(name)
        if child is None:
            return False
        if not isinstance(child, LayerDirectory):
            return True
        upper = child
    return True  # a directory has this path


def find_target(trees: Mapping[int, LayerTree], pending: Pending) -> Inode | None:
    """Find the file that a hard link names in lower layers; None if there is none. `trees`: by layer."""
    target = pending.target
    for below in range(pending.layer - 1, -1, -1):
        directory = trees[below].root
        hides = False
        for place, name in enumerate(target):
            hides = hides or directory.is_opaque or name in directory.whiteouts
            child = directory.children.get(name)
            if child is None and hides:
                return None
            if child is None:
                break
            if isinstance(child, LayerDirectory):
                directory = child
                continue
            if place + 1 < len(target):
                return None
            return find_target(trees, child) if isinstance(child, Pending) else child
        else:
            return None  # a directory
    return None


def to_inodes(folded: LayerDirectory, targets: dict[int, Inode]) -> Inode:
    """Return the root of the tree that all layers show. `targets`: by identity of pending names."""
    root = _directory_inode(folded)
    todo = [(folded, root)]
    while todo:
        directory, inode = todo.pop()
        assert inode.children is not None
        for name, child in directory.children.items():
            if isinstance(child, LayerDirectory):
                below = inode.children[name] = _directory_inode(child)
                todo.append((child, below))
            elif isinstance(child, Pending):
                inode.children[name] = targets[id(child)]
            else:
                inode.children[name] = child
    return root


def walk_leaves(folded: LayerDirectory) -> Iterator[tuple[Path, Inode | Pending]]:
    """Yield everything except directories, with its path; sorted by name."""
    todo: list[tuple[Path, LayerDirectory | Inode | Pending]] = [((), folded)]
    while todo:
        path, node = todo.pop()
        if isinstance(node, LayerDirectory):
            todo += [((*path, name), node.children[name]) for name in sorted(node.children, reverse=True)]
        else:
            yield path, node


def _directory_inode(directory: LayerDirectory) -> Inode:
    made = Inode(stat.S_IFDIR | 0o755)
    found = directory.inode
    if found is not None:
        made.mode, made.uid, made.gid, made.mtime_ns = found.mode, found.uid, found.gid, found.mtime_ns
        made.xattrs = found.xattrs
    return made
