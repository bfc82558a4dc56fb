"""Layers of an OCI image as the source of a tree: read as streams, never unpacked, no root needed.

Layers come from the top down, so that files which an upper layer hides are passed over, and what is seen is
taken in the same pass. Whether a file is needed is known for certain only when all layers have been read: what was
passed over and is needed after all (by another name that is not hidden) is read in a second pass over its layer.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, Protocol

from bootseer.errors import IntegrityError
from bootseer.storage.oci_manifest import Descriptor
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.building import Contents, Progress, piece_count
from bootseer.tree.image_config import read_config
from bootseer.tree.index import BLOCK_BYTES, HOLE, MOST_RAW_INDEX_BYTES
from bootseer.tree.inodes import Inode
from bootseer.tree.layer_stream import MOST_LAYER_BYTES, read_layer
from bootseer.tree.layer_tree import (
    Body,
    LayerFolder,
    LayerTree,
    Member,
    Path,
    Pending,
    find_target,
    fold,
    is_hidden,
    show,
    split_path,
    to_inodes,
    walk_leaves,
)
from bootseer.tree.packing import Packer
from bootseer.tree.read_ahead import read_ahead
from bootseer.tree.tar_stream import TarMember, TarStream

CHUNKS_AHEAD = 8  # of 1 MiB, decompressed while others are parsed
MEMBER_BYTES = 256  # that a member without a name would take in an index, and in memory
_MOST_ID = (1 << 32) - 2
_MOST_TIME_NS = (1 << 63) - 1


Give = Callable[[Body, Iterator[bytes | int]], None]  # pieces, or numbers of those that are holes


class LayerSource(Protocol):
    """An image, wherever it lies."""

    @property
    def layers(self) -> Sequence[Descriptor]:
        """The lowest first, as in the manifest."""

    @property
    def config(self) -> bytes:
        """JSON, with its digest verified."""

    def open(self, layer: Descriptor) -> BinaryIO:
        """The stored bytes of a layer, from the first one on; read in another thread. May be asked for again.

        If it has a method `cancel`, that is called when the rest is not wanted.
        """


class Layers:
    """A source for `build`: the layers of an image.

    `name` stands in the index and in errors. No layer may have more than `most_bytes` when it is decompressed.
    """

    def __init__(self, image: LayerSource, *, name: str = "", most_bytes: int = MOST_LAYER_BYTES) -> None:
        self.name = name
        self._image = image
        self._most_bytes = most_bytes

    def read(self, packer: Packer, hot_paths: Sequence[bytes], on_progress: Progress) -> Contents:
        """As `Source` says. With `hot_paths` all layers are read twice, and hot files lie in a temporary file
        meanwhile (in TMPDIR, without a name), as an archive cannot be read in another order.

        Raises: IntegrityError for layers that are damaged, hostile or cannot be put together; StorageError.
        """
        name = self.name or "the image"
        config, diff_ids = read_config(self._image.config, self._image.layers, name)
        reading = _Reading(self._image, diff_ids, name, self._most_bytes, packer, on_progress)
        root = reading.read_hot(hot_paths) if hot_paths else reading.read_seen()
        return Contents(root, config, dict(reading.left_out))


class _Reading:
    """One build."""

    def __init__(
        self,
        image: LayerSource,
        diff_ids: Sequence[str],
        name: str,
        most_bytes: int,
        packer: Packer,
        on_progress: Progress,
    ) -> None:
        self._image = image
        self._diff_ids = diff_ids
        self._name = name
        self._most_bytes = most_bytes
        self._packer = packer
        self._on_progress = on_progress
        self._trees: dict[int, LayerTree] = {}  # by layer
        self._folded = LayerFolder()
        self._kept_bytes = 0  # of names and attributes, about
        self.left_out: Counter[str] = Counter()

    def read_seen(self) -> Inode:
        """The root; data in the order of the layers from the top down, and of their archives."""
        linked: set[Path] = set()  # files of lower layers that upper ones give another name

        def is_seen(path: Path) -> bool:
            return path in linked or not is_hidden(self._folded, path)

        for layer in reversed(range(len(self._image.layers))):
            self._read_new(layer, is_seen, self._pack)
            linked |= {pending.target for pending in self._trees[layer].pending}
        root = self._join()
        self._read_missing(root)
        return root

    def read_hot(self, hot_paths: Sequence[bytes]) -> Inode:
        """The root; data of hot files first."""
        hot = {tuple(path.split(b"/")) for path in hot_paths}
        with _Spool() as spool:
            for layer in reversed(range(len(self._image.layers))):
                self._read_new(layer, lambda path: path in hot and not is_hidden(self._folded, path), spool.put)
            root = self._join()
            for path in dict.fromkeys(hot_paths):
                body = _find(root, path)
                if isinstance(body, Body) and body in spool and not body.is_taken:
                    self._pack(body, spool.pieces(body))
        self._packer.divide()  # else a start would fetch cold files with its last hot ones
        self._read_missing(root)
        return root

    def _read_new(self, layer: int, takes: Callable[[Path], bool], give: Give) -> None:
        """A layer for the first time: what is in it, and the data of files that `takes` wants."""
        where = self._where(layer)
        tree = self._trees[layer] = LayerTree(layer, where)
        with self._open(layer) as archive:
            for member in archive:
                body = self._make_body(layer, member)
                link = None if member.link is None else split_path(member.link, where)
                path = tree.add(Member(split_path(member.path, where), body, link))
                if member.size and path is not None and takes(path):
                    give(body, archive.read_pieces(member))
            self.left_out["extended attributes"] += archive.skipped_xattrs
        self.left_out["names of aufs"] += tree.skipped
        self.left_out = +self.left_out  # without zeros
        fold(self._folded, tree.root)

    def _read_missing(self, root: Inode) -> None:
        """Data of all files that are there and whose data is not yet."""
        missing: dict[int, dict[int, Body]] = {}  # by layer and member
        for inode in _walk(root):
            if isinstance(inode, Body) and inode.size and not inode.is_taken:
                missing.setdefault(inode.layer, {})[inode.member] = inode
        for layer in sorted(missing, reverse=True):
            with self._open(layer) as archive:
                for member in archive:
                    body = missing[layer].pop(member.number, None)
                    if body is not None:
                        self._pack(body, archive.read_pieces(member))
            if missing[layer]:
                raise IntegrityError(f"{self._where(layer)}: changed while it was read")

    def _join(self) -> Inode:
        """What all layers show together."""
        targets: dict[int, Inode] = {}
        for path, node in walk_leaves(self._folded):
            if isinstance(node, Pending) and id(node) not in targets:
                found = find_target(self._trees, node)
                if found is None:
                    what = f"{show(path)} is a hard link to {show(node.target)}, which is not there"
                    raise IntegrityError(f"{self._where(node.layer)}: {what}")
                targets[id(node)] = found
        return to_inodes(self._folded, targets)

    @contextmanager
    def _open(self, layer: int) -> Iterator[TarStream]:
        descriptor, where = self._image.layers[layer], self._where(layer)
        with self._image.open(descriptor) as stream:
            chunks = read_layer(stream, descriptor, self._diff_ids[layer], where, most_bytes=self._most_bytes)
            with read_ahead(chunks, CHUNKS_AHEAD) as ahead:
                try:
                    yield TarStream(ahead, where)
                except BaseException:
                    getattr(stream, "cancel", _do_nothing)()  # else its thread is waited for until it is served
                    raise

    def _where(self, layer: int) -> str:
        digest = self._image.layers[layer].digest
        return f"{self._name}: layer {layer + 1} of {len(self._image.layers)} ({digest[:19]})"

    def _pack(self, body: Body, pieces: Iterator[bytes | int]) -> None:
        body.is_taken = True
        for piece in pieces:
            if isinstance(piece, int):
                body.add_pieces(HOLE, piece)
            else:
                body.add_pieces(self._packer.add(piece), 1)
        self._on_progress(body.size, 1)

    def _make_body(self, layer: int, member: TarMember) -> Body:
        """The attributes of a member, if a tree can hold them."""
        where = self._where(layer)
        ids_fit = 0 <= member.uid <= _MOST_ID and 0 <= member.gid <= _MOST_ID
        devices_fit = member.rdev is None or (0 <= member.rdev[0] < 1 << 12 and 0 <= member.rdev[1] < 1 << 20)
        if not ids_fit or not devices_fit or not -_MOST_TIME_NS <= member.mtime_ns <= _MOST_TIME_NS:
            raise IntegrityError(f"{where}: {show((member.path,))} has an owner, time or device that cannot be")
        self._kept_bytes += MEMBER_BYTES + len(member.path) + len(member.target)
        self._kept_bytes += sum(len(name) + len(value) for name, value in member.xattrs)
        if self._kept_bytes > MOST_RAW_INDEX_BYTES:
            raise IntegrityError(f"{where}: has more names and attributes than a tree can hold")
        body = Body(member.mode, layer, member.number)
        body.uid, body.gid, body.mtime_ns = member.uid, member.gid, member.mtime_ns
        body.target, body.rdev, body.xattrs = member.target, member.rdev, member.xattrs
        body.size = member.size
        piece_count(member.size, where)
        return body


class _Spool:
    """Data of files in a temporary file; it has no name, so nothing is left of it."""

    def __init__(self) -> None:
        with map_os_errors("TMPDIR"):
            self._where = f"a temporary file in {tempfile.gettempdir()}"
            self._file = tempfile.TemporaryFile(prefix="bootseer-")  # noqa: SIM115
        self._end = 0
        self._extents: dict[Body, list[tuple[int, int]]] = {}  # offset in the file or HOLE, pieces

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._file.close()
        except OSError:  # what was still to be written nobody reads any more
            pass

    def __contains__(self, body: Body) -> bool:
        return body in self._extents

    def put(self, body: Body, pieces: Iterator[bytes | int]) -> None:
        extents = self._extents[body] = []
        for piece in pieces:
            if isinstance(piece, int):
                extents.append((HOLE, piece))
            else:
                with map_os_errors(self._where):
                    self._file.write(piece)
                extents.append((self._end, 1))
                self._end += len(piece)

    def pieces(self, body: Body) -> Iterator[bytes | int]:
        left = body.size
        for offset, count in self._extents[body]:
            if offset == HOLE:
                yield count
            else:
                with map_os_errors(self._where):
                    self._file.seek(offset)
                    piece = self._file.read(min(left, BLOCK_BYTES))
                yield piece
            left -= count * BLOCK_BYTES


def _walk(root: Inode) -> Iterator[Inode]:
    """Everything below, hard links once for each name."""
    todo = [root]
    while todo:
        inode = todo.pop()
        yield inode
        todo += (inode.children or {}).values()


def _find(root: Inode, path: bytes) -> Inode | None:
    found: Inode | None = root
    for name in path.split(b"/"):
        found = (found.children or {}).get(name) if found is not None else None
    return found


def _do_nothing() -> None:
    pass
