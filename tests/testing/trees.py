"""File trees for tests: generated at random, written to a disk, inspected, and put into image layouts.

They are reproducible: the same random number generator gives the same tree.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bootseer.tree import compression
from bootseer.tree.block_codec import block_digest, unpack_block
from bootseer.tree.index import BLOCK_UNITS, HOLE, UNIT_BYTES, Index
from bootseer.tree.reading import BlockSource

ODD_NAMES = (
    b"\xff\xfe",
    b"new\nline",
    b" ",
    b"-rf",
    b"\\",
    "\u00e9\u4e2d".encode(),
    b"a" * 255,
    b".hidden",
    b"~",
    b"'\"",
)
SIZES = (0, 1, 4095, 4096, 4097, 12288, 131071, 131072, 131073, 262144, 300_000)
TIMES_NS = (0, 1, -1_500_000_000, 999_999_999, 1_700_000_000_123_456_789, 2_500_000_000_000_000_007)
_ACL = bytes.fromhex("0200000001000600ffffffff02000700e803000004000400ffffffff10000700ffffffff20000400ffffffff")


class Node(NamedTuple):
    """A file of a generated tree."""

    mode: int  # as st_mode
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size: int = 0
    data: tuple[tuple[int, bytes], ...] = ()  # offset and bytes, in order; between them are holes
    target: bytes = b""  # of a symbolic link
    rdev: tuple[int, int] = (0, 0)
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    link: bytes | None = None  # a further name of the file at this path; all other fields are then ignored


Tree = dict[bytes, Node]  # by path; b"" is the root, directories come before their contents


def make_tree(chance: random.Random, entries: int, *, as_root: bool) -> Tree:
    """Generate a tree with odd names and sizes; with `as_root` also owners, devices and root-only attributes."""
    tree: Tree = {b"": _with_attributes(chance, stat.S_IFDIR, as_root=as_root)}
    directories = [b""]
    contents = [chance.randbytes(300_000), b"the same words again and again. " * 10_000, bytes(300_000)]
    for number in range(entries):
        parent = chance.choice(directories)
        name = chance.choice(ODD_NAMES) if chance.random() < 0.2 else b"%c%d" % (chance.randrange(97, 123), number)
        path = parent + b"/" + name if parent else name
        if path in tree or len(path) > 3000:
            continue
        roll = chance.random()
        files = [each for each, node in tree.items() if not stat.S_ISDIR(node.mode) and node.link is None]
        if roll < 0.2:
            directories.append(path)
            tree[path] = _with_attributes(chance, stat.S_IFDIR, as_root=as_root)
        elif roll < 0.3:
            target = chance.choice((b"/etc/passwd", b"..", b"\xff", b"x" * 4000, path[:4000]))
            tree[path] = _with_attributes(chance, stat.S_IFLNK, as_root=as_root)._replace(
                mode=0o120777, target=target
            )
        elif roll < 0.4 and files:
            first = chance.choice(files)
            tree[path] = tree[first]._replace(link=first)
        elif roll < 0.45:
            tree[path] = _with_attributes(chance, chance.choice((stat.S_IFIFO, stat.S_IFSOCK)), as_root=as_root)
        elif roll < 0.5 and as_root:
            kind = chance.choice((stat.S_IFCHR, stat.S_IFBLK))
            rdev = chance.choice(((0, 0), (1, 3), (259, 1_048_575)))
            tree[path] = _with_attributes(chance, kind, as_root=as_root)._replace(rdev=rdev)
        else:
            tree[path] = _file(chance, contents, as_root=as_root)
    return tree


def write_tree(directory: str, tree: Tree, *, order: random.Random | None = None) -> None:
    """Write a tree to an empty directory. `order`: create the names of a directory in random order."""
    root = os.fsencode(directory)
    paths = list(tree)
    if order is not None:  # but parents first
        places = {path: order.random() for path in paths}
        paths.sort(key=lambda path: (path.count(b"/") + bool(path), places[path]))
    links = [path for path in paths if tree[path].link is not None]
    for path in paths:
        if path and tree[path].link is None:
            _create(os.path.join(root, path), tree[path])
    for path in links:
        os.link(os.path.join(root, tree[path].link or b""), os.path.join(root, path), follow_symlinks=False)
    for path in sorted(paths, key=lambda path: path.count(b"/") + bool(path), reverse=True):
        if tree[path].link is None:
            _set_attributes(os.path.join(root, path), tree[path])


def _file(chance: random.Random, contents: Sequence[bytes], *, as_root: bool) -> Node:
    size = chance.choice(SIZES)
    content = chance.choice(contents)
    begin = chance.choice((0, 0, 4096, 65536)) if size <= 200_000 else 0
    data: tuple[tuple[int, bytes], ...] = ((0, content[begin : begin + size]),) if size else ()
    if chance.random() < 0.2:  # with holes
        size = chance.choice((1 << 20, (3 << 20) + 17, 131072 * 5 + 1))
        places = sorted(chance.sample(range(size // 65536), 3))
        data = tuple((place * 65536, content[:5000]) for place in places if place * 65536 + 5000 <= size)
    return _with_attributes(chance, stat.S_IFREG, as_root=as_root)._replace(size=size, data=data)


def _with_attributes(chance: random.Random, kind: int, *, as_root: bool) -> Node:
    mode = kind | chance.choice((0o644, 0o755, 0o600, 0o400, 0o777, 0o4755, 0o2750, 0o1777, 0o000))
    uid, gid = (chance.choice((0, 1000, 65534, 4_000_000_000)) for _ in range(2)) if as_root else (0, 0)
    mtime_ns = chance.choice(TIMES_NS)
    xattrs: dict[bytes, bytes] = {}
    if kind in (stat.S_IFREG, stat.S_IFDIR) and chance.random() < 0.3:
        xattrs[b"user.plain"] = chance.randbytes(chance.choice((0, 1, 100)))
        xattrs[b"user.\xff odd=name"] = b"\0\xff\n"
    if as_root and chance.random() < 0.2:
        xattrs[b"trusted.some"] = b"where"
        if kind == stat.S_IFREG:
            xattrs[b"security.capability"] = bytes.fromhex("0000000200040000000000000000000000000000")
            if chance.random() < 0.5 and mode & 0o7000 == 0:
                xattrs[b"system.posix_acl_access"] = _ACL
                mode = (mode & ~0o777) | 0o674  # as in that list
    return Node(mode, uid, gid, mtime_ns, xattrs=tuple(sorted(xattrs.items())))


def _create(path: bytes, node: Node) -> None:
    kind = stat.S_IFMT(node.mode)
    if kind == stat.S_IFDIR:
        os.mkdir(path, 0o700)
    elif kind == stat.S_IFLNK:
        os.symlink(node.target, path)
    elif kind == stat.S_IFREG:
        with open(path, "xb") as file:
            for offset, data in node.data:
                file.seek(offset)
                file.write(data)
            file.truncate(node.size)
    elif kind in (stat.S_IFCHR, stat.S_IFBLK):
        os.mknod(path, kind | 0o600, os.makedev(*node.rdev))
    else:
        os.mknod(path, kind | 0o600)


def _set_attributes(path: bytes, node: Node) -> None:
    if os.geteuid() == 0:
        os.chown(path, node.uid, node.gid, follow_symlinks=False)
    for name, value in node.xattrs:
        os.setxattr(path, name, value, follow_symlinks=False)
    if not stat.S_ISLNK(node.mode):
        os.chmod(path, stat.S_IMODE(node.mode))
    os.utime(path, ns=(node.mtime_ns, node.mtime_ns), follow_symlinks=False)


# ---- inspecting a tree on disk -----------------------------------------------------------------------------


class FileFacts(NamedTuple):
    """The visible attributes of a file."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int  # of a regular file
    sha256: str  # of a regular file's bytes
    target: bytes
    rdev: tuple[int, int]
    xattrs: tuple[tuple[bytes, bytes], ...]
    first_name: bytes  # of the same file, in bytewise order of paths


