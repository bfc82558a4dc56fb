"""What one layer of an image says, and how layers lie one over the other. Pure.

A layer is read into a tree of its own, as if it were unpacked into an empty folder: names in order, the last one
wins, links to folders that it made itself are followed within the root. Whiteouts are kept beside the names, since
they hide lower layers only. Then layers are folded from the top down, as overlayfs shows them.

Source: image-spec/layer.md; containerd's archive/tar.go and overlayfs for what the specification leaves open.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bootseer.errors import IntegrityError
from bootseer.tree.index import MOST_DEPTH, MOST_NAME_BYTES
from bootseer.tree.inodes import Inode

OPAQUE = b".wh..wh..opq"
WHITEOUT = b".wh."
AUFS = b".wh..wh."  # what else aufs kept beside the files
MOST_FOLLOWED = 40  # links on the way to one name, as in the kernel

Path = tuple[bytes, ...]


class Body(Inode):
    """A file of a layer; `member` says where its data is."""

    __slots__ = ("is_taken", "layer", "member")

    def __init__(self, mode: int, layer: int, member: int) -> None:
        super().__init__(mode)
        self.layer = layer  # 0 is the lowest
        self.member = member  # number in the layer's archive
        self.is_taken = False  # its data


class Pending:
    """A further name of a file that a lower layer has; the same object under each such name."""

    __slots__ = ("layer", "target")

    def __init__(self, layer: int, target: Path) -> None:
        self.layer = layer  # that gives the name
        self.target = target


class LayerFolder:
    """A folder of a layer, or of several that were folded."""

    __slots__ = ("children", "inode", "is_opaque", "whiteouts")

    def __init__(self) -> None:
        self.inode: Inode | None = None  # None: only what lies in it was named
        self.children: dict[bytes, LayerFolder | Inode | Pending] = {}
        self.whiteouts: set[bytes] = set()  # names that lower layers may have and that are hidden
        self.is_opaque = False  # all names of lower layers are


class Member(NamedTuple):
    """A name in a layer's archive."""

    path: Path
    inode: Body  # also its type
    link: Path | None = None  # further name of this one


