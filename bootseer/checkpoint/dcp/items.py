"""Items of DCP files: which parts are wanted, which are read together, and how their bytes become tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from bootseer.checkpoint.format.saved_tensor import SavedLayout, SavedTensor
from bootseer.checkpoint.io.fetching import SLOT_BYTES, Span

NARROW_BYTES = 4 << 20  # of a tensor: smaller ones are not worth two more reads
NARROW_SHARE = 0.75  # of its rows: if more are wanted, all are read
GAP_BYTES = 1 << 20  # unwanted bytes that are read rather than starting a new span


class Item(NamedTuple):
    """Bytes written by one `torch.save`, and all reads of parts of them."""

    path: str
    offset: int  # bytes
    length: int  # bytes
    transforms: Sequence[str]
    reads: list[ReadItem]
    rows: SavedLayout | None = None  # set: bare rows of a tensor, and `reads` count from the first of them


def rows_of(item: Item, entries: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the first and one past the last row that any read wants; None: read all."""
    if item.length < NARROW_BYTES or item.transforms:
        return None
    index = item.reads[0].storage_index
    chunks = getattr(entries.get(index.fqn), "chunks", ())
    shape = next((chunk.sizes for chunk in chunks if chunk.offsets == index.offset), None)
    if not shape or any(read.type != LoadItemType.TENSOR or not read.lengths for read in item.reads):
        return None
    first = min(read.storage_offsets[0] for read in item.reads)
    last = max(read.storage_offsets[0] + read.lengths[0] for read in item.reads)
    if not 0 <= first < last <= shape[0] or last - first > NARROW_SHARE * shape[0]:
        return None
    return first, last


def shift(read: ReadItem, first: int) -> ReadItem:
    offsets = torch.Size([read.storage_offsets[0] - first, *read.storage_offsets[1:]])
    return dataclasses.replace(read, storage_offsets=offsets)


def join(items: Sequence[Item]) -> tuple[list[Span], list[list[Item]]]:
    """Join items that lie close to each other into one span, as long as it fits into a slot."""
    spans: list[Span] = []
    members: list[list[Item]] = []
    for item in items:
        end = item.offset + item.length
        if spans:
            last = spans[-1]
            joined = max(last.end, end) - last.start
            if item.path == last.path and item.offset <= last.end + GAP_BYTES and joined <= SLOT_BYTES - 4096:
                spans[-1] = last._replace(end=max(last.end, end))
                members[-1].append(item)
                continue
        spans.append(Span(item.path, item.offset, end))
        members.append([item])
    return spans, members


def copy_bytes(saved: SavedTensor, read: ReadItem, target: torch.Tensor) -> bool:
    """Copy the part that `read` wants as bytes, which needs no alignment. Return False if that is impossible."""
    dims = len(saved.shape)
    if target.dtype != saved.dtype or target.dim() != dims or len(read.lengths) != dims:
        return False
    if not dims:
        target.unsqueeze(0).view(torch.uint8).copy_(saved.as_bytes())
        return True
    if target.stride(-1) != 1 and target.size(-1) != 1:
        return False
    part = saved.as_bytes()
    for dim, (offset, length) in enumerate(zip(read.storage_offsets, read.lengths, strict=True)):
        if offset < 0 or length < 0 or offset + length > saved.shape[dim] or length != target.size(dim):
            return False  # the slow path reports the error
        scale = saved.dtype.itemsize if dim == dims - 1 else 1
        part = part.narrow(dim, offset * scale, length * scale)
    if target.stride(-1) != 1:  # a last dimension of one element may have any stride
        target = target.as_strided(target.size(), (*target.stride()[:-1], 1))
    target.view(torch.uint8).copy_(part)
    return True
