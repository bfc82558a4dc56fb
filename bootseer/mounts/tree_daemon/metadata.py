"""EROFS metadata of a tree, stored in the cache: making it takes most of a second for large trees.

A file in the tree's cache directory: a SHA-256 over format version, tree digest and metadata, then the metadata.
Its presence means that the whole index was validated. It is read once and mounted from memory: changes of the file
while the tree is mounted have no effect.
"""

from __future__ import annotations

import hashlib
import os

import msgspec

from bootseer.blocks.cache import TREES, Cache
from bootseer.blocks.tree_files import write_whole
from bootseer.errors import IntegrityError
from bootseer.logs import get_logger
from bootseer.tree import erofs
from bootseer.tree.compression import decompress
from bootseer.tree.index import MAX_RAW_INDEX_BYTES, Config, Index

_log = get_logger(__name__)

NAME = f"erofs-{erofs.VERSION}"
WITH_PLACE = f"{NAME}-status"  # for a mount with a status folder
_DIGEST_BYTES = 32


class _Blocks(msgspec.Struct):
    """The part of an index for fetching blocks."""

    tool: str
    config: Config
    packs: list[tuple[bytes, int]]
    blocks: bytes


def read(directory: str, digest: str, name: str = NAME) -> bytes | None:
    """Return the stored metadata of a tree's cache directory; None when it is absent or damaged."""
    try:
        fd = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb", buffering=0) as file:
            seal, data = file.read(_DIGEST_BYTES), file.read()
    except OSError:
        return None
    return data if data and seal == _seal(name, digest, data) else None


def may_be_cached(cache: Cache, digest: str) -> bool:
    """Return whether this node has metadata of a tree, valid or not."""
    return os.path.lexists(os.path.join(cache.folder, TREES, digest, NAME))


def store(directory: str, digest: str, data: bytes | bytearray | memoryview, name: str = NAME) -> None:
    """Store metadata for the next start. Without space it is made again then."""
    try:
        write_whole(directory, name, b"".join([_seal(name, digest, data), data]))
    except OSError as error:
        _log.info("%s: the tree's metadata is not cached: %s", directory, error.strerror)


def slim(index: Index) -> Index:
    """Return only the part for fetching: the entries of a large tree need much memory."""
    return _without_entries(index.tool, index.config, index.packs, index.blocks)


def decode_slim(data: bytes, digest: str) -> Index:
    """Decode the part for fetching from an index object that the caller knows to be validated.

    Raises: IntegrityError.
    """
    where = f"the cached index of {digest}"
    return read_slim(decompress(data, MAX_RAW_INDEX_BYTES, where), where)


def write_slim(index: Index) -> bytes:
    """Return the part for fetching, encoded for `read_slim`."""
    return msgspec.msgpack.encode(_Blocks(index.tool, index.config, index.packs, index.blocks))


def read_slim(raw: bytes, where: str) -> Index:
    """Decode the result of `write_slim`. Raises: IntegrityError."""
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


def _seal(name: str, digest: str, data: bytes | bytearray | memoryview) -> bytes:
    return hashlib.sha256(f"{name} {digest} ".encode() + hashlib.sha256(data).digest()).digest()
