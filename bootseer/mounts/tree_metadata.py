"""EROFS metadata of a tree, kept in the cache: making it takes most of a second for large trees.

A file in the tree's cache folder: SHA-256 of what makes it this tree's by this version, then the metadata. Whoever
has it also has had the whole index checked. It is read once and shown to the kernel from memory: what becomes of
the file while the tree is mounted changes nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

import msgspec

from bootseer.blocks.cache import TREES, Cache
from bootseer.blocks.tree_files import write_whole
from bootseer.errors import IntegrityError
from bootseer.tree import erofs
from bootseer.tree.compression import decompress
from bootseer.tree.index import MOST_RAW_INDEX_BYTES, Config, Index

NAME = f"erofs-{erofs.VERSION}"
_DIGEST_BYTES = 32


class _Blocks(msgspec.Struct):
    """The part of an index that fetching blocks takes."""

    tool: str
    config: Config
    packs: list[tuple[bytes, int]]
    blocks: bytes


def read(folder: str, digest: str) -> bytes | None:
    """The metadata that was kept in a tree's cache folder; None when there is none, or it is not as it was."""
    try:
        fd = os.open(os.path.join(folder, NAME), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb", buffering=0) as file:
            seal, data = file.read(_DIGEST_BYTES), file.read()
    except OSError:
        return None
    return data if data and seal == _seal(digest, data) else None


def may_be_kept(cache: Cache, digest: str) -> bool:
    """Whether this node has metadata of a tree, right or not."""
    return os.path.lexists(os.path.join(cache.folder, TREES, digest, NAME))


def keep(folder: str, digest: str, data: bytes | bytearray | memoryview, log: Callable[[str], None]) -> None:
    """For the next start. Without room it is made again then."""
    try:
        write_whole(folder, NAME, b"".join([_seal(digest, data), data]))
    except OSError as error:
        log(f"{folder}: the tree's metadata is not kept: {error.strerror}")


def slim(index: Index) -> Index:
    """Only what fetching takes: the entries of a large tree are much memory."""
    return _without_entries(index.tool, index.config, index.packs, index.blocks)


def decode_slim(data: bytes, digest: str) -> Index:
    """The same of an index object that was checked before, which is the caller's to know.

    Raises: IntegrityError.
    """
    where = f"the cached index of {digest}"
    return read_slim(decompress(data, MOST_RAW_INDEX_BYTES, where), where)


def write_slim(index: Index) -> bytes:
    """The same, for `read_slim`."""
    return msgspec.msgpack.encode(_Blocks(index.tool, index.config, index.packs, index.blocks))


def read_slim(raw: bytes, where: str) -> Index:
    """Raises: IntegrityError."""
    try:
        found = msgspec.msgpack.decode(raw, type=_Blocks)
    except msgspec.MsgspecError as error:
        raise IntegrityError(f"{where}: {error}") from error
    return _without_entries(found.tool, found.config, found.packs, found.blocks)


def _without_entries(tool: str, config: Config, packs: list[tuple[bytes, int]], blocks: bytes) -> Index:
    return Index(
        tool=tool, config=config, packs=packs, blocks=blocks, parents=[], names=[], modes=[], uids=[], gids=[],
        mtimes_ns=[], sizes=[], runs=[], targets=[], links=[],
    )  # fmt: skip


def _seal(digest: str, data: bytes | bytearray | memoryview) -> bytes:
    return hashlib.sha256(f"{NAME} {digest} ".encode() + hashlib.sha256(data).digest()).digest()
