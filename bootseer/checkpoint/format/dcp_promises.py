"""PURE: which bytes of which files the metadata of a DCP directory promises, read without torch.

In: `.metadata`, or one `__RANK.metadata` per rank if the save was made without collectives. Out: items, each a
part of a file. torch writes the metadata last, but that does not prove that the files have not changed since.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bootseer.checkpoint.format.file_parts import Cursor, IncompleteFile, Parts
from bootseer.checkpoint.format.pickle_data import Inert, read

NAME = ".metadata"
_OF_RANK = re.compile(r"__(\d+)\.metadata")
_DATA_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")


class StoredExtent(NamedTuple):
    """Bytes that one `torch.save` wrote, possibly transformed."""

    path: str  # relative to the metadata's directory
    offset: int
    length: int
    is_plain: bool  # not transformed

    @property
    def end(self) -> int:
        return self.offset + self.length


def names_of(names: Sequence[str]) -> list[str]:
    """Return the metadata files among the names of a directory. Raises: Torn if a rank's is missing."""
    if NAME in names:
        return [NAME]
    ranks = {int(found[1]): name for name in names if (found := _OF_RANK.fullmatch(name))}
    with_data = {int(found[1]) for name in names if (found := _DATA_OF_RANK.fullmatch(name))}
    if not ranks:
        raise IncompleteFile("has no .metadata, which its saver writes last")
    missing = sorted((with_data | set(range(max(ranks)))) - set(ranks))
    if missing:
        raise IncompleteFile(f"has no __{missing[0]}.metadata, which its rank writes last")
    return [ranks[rank] for rank in sorted(ranks)]


def parse(data: bytes) -> Inert:
    """Parse metadata. Raises: Torn."""
    if not data:
        raise IncompleteFile("is empty")
    found, _ = read(Cursor(Parts.of(data)))
    if not isinstance(found, Inert) or not found.origin.endswith("Metadata"):
        raise IncompleteFile("is not metadata of torch.distributed.checkpoint")
    if not isinstance(found.state.get("state_dict_metadata"), dict):
        raise IncompleteFile("is not metadata of torch.distributed.checkpoint")
    if not isinstance(found.state.get("storage_data"), dict):
        raise IncompleteFile("does not locate its tensors")
    return found


def items(metadata: Inert) -> list[StoredExtent]:
    """Return the items that the metadata promises. Raises: Torn."""
    found: dict[tuple[str, int], StoredExtent] = {}
    for each in metadata.state["storage_data"].values():
        state: Mapping[str, Any] = each.state if isinstance(each, Inert) else {}
        path, offset, length = state.get("relative_path"), state.get("offset"), state.get("length")
        if not isinstance(path, str) or not isinstance(offset, int) or not isinstance(length, int):
            continue  # of another writer, with a representation of its own
        found[path, offset] = StoredExtent(path, offset, length, not state.get("transform_descriptors"))
    return list(found.values())


def check_covered(parts: Sequence[Inert]) -> None:
    """Check that the metadata of ranks covers whole tensors. Raises: Torn."""
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
            raise IncompleteFile(f"lacks parts of {str(name)[:80]}: a rank has not saved its parts")
