"""Layers of an OCI image as the source of a tree: read as streams, never unpacked, without root.

Layers are read from the top down. So files hidden by an upper layer are skipped, and visible ones are taken in the
same pass. Only after all layers is it certain which files are needed. A skipped file that is needed after all (by
another visible name) is read in a second pass over its layer.
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, Generic, Protocol, TypeVar

from bootseer.errors import IntegrityError
from bootseer.storage.oci.manifest import Descriptor
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.builder.building import Progress, SourceContents, piece_count
from bootseer.tree.builder.image_config import read_config
from bootseer.tree.builder.layer_stream import MAX_LAYER_BYTES, read_layer
from bootseer.tree.builder.layer_tree import (
    Body,
    LayerDirectory,
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
from bootseer.tree.builder.packing import Packer
from bootseer.tree.builder.tar_stream import TarMember, TarStream
from bootseer.tree.index import BLOCK_BYTES, HOLE, MAX_RAW_INDEX_BYTES
from bootseer.tree.inodes import Inode

CHUNKS_AHEAD = 8  # of 1 MiB, decompressed while others are parsed
MEMBER_BYTES = 256  # memory and index size of a member without its name
_MAX_ID = (1 << 32) - 2
_MAX_TIME_NS = (1 << 63) - 1


Give = Callable[[Body, Iterator[bytes | int]], None]  # pieces, or counts of pieces that are holes
T = TypeVar("T")


class LayerSource(Protocol):
    """An image in a registry or a layout."""

    @property
    def layers(self) -> Sequence[Descriptor]:
        """All layers, lowest first, as in the manifest."""

    @property
    def config(self) -> bytes:
        """The configuration as JSON, with its digest verified."""

    def open(self, layer: Descriptor) -> BinaryIO:
        """Open the stored bytes of a layer from the start; another thread reads them. May be called again.

        The reader calls its method `cancel`, if any, when the rest is not needed.
        """


class LayersSource:
    """A source for `build`: the layers of an image.

    `name` is used in the index and in errors. `max_bytes`: the maximum decompressed size of a layer.
    """

    def __init__(self, image: LayerSource, *, name: str = "", max_bytes: int = MAX_LAYER_BYTES) -> None:
        self.name = name
        self._image = image
        self._max_bytes = max_bytes

    def read(self, packer: Packer, hot_paths: Sequence[bytes], on_progress: Progress) -> SourceContents:
        """Implement `Source.read`.

        With `hot_paths`, all layers are read twice, as archives have a fixed order. Hot files are kept in a
        nameless temporary file (in TMPDIR) meanwhile.

        Raises: IntegrityError for damaged, hostile or inconsistent layers; StorageError.
        """
        name = self.name or "the image"
        config, diff_ids = read_config(self._image.config, self._image.layers, name)
        reading = _Reading(self._image, diff_ids, name, self._max_bytes, packer, on_progress)
        root = reading.read_hot(hot_paths) if hot_paths else reading.read_seen()
        return SourceContents(root, config, dict(reading.left_out))


class _Reading:
    def __init__(
        self,
        image: LayerSource,
        diff_ids: Sequence[str],
        name: str,
        max_bytes: int,
        packer: Packer,
        on_progress: Progress,
    ) -> None:
        self._image = image
        self._diff_ids = diff_ids
        self._name = name
        self._max_bytes = max_bytes
        self._packer = packer
        self._on_progress = on_progress
        self._trees: dict[int, LayerTree] = {}  # by layer
        self._folded = LayerDirectory()
        self._kept_bytes = 0  # of names and attributes, approximately
        self.left_out: Counter[str] = Counter()

    def read_seen(self) -> Inode:
        """Read the layers; return the root. Data has the order of the layers, from the top down."""
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
        """Read the layers; return the root. Data of hot files comes first."""
        hot = {tuple(path.split(b"/")) for path in hot_paths}
        with _Spool() as spool:
            for layer in reversed(range(len(self._image.layers))):
                self._read_new(layer, lambda path: path in hot and not is_hidden(self._folded, path), spool.put)
            root = self._join()
            for path in dict.fromkeys(hot_paths):
                body = _find(root, path)
                if isinstance(body, Body) and body in spool and not body.is_taken:
                    self._pack(body, spool.pieces(body))
        self._packer.end_blocks()  # else a start would fetch cold files with its last hot ones
        self._read_missing(root)
        return root

    def _read_new(self, layer: int, takes: Callable[[Path], bool], give: Give) -> None:
        """Read a layer for the first time: its members, and the data of files that `takes` accepts."""
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
        """Read the missing data of all visible files."""
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
        """Join the folded layers to one tree."""
        targets: dict[int, Inode] = {}
        for path, node in walk_leaves(self._folded):
            if isinstance(node, Pending) and id(node) not in targets:
                found = find_target(self._trees, node)
                if found is None:
                    what = f"{show(path)} is a hard link to {show(node.target)}, which does not exist"
                    raise IntegrityError(f"{self._where(node.layer)}: {what}")
                targets[id(node)] = found
        return to_inodes(self._folded, targets)

    @contextmanager
    def _open(self, layer: int) -> Iterator[TarStream]:
        descriptor, where = self._image.layers[layer], self._where(layer)
        with self._image.open(descriptor) as stream:
            chunks = read_layer(stream, descriptor, self._diff_ids[layer], where, max_bytes=self._max_bytes)
            with read_ahead(chunks, CHUNKS_AHEAD) as ahead:
                try:
                    yield TarStream(ahead, where)
                except BaseException:
                    getattr(stream, "cancel", _do_nothing)()  # else its thread may block
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
        """Make the inode of a member, if a tree can hold its attributes."""
        where = self._where(layer)
        ids_fit = 0 <= member.uid <= _MAX_ID and 0 <= member.gid <= _MAX_ID
        devices_fit = member.rdev is None or (0 <= member.rdev[0] < 1 << 12 and 0 <= member.rdev[1] < 1 << 20)
        if not ids_fit or not devices_fit or not -_MAX_TIME_NS <= member.mtime_ns <= _MAX_TIME_NS:
            raise IntegrityError(f"{where}: {show((member.path,))} has an impossible owner, time or device")
        self._kept_bytes += MEMBER_BYTES + len(member.path) + len(member.target)
        self._kept_bytes += sum(len(name) + len(value) for name, value in member.xattrs)
        if self._kept_bytes > MAX_RAW_INDEX_BYTES:
            raise IntegrityError(f"{where}: has more names and attributes than a tree can hold")
        body = Body(member.mode, layer, member.number)
        body.uid, body.gid, body.mtime_ns = member.uid, member.gid, member.mtime_ns
        body.target, body.rdev, body.xattrs = member.target, member.rdev, member.xattrs
        body.size = member.size
        piece_count(member.size, where)
        return body


class _Spool:
    """Data of files in a temporary file without a name, so nothing of it remains."""

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
        except OSError:  # nothing reads unwritten data any more
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
    """Yield everything below; a hard link once for each name."""
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


@contextmanager
def read_ahead(items: Iterator[T], most: int) -> Iterator[Iterator[T]]:
    """Yield the same items; up to `most` wait. Errors of the iterator follow the items before them.

    At the end of the block the thread has ended: at once if it waits, else after the current item.
    """
    ahead = _Ahead(items, most)
    ahead.thread.start()
    try:
        yield ahead.take()
    finally:
        ahead.stop()


class _Ahead(Generic[T]):
    def __init__(self, items: Iterator[T], most: int) -> None:
        self._items = items
        self._most = most
        self._made: deque[T] = deque()
        self._change = threading.Condition()
        self._is_done = self._is_stopped = False
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="tree-read", daemon=True)

    def take(self) -> Iterator[T]:
        while True:
            with self._change:
                while not self._made and not self._is_done:
                    self._change.wait()
                if not self._made:
                    break
                item = self._made.popleft()
                self._change.notify_all()
            yield item
        error, self._error = self._error, None
        if error is not None:
            raise error

    def stop(self) -> None:
        with self._change:
            self._is_stopped = True
            self._made.clear()
            self._change.notify_all()
        self.thread.join()

    def _run(self) -> None:
        try:
            for item in self._items:
                with self._change:
                    while len(self._made) >= self._most and not self._is_stopped:
                        self._change.wait()
                    if self._is_stopped:
                        break
                    self._made.append(item)
                    self._change.notify_all()
        except BaseException as error:  # `take` raises it again
            self._error = error
        finally:
            close = getattr(self._items, "close", None)
            if close is not None:
                close()
            with self._change:
                self._is_done = True
                self._change.notify_all()
