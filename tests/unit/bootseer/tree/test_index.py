"""The index of a tree: what is written is read again, nothing that breaks a bound of docs/reference/formats.md."""

from __future__ import annotations

import itertools
import re
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bootseer.errors import FormatVersion, IntegrityError
from bootseer.tree import compression, index
from bootseer.tree.index import (
    BLOCK,
    BLOCK_BYTES,
    BLOCK_UNITS,
    HOLE,
    UNIT_BYTES,
    Config,
    Index,
    check,
    decode,
    digest_of,
    encode,
)
from tests.made_trees import in_directories

S = msgspec.structs.replace
DIR, REG, LNK = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o644, stat.S_IFLNK | 0o777
CHR, BLK, FIFO = stat.S_IFCHR | 0o600, stat.S_IFBLK | 0o600, stat.S_IFIFO | 0o600
WHOLE = BLOCK_BYTES


def blocks_of(*raws: int, stored: int | None = None) -> bytes:
    """Blocks of these sizes, one after the other in pack 0, as they are."""
    found, offset = b"", 0
    for number, raw in enumerate(raws):
        size = raw if stored is None else stored
        found += BLOCK.pack(bytes([number % 256]) * 32, 0, offset, size, raw)
        offset += size
    return found


def made(entries: list[tuple[int, bytes, int]] | None = None, **fields: Any) -> Index:
    """A tree of entries (parent, name, mode) behind the root; what is not given is empty."""
    rows = [(0, b"", DIR), *(entries or [])]
    count = len(rows)
    blocks = fields.pop("blocks", b"")
    size = sum(BLOCK.unpack_from(blocks, place)[3] for place in range(0, len(blocks), BLOCK.size))
    columns: dict[str, Any] = {
        "tool": "test", "blocks": blocks, "packs": [(b"p" * 32, size)] if size else [],
        "parents": [row[0] for row in rows], "names": [row[1] for row in rows], "modes": [row[2] for row in rows],
        "uids": [0] * count, "gids": [0] * count, "mtimes_ns": [0] * count, "sizes": [0] * count,
        "runs": [[] for _ in rows], "targets": [b"" for _ in rows], "links": [-1] * count,
    }  # fmt: skip
    return Index(**columns | fields)


def stored(found: Index) -> tuple[bytes, str]:
    data = compression.compress(encode(found))
    return data, digest_of(data)


def again(found: Index) -> Index:
    return decode(*stored(found), "here")


def set_(column: list[Any], entry: int, value: Any) -> list[Any]:
    return [*column[:entry], value, *column[entry + 1 :]]


# Of everything a little: a folder, a file of two blocks and a hole, a second name of it, a device, a pipe, a link.
FULL = made(
    [
        (0, b"char", CHR), (0, b"dir", DIR), (2, b"file", REG), (2, b"same", REG), (2, b"small", REG),
        (0, b"pipe", FIFO), (0, b"to", LNK),
    ],
    blocks=blocks_of(WHOLE, WHOLE, 3 * UNIT_BYTES),
    uids=[0, 1, 2, 3, 3, (1 << 32) - 2, 6, 7],
    mtimes_ns=[0, -1, 1 << 62, -(1 << 63), -(1 << 63), (1 << 63) - 1, 5, 6],
    sizes=[0, 0, 0, 4 * WHOLE - 5, 4 * WHOLE - 5, 4097, 0, 0],
    runs=[[], [], [], [0, 1, HOLE, 2, BLOCK_UNITS, 1], [], [2 * BLOCK_UNITS + 1, 1], [], []],
    targets=[b"", b"", b"", b"", b"", b"", b"", b"dir/small"],
    links=[-1, -1, -1, -1, 3, -1, -1, -1],
    rdevs={1: (5, 1)},
    xattrs={0: [(b"security.capability", b"\x01\x00"), (b"user.a", b"")], 3: [(b"system.posix_acl_access", b"x")]},
    opaque=[2],
    config=Config(env=["PATH=/bin", "EMPTY="], entrypoint=["/bin/sh", "-c"], user="1:2", architecture="amd64"),
    source="docker://python:3.11",
)  # fmt: skip


