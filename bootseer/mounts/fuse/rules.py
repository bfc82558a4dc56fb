"""Rules by which names describe a save: which belong together, which are not final, what is missing. Pure.

They follow the conventions of savers: torch, safetensors, transformers, DCP, DeepSpeed, Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

COMMIT_NAME = ".commit"  # made by the program that knows that a save is complete
DCP_METADATA = ".metadata"  # DCP renames it into place when all ranks have written
# Written when a directory is complete; they hold its name or its number.
POINTERS = ("latest", "latest_checkpointed_iteration.txt")
SIDE_BYTES = 1 << 20  # a small file at the top is added to saves and is not one itself
WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".npz", ".npy", ".gguf", ".h5", ".msgpack", ".pkl")

_TEMPORARY = re.compile(
    r"^\.|~$|(^|[._-])(tmp|temp|partial|incomplete|part|swp)([._-]|$)|[._-]tmp\w*$", re.IGNORECASE
)
_SHARD = re.compile(r"(.*?)-?([0-9]{1,9})-of-([0-9]{1,9})(\..*)?")
_DCP_PART = re.compile(rb"__[0-9]{1,9}_[0-9]{1,9}\.distcp")
_NUMBER = re.compile(r"([0-9]{1,18})(?!.*[0-9])")


def is_temporary(name: str) -> bool:
    """Return whether savers use such a name until a file or directory is complete."""
    return name != DCP_METADATA and _TEMPORARY.search(name) is not None


def is_part(name: str) -> bool:
    """Return whether a file is useful only with others beside it: of DCP, or one of several shards."""
    shard = _SHARD.fullmatch(name)
    return name == DCP_METADATA or name.endswith(".distcp") or (shard is not None and int(shard[3]) > 1)


def find_parts(metadata: bytes | bytearray) -> set[str]:
    """Return the names of files in DCP's metadata. They are searched for, not unpickled."""
    return {found[0].decode() for found in _DCP_PART.finditer(metadata)}


def is_side_file(name: str, size: int) -> bool:
    """Return whether a file at the top is not a save of its own."""
    return name in POINTERS or (size <= SIDE_BYTES and not name.endswith(WEIGHTS) and not is_part(name))


def find_step(name: str) -> int | None:
    """Return the training step in the name of a save: its last number."""
    found = _NUMBER.search(name.rpartition(".")[0] if "." in name else name)
    return int(found[1]) if found else None


def find_named(text: str, directories: Iterable[str]) -> str:
    """Return the directory that the text of a pointer names, "" if none."""
    text = text.strip()
    for name in directories:
        if name == text or (text.isdigit() and find_step(name) == int(text)):
            return name
    return ""


def find_missing(paths: Mapping[str, int]) -> str:
    """Return why the files of a directory are not a complete save, "" if nothing is missing.

    `paths`: below the directory, each with a number that grows with each change of any file.
    """
    metadata = {path: at for path, at in paths.items() if path.rpartition("/")[2] == DCP_METADATA}
    for path, changed in paths.items():
        if path.endswith(".distcp"):
            at = metadata.get(path.rpartition("/")[0] + "/" + DCP_METADATA if "/" in path else DCP_METADATA)
            if at is None or at < changed:
                return f"{path} has no {DCP_METADATA} that was written after it"
    shards: dict[tuple[str, str, int], set[int]] = {}
    for path in paths:
        found = _SHARD.fullmatch(path)
        if found is not None:
            shards.setdefault((found[1], found[4] or "", int(found[3])), set()).add(int(found[2]))
    for (stem, suffix, count), numbers in shards.items():
        if len(numbers) < count:
            return f"{stem}-*-of-{count}{suffix} has {len(numbers)} of {count} parts"
    unfinished = [path for path in paths if any(is_unfinished_part(name) for name in path.split("/"))]
    if unfinished:
        return f"{unfinished[0]} has the name of an unfinished file"
    return ""


def is_unfinished_part(name: str) -> bool:
    """Return whether a name in a directory is temporary: stricter, as hidden files are common there."""
    return name not in (DCP_METADATA, COMMIT_NAME) and not name.startswith(".") and is_temporary(name)
