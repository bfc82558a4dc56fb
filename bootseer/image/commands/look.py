"""`bootseer image inspect` and `verify`: the properties of a tree, and verification of all its bytes."""

from __future__ import annotations

import stat
from typing import NamedTuple

import msgspec

from bootseer import aio
from bootseer.image.commands.common import Progress, opened, tree_url
from bootseer.image.commands.traces import hot_blocks, known_traces, stored_traces
from bootseer.logs import sent_to
from bootseer.tree.index import BLOCK, Config
from bootseer.tree.verifying import TreeFault, verify_blocks
from bootseer.trust import Trust

MAX_NAMED = 10_000  # faults that are listed; all are counted


# ---- inspect -----------------------------------------------------------------------------------------------


class TreeInfo(NamedTuple):
    digest: str
    name: str  # "" if it was requested by its digest
    kind: str
    because: str  # why it is trusted
    tool: str
    source: str
    config: Config
    entries: int
    files: int
    folders: int
    symlinks: int
    others: int  # devices, sockets, pipes
    file_bytes: int
    device_bytes: int  # of the mounted device: files without holes and duplicates, in whole blocks
    stored_bytes: int
    ratio: float  # of file bytes to stored bytes
    index_bytes: int
    blocks: int
    packs: int
    traces: int
    hot_blocks: int  # of all traces together
    hot_bytes: int  # stored
    hot_share: float  # of the stored bytes


def inspect(url: str, *, name: str) -> TreeInfo:
    """Inspect a tree. Raises: as `open_tree`."""
    url, trust = tree_url(url), Trust.load()
    with opened(url, name=name, trust=trust) as tree:
        known = known_traces(tree.store, tree.digest, tree.index.block_count, trust)
    index = tree.index
    kinds = [stat.S_IFMT(mode) for mode, link in zip(index.modes, index.links, strict=True) if link == -1]
    files, directories, symlinks = (kinds.count(kind) for kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK))
    file_bytes = sum(size for size, link in zip(index.sizes, index.links, strict=True) if link == -1)
    stored_bytes = sum(stored for *_, stored, _ in BLOCK.iter_unpack(index.blocks))
    hot = hot_blocks(known)
    hot_bytes = sum(index.block(number).stored_bytes for number in hot)
    return TreeInfo(
        digest=tree.digest,
        name=tree.head.name if tree.head is not None else "",
        kind=tree.head.kind if tree.head is not None else "",
        because=tree.because,
        tool=index.tool,
        source=index.source,
        config=index.config,
        entries=len(index),
        files=files,
        folders=directories,
        symlinks=symlinks,
        others=len(kinds) - files - directories - symlinks,
        file_bytes=file_bytes,
        device_bytes=index.device_bytes,
        stored_bytes=index.stored_bytes,
        ratio=round(file_bytes / index.stored_bytes, 3) if index.stored_bytes else 0.0,
        index_bytes=len(tree.index_bytes),
        blocks=index.block_count,
        packs=len(index.packs),
        traces=len(known),
        hot_blocks=len(hot),
        hot_bytes=hot_bytes,
        hot_share=round(hot_bytes / stored_bytes, 4) if stored_bytes else 0.0,
    )


def to_record(found: TreeInfo) -> dict[str, object]:
    return found._asdict() | {"config": msgspec.to_builtins(found.config)}


# ---- verify ------------------------------------------------------------------------------------------------


class VerifyResult(NamedTuple):
    """The result of a verification of every block."""

    digest: str
    because: str  # why the tree is trusted
    blocks: int
    right_blocks: int
    checked_bytes: int  # as stored
    faults: list[TreeFault]  # the first MAX_NAMED
    fault_count: int
    traces: int
    trace_faults: list[str]


def verify(url: str, *, name: str, progress: Progress) -> VerifyResult:
    """Read every block from the store, past all caches, and compare it with the index.

    Raises: as `open_tree`; StorageError if the store cannot be read at all: that is not a fault of the tree.
    """
    url, trust = tree_url(url), Trust.load()
    with opened(url, name=name, trust=trust) as tree:
        found = aio.run_sync(verify_blocks(tree.store, tree.index, progress))
        trace_faults: list[str] = []
        with sent_to(trace_faults.append):
            traces = aio.run_sync(stored_traces(tree.store, tree.digest, tree.index.block_count, trust))
    return VerifyResult(
        tree.digest,
        tree.because,
        found.blocks,
        found.right_blocks,
        found.checked_bytes,
        found.faults[:MAX_NAMED],
        len(found.faults),
        len(traces),
        trace_faults,
    )
