"""What first training steps leave behind: which folders, which files of them are kept, and what is whole. Pure.

How the frameworks write, read in torch 2.13 and triton 3: inductor and triton write to a temporary name and
rename, but the compilers that inductor starts write objects in place, under an flock of `locks/<name>.lock`.
Extensions are built in place by ninja under a file `lock` that outlives its owner. CUDA keeps one `index` beside
its entries.
"""

from __future__ import annotations

import json
import re
import struct
from enum import Enum
from typing import NamedTuple

MOST_PATH_BYTES = 1024
MOST_JSON_BYTES = 4 << 20  # longer ones are not parsed
_CUDA_MOST_BYTES = 2 << 30  # the driver's own limit is 256 MiB to 1 GiB
_ELF64 = struct.Struct("<4sBBB9xHHIQQQIHHHHHH")
_TEMPORARY = re.compile(r"lock|.*\.(?:lock|tmp)|tmp\..*|.*\.tmp\..*|\.nfs.*|\.bootseer.*", re.DOTALL)
_NOT_TAKEN = {
    # Locks; a compiler that inductor may install; inputs of kernels that somebody debugs.
    "inductor": {"locks", "gcc", "unhashed_kernel_inputs"},
}
_GROUP = re.compile(r"__grp__.*\.json", re.DOTALL)


class Grouping(Enum):
    """What is used, and goes, together."""

    STEM = "stem"  # files of a folder whose names are the same up to the first dot
    FOLDER = "folder"  # what is in a folder of the first level
    WHOLE_FOLDER = "whole folder"  # the same, and never a part of it
    WHOLE = "whole"  # everything, never a part of it


class Kind(NamedTuple):
    """A kind of cache."""

    name: str  # of its folder
    variable: str = ""  # that says where it is
    also: tuple[tuple[str, str], ...] = ()  # set with it
    grouping: Grouping = Grouping.STEM
    is_bound: bool = False  # to the path that it was made at
    is_by_content: bool = False  # names say what files were made of: two of a name are as good as each other

    @property
    def is_whole(self) -> bool:
        """Whether a unit is taken with all its files or not at all."""
        return self.grouping in (Grouping.WHOLE_FOLDER, Grouping.WHOLE)


KINDS = (
    # What variables of inductor say is part of its own keys: none is set. This one is for the code of ours in
    # ranks (launcher/inside.py): no headers are compiled for kernels that are there.
    Kind(
        "inductor",
        "TORCHINDUCTOR_CACHE_DIR",
        (("BOOTSEER_MARK_PROBES", "1"),),
        is_by_content=True,
    ),
    Kind("triton", "TRITON_CACHE_DIR", (("TRITON_CACHE_AUTOTUNING", "1"),), Grouping.FOLDER, is_by_content=True),
    Kind("cuda", "CUDA_CACHE_PATH", (("CUDA_CACHE_MAXSIZE", str(_CUDA_MOST_BYTES)),), Grouping.WHOLE),
    Kind("extensions", "TORCH_EXTENSIONS_DIR", (), Grouping.WHOLE_FOLDER, is_bound=True),
    Kind("jax", "JAX_COMPILATION_CACHE_DIR", is_by_content=True),
    Kind("numba", "NUMBA_CACHE_DIR"),
)
NCCL = Kind("nccl")  # only where it is asked for: a topology of another node would be wrong
_RULED = {kind.name for kind in (*KINDS, NCCL)}
# In a user's own folder, whatever it is called: only below `huggingface` and the like they are known elsewhere.
_CREDENTIALS = {"token", "stored_tokens", "credentials", "application_default_credentials.json", "hosts.yml"}


def is_own(kind: Kind) -> bool:
    """Whether it is one that the user has named, by --cache-dir: anything may be in it."""
    return kind.name not in _RULED


def is_named_as_credential(path: str) -> bool:
    """Whether a file of an own folder is one that tools keep tokens in."""
    return path.rpartition("/")[2] in _CREDENTIALS


def is_temporary(name: str) -> bool:
    """Whether a file or folder of this name is only there while somebody writes."""
    return _TEMPORARY.fullmatch(name) is not None


