"""Trees for tests: an index and its device from a list of entries, and what a mounted tree shows of them.

Blocks are laid out as docs/reference/formats.md says; they are stored nowhere, so their digests are made up.
"""

from __future__ import annotations

import hashlib
import os
import random
import socket
import stat
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st

from bootseer.tree.index import (
    BLOCK,
    BLOCK_BYTES,
    BLOCK_UNITS,
    HOLE,
    UNIT_BYTES,
    Index,
    check,
    encode,
)

Segments = Sequence["bytes | int"]  # bytes, or a number of zeros


class Entry(NamedTuple):
    """One name of a tree."""

    path: bytes  # from the root, b"" for the root
    mode: int
    data: Segments = ()
    target: bytes = b""
    link: bytes = b""  # path of the first name of the same file
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 1_700_000_000_123_456_789
    rdev: tuple[int, int] = (0, 0)
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    is_opaque: bool = False


class Made(NamedTuple):
    index: Index
    device: bytes  # all blocks
    digest: str


class Seen(NamedTuple):
    """What a program sees of one name."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    nlink: int
    size: int  # of a folder 0: that is the file system's affair
    rdev: tuple[int, int]
    target: bytes
    xattrs: dict[bytes, bytes]
    sha256: str
    first_name: bytes  # of all names of the same file


def folder(path: bytes, mode: int = 0o755, **more: object) -> Entry:
    return Entry(path, stat.S_IFDIR | mode, **more)  # type: ignore[arg-type]


def file(path: bytes, *data: bytes | int, mode: int = 0o644, **more: object) -> Entry:
    return Entry(path, stat.S_IFREG | mode, data, **more)  # type: ignore[arg-type]


def symlink(path: bytes, target: bytes, **more: object) -> Entry:
    return Entry(path, stat.S_IFLNK | 0o777, target=target, **more)  # type: ignore[arg-type]


def whiteout(path: bytes) -> Entry:
    return Entry(path, stat.S_IFCHR, rdev=(0, 0))


def make(entries: Iterable[Entry]) -> Made:
    """The tree; a root is added when there is none, folders have to be named.

    Further names of a file have to be alike in all attributes, and to sort behind the first one.
    """
    ordered = sorted(entries, key=lambda entry: entry.path.split(b"/") if entry.path else [])
    if not ordered or ordered[0].path:
        ordered.insert(0, folder(b""))
    numbers = {entry.path: number for number, entry in enumerate(ordered)}
    device = _Device()
    runs, sizes, links = [], [], []
    for entry in ordered:
        first = entry if not entry.link else ordered[numbers[entry.link]]
        links.append(numbers[entry.link] if entry.link else -1)
        size = sum(each if isinstance(each, int) else len(each) for each in first.data)
        sizes.append(size)
        runs.append([] if entry.link or not size else device.add(first.data, size))
    blocks = device.table()
    stored = len(device.data)
    index = Index(
        tool="test",
        packs=[(hashlib.sha256(device.data).digest(), stored)] if stored else [],
        blocks=blocks,
        parents=[numbers[entry.path.rpartition(b"/")[0]] for entry in ordered],
        names=[entry.path.rpartition(b"/")[2] for entry in ordered],
        modes=[entry.mode for entry in ordered],
        uids=[entry.uid for entry in ordered],
        gids=[entry.gid for entry in ordered],
        mtimes_ns=[entry.mtime_ns for entry in ordered],
        sizes=sizes,
        runs=runs,
        targets=[entry.target for entry in ordered],
        links=links,
        rdevs={
            number: entry.rdev
            for number, entry in enumerate(ordered)
            if stat.S_ISCHR(entry.mode) or stat.S_ISBLK(entry.mode)
        },
        xattrs={
            number: sorted(entry.xattrs) for number, entry in enumerate(ordered) if entry.xattrs and not entry.link
        },
        opaque=[number for number, entry in enumerate(ordered) if entry.is_opaque],
    )
    check(index, "made")
    return Made(index, bytes(device.data), hashlib.sha256(encode(index)).hexdigest())


def in_directories(tree: Index) -> Index:
    """The same with all names of a folder one after the other, as trees are built."""
    below: dict[int, list[int]] = {}
    for entry in range(1, len(tree)):
        below.setdefault(tree.parents[entry], []).append(entry)
    order, open_ = [0], [0]
    while open_:
        found = below.get(open_.pop(), [])
        order += found
        open_ += [entry for entry in reversed(found) if entry in below]
    place = {entry: number for number, entry in enumerate(order)}
    # Of the names of a file the first one has what the others refer to.
    first = {entry: min(place[each] for each in range(len(tree)) if entry in (each, tree.links[each]))
             for entry in range(len(tree)) if tree.links[entry] == -1}  # fmt: skip

    def own(entry: int) -> int:
        return entry if tree.links[entry] == -1 else tree.links[entry]

    alike = ("names", "modes", "uids", "gids", "mtimes_ns", "sizes", "targets")
    columns: dict[str, Any] = {name: [getattr(tree, name)[entry] for entry in order] for name in alike}
    return msgspec.structs.replace(
        tree,
        **columns,
        parents=[place[tree.parents[entry]] for entry in order],
        links=[-1 if first[own(entry)] == place[entry] else first[own(entry)] for entry in order],
        runs=[tree.runs[own(entry)] if first[own(entry)] == place[entry] else [] for entry in order],
        rdevs={place[entry]: number for entry, number in tree.rdevs.items()},
        xattrs={first[own(entry)]: pairs for entry, pairs in tree.xattrs.items()},
        opaque=[place[entry] for entry in tree.opaque],
    )


def expected(made: Made) -> dict[bytes, Seen]:
    """What programs are to see of it, by path; the content is read from the device as the index says."""
    index = made.index
    names: dict[int, list[bytes]] = {}
    for entry in range(len(index)):
        first = entry if index.links[entry] == -1 else index.links[entry]
        names.setdefault(first, []).append(index.path(entry))
    found = {}
    for entry in range(len(index)):
        first = entry if index.links[entry] == -1 else index.links[entry]
        mode = index.modes[entry]
        xattrs = dict(index.xattrs.get(first, []))
        if entry in index.opaque:
            xattrs[b"trusted.overlay.opaque"] = b"y"
        is_folder = stat.S_ISDIR(mode)
        directories = (
            sum(stat.S_ISDIR(index.modes[each]) for each in range(1, len(index)) if index.parents[each] == entry)
            if is_folder
            else 0
        )
        found[index.path(entry)] = Seen(
            mode=mode,
            uid=index.uids[entry],
            gid=index.gids[entry],
            mtime_ns=index.mtimes_ns[entry],
            nlink=2 + directories if is_folder else len(names[first]),
            size=len(index.targets[entry]) or index.sizes[entry],
            rdev=index.rdevs.get(first, (0, 0)),
            target=index.targets[entry],
            xattrs=xattrs,
            sha256=hashlib.sha256(content(made, first)).hexdigest() if stat.S_ISREG(mode) else "",
            first_name=min(names[first]),
        )
    return found


def content(made: Made, entry: int) -> bytes:
    """The bytes of a file, by the index's pieces alone."""
    parts = []
    for _, address, length in made.index.pieces(entry):
        at = address * UNIT_BYTES
        parts.append(bytes(length) if address == HOLE else made.device[at : at + length])
    return b"".join(parts)


