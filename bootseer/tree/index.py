"""The index of a tree (docs/reference/formats.md), as columns.

In: untrusted bytes from a store. Out: an Index with bounded sizes, names inside the tree and consistent numbers,
so that users of it need no further checks; or one error that names the culprit. Columns, not records: a tree has
tens of thousands of entries and is read at each start.
"""

from __future__ import annotations

import hashlib
import stat
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count as counting
from itertools import islice
from operator import add, ge, le, lt, ne, or_
from typing import NamedTuple, TypeVar

import msgspec

from bootseer.errors import IntegrityError
from bootseer.formats import other_format
from bootseer.tree.compression import decompress

FORMAT = "bootseer-tree/1"
MAX_INDEX_BYTES = 256 << 20
MAX_RAW_INDEX_BYTES = 1 << 30

BLOCK_BYTES = 128 << 10
PACKS = "packs"  # directory of a tree's packs, which never change
UNIT_BYTES = 4 << 10  # the unit of addresses
BLOCK_UNITS = BLOCK_BYTES // UNIT_BYTES
HOLE = -1

MAX_ENTRIES = 1 << 24
MAX_BLOCKS = 1 << 24
MAX_PACKS = 1 << 20
MAX_PIECES = 1 << 26
MAX_FILE_BYTES = 1 << 50
MAX_NAME_BYTES = 255
MAX_TIME_NS = (1 << 63) - 1  # the year 2262; later times are stored as this
MAX_TARGET_BYTES = 4095
MAX_XATTR_BYTES = 65535  # of a value
MAX_ENTRY_XATTR_BYTES = 64 << 10  # names and values of an entry
MAX_DEPTH = 1024
XATTR_PREFIXES = (b"user.", b"trusted.", b"security.")
OVERLAY_XATTRS = (b"trusted.overlay.", b"user.overlay.")  # left out: they would change what a mount shows
XATTR_NAMES = (b"system.posix_acl_access", b"system.posix_acl_default")

BLOCK = struct.Struct("<32sIIII")
_TYPES = frozenset({
    stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK,
})  # fmt: skip


class Block(NamedTuple):
    digest: bytes  # of the stored bytes: block_codec.block_digest
    pack: int
    offset: int  # in the pack, bytes
    stored_bytes: int
    raw_bytes: int  # a multiple of UNIT_BYTES


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings to run an image; empty for other trees."""

    env: list[str] = []  # NAME=value
    entrypoint: list[str] = []
    cmd: list[str] = []
    workdir: str = ""
    user: str = ""
    architecture: str = ""


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tree. Shapes: E entries, B blocks, P packs."""

    format: str = FORMAT
    tool: str
    source: str = ""
    config: Config = Config()
    packs: list[tuple[bytes, int]]  # P: digest, bytes
    blocks: bytes  # B x BLOCK
    parents: list[int]  # E
    names: list[bytes]  # E
    modes: list[int]  # E
    uids: list[int]  # E
    gids: list[int]  # E
    mtimes_ns: list[int]  # E
    sizes: list[int]  # E
    runs: list[list[int]]  # E: address, pieces, address, pieces ...
    targets: list[bytes]  # E
    links: list[int]  # E
    rdevs: dict[int, tuple[int, int]] = {}
    xattrs: dict[int, list[tuple[bytes, bytes]]] = {}
    opaque: list[int] = []

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.parents)

    @property
    def block_count(self) -> int:
        return len(self.blocks) // BLOCK.size

    @property
    def device_bytes(self) -> int:
        """The size of the device of all blocks."""
        return self.block_count * BLOCK_BYTES

    @property
    def stored_bytes(self) -> int:
        """The size of all packs."""
        return sum(size for _, size in self.packs)

    def block(self, number: int) -> Block:
        return Block._make(BLOCK.unpack_from(self.blocks, number * BLOCK.size))

    def pack_path(self, pack: int) -> str:
        """Return the path of a pack in the tree's directory."""
        return f"{PACKS}/{self.packs[pack][0].hex()}"

    def path(self, entry: int) -> bytes:
        """Return the names from the root, joined by "/"; empty for the root itself."""
        names = []
        while entry:
            names.append(self.names[entry])
            entry = self.parents[entry]
        return b"/".join(reversed(names))

    def pieces(self, entry: int) -> Iterator[tuple[int, int, int]]:
        """Yield (offset in the file, address or HOLE, bytes) of each piece of a regular file, in order."""
        return pieces_of(self.runs[entry], self.sizes[entry])