def snapshot(directory: str) -> dict[bytes, FileFacts]:
    """Return all entries of a directory by path, b"" for itself; the user must be able to read all."""
    root = os.fsencode(directory)
    paths = [b""]
    for above, directories, files in os.walk(root):
        paths += [os.path.relpath(os.path.join(above, name), root) for name in (*directories, *files)]
    first: dict[tuple[int, int], bytes] = {}
    seen = {}
    for path in sorted(paths):
        full = os.path.join(root, path) if path else root
        try:
            found = os.lstat(full)
        except FileNotFoundError:  # overlayfs lists whiteouts in directories that it need not merge
            continue
        mode = found.st_mode
        identity = (found.st_dev, found.st_ino)
        is_device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
        seen[path] = FileFacts(
            mode,
            found.st_uid,
            found.st_gid,
            found.st_mtime_ns,
            found.st_size if stat.S_ISREG(mode) else 0,
            _sha256(full) if stat.S_ISREG(mode) else "",
            os.readlink(full) if stat.S_ISLNK(mode) else b"",
            (os.major(found.st_rdev), os.minor(found.st_rdev)) if is_device else (0, 0),
            tuple(sorted((name, _xattr(full, name)) for name in map(os.fsencode, _xattr_names(full)))),
            path if stat.S_ISDIR(mode) else first.setdefault(identity, path),
        )
    return seen