def observe(top: str | bytes) -> dict[bytes, Seen]:
    """What is to be seen of a tree of files, by path from `top`."""
    top = os.fsencode(top)
    paths = [b""]
    for above, directories, files in os.walk(top, onerror=_fail):
        paths += [os.path.relpath(os.path.join(above, name), top) for name in directories + files]
    names: dict[int, list[bytes]] = {}
    for path in paths:
        names.setdefault(os.lstat(os.path.join(top, path)).st_ino, []).append(path)
    found = {}
    for path in paths:
        full = os.path.join(top, path) if path else top
        status = os.lstat(full)
        mode = status.st_mode
        found[path] = Seen(
            mode=mode,
            uid=status.st_uid,
            gid=status.st_gid,
            mtime_ns=status.st_mtime_ns,
            nlink=status.st_nlink,
            size=0 if stat.S_ISDIR(mode) else status.st_size,
            rdev=(os.major(status.st_rdev), os.minor(status.st_rdev)),
            target=os.readlink(full) if stat.S_ISLNK(mode) else b"",
            xattrs={
                os.fsencode(name): os.getxattr(full, name, follow_symlinks=False)
                for name in os.listxattr(full, follow_symlinks=False)
            },
            sha256=_sha256(full) if stat.S_ISREG(mode) else "",
            first_name=min(names[status.st_ino]),
        )
    return found