class Names(msgspec.Struct, frozen=True):
    """The directory structure of an index; the rest takes longer to decode. Unchecked."""

    parents: list[int]
    names: list[bytes]
    modes: list[int]
    rdevs: dict[int, tuple[int, int]] = {}
    xattrs: dict[int, list[tuple[bytes, bytes]]] = {}

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.parents)

    def path(self, entry: int) -> bytes:
        """Return a path as `Index.path` does, even for unchecked entries."""
        names = []
        while entry:
            names.append(self.names[entry])
            entry = min(self.parents[entry], entry - 1)
        return b"/".join(reversed(names))


class Files(msgspec.Struct, frozen=True):
    """The locations of file data in an index. Unchecked."""

    modes: list[int]
    blocks: bytes
    sizes: list[int]
    runs: list[list[int]]
    links: list[int]

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.modes)


def pieces_of(runs: list[int], size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (offset in the file, address or HOLE, bytes) of each piece."""
    offset = 0
    for place in range(0, len(runs), 2):
        address = runs[place]
        for number in range(runs[place + 1]):
            length = min(BLOCK_BYTES, size - offset)
            yield offset, HOLE if address == HOLE else address + number * BLOCK_UNITS, length
            offset += length


_Part = TypeVar("_Part", Names, Files)


class _Head(msgspec.Struct):
    """The first field of every version of the format."""

    format: str


# Like Index, but without optional fields.
_Wire = msgspec.defstruct(
    "_Wire", [(field.name, field.type) for field in msgspec.structs.fields(Index)], forbid_unknown_fields=True
)


def index_path(digest: str) -> str:
    """Return the path of the index object in the tree's directory."""
    return f"index/{digest}"


def digest_of(data: bytes) -> str:
    """Return the tree digest: that of the stored index object."""
    return hashlib.sha256(data).hexdigest()


def encode(index: Index) -> bytes:
    """Encode as MessagePack, before compression. Raises: IntegrityError for a tree that no reader would accept."""
    check(index, "this tree")
    return msgspec.msgpack.encode(index)


def decode(data: bytes, digest: str, where: str) -> Index:
    """Decode the index with this digest from bytes of a store.

    Raises: IntegrityError when the digest differs or the index is invalid; FormatVersion.
    """
    index = read_unchecked(data, digest, where)
    check(index, where)
    return index


def read_unchecked(data: bytes, digest: str, where: str) -> Index:
    """Do the same, but check only types: for work that is discarded if `check` fails.

    Raises: IntegrityError, FormatVersion.
    """
    if len(data) > MAX_INDEX_BYTES:
        raise IntegrityError(f"{where}: {len(data)} bytes; no index is larger than {MAX_INDEX_BYTES}")
    if digest_of(data) != digest:
        raise IntegrityError(f"{where}: is damaged: its SHA-256 is not {digest}")
    raw = to_raw(data, where)
    try:
        try:
            index = Index(**msgspec.structs.asdict(msgspec.msgpack.decode(raw, type=_Wire)))
        except msgspec.ValidationError:
            _check_format(msgspec.msgpack.decode(raw, type=_Head).format, where)  # the clearer error, if any
            raise
        _check_format(index.format, where)
        return index
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{where}: is not an index of a tree: {error}") from error


def to_raw(data: bytes, where: str) -> bytes:
    """Decompress an index object. Raises: IntegrityError."""
    return decompress(data, MAX_RAW_INDEX_BYTES, where)


def read_part(raw: bytes, part: type[_Part], where: str) -> _Part:
    """Decode Names or Files from the result of `to_raw`. Raises: IntegrityError."""
    try:
        return msgspec.msgpack.decode(raw, type=part)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{where}: is not an index of a tree: {error}") from error


def _check_format(found: str, where: str) -> None:
    if found != FORMAT:
        raise other_format(found, FORMAT, where)


def check(index: Index, where: str) -> None:
    """Check that all numbers and names are consistent. Raises: IntegrityError.

    A start waits for this. So it checks whole columns where possible. It checks entries one by one only to find a
    fault, or in trees of another shape than `building.lay_out` makes.
    """
    check_shape(index, where)
    check_attributes(index, where)
    check_files(index, where)


def check_shape(index: Index, where: str) -> None:
    """Do the first part of `check`: blocks, types, names, parents. Raises: IntegrityError."""
    with _naming(where):
        _check_head(index)
        check_blocks(index, where)
        check_names(index, where)


def check_attributes(index: Index, where: str) -> None:
    """Do the second part of `check`. For an index of invalid shape it may raise anything, or find nothing.

    Raises: IntegrityError.
    """
    with _naming(where):
        _check_attributes(index)


def check_files(index: Index, where: str) -> None:
    """Do the third part of `check`, with the same condition as the second."""
    with _naming(where):
        _check_files(index)


def check_files_alone(files: Files, where: str) -> bool:
    """Do the same as `check_files`. After a fault in another part, it may raise anything, or find nothing.

    Returns: False if it cannot decide, as all names of one file must have the same attributes.
    Raises: IntegrityError.
    """
    if files.links.count(-1) != len(files):
        return False
    with _naming(where):
        _check_files(files)
    return True


def check_names(index: Index | Names, where: str) -> None:
    """Check types, names and parents. For an index with an invalid head, it may raise anything, or find nothing.

    Raises: IntegrityError.
    """
    with _naming(where):
        _check_modes(index)
        _check_names(index)


def check_head(index: Index, where: str) -> None:
    """Do the fast part of `check`: the lengths of all columns. Raises: IntegrityError."""
    with _naming(where):
        _check_head(index)


def check_blocks(index: Index, where: str) -> None:
    """Check the list of blocks alone. Raises: IntegrityError."""
    with _naming(where):
        _check_blocks(index)


@contextmanager
def _naming(where: str) -> Iterator[None]:
    try:
        yield
    except _WrongError as wrong:
        raise IntegrityError(f"{where}: {wrong}") from None


class _WrongError(Exception):
    """An inconsistency."""


def _check_head(index: Index) -> None:
    count = len(index)
    if not 1 <= count <= MAX_ENTRIES:
        raise _WrongError(f"has {count} entries; 1 to {MAX_ENTRIES}")
    for name in ("names", "modes", "uids", "gids", "mtimes_ns", "sizes", "runs", "targets", "links"):
        if len(getattr(index, name)) != count:
            raise _WrongError(f"has {count} entries and {len(getattr(index, name))} {name}")
    if len(index.tool) > 200 or len(index.source.encode("utf-8", "surrogatepass")) > 1024:
        raise _WrongError("tool or source is too long")
    config = index.config
    # Programs are started with them.
    strings = (*config.env, *config.entrypoint, *config.cmd, config.workdir, config.user, config.architecture)
    if any("\0" in each for each in strings):
        raise _WrongError("its configuration has a NUL")
    for each in config.env:
        if each.find("=") < 1:
            raise _WrongError(f"its configuration sets {each[:80]!r}, which is not NAME=value")


def _check_blocks(index: Index) -> None:
    if len(index.blocks) % BLOCK.size or index.block_count > MAX_BLOCKS:
        raise _WrongError("the list of blocks has an impossible length")
    if len(index.packs) > MAX_PACKS:
        raise _WrongError(f"has more than {MAX_PACKS} packs")
    if any(len(digest) != 32 or not 0 < size < 1 << 32 for digest, size in index.packs):
        raise _WrongError("a pack has an impossible digest or size")
    sizes = [size for _, size in index.packs]
    packs = len(sizes)
    if _are_blocks_right(index.blocks, sizes):
        return
    for number, (_, pack, offset, stored, raw) in enumerate(BLOCK.iter_unpack(index.blocks)):
        if pack >= packs or not 0 < stored <= raw or offset + stored > sizes[pack]:
            raise _WrongError(f"block {number} lies outside its pack")
        if raw > BLOCK_BYTES or raw % UNIT_BYTES:
            raise _WrongError(f"block {number} has {raw} bytes")


def _are_blocks_right(blocks: bytes, pack_sizes: list[int]) -> bool:
    """PURE: return whether all blocks are valid; False where each must be checked."""
    if not blocks:
        return True
    packs, offsets, stored, raws = _columns(blocks)
    return (
        max(packs) < len(pack_sizes)
        and min(stored) > 0
        and all(map(le, stored, raws))
        and all(map(le, map(add, offsets, stored), map(pack_sizes.__getitem__, packs)))
        and all(raw <= BLOCK_BYTES and raw % UNIT_BYTES == 0 for raw in set(raws))
    )


def _columns(blocks: bytes) -> list[array[int]]:
    """PURE: return columns of BLOCK: packs, offsets, stored and raw bytes."""
    words = array("I", blocks)
    if sys.byteorder == "big":
        words.byteswap()
    each = BLOCK.size // words.itemsize
    return [words[place::each] for place in range(each - 4, each)]


def _check_modes(index: Index | Names) -> None:
    """Check modes before any code uses their types."""
    if all(0 <= mode <= 0xFFFF and stat.S_IFMT(mode) in _TYPES for mode in set(index.modes)):
        return
    for entry, mode in enumerate(index.modes):
        if not 0 <= mode <= 0xFFFF or stat.S_IFMT(mode) not in _TYPES:
            raise _WrongError(f"entry {entry} has mode {mode:#o}")


def _check_names(index: Index | Names) -> None:
    parents, names, modes = index.parents, index.names, index.modes
    if parents[0] != 0 or names[0] != b"" or not stat.S_ISDIR(modes[0]):
        raise _WrongError("entry 0 is not the root")
    if _are_names_right(index):
        return
    depths = [0] * len(index)
    last: dict[int, bytes] = {}  # directory -> name of its last entry so far
    for entry in range(1, len(index)):
        parent, name = parents[entry], names[entry]
        if not 0 <= parent < entry or not stat.S_ISDIR(modes[parent]):
            raise _WrongError(f"entry {entry} is in no directory")
        if not 0 < len(name) <= MAX_NAME_BYTES or b"/" in name or b"\0" in name or name in (b".", b".."):
            raise _WrongError(f"{name[:80]!r} is not a valid name")
        if name <= last.get(parent, b""):
            raise _WrongError(f"{name[:80]!r} is duplicated or out of order")
        last[parent] = name
        depths[entry] = depths[parent] + 1
    if max(depths) > MAX_DEPTH:
        raise _WrongError(f"directories are nested more than {MAX_DEPTH} deep")


def _are_names_right(index: Index | Names) -> bool:
    """PURE: return whether all names are valid; False where each must be checked. Entry 0 is the root."""
    parents, names = index.parents[1:], index.names[1:]
    if not names:
        return True
    joined = b"/".join([*index.names, b""])  # begins with "/", as the root has no name
    if joined.count(b"/") != len(names) + 1 or any(each in joined for each in (b"\0", b"//", b"/./", b"/../")):
        return False
    if max(map(len, names)) > MAX_NAME_BYTES or min(parents) < 0 or any(map(ge, parents, counting(1))):
        return False
    directories = set(parents)
    if not all(stat.S_ISDIR(index.modes[directory]) for directory in directories):
        return False
    begins = list(map(ne, parents, islice(parents, 1, None)))  # whether the next one is in another directory
    if 1 + sum(begins) != len(directories):
        return False  # entries of a directory are not adjacent
    if not all(map(or_, begins, map(lt, names, islice(names, 1, None)))):
        return False
    depths = {0: 1}  # of entries in a directory
    for directory in sorted(directories - {0}):
        depths[directory] = depths[index.parents[directory]] + 1
    return max(depths.values()) <= MAX_DEPTH


def _check_attributes(index: Index) -> None:
    count = len(index)
    modes = Counter(index.modes)
    for column in (index.uids, index.gids):
        ids = column[:1] if column.count(column[0]) == count else column  # nearly always
        if min(ids) < 0 or max(ids) > (1 << 32) - 2:
            raise _WrongError("an owner is impossible")
    if min(index.mtimes_ns) < -MAX_TIME_NS - 1 or max(index.mtimes_ns) > MAX_TIME_NS:
        raise _WrongError("a time is impossible")
    linking = [entry for entry, target in enumerate(index.targets) if target]
    if len(linking) != sum(times for mode, times in modes.items() if stat.S_ISLNK(mode)):
        linking = list(range(count))  # a link has no target, or the reverse
    for entry in linking:
        target = index.targets[entry]
        if stat.S_ISLNK(index.modes[entry]) != bool(target) or len(target) > MAX_TARGET_BYTES or b"\0" in target:
            raise _WrongError(f"entry {entry} has an impossible link target")
    for entry, (major, minor) in index.rdevs.items():
        if not 0 <= entry < count or not _is_device(index.modes[entry]):
            raise _WrongError(f"entry {entry} is not a device")
        if not 0 <= major < 1 << 12 or not 0 <= minor < 1 << 20:
            raise _WrongError(f"entry {entry} has device number {major}:{minor}")
    if sum(times for mode, times in modes.items() if _is_device(mode)) != len(index.rdevs):
        raise _WrongError("a device has no number")
    for entry in index.opaque:
        if not 0 <= entry < count or not stat.S_ISDIR(index.modes[entry]):
            raise _WrongError(f"entry {entry} is opaque and not a directory")
    if len(set(index.opaque)) != len(index.opaque):
        raise _WrongError("a directory is opaque twice")
    for entry, pairs in index.xattrs.items():
        if not 0 <= entry < count or not pairs:
            raise _WrongError(f"entry {entry} has impossible attributes")
        before = b""
        total, most = 0, MAX_ENTRY_XATTR_BYTES
        for name, value in pairs:
            total += len(name) + len(value)
            if name <= before or not is_xattr(name) or len(value) > MAX_XATTR_BYTES or total > most:
                raise _WrongError(f"entry {entry} has an impossible attribute {name[:80]!r}")
            before = name


def _check_files(index: Index | Files) -> None:
    raws = _columns(index.blocks)[-1].tolist()
    max_address = len(raws) * BLOCK_UNITS
    others = _others(index, raws, max_address)
    pieces = len(index) - len(others)
    for entry in _holding(index, others):
        mode, size, runs, link = index.modes[entry], index.sizes[entry], index.runs[entry], index.links[entry]
        if link != -1:
            if not 0 <= link < entry or index.links[link] != -1 or stat.S_ISDIR(mode):
                raise _WrongError(f"entry {entry} is a link to no file")
            assert isinstance(index, Index)
            if runs or entry in index.xattrs or not _are_alike(index, entry, link):
                raise _WrongError(f"entry {entry} differs from the file that it is a name of")
            continue
        if not stat.S_ISREG(mode):
            if size or runs:
                raise _WrongError(f"entry {entry} has data and is not a file")
            continue
        if not 0 <= size <= MAX_FILE_BYTES or len(runs) % 2:
            raise _WrongError(f"entry {entry} has an impossible size or extents")
        needed = -(-size // BLOCK_BYTES)
        pieces += needed
        if pieces > MAX_PIECES:  # before any of them is checked
            raise _WrongError(f"has more than {MAX_PIECES} pieces of files")
        _check_runs(entry, size, runs, raws, max_address)


def _others(index: Index | Files, raws: list[int], max_address: int) -> list[int]:
    """PURE: return entries other than the usual ones: files in one piece, in a block with enough data."""
    regular = frozenset(mode for mode in set(index.modes) if stat.S_ISREG(mode))
    columns = zip(counting(), index.modes, index.sizes, index.runs, index.links, strict=False)
    return [
        entry
        for entry, mode, size, runs, link in columns
        if not (
            len(runs) == 2
            and runs[1] == 1
            and 0 <= (address := runs[0]) < max_address
            and 0 < size <= raws[address // BLOCK_UNITS] - address % BLOCK_UNITS * UNIT_BYTES
            and link == -1
            and mode in regular
        )
    ]


def _holding(index: Index | Files, entries: list[int]) -> list[int]:
    """PURE: of these, return those with data and links; directories and the like have no data."""
    sizes, runs, links = index.sizes, index.runs, index.links
    return [entry for entry in entries if runs[entry] or sizes[entry] or links[entry] != -1]


def _check_runs(entry: int, size: int, runs: list[int], raws: list[int], max_address: int) -> None:
    """Check a file with more than one piece, or with a hole."""
    outside = _WrongError(f"entry {entry} lies outside the device")
    offset = 0
    for place in range(0, len(runs), 2):
        address, count = runs[place], runs[place + 1]
        if not 0 < count <= MAX_PIECES:
            raise _WrongError(f"entry {entry} has an impossible extent")
        if address == HOLE:
            offset += count * BLOCK_BYTES
            continue
        if address < 0 or address + (count - 1) * BLOCK_UNITS >= max_address:
            raise outside
        block, inside = divmod(address, BLOCK_UNITS)
        if inside and count > 1:
            raise outside  # it would cross a block boundary
        for number in range(block, block + count):
            length = min(BLOCK_BYTES, size - offset)
            if length <= 0 or inside * UNIT_BYTES + length > raws[number]:
                raise outside
            offset += BLOCK_BYTES
    if offset != -(-size // BLOCK_BYTES) * BLOCK_BYTES:
        raise _WrongError(f"entry {entry} has {size} bytes and other extents")


def _are_alike(index: Index, entry: int, other: int) -> bool:
    columns = (index.modes, index.uids, index.gids, index.mtimes_ns, index.sizes, index.targets)
    return all(column[entry] == column[other] for column in columns) and index.rdevs.get(entry) == index.rdevs.get(
        other
    )


def _is_device(mode: int) -> bool:
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def is_xattr(name: bytes) -> bool:
    """Return whether a tree can contain an extended attribute of this name."""
    if name in XATTR_NAMES:
        return True
    return (
        len(name) <= MAX_NAME_BYTES
        and b"\0" not in name
        and any(name.startswith(prefix) and len(name) > len(prefix) for prefix in XATTR_PREFIXES)
    )