class LayerTree:
    """One layer. `where` names it in errors."""

    def __init__(self, layer: int, where: str) -> None:
        self._layer = layer
        self._where = where
        self.root = LayerFolder()
        self.pending: list[Pending] = []
        self.skipped = 0  # names of aufs

    def add(self, member: Member) -> Path | None:
        """The next name of the archive. Gives the path at which the member's own data is seen, if it has some.

        Raises: IntegrityError for a name that cannot be there.
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
        names, folder = reached
        if name == OPAQUE:
            folder.is_opaque = True
        elif name.startswith(WHITEOUT):
            hidden = name[len(WHITEOUT) :]
            if hidden in (b"", b".", b".."):
                raise self._wrong(member.path, "hides nothing that can be there")
            folder.whiteouts.add(hidden)
        elif member.link is not None:
            folder.children[name] = self._link(member.path, member.link)
        elif member.inode.rdev == (0, 0) and stat.S_ISCHR(member.inode.mode):  # as overlayfs writes it
            folder.children.pop(name, None)
            folder.whiteouts.add(name)
        elif stat.S_ISDIR(member.inode.mode):
            child = folder.children.get(name)
            if not isinstance(child, LayerFolder):
                child = folder.children[name] = LayerFolder()
            child.inode = member.inode
        else:
            folder.children[name] = member.inode
            return (*names, name)
        return None

    def _reach(self, names: Sequence[bytes], path: Path, *, makes: bool) -> tuple[list[bytes], LayerFolder] | None:
        """The folder of these names, and those that lead to it without links; None: missing, and not made."""
        walked: list[tuple[bytes, LayerFolder]] = []
        folder = self.root
        todo = list(reversed(names))
        followed = 0
        while todo:
            name = todo.pop()
            if name in (b"", b"."):
                continue
            if name == b"..":
                if walked:
                    walked.pop()
                folder = walked[-1][1] if walked else self.root
                continue
            child = folder.children.get(name)
            if child is None and not makes:
                return None
            if child is None:
                if len(name) > MOST_NAME_BYTES or len(walked) >= MOST_DEPTH:
                    raise self._wrong(path, "is too long a path")
                child = folder.children[name] = LayerFolder()
            if isinstance(child, LayerFolder):
                walked.append((name, child))
                folder = child
                continue
            if isinstance(child, Pending) or not stat.S_ISLNK(child.mode):
                raise self._wrong(path, "lies below a file")
            followed += 1
            if followed > MOST_FOLLOWED:
                raise self._wrong(path, "is reached by too many links")
            if child.target.startswith(b"/"):
                walked, folder = [], self.root
            todo += reversed(child.target.split(b"/"))
        return [name for name, _ in walked], folder

    def _link(self, path: Path, target: Path) -> Inode | Pending:
        """What a hard link names: a file of this layer, or one that lower layers should have."""
        if not target:
            raise self._wrong(path, "is a hard link to the root")
        reached = self._reach(target[:-1], path, makes=False)
        found = None if reached is None else reached[1].children.get(target[-1])
        if isinstance(found, LayerFolder):
            raise self._wrong(path, "is a hard link to a folder")
        if found is None:
            found = Pending(self._layer, target)
            self.pending.append(found)
        return found

    def _wrong(self, path: Path, reason: str) -> IntegrityError:
        return IntegrityError(f"{self._where}: {show(path)} {reason}")


def show(path: Path) -> str:
    """A path as it may stand in a message."""
    return repr(b"/".join(path)[:200])[1:]


def split_path(raw: bytes, where: str) -> Path:
    """Names of a path from an archive, below the root. Raises: IntegrityError for one that leads elsewhere."""
    names = tuple(name for name in raw.split(b"/") if name not in (b"", b"."))
    if (
        b".." in names
        or b"\0" in raw
        or len(names) > MOST_DEPTH
        or any(len(name) > MOST_NAME_BYTES for name in names)
    ):
        raise IntegrityError(f"{where}: {show((raw,))} is no path below the root: the image is not taken")
    return names


def fold(upper: LayerFolder, lower: LayerFolder) -> None:
    """Puts a layer below what was folded so far; `lower` stays as it is."""
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
            if not isinstance(child, LayerFolder):
                if mine is None:
                    upper.children[name] = child
                else:
                    hidden.append(name)  # what lies below a file is not seen, whatever replaces the file
            elif mine is None or isinstance(mine, LayerFolder):
                if mine is None:
                    mine = upper.children[name] = LayerFolder()
                todo.append((mine, child))
        upper.whiteouts |= lower.whiteouts
        upper.whiteouts.update(hidden)
        upper.is_opaque = lower.is_opaque


def is_hidden(upper: LayerFolder, path: Path) -> bool:
    """Whether a file at this path of a lower layer is not seen through what was folded so far."""
    for name in path:
        if upper.is_opaque or name in upper.whiteouts:
            return True
        child = upper.children.get(name)
        if child is None:
            return False
        if not isinstance(child, LayerFolder):
            return True
        upper = child
    return True  # a folder is there


def find_target(trees: Mapping[int, LayerTree], pending: Pending) -> Inode | None:
    """The file that a hard link names in the layers below its own; None: there is none. `trees`: by layer."""
    target = pending.target
    for below in range(pending.layer - 1, -1, -1):
        folder = trees[below].root
        hides = False
        for place, name in enumerate(target):
            hides = hides or folder.is_opaque or name in folder.whiteouts
            child = folder.children.get(name)
            if child is None and hides:
                return None
            if child is None:
                break
            if isinstance(child, LayerFolder):
                folder = child
                continue
            if place + 1 < len(target):
                return None
            return find_target(trees, child) if isinstance(child, Pending) else child
        else:
            return None  # a folder
    return None


def to_inodes(folded: LayerFolder, targets: dict[int, Inode]) -> Inode:
    """The root of the tree that all layers show. `targets`: by identity of what is pending."""
    root = _folder_inode(folded)
    todo = [(folded, root)]
    while todo:
        folder, inode = todo.pop()
        assert inode.children is not None
        for name, child in folder.children.items():
            if isinstance(child, LayerFolder):
                below = inode.children[name] = _folder_inode(child)
                todo.append((child, below))
            elif isinstance(child, Pending):
                inode.children[name] = targets[id(child)]
            else:
                inode.children[name] = child
    return root


def walk_leaves(folded: LayerFolder) -> Iterator[tuple[Path, Inode | Pending]]:
    """All that is no folder, with its path; by name."""
    todo: list[tuple[Path, LayerFolder | Inode | Pending]] = [((), folded)]
    while todo:
        path, node = todo.pop()
        if isinstance(node, LayerFolder):
            todo += [((*path, name), node.children[name]) for name in sorted(node.children, reverse=True)]
        else:
            yield path, node


def _folder_inode(folder: LayerFolder) -> Inode:
    made = Inode(stat.S_IFDIR | 0o755)
    found = folder.inode
    if found is not None:
        made.mode, made.uid, made.gid, made.mtime_ns = found.mode, found.uid, found.gid, found.mtime_ns
        made.xattrs = found.xattrs
    return made