def materialise(made: Made, top: str) -> None:
    """The same tree as ordinary files; needs root."""
    index = made.index
    for entry in range(len(index)):
        full = os.path.join(os.fsencode(top), index.path(entry)) if entry else os.fsencode(top)
        mode = index.modes[entry]
        if index.links[entry] != -1:
            os.link(os.path.join(os.fsencode(top), index.path(index.links[entry])), full, follow_symlinks=False)
            continue
        if stat.S_ISREG(mode):
            with open(full, "wb") as opened:
                opened.write(content(made, entry))
        elif stat.S_ISDIR(mode):
            os.makedirs(full, exist_ok=True)
        elif stat.S_ISLNK(mode):
            os.symlink(index.targets[entry], full)
        elif stat.S_ISSOCK(mode):
            _bind(full)
        else:
            os.mknod(full, mode, os.makedev(*index.rdevs.get(entry, (0, 0))))
        os.chown(full, index.uids[entry], index.gids[entry], follow_symlinks=False)
        if not stat.S_ISLNK(mode):
            os.chmod(full, stat.S_IMODE(mode))
        xattrs = index.xattrs.get(entry, [])
        if entry in index.opaque:
            xattrs = [*xattrs, (b"trusted.overlay.opaque", b"y")]
        for name, value in xattrs:
            os.setxattr(full, name, value, follow_symlinks=False)
    for entry in reversed(range(len(index))):
        full = os.path.join(os.fsencode(top), index.path(entry)) if entry else os.fsencode(top)
        os.utime(full, ns=(index.mtimes_ns[entry],) * 2, follow_symlinks=False)