def _sha256(path: bytes) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _xattr_names(path: bytes) -> list[str]:
    return os.listxattr(path, follow_symlinks=False)


def _xattr(path: bytes, name: bytes) -> bytes:
    return os.getxattr(path, name, follow_symlinks=False)


# ---- trees that were built, without a disk ------------------------------------------------------------------


class MemoryPacks:
    """Packs of `build` in memory; a `BlockSource` once it has the index."""

    def __init__(self) -> None:
        self.packs: dict[str, bytes] = {}
        self.index: Index | None = None
        self.asked: list[int] = []  # numbers of blocks, in the order of their reads
        self._lock = threading.Lock()

    def put(self, digest: str, data: bytes) -> None:
        assert hashlib.sha256(data).hexdigest() == digest
        self.packs[digest] = data

    def read_blocks(self, numbers: Sequence[int], /) -> Iterator[tuple[int, bytes]]:
        assert self.index is not None
        with self._lock:
            self.asked += numbers
        for number in numbers:
            block = self.index.block(number)
            data = self.packs[self.index.packs[block.pack][0].hex()][block.offset :][: block.stored_bytes]
            assert block_digest(data) == block.digest
            yield number, bytes(unpack_block(data, block.raw_bytes, "block"))


def listing(index: Index, blocks: BlockSource) -> dict[bytes, FileFacts]:
    """Return what `snapshot` would return for a tree."""
    raws = dict(blocks.read_blocks(range(index.block_count)))
    paths = {index.path(entry): entry for entry in range(len(index))}
    first: dict[int, bytes] = {}
    seen = {}
    for path in sorted(paths):
        entry = paths[path]
        owner = index.links[entry] if index.links[entry] != -1 else entry
        mode = index.modes[entry]
        digest = hashlib.sha256()
        for _, address, length in index.pieces(owner) if stat.S_ISREG(mode) else ():
            block, inside = divmod(address, BLOCK_UNITS)
            begin = inside * UNIT_BYTES
            digest.update(bytes(length) if address == HOLE else raws[block][begin : begin + length])
        seen[path] = FileFacts(
            mode,
            index.uids[entry],
            index.gids[entry],
            index.mtimes_ns[entry],
            index.sizes[entry],
            digest.hexdigest() if stat.S_ISREG(mode) else "",
            index.targets[entry],
            index.rdevs.get(owner, (0, 0)),
            tuple(index.xattrs.get(owner, ())),
            first.setdefault(owner, path),
        )
    return seen


# ---- image layouts -----------------------------------------------------------------------------------------

PACKERS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, 6, mtime=0),
    "zstd": compression.compress,
    "none": bytes,
}


def write_layout(
    directory: str,
    archives: Sequence[bytes],
    *,
    packer: str = "gzip",
    architecture: str = "amd64",
    run: Mapping[str, object] | None = None,
) -> list[str]:
    """Write an OCI image layout with one image of these tar archives, the lowest first; return the layers' paths.

    `packer`: compression of layers. `run`: the `config` of the image's configuration.
    """
    os.makedirs(os.path.join(directory, "blobs", "sha256"), exist_ok=True)
    layers, paths = [], []
    for archive in archives:
        data = PACKERS[packer](archive)
        suffix = "" if packer == "none" else f"+{packer}"
        layers.append(write_blob(directory, data, f"application/vnd.oci.image.layer.v1.tar{suffix}"))
        paths.append(os.path.join(directory, "blobs", str(layers[-1]["digest"]).replace(":", "/")))
    image = {
        "os": "linux",
        "architecture": architecture,
        "rootfs": {
            "type": "layers",
            "diff_ids": [f"sha256:{hashlib.sha256(each).hexdigest()}" for each in archives],
        },
        "config": dict(run or {}),
    }
    config = write_blob(directory, json.dumps(image).encode(), "application/vnd.oci.image.config.v1+json")
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers}
    head = write_blob(directory, json.dumps(manifest).encode(), kind)
    head["platform"] = {"os": "linux", "architecture": architecture}
    write_layout_index(directory, [head])
    return paths


def write_layout_index(directory: str, manifests: Sequence[Mapping[str, object]]) -> None:
    """Write `index.json` and `oci-layout` for these descriptors."""
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": list(manifests),
    }
    for name, document in (("index.json", index), ("oci-layout", {"imageLayoutVersion": "1.0.0"})):
        with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
            json.dump(document, file)


def write_blob(directory: str, data: bytes, media_type: str) -> dict[str, object]:
    """Write a blob of a layout and return its descriptor."""
    digest = hashlib.sha256(data).hexdigest()
    with open(os.path.join(directory, "blobs", "sha256", digest), "wb") as file:
        file.write(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}
