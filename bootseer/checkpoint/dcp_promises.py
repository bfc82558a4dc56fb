"""PURE: which bytes of which files the metadata of a DCP folder promises, read without torch.

In: `.metadata`, or one `__RANK.metadata` for each rank where the save was made without collectives. Out: items,
each a part of a file. torch writes the metadata last, but nothing says that the files are still as they were then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bootseer.checkpoint.file_parts import Cursor, Parts, Torn
from bootseer.checkpoint.pickle_data import Inert, read

NAME = ".metadata"
_OF_RANK = re.compile(r"__(\d+)\.metadata")
_DATA_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")


class Item(NamedTuple):
    """What one `torch.save`, or a transformed one, wrote."""

    path: str  # relative to the metadata's folder
    offset: int
    length: int
    is_plain: bool  # not transformed

    @property
    def end(self) -> int:
        return self.offset + self.length


def names_of(names: Sequence[str]) -> list[str]:
    """Metadata files among the names of a folder. Raises: Torn where a rank's is missing."""
    if NAME in names:
        return [NAME]
    ranks = {int(found[1]): name for name in names if (found := _OF_RANK.fullmatch(name))}
    with_data = {int(found[1]) for name in names if (found := _DATA_OF_RANK.fullmatch(name))}
    if not ranks:
        raise Torn("has no .metadata, which its saver writes last")
    missing = sorted((with_data | set(range(max(ranks)))) - set(ranks))
    if missing:
        raise Torn(f"has no __{missing[0]}.metadata, which its rank writes last")
    return [ranks[rank] for rank in sorted(ranks)]


def parse(data: bytes) -> Inert:
    """Raises: Torn."""
    if not data:
        raise Torn("is empty")
    found, _ = read(Cursor(Parts.of(data)))
    if not isinstance(found, Inert) or not found.origin.endswith("Metadata"):
        raise Torn("is no metadata of torch.distributed.checkpoint")
    if not isinstance(found.state.get("state_dict_metadata"), dict):
        raise Torn("is no metadata of torch.distributed.checkpoint")
    if not isinstance(found.state.get("storage_data"), dict):
        raise Torn("does not say where its tensors are")
    return found


def items(metadata: Inert) -> list[Item]:
    """Raises: Torn."""
    found: dict[tuple[str, int], Item] = {}
    for each in metadata.state["storage_data"].values():
        state: Mapping[str, Any] = each.state if isinstance(each, Inert) else {}
        path, offset, length = state.get("relative_path"), state.get("offset"), state.get("length")
        if not isinstance(path, str) or not isinstance(offset, int) or not isinstance(length, int):
            continue  # of another writer, which says it in its own way
        found[path, offset] = Item(path, offset, length, not state.get("transform_descriptors"))
    return list(found.values())


def check_covered(parts: Sequence[Inert]) -> None:
    """Whether what ranks say for themselves makes whole tensors. Raises: Torn."""
    sizes: dict[str, Any] = {}
    chunks: dict[str, set[Any]] = {}
    for each in parts:
        for name, tensor in each.state["state_dict_metadata"].items():
            state: Mapping[str, Any] = tensor.state if isinstance(tensor, Inert) else {}
            if "chunks" not in state or not isinstance(state.get("size"), tuple):
                continue
            sizes[name] = state["size"]
            known = chunks.setdefault(name, set())
            for chunk in state["chunks"]:
                known.add((chunk.state.get("offsets"), chunk.state.get("sizes")))
    for name, size in sizes.items():
        have = sum(math.prod(chunk[1] or ()) for chunk in chunks[name])
        if have < math.prod(size):
            raise Torn(f"lacks parts of {str(name)[:80]}: those of a rank that has not saved")
