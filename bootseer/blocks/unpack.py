"""Stored blocks, as they came, into the cache: verified, decompressed within bounds, kept. Code for a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bootseer.blocks.spans import StoredBlock
from bootseer.blocks.tree_cache import TreeCache
from bootseer.tree.block_codec import block_digest, unpack_block


class Unpacked(NamedTuple):
    """What became of some blocks."""

    wrong: list[StoredBlock]  # came with other bytes than they should have
    raws: dict[int, memoryview]  # bytes of those that somebody wants, and of those refused
    refused: list[int]  # the cache has no room for them


def unpack_blocks(
    parts: Sequence[tuple[StoredBlock, memoryview]],
    cache: TreeCache | None,
    is_wanted: Callable[[int], bool],
    where: str,
) -> Unpacked:
    """Fills `cache`, if there is one, with the blocks whose bytes came.

    Raises: IntegrityError for a block that has the right digest and cannot be unpacked: its tree was built wrong.
    """
    done = Unpacked([], {}, [])
    for block, stored in parts:
        if block_digest(stored) != block.digest:
            done.wrong.append(block)
            continue
        raw = unpack_block(stored, block.raw_bytes, f"{where}: block {block.number}")
        is_kept = cache is not None and cache.fill(block.number, raw)
        if cache is not None and not is_kept:
            done.refused.append(block.number)
        if is_wanted(block.number) or not is_kept:
            # `stored` is memory that is used again.
            done.raws[block.number] = memoryview(raw if isinstance(raw, bytes) else bytes(raw))
    return done