def test_what_is_written_is_read_again() -> None:
    assert again(FULL) == FULL
    assert again(made()) == made()
    assert (len(FULL), FULL.block_count, FULL.device_bytes) == (8, 3, 3 * WHOLE)
    assert FULL.stored_bytes == 2 * WHOLE + 3 * UNIT_BYTES
    assert (FULL.path(0), FULL.path(3)) == (b"", b"dir/file")
    assert FULL.block(2) == (b"\x02" * 32, 0, 2 * WHOLE, 3 * UNIT_BYTES, 3 * UNIT_BYTES)
    assert FULL.pack_path(0) == "packs/" + "70" * 32
    assert list(FULL.pieces(3)) == [
        (0, 0, WHOLE), (WHOLE, HOLE, WHOLE), (2 * WHOLE, HOLE, WHOLE), (3 * WHOLE, BLOCK_UNITS, WHOLE - 5),
    ]  # fmt: skip


def test_the_same_tree_gives_the_same_bytes() -> None:
    assert stored(FULL) == stored(S(FULL))


# ---- random trees ------------------------------------------------------------------------------------------

names = st.binary(min_size=1, max_size=12).filter(
    lambda name: not {0, 47} & set(name) and name not in (b".", b"..")
)
ids = st.integers(0, (1 << 32) - 2)
times = st.integers(-(1 << 63), (1 << 63) - 1)
xattrs = st.dictionaries(
    st.one_of(
        st.builds(bytes.__add__, st.sampled_from([b"user.", b"trusted.", b"security."]), names),
        st.sampled_from([b"system.posix_acl_access", b"system.posix_acl_default"]),
    ),
    st.binary(max_size=20),
    min_size=1,
    max_size=3,
).map(lambda found: sorted(found.items()))