def _bind(path: bytes) -> None:
    above, name = os.path.split(path)
    fd = os.open(above, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(b"/proc/self/fd/%d/" % fd + name)  # names of sockets are short
    finally:
        os.close(fd)


def _sha256(path: bytes) -> str:
    with open(path, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _fail(error: OSError) -> None:
    raise error


def _next_address(runs: list[int]) -> int | None:
    """Of a piece that goes on with the last run; runs of several pieces begin with a block."""
    address = runs[-2]
    if address == HOLE:
        return HOLE
    return None if address % BLOCK_UNITS else address + runs[-1] * BLOCK_UNITS


class _Device:
    """Blocks in the making: whole pieces are blocks, ends of files share some, equal pieces are stored once."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._raw: list[int] = []  # bytes of each block that are used
        self._known: dict[bytes, int] = {}
        self._shared = -1  # block that takes ends of files

    def add(self, segments: Segments, size: int) -> list[int]:
        """Runs of a file's data."""
        joined = b"".join(bytes(each) if isinstance(each, int) else each for each in segments)
        addresses = []
        for offset in range(0, size, BLOCK_BYTES):
            piece = joined[offset : offset + BLOCK_BYTES]
            addresses.append(HOLE if not piece.strip(b"\0") else self._put(piece))
        runs: list[int] = []
        for address in addresses:
            if runs and address == _next_address(runs):
                runs[-1] += 1
            else:
                runs += [address, 1]
        return runs

    def table(self) -> bytes:
        """The index's list of blocks, all stored as they are, one after the other in one pack."""
        rows = []
        for number, raw in enumerate(self._raw):
            digest = hashlib.sha256(self.data[number * BLOCK_BYTES : number * BLOCK_BYTES + raw]).digest()
            rows.append(BLOCK.pack(digest, 0, number * BLOCK_BYTES, raw, raw))
        return b"".join(rows)

    def _put(self, piece: bytes) -> int:
        known = self._known.get(piece)
        if known is not None:
            return known
        needed = -(-len(piece) // UNIT_BYTES) * UNIT_BYTES
        block = self._shared
        if needed == BLOCK_BYTES or block < 0 or self._raw[block] + needed > BLOCK_BYTES:
            block = len(self._raw)
            self._raw.append(0)
            self.data += bytes(BLOCK_BYTES)
            if needed < BLOCK_BYTES:
                self._shared = block
        at = block * BLOCK_BYTES + self._raw[block]
        self.data[at : at + len(piece)] = piece
        self._raw[block] += needed
        self._known[piece] = at // UNIT_BYTES
        return at // UNIT_BYTES


# ---- trees ---------------------------------------------------------------------------------------------------


def everything(*, has_extremes: bool = True) -> Made:
    """A tree with all that the format knows, and with what is at the edges of EROFS.

    `has_extremes`: also what ext4 or mkfs.erofs 1.5 cannot keep, as times before 1901 and large attributes.
    """
    pick = random.Random(5)
    entries = [
        folder(b"", 0o1777, mtime_ns=-1),
        folder(b"empty"),
        folder(b"many"),
        folder(b"opaque", is_opaque=True, xattrs=((b"trusted.x", b"y"), (b"user.x", b""))),
        folder(b"deep"),
        folder(b"sizes"),
        folder(b"copies"),
        folder(b"links"),
        folder(b"odd"),
        whiteout(b"gone"),
    ]
    entries += [file(b"many/%05d" % number, b"%d" % number) for number in range(2000)]
    path = b"deep"
    for number in range(60):
        path += b"/%d" % number
        entries.append(folder(path, uid=number))
    sizes = {1, 4095, 4096, 4097, 8192}
    for near in (BLOCK_BYTES, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES):
        sizes |= {near - 4097, near - 4096, near - 1, near, near + 1, near + 4096, near + 4097}
    entries += [file(b"sizes/%d" % size, pick.randbytes(size)) for size in sorted(sizes)]
    entries += [
        file(b"sizes/0"),
        file(b"sizes/zeros", 1),
        file(b"sizes/more zeros", 5 << 20),
        file(b"sizes/huge", 1 << 20, b"x", (3 << 20) + 7, b"end"),
        file(b"sizes/hole first", BLOCK_BYTES, b"data" * 40000),
        file(b"sizes/hole last", b"data" * (BLOCK_BYTES // 4), 3 * BLOCK_BYTES),
    ]
    same = pick.randbytes(2 * BLOCK_BYTES + 5000)
    entries += [
        file(b"copies/%d" % number, same[: len(same) - number * 1000], mtime_ns=number) for number in range(4)
    ]
    entries += [file(b"copies/repeats", same[:BLOCK_BYTES] * 3)]
    for length in (1, 2047, 2048, 2049, 4000, 4094, 4095):
        entries.append(symlink(b"links/%d" % length, (b"../odd/" * 600)[:length]))
    entries += [
        symlink(b"links/attributes", b"x", xattrs=((b"trusted.overlay.origin", b"\0" * 30),), uid=7, mtime_ns=5),
        file(b"links/first", b"several names"),
        file(b"zz", b"", link=b"links/first"),
        file(b"links/second", link=b"links/first"),
        Entry(b"links/pipe", stat.S_IFIFO | 0o644),
        Entry(b"links/pipe too", stat.S_IFIFO | 0o644, link=b"links/pipe"),
    ]
    entries += [
        Entry(b"odd/null", stat.S_IFCHR | 0o666, rdev=(1, 3)),
        Entry(b"odd/large", stat.S_IFBLK | 0o600, rdev=(4095, (1 << 20) - 1)),
        Entry(b"odd/zero", stat.S_IFBLK | 0o600, rdev=(0, 0)),
        Entry(b"odd/pipe", stat.S_IFIFO | 0o600),
        Entry(b"odd/socket", stat.S_IFSOCK | 0o755),
        file(b"odd/setuid", b"#!", mode=0o6755, uid=70000, gid=(1 << 32) - 2),
        file(b"odd/" + b"\xff\xfe\n\\", b"bytes"),
        *(file(b"odd/" + name, name) for name in (b"!", b"-", b".!", b"..!", b".a", b"...", b" ", b"~", b"\x01")),
        *(
            file(b"odd/time%d" % number, mtime_ns=mtime_ns)
            for number, mtime_ns in enumerate(
                (0, 1, -1, -1_500_000_000, 10**9 - 1, 10**9, 4_102_444_800_999_999_999)
            )
        ),
        file(b"odd/acl", b"x", mode=0o664, xattrs=((b"system.posix_acl_access", acl(6, 7, 4)),)),
        folder(
            b"odd/acl folder",
            0o765,
            xattrs=((b"system.posix_acl_access", acl(7, 5, 5)), (b"system.posix_acl_default", acl(7, 7, 0))),
        ),
        file(
            b"odd/capability",
            b"x",
            xattrs=((b"security.capability", struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0)),),
        ),
    ]
    if has_extremes:
        entries += [
            file(b"odd/" + b"n" * 255, b"name"),
            file(b"odd/first time", mtime_ns=-(1 << 63)),
            file(b"odd/last time", mtime_ns=(1 << 63) - 1),
            file(b"odd/long", b"x", xattrs=((b"user." + b"n" * 250, b"v" * 3000), (b"user.x", bytes(60000)))),
            folder(b"odd/long folder", xattrs=((b"trusted." + b"n" * 247, pick.randbytes(9000)),)),
            symlink(b"odd/long link", b"t" * 2000, xattrs=((b"trusted.n", pick.randbytes(5000)),)),
        ]
    entries += tails()
    return make(entries)


TAILS = (2047, 2048, 2049, 4095, 4096, 4096 + 15, 4096 + 2048, 4096 + 2049, 8192 - 1, 8192, 8192 + 2048)


def tails() -> list[Entry]:
    """Folders of these sizes, without room to spare in any block: they decide where the last block goes."""
    entries = []
    for length in TAILS:
        top = b"tail%d" % length
        entries.append(folder(top))
        number = 0
        for block in range(0, length, UNIT_BYTES):
            left = min(UNIT_BYTES, length - block) - (0 if block else 2 * 12 + 3)  # "." and ".."
            count = -(-left // 112)
            for place in range(count):
                name_bytes = left // count + (place < left % count) - 12
                entries.append(file(top + b"/" + (b"%03d" % number).ljust(name_bytes, b"x")))
                number += 1
    return entries


def acl(user: int, group: int, other: int) -> bytes:
    """An access list with a named user, as the attribute has it."""
    rows = (
        (1, user, 0xFFFFFFFF),
        (2, 6, 1000),
        (4, group, 0xFFFFFFFF),
        (0x10, 6, 0xFFFFFFFF),
        (0x20, other, 0xFFFFFFFF),
    )
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *row) for row in rows)


_NAMES = (
    st.one_of(
        st.binary(min_size=1, max_size=12),
        st.binary(min_size=200, max_size=255),
        st.sampled_from([b"a", b"b", b"-", b".a", b"~", b"...", b"\xff"]),
    )
    .map(lambda name: name.replace(b"/", b"_").replace(b"\0", b"_"))
    .filter(lambda name: name not in (b".", b".."))
)
_BYTES = st.tuples(st.binary(min_size=1, max_size=8), st.integers(1, 40000)).map(lambda made: made[0] * made[1])
_SEGMENTS = st.lists(
    st.one_of(_BYTES, st.integers(0, 3 * BLOCK_BYTES), st.sampled_from([b"x", UNIT_BYTES, BLOCK_BYTES])),
    max_size=4,
)
_TIMES = st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-(10**10), 10**10))
_IDS = st.one_of(st.integers(0, 3), st.integers(0, (1 << 32) - 2))
_XATTRS = st.dictionaries(
    st.binary(min_size=1, max_size=30).map(lambda name: b"trusted." + name.replace(b"\0", b"_")),
    st.one_of(st.binary(max_size=40), st.integers(0, 9000).map(lambda length: b"v" * length)),
    max_size=3,
).map(lambda made: tuple(made.items()))


@st.composite
def trees(draw: st.DrawFn) -> Made:
    """Trees of all kinds of entries."""
    directories, files = [b""], []
    entries = {b"": folder(b"", draw(st.integers(0, 0o7777)), mtime_ns=draw(_TIMES))}
    for _ in range(draw(st.integers(0, 25))):
        above = draw(st.sampled_from(directories))
        path = (above + b"/" if above else b"") + draw(_NAMES)
        if path in entries or path.count(b"/") > 8:
            continue
        mode = draw(st.integers(0, 0o7777))
        attributes = {
            "uid": draw(_IDS), "gid": draw(_IDS), "mtime_ns": draw(_TIMES), "xattrs": draw(_XATTRS),
        }  # fmt: skip
        kind = draw(st.sampled_from(["folder", "file", "file", "symlink", "device", "pipe", "link", "whiteout"]))
        if kind == "folder":
            directories.append(path)
            entries[path] = folder(path, mode, is_opaque=draw(st.booleans()), **attributes)
        elif kind == "file":
            files.append(path)
            entries[path] = file(path, *draw(_SEGMENTS), mode=mode, **attributes)
        elif kind == "symlink":
            target = draw(st.one_of(_NAMES, st.integers(1, 4095).map(lambda length: b"t" * length)))
            entries[path] = symlink(path, target, **attributes)
        elif kind == "device":
            rdev = draw(st.integers(0, 4095)), draw(st.integers(0, (1 << 20) - 1))
            entries[path] = Entry(
                path, draw(st.sampled_from([stat.S_IFCHR, stat.S_IFBLK])) | mode, rdev=rdev, **attributes
            )
        elif kind == "pipe":
            entries[path] = Entry(path, stat.S_IFIFO | mode, **attributes)
        elif kind == "whiteout":
            entries[path] = whiteout(path)
        elif files:
            first = entries[draw(st.sampled_from(files))]
            entries[path] = first._replace(path=path, data=(), xattrs=(), link=first.path)
    return make(_in_order(entries))


def _in_order(entries: dict[bytes, Entry]) -> list[Entry]:
    """Of several names of a file the one that sorts first has the file."""
    names: dict[bytes, list[bytes]] = {}
    for path, entry in entries.items():
        names.setdefault(entry.link or path, []).append(path)
    made = []
    for original, paths in names.items():
        first, *more = sorted(paths, key=lambda path: path.split(b"/"))
        kept = entries[original]._replace(path=first)
        made.append(kept)
        made += [kept._replace(path=path, data=(), xattrs=(), link=first) for path in more]
    return made