def is_taken(kind: Kind, path: str) -> bool:
    """Whether a file, by its path in the cache's folder, may be kept at all."""
    parts = path.split("/")
    if any(is_temporary(part) for part in parts) or parts[0] in _NOT_TAKEN.get(kind.name, ()):
        return False
    return is_path(path)


def is_path(path: str) -> bool:
    """Whether it is a path that stays below its folder and can be written down."""
    if not path.isprintable() or "\\" in path or any(part in ("", ".", "..") for part in path.split("/")):
        return False
    return all(len(part.encode()) <= 255 for part in path.split("/")) and len(path.encode()) <= MOST_PATH_BYTES


def unit_of(kind: Kind, path: str) -> str:
    """What a file belongs to, as a path in the cache's folder; "" is the folder itself."""
    if kind.grouping is Grouping.WHOLE:
        return ""
    if kind.grouping in (Grouping.FOLDER, Grouping.WHOLE_FOLDER):
        return path.partition("/")[0]
    folder, slash, name = path.rpartition("/")
    stem = name[:1] + name[1:].partition(".")[0]
    return folder + slash + stem.removesuffix("-cache").removesuffix("-atime")  # jax


def lock_of(kind: Kind, path: str) -> str:
    """The file, in the cache's folder, that whoever writes this one has locked (flock); "" if there is none."""
    if kind.name != "inductor":
        return ""
    return f"locks/{path.rpartition('/')[2].partition('.')[0]}.lock"


def looks_whole(path: str, size: int, head: bytes, text: bytes | None, tail: bytes) -> bool:
    """Whether a file that nobody writes any more can be one that was finished.

    Args: head: its first 64 bytes. text: all of it, of a small `.json`. tail: its last 64 bytes.
    """
    if not size:
        return False
    if head.startswith(b"\x7fELF"):
        return _is_whole_elf(head, size)
    if path.endswith(".so") or (path.endswith(".o") and not head.strip(b"\0")):
        return False
    if path.endswith(".xml"):
        return tail.rstrip().endswith(b">")
    if text is not None and path.endswith(".json"):
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return False
    return True


def _is_whole_elf(head: bytes, size: int) -> bool:
    """Linkers write the table of sections last."""
    if len(head) < _ELF64.size:
        return False
    _, bits, order, *_, table, _flags, _header, _, _, entry_bytes, entries, _ = _ELF64.unpack_from(head)
    if (bits, order) != (2, 1):
        return True  # of another machine: nothing is known of it
    return bool(table + entry_bytes * entries <= size)


def is_built(times_ns: dict[str, int]) -> bool:
    """Whether the folder of an extension is one that ninja has finished. By name in it: mtimes in ns.

    The library is newer than all that it was made of; build.ninja and ninja's logs are written at each start.
    """
    made = [at for name, at in times_ns.items() if name.endswith(".so")]
    if not made or "build.ninja" not in times_ns:
        return False
    inputs = [at for name, at in times_ns.items() if not name.endswith(".so") and "ninja" not in name]
    return all(at <= max(made) for at in inputs)


# ---- triton's groups ---------------------------------------------------------------------------------------


def is_group(path: str) -> bool:
    """Whether it is a file of triton's that names others by their absolute paths.

    At another path they are not found, and everything is compiled anew.
    """
    return _GROUP.fullmatch(path.rpartition("/")[2]) is not None


def without_folder(data: bytes) -> bytes | None:
    """A group with names instead of paths: the same bytes wherever it was made. None for what is no group."""
    paths = _child_paths(data)
    if paths is None:
        return None
    names = {name: path.rpartition("/")[2] for name, path in paths.items()}
    if not all(is_path(name) for name in names.values()):
        return None
    return _group(names)


def with_folder(data: bytes, folder: str) -> bytes | None:
    """The group for files in `folder`. None for what is no group."""
    names = without_folder(data)
    if names is None:
        return None
    return _group({name: f"{folder}/{path}" for name, path in (_child_paths(names) or {}).items()})


def _child_paths(data: bytes) -> dict[str, str] | None:
    if len(data) > MOST_JSON_BYTES:
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    paths = found.get("child_paths") if isinstance(found, dict) else None
    if not isinstance(paths, dict) or not all(isinstance(path, str) for path in paths.values()):
        return None
    return paths


def _group(paths: dict[str, str]) -> bytes:
    return json.dumps({"child_paths": dict(sorted(paths.items()))}).encode()