@st.composite
def trees(draw: st.DrawFn) -> Index:
    raws = draw(st.lists(st.integers(1, BLOCK_UNITS).map(lambda units: units * UNIT_BYTES), max_size=5))
    places = [draw(st.tuples(st.integers(0, 1), st.integers(0, 99), st.integers(1, raw))) for raw in raws]
    sizes = [max([offset + size for pack, offset, size in places if pack == each], default=1) for each in (0, 1)]
    whole = [number for number, raw in enumerate(raws) if raw == WHOLE]

    def file() -> tuple[int, list[int]]:
        """Whole pieces from whole blocks and holes; the last one from anywhere that it fits into."""
        found: list[int] = []
        pieces = draw(st.lists(st.sampled_from([*whole, HOLE]), max_size=4))
        for block in pieces:
            address = HOLE if block == HOLE else block * BLOCK_UNITS
            if (
                found
                and draw(st.booleans())
                and (
                    address == HOLE == found[-2]
                    or (found[-2] >= 0 and address == found[-2] + found[-1] * BLOCK_UNITS)
                )
            ):
                found[-1] += 1
            else:
                found += [address, 1]
        rest = 0
        if raws and draw(st.booleans()):
            block = draw(st.integers(0, len(raws) - 1))
            unit = draw(st.integers(0, raws[block] // UNIT_BYTES - 1))
            rest = draw(st.integers(1, raws[block] - unit * UNIT_BYTES))
            found += [block * BLOCK_UNITS + unit, 1]
        return len(pieces) * WHOLE + rest, found

    rows: list[dict[str, Any]] = []

    def grow(parent: int, depth: int) -> None:
        for name in sorted(draw(st.sets(names, max_size=4 if depth else 6))):
            kind = draw(st.sampled_from([DIR, REG, REG, LNK, CHR, BLK, FIFO, stat.S_IFSOCK | 0o700]))
            row: dict[str, Any] = {
                "parents": parent, "names": name, "uids": draw(ids), "gids": draw(ids), "mtimes_ns": draw(times),
                "sizes": 0, "runs": [], "targets": b"", "links": -1,
                "modes": stat.S_IFMT(kind) | draw(st.integers(0, 0o7777)),
            }  # fmt: skip
            earlier = [n for n, each in enumerate(rows) if not stat.S_ISDIR(each["modes"]) and each["links"] == -1]
            if earlier and draw(st.integers(0, 5)) == 0:
                first = draw(st.sampled_from(earlier))
                rows.append(rows[first] | {"parents": parent, "names": name, "runs": [], "links": first})
                rows[-1].pop("xattrs", None)
                continue
            if kind == REG:
                row["sizes"], row["runs"] = file()
            elif kind == LNK:
                row["targets"] = draw(st.binary(min_size=1, max_size=9).filter(lambda target: 0 not in target))
            elif kind in (CHR, BLK):
                row["rdevs"] = (draw(st.integers(0, 4095)), draw(st.integers(0, (1 << 20) - 1)))
            if draw(st.integers(0, 3)) == 0:
                row["xattrs"] = draw(xattrs)
            row["opaque"] = kind == DIR and draw(st.booleans())
            rows.append(row)
            if kind == DIR and depth < 3:
                grow(len(rows) - 1, depth + 1)

    rows.append({"parents": 0, "names": b"", "modes": DIR, "uids": 0, "gids": 0, "mtimes_ns": 0, "sizes": 0,
                 "runs": [], "targets": b"", "links": -1})  # fmt: skip
    grow(0, 0)
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("rdevs", "xattrs", "opaque")}
    return Index(
        tool="test",
        packs=[(bytes([n]) * 32, size) for n, size in enumerate(sizes)],
        blocks=b"".join(
            BLOCK.pack(bytes(32), *place, raw) for place, raw in zip(places, raws, strict=True)
        ),
        rdevs={n: row["rdevs"] for n, row in enumerate(rows) if "rdevs" in row},
        xattrs={n: row["xattrs"] for n, row in enumerate(rows) if "xattrs" in row},
        opaque=[n for n, row in enumerate(rows) if row.get("opaque")],
        **columns,
    )  # fmt: skip


@given(trees())
@settings(max_examples=150)
def test_any_tree_is_read_as_it_was_written(tree: Index) -> None:
    found = again(tree)
    assert found == tree
    for entry in range(len(found)):
        if stat.S_ISREG(found.modes[entry]) and found.links[entry] == -1:
            pieces = list(found.pieces(entry))
            assert sum(length for _, _, length in pieces) == found.sizes[entry]
            assert [offset for offset, _, _ in pieces] == list(range(0, found.sizes[entry], WHOLE))
            for _, address, length in pieces:
                if address != HOLE:  # in one block, and inside of it
                    block, unit = divmod(address, BLOCK_UNITS)
                    assert unit * UNIT_BYTES + length <= found.block(block).raw_bytes


@given(trees(), st.data())
@settings(max_examples=150)
def test_a_flipped_bit_of_the_stored_index_is_noticed(tree: Index, data: st.DataObject) -> None:
    frame, digest = stored(tree)
    place = data.draw(st.integers(0, 8 * len(frame) - 1))
    damaged = bytearray(frame)
    damaged[place // 8] ^= 1 << place % 8
    with pytest.raises(IntegrityError, match="here: is damaged: its SHA-256 is not"):
        decode(bytes(damaged), digest, "here")
    # As if whoever made it had signed it so: refused, or a tree that adds up.
    _only_ours(lambda: decode(bytes(damaged), digest_of(bytes(damaged)), "here"))


@given(trees(), st.data())
@settings(max_examples=200)
def test_wrong_bytes_inside_are_refused_or_add_up(tree: Index, data: st.DataObject) -> None:
    raw = bytearray(encode(tree))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    frame = compression.compress(bytes(raw))
    _only_ours(lambda: decode(frame, digest_of(frame), "here"))


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x81" * 200)  # maps in maps
@example(b"\x91" * 100_000)
def test_anything_else_is_refused(data: bytes) -> None:
    for frame in (data, compression.compress(data)):
        with pytest.raises(IntegrityError, match=r"^here: "):
            decode(frame, digest_of(frame), "here")


def _only_ours(read: Callable[[], Index]) -> None:
    try:
        found = read()
    except IntegrityError as error:
        assert str(error).startswith("here: ")
    else:
        check(found, "it")


# ---- all at once, and one by one ---------------------------------------------------------------------------


def said(tree: Index) -> str:
    try:
        check(tree, "it")
    except IntegrityError as error:
        return str(error)
    return ""


def is_right_in_parts(frame: bytes) -> bool:
    """As validation.py has it: each of three processes looks at a part, and goes on whatever the others find."""

    def blocks() -> None:
        index.check_blocks(index.read_unchecked(frame, digest_of(frame), "it"), "it")

    def rest() -> None:
        found = index.read_unchecked(frame, digest_of(frame), "it")
        index.check_head(found, "it")
        index.check_attributes(found, "it")

    def names_and_files() -> None:
        raw = index.to_raw(frame, "it")
        index.check_names(index.read_part(raw, index.Names, "it"), "it")
        if not index.check_files_alone(index.read_part(raw, index.Files, "it"), "it"):
            index.check_files(index.read_unchecked(frame, digest_of(frame), "it"), "it")

    for part in (blocks, rest, names_and_files):
        with suppress(Exception):  # whatever it is, nobody says that this part is right
            part()
            continue
        return False
    return True


@given(trees(), st.booleans(), st.data())
@settings(max_examples=400, deadline=None)
def test_whatever_is_looked_at_as_a_whole_is_as_if_it_were_one_by_one(
    tree: Index, is_as_built: bool, data: st.DataObject
) -> None:
    if is_as_built:
        tree = in_directories(tree)
        assert said(tree) == "" and index._are_names_right(tree)
    column = data.draw(st.sampled_from([*COLUMNS, "blocks", "none"]))
    if column == "blocks" and tree.blocks:
        place = data.draw(st.integers(0, len(tree.blocks) - 1))
        tree = S(
            tree,
            blocks=tree.blocks[:place] + data.draw(st.binary(min_size=1, max_size=1)) + tree.blocks[place + 1 :],
        )
    elif column in COLUMNS:
        values = getattr(tree, column)
        entry = data.draw(st.integers(0, len(values) - 1))
        odd = {"names": [b"", b".", b"..", b"a/b", b"a\0", b"x" * 256, b"~"], "targets": [b"", b"t", b"\0"],
               "runs": [[], [0, 1], [HOLE, 1], [1, 1], [0, 2], [-2, 1], [0], [1 << 40, 1]]}  # fmt: skip
        extremes = odd.get(column, [-1, 0, 1, 2, 1 << 16, 1 << 32, 1 << 63, REG, DIR, LNK, CHR, WHOLE, WHOLE + 1])
        value = data.draw(st.sampled_from([*values, *extremes]))
        tree = S(tree, **{column: set_(values, entry, value)})
    fast = said(tree)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_are_blocks_right", lambda *_: False)
        patch.setattr(index, "_are_names_right", lambda *_: False)
        patch.setattr(index, "_others", lambda tree, *_: list(range(len(tree))))
        assert fast == said(tree)
    with suppress(OverflowError):  # no number of MessagePack
        assert is_right_in_parts(compression.compress(msgspec.msgpack.encode(tree))) == (not fast)


# ---- every bound -------------------------------------------------------------------------------------------


def wrong() -> Iterator[tuple[str, Index, str]]:
    """(what is wrong, the tree, what the error says)."""
    f = FULL
    yield "no entries", made() and S(made(), **{name: [] for name in COLUMNS}), "has 0 entries"
    for name in COLUMNS[1:]:
        yield f"{name} too short", S(f, **{name: getattr(f, name)[:-1]}), f"has 8 entries and 7 {name}"
    yield "long tool", S(f, tool="x" * 201), "too long"
    yield "long source", S(f, source="ä" * 513), "too long"
    for field, value in (
        ("env", ["A=\0"]),
        ("cmd", ["\0"]),
        ("entrypoint", ["a\0"]),
        ("workdir", "/\0"),
        ("user", "\0"),
    ):
        yield f"NUL in {field}", S(f, config=S(f.config, **{field: value})), "has a NUL"
    for env in ("A", "=b", ""):
        yield f"env {env!r}", S(f, config=Config(env=[env])), "not NAME=value"

    pack = (b"p" * 32, f.stored_bytes)
    yield "half a block", S(f, blocks=f.blocks + b"x"), "an impossible length"
    yield "short digest of a pack", S(f, packs=[(b"p" * 31, f.stored_bytes)]), "pack has an impossible"
    yield "empty pack", S(f, packs=[pack, (b"q" * 32, 0)]), "pack has an impossible"
    yield "huge pack", S(f, packs=[pack, (b"q" * 32, 1 << 32)]), "pack has an impossible"
    yield "block in no pack", S(f, packs=[]), "block 0 lies outside its pack"
    yield "block past its pack", S(f, packs=[(b"p" * 32, f.stored_bytes - 1)]), "block 2 lies outside"
    for what, place, size, raw, text in (
        ("empty block", 0, 0, UNIT_BYTES, "lies outside"),
        ("block that grew", 0, UNIT_BYTES + 1, UNIT_BYTES, "lies outside"),
        ("block at the end", (1 << 32) - 1, (1 << 17), 1 << 17, "lies outside"),
        ("odd block", 0, 100, UNIT_BYTES + 1, "has 4097 bytes"),
        ("huge block", 0, 100, WHOLE + UNIT_BYTES, "has 135168 bytes"),
    ):
        yield what, S(made(), packs=[(b"p" * 32, WHOLE)], blocks=BLOCK.pack(b"d" * 32, 0, place, size, raw)), text

    yield "root with a name", S(f, names=set_(f.names, 0, b"x")), "entry 0 is not the root"
    yield "root in a folder", S(f, parents=set_(f.parents, 0, 1)), "entry 0 is not the root"
    yield "root that is a file", S(f, modes=set_(f.modes, 0, REG)), "entry 0 is not the root"
    yield "parent after its child", S(f, parents=set_(f.parents, 2, 3)), "entry 2 is in no directory"
    yield "parent of itself", S(f, parents=set_(f.parents, 2, 2)), "entry 2 is in no directory"
    yield "parent below zero", S(f, parents=set_(f.parents, 2, -1)), "entry 2 is in no directory"
    yield "parent that is a file", S(f, parents=set_(f.parents, 7, 3)), "entry 7 is in no directory"
    for name in (b"", b".", b"..", b"a/b", b"/", b"a\0", b"x" * 256):
        yield f"name {name[:8]!r}", S(f, names=set_(f.names, 1, name)), "not a valid name"
    yield "name twice", S(f, names=set_(f.names, 4, b"file")), "is duplicated or out of order"
    yield "names out of order", S(f, names=set_(f.names, 4, b"aaa")), "is duplicated or out of order"
    deep = [(number, b"d", DIR) for number in range(index.MAX_DEPTH + 1)]
    yield "deep", made(deep), "more than 1024 deep"

    yield "mode too large", S(f, modes=set_(f.modes, 3, 1 << 16 | REG)), "has mode"
    yield "mode below zero", S(f, modes=set_(f.modes, 3, -1)), "has mode"
    yield "mode of no type", S(f, modes=set_(f.modes, 3, 0o644)), "has mode"
    yield "mode of another type", S(f, modes=set_(f.modes, 3, 0xF000)), "has mode"
    for column in ("uids", "gids"):
        for value in (-1, (1 << 32) - 1):
            changed = S(f, **{column: set_(getattr(f, column), 1, value)})
            yield f"{column} {value}", changed, "an owner is impossible"
    for value in (-(1 << 63) - 1, 1 << 63):
        yield f"time {value}", S(f, mtimes_ns=set_(f.mtimes_ns, 1, value)), "a time is impossible"
    for target in (b"", b"a\0b", b"x" * 4096):
        yield f"target {target[:4]!r}", S(f, targets=set_(f.targets, 7, target)), "impossible link target"
    yield "target of a file", S(f, targets=set_(f.targets, 5, b"x")), "impossible link target"
    yield "number of a file", S(f, rdevs={1: (1, 3), 3: (1, 3)}), "entry 3 is not a device"
    for entry in (-1, 8):
        yield f"number of entry {entry}", S(f, rdevs={1: (1, 3), entry: (1, 3)}), "is not a device"
        yield f"opaque entry {entry}", S(f, opaque=[entry]), "opaque and not a directory"
        yield f"attributes of entry {entry}", S(f, xattrs={entry: [(b"user.a", b"")]}), "impossible attributes"
    for number in ((-1, 0), (4096, 0), (0, -1), (0, 1 << 20)):
        yield f"number {number}", S(f, rdevs={1: number}), "has device number"
    yield "device without a number", S(f, rdevs={}), "a device has no number"
    yield "opaque file", S(f, opaque=[3]), "opaque and not a directory"
    yield "opaque twice", S(f, opaque=[2, 2]), "opaque twice"
    a = (b"user.a", b"")
    for what, pairs in (
        ("none", []), ("twice", [a, a]), ("out of order", [(b"user.b", b""), a]), ("no name", [(b"", b"")]),
        ("short name", [(b"user.", b"")]), ("other name", [(b"system.other", b"")]), ("plain name", [(b"a", b"")]),
        ("NUL", [(b"user.\0", b"")]), ("long name", [(b"user." + b"x" * 251, b"")]),
        ("long value", [(b"user.a", b"x" * 65536)]),
        ("too much", [(b"user.a", b"x" * 65000), (b"user.b", b"x" * 525)]),
    ):  # fmt: skip
        yield f"attributes: {what}", S(f, xattrs={3: pairs}), "impossible attribute"

    for value in (3, 7, 8, -2):  # itself, later, none, none
        yield f"link to {value}", S(f, links=set_(f.links, 3, value)), "is a link to no file"
    yield "link to a folder", S(f, links=set_(f.links, 3, 2)), "differs from the file"
    yield (
        "link that is a folder",
        S(made([(0, b"a", DIR), (0, b"b", DIR)]), links=[-1, -1, 1]),
        "is a link to no file",
    )
    three = made([(0, name, REG) for name in (b"a", b"b", b"c")])
    assert check(S(three, links=[-1, -1, 1, 1]), "it") is None
    yield "link to a link", S(three, links=[-1, -1, 1, 2]), "is a link to no file"
    yield "link with runs", S(f, runs=set_(f.runs, 4, [0, 1])), "differs from the file"
    yield "link with attributes", S(f, xattrs={4: [a]}), "differs from the file"
    for column, other in (("modes", REG | 1), ("uids", 9), ("gids", 9), ("mtimes_ns", 9), ("sizes", 9)):
        yield f"link with other {column}", S(f, **{column: set_(getattr(f, column), 4, other)}), "differs from"
    two = made([(0, b"a", CHR), (0, b"b", CHR)], rdevs={1: (1, 3), 2: (1, 5)})
    yield "link with another number", S(two, links=[-1, -1, 1]), "differs from the file"

    yield "size of a pipe", S(f, sizes=set_(f.sizes, 6, 1)), "has data and is not a file"
    yield "runs of a folder", S(f, runs=set_(f.runs, 2, [0, 1])), "has data and is not a file"

    def file(size: int, *runs: int) -> Index:
        blocks = blocks_of(WHOLE, WHOLE, 3 * UNIT_BYTES)
        return made([(0, b"f", REG)], blocks=blocks, sizes=[0, size], runs=[[], list(runs)])

    for good in (
        file(0), file(1, 0, 1), file(WHOLE, HOLE, 1), file(2 * WHOLE, 0, 2), file(WHOLE + 1, 32, 1, 65, 1),
        file(2 * UNIT_BYTES, 2 * 32 + 1, 1), file(2 * WHOLE, 0, 1, 0, 1),
    ):  # fmt: skip
        check(good, "it")
    for size, runs, text in (
        (-1, [], "impossible size"), ((1 << 50) + 1, [HOLE, 1], "impossible size"), (1, [0], "impossible size"),
        (0, [0, 1], "outside the device"), (0, [HOLE, 1], "and other extents"), (1, [], "and other extents"),
        (1, [HOLE, 2], "and other extents"), (1, [0, 1, HOLE, 1], "and other extents"),
        (1, [0, 2], "outside the device"), (WHOLE + 1, [0, 1], "and other extents"),
        (1, [0, 0], "impossible extent"), (1, [0, -1], "impossible extent"), (1, [HOLE, 0], "impossible extent"),
        (1, [HOLE, (1 << 26) + 1], "impossible extent"), (1, [0, (1 << 26) + 1], "impossible extent"),
        (1, [-2, 1], "outside the device"), (1, [96, 1], "outside the device"),
        (3 * WHOLE, [0, 3], "outside the device"), (2 * WHOLE, [1, 2], "outside the device"),
        (WHOLE, [1, 1], "outside the device"), (3 * UNIT_BYTES + 1, [64, 1], "outside the device"),
        (2 * UNIT_BYTES + 1, [65, 1], "outside the device"), (2 * WHOLE, [0, 1, 64, 1], "outside the device"),
        (WHOLE + 1, [64, 1, 0, 1], "outside the device"), (2 * WHOLE, [0, 2, 0, 2], "outside the device"),
    ):  # fmt: skip
        yield f"{size} bytes at {runs}", file(size, *runs), text


COLUMNS = ["parents", "names", "modes", "uids", "gids", "mtimes_ns", "sizes", "runs", "targets", "links"]
WRONG = list(wrong())


@pytest.mark.parametrize(("what", "tree", "text"), WRONG, ids=[each[0] for each in WRONG])
def test_what_does_not_add_up_is_refused(what: str, tree: Index, text: str) -> None:
    with pytest.raises(IntegrityError, match=f"^this tree: .*{re.escape(text)}"):
        encode(tree)
    try:
        frame = compression.compress(msgspec.msgpack.encode(tree))
    except OverflowError:
        return  # no number of MessagePack
    with pytest.raises(IntegrityError, match=r"^here: "):
        decode(frame, digest_of(frame), "here")
    assert not is_right_in_parts(frame)


@given(trees(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_what_is_right_is_so_in_parts(tree: Index, is_as_built: bool) -> None:
    frame, _ = stored(in_directories(tree) if is_as_built else tree)
    assert is_right_in_parts(frame)
    whole, names = (
        decode(frame, digest_of(frame), "it"),
        index.read_part(index.to_raw(frame, "it"), index.Names, "it"),
    )
    assert [names.path(entry) for entry in range(len(whole))] == list(map(whole.path, range(len(whole))))


def test_attributes_may_be_as_large_as_the_format_says() -> None:
    value = b"x" * 65535
    check(S(FULL, xattrs={3: [(b"user.a", value[: -len(b"user.a")] + b"x")]}), "it")  # 64 KiB with its name
    check(S(FULL, targets=set_(FULL.targets, 7, b"x" * 4095)), "it")
    check(S(FULL, names=set_(FULL.names, 7, b"x" * 255)), "it")


@pytest.mark.parametrize(
    ("name", "most", "text"),
    [
        ("MAX_ENTRIES", 7, "has 8 entries; 1 to 7"),
        ("MAX_BLOCKS", 2, "an impossible length"),
        ("MAX_PACKS", 0, "more than 0 packs"),
    ],
)
def test_counts_are_bounded(monkeypatch: pytest.MonkeyPatch, name: str, most: int, text: str) -> None:
    """Real ones would need gigabytes."""
    monkeypatch.setattr(index, name, most + 1)
    check(FULL, "it")
    monkeypatch.setattr(index, name, most)
    with pytest.raises(IntegrityError, match=text):
        check(FULL, "it")


def test_pieces_are_counted_before_they_are_looked_at() -> None:
    """Holes are pieces too; a few bytes may not make a reader count for hours."""
    most = index.MAX_PIECES
    holes = made([(0, b"a", REG)], sizes=[0, most * WHOLE], runs=[[], [HOLE, most]])
    check(holes, "it")
    blocks = blocks_of(UNIT_BYTES)
    for size, runs in ((1, [0, 1]), (1, [HOLE, 1])):
        more = made([(0, b"a", REG), (0, b"b", REG)], blocks=blocks, sizes=[0, most * WHOLE, size],
                    runs=[[], [HOLE, most], runs])  # fmt: skip
        with pytest.raises(IntegrityError, match=f"more than {most} pieces"):
            check(more, "it")
    count = 1 << 12
    many = made([(0, b"a", REG)], blocks=blocks_of(*[WHOLE] * count, stored=64),
                sizes=[0, 1 << 50], runs=[[], [0, count] * ((1 << 33) // count)])  # fmt: skip
    with pytest.raises(IntegrityError, match=f"more than {most} pieces"):
        check(many, "it")


# ---- the bytes around it -----------------------------------------------------------------------------------


def framed(fields: dict[str, Any], *, tail: bytes = b"") -> tuple[bytes, str, str]:
    frame = compression.compress(msgspec.msgpack.encode(fields) + tail)
    return frame, digest_of(frame), "here"


def test_every_key_is_there_and_no_other() -> None:
    fields = msgspec.msgpack.decode(encode(FULL))
    assert decode(*framed(fields)) == FULL
    for name in fields:
        less = {key: value for key, value in fields.items() if key != name}
        with pytest.raises(IntegrityError, match="is not an index of a tree"):
            decode(*framed(less))
        for value in (None, "x", 1.5, [None], {"a": 1}, True):
            if name not in ("format", "tool", "source") or value != "x":
                with pytest.raises(IntegrityError):
                    decode(*framed(fields | {name: value}))
    with pytest.raises(IntegrityError, match="unknown field"):
        decode(*framed(fields | {"more": 1}))
    with pytest.raises(IntegrityError, match="is not an index of a tree"):
        decode(*framed(fields, tail=b"\0"))
    with pytest.raises(IntegrityError, match="is not an index of a tree"):
        decode(*framed(fields | {"config": {"unknown": []}}))
    assert decode(*framed(fields | {"config": {}})).config == Config()


def test_other_formats_are_named() -> None:
    fields = msgspec.msgpack.decode(encode(FULL))
    with pytest.raises(FormatVersion, match="bootseer-tree/2; this Bootseer reads bootseer-tree/1: take a newer"):
        decode(*framed({"format": "bootseer-tree/2", "something": "else"}))
    for other in ("bootseer-stripe/1", "bootseer-tree/1 ", "", "x" * 1000):
        with pytest.raises(FormatVersion, match="not bootseer-tree/1") as caught:
            decode(*framed(fields | {"format": other}))
        assert len(str(caught.value)) < 200


def test_an_index_that_is_too_large_is_not_looked_at() -> None:
    with pytest.raises(IntegrityError, match="no index is larger than 268435456"):
        decode(bytes(index.MAX_INDEX_BYTES + 1), "0" * 64, "here")


def frame_that_claims(size: int, data: bytes) -> bytes:
    """A zstd frame whose header says another size than that of its data."""
    frame = zstandard.ZstdCompressor(write_content_size=False, write_checksum=False).compress(data)
    magic, descriptor, window = struct.unpack_from("<IBB", frame)
    assert magic == 0xFD2FB528 and not descriptor & 0xE3
    return struct.pack("<IBBQ", magic, descriptor | 0xC0, window, size) + frame[6:]


@pytest.mark.parametrize("size", [(1 << 30) + 1, 1 << 40, (1 << 64) - 3])
def test_a_bomb_is_refused_by_what_it_says(size: int) -> None:
    bomb = frame_that_claims(size, b"x" * 1000)
    with pytest.raises(IntegrityError, match=r"here: (claims to hold|cannot be decompressed)"):
        decode(bomb, digest_of(bomb), "here")


def test_a_bomb_that_lies_gives_no_more_than_it_said() -> None:
    data = bytes(64 << 20)
    for size in (0, 1, 4096, WHOLE):
        bomb = frame_that_claims(size, data)
        assert len(bomb) < 10_000
        with pytest.raises(IntegrityError, match=r"^it: "):
            compression.decompress(bomb, WHOLE, "it")
    with pytest.raises(IntegrityError, match=r"^it: "):  # and no less
        compression.decompress(frame_that_claims(WHOLE, b"x" * 100), WHOLE, "it")


def test_frames_say_their_size_and_stand_alone() -> None:
    frame = compression.compress(b"abc")
    assert compression.decompress(frame, 3, "it") == b"abc"
    assert compression.decompress(memoryview(frame), 3, "it") == b"abc"
    with pytest.raises(IntegrityError, match="it: claims to hold 3 bytes; 1 to 2"):
        compression.decompress(frame, 2, "it")
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"abc")
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"abcd"
    empty = compression.compress(b"")
    for other in (
        unsized,
        frame + frame,
        frame + b"x",
        frame[:-1],
        b"",
        b"abc",
        skippable,
        skippable + frame,
        empty,
    ):
        with pytest.raises(IntegrityError, match=r"^it: "):
            compression.decompress(other, 1 << 20, "it")


def test_version_says_what_decides_the_bytes() -> None:
    assert re.fullmatch(r"zstd \d+\.\d+\.\d+ level 3", compression.version())


def test_threads_compress_alike() -> None:
    import threading

    frames = []
    threads = [
        threading.Thread(target=lambda: frames.append(compression.compress(b"abc" * 999))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(frames) == 4 and len(set(frames)) == 1


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        (b"user.x", True), (b"trusted.overlay.opaque", True), (b"security.capability", True),
        (b"system.posix_acl_access", True), (b"system.posix_acl_default", True), (b"system.nfs4_acl", False),
        (b"user.", False), (b"xuser.a", False), (b"", False), (b"user.\0", False), (b"user." + b"x" * 250, True),
    ],
)  # fmt: skip
def test_names_of_attributes(name: bytes, fits: bool) -> None:
    assert index.is_xattr(name) is fits


def test_pieces_go_on_by_a_block() -> None:
    runs = [7 * BLOCK_UNITS, 3, HOLE, 1, 5, 1]
    found = list(index.pieces_of(runs, 4 * WHOLE + 10))
    assert [address for _, address, _ in found] == [7 * 32, 8 * 32, 9 * 32, HOLE, 5]
    assert [length for _, _, length in found] == [WHOLE] * 4 + [10]
    assert [offset for offset, _, _ in found] == list(itertools.accumulate([0] + [WHOLE] * 4))
