"""The kinds of compile caches: their directories, the files that are kept, and checks for complete files. Pure.

In torch 2.13 and triton 3, inductor and triton write to a temporary name and rename. But the compilers that
inductor starts write objects in place, under an flock of `locks/<name>.lock`. Ninja builds extensions in place
under a file `lock` that outlives its owner. CUDA keeps one `index` beside its entries.
"""

from __future__ import annotations

import json
import re
import struct
from enum import Enum
from typing import NamedTuple

MAX_PATH_BYTES = 1024
MAX_JSON_BYTES = 4 << 20  # longer ones are not parsed
_CUDA_MAX_BYTES = 2 << 30  # the driver's own limit is 256 MiB to 1 GiB
_ELF64 = struct.Struct("<4sBBB9xHHIQQQIHHHHHH")
_TEMPORARY = re.compile(r"lock|.*\.(?:lock|tmp)|tmp\..*|.*\.tmp\..*|\.nfs.*|\.bootseer.*", re.DOTALL)
_NOT_TAKEN = {
    # Locks; a compiler that inductor may install; inputs of kernels for debugging.
    "inductor": {"locks", "gcc", "unhashed_kernel_inputs"},
}
_GROUP = re.compile(r"__grp__.*\.json", re.DOTALL)


class Grouping(Enum):
    """The files that are used and evicted together."""

    STEM = "stem"  # files of a directory whose names are the same up to the first dot
    DIRECTORY = "folder"  # files in a directory of the first level
    WHOLE_DIRECTORY = "whole folder"  # the same, and never a part of them
    WHOLE = "whole"  # all files, never a part of them


class CacheKind(NamedTuple):
    name: str  # of its directory
    variable: str = ""  # that sets its path
    also: tuple[tuple[str, str], ...] = ()  # set with it
    grouping: Grouping = Grouping.STEM
    is_bound: bool = False  # to the path that it was made at
    is_by_content: bool = False  # names are digests of the inputs: two files of a name are equivalent

    @property
    def is_whole(self) -> bool:
        """Whether a unit is kept with all its files or not at all."""
        return self.grouping in (Grouping.WHOLE_DIRECTORY, Grouping.WHOLE)


KINDS = (
    # Variables of inductor are part of its own keys, so none is set. This one is for the rank bootstrap
    # (launcher/in_rank/bootstrap.py): it compiles no headers for kernels that exist already.
    CacheKind(
        "inductor",
        "TORCHINDUCTOR_CACHE_DIR",
        (("BOOTSEER_MARK_PROBES", "1"),),
        is_by_content=True,
    ),
    CacheKind(
        "triton", "TRITON_CACHE_DIR", (("TRITON_CACHE_AUTOTUNING", "1"),), Grouping.DIRECTORY, is_by_content=True
    ),
    CacheKind("cuda", "CUDA_CACHE_PATH", (("CUDA_CACHE_MAXSIZE", str(_CUDA_MAX_BYTES)),), Grouping.WHOLE),
    CacheKind("extensions", "TORCH_EXTENSIONS_DIR", (), Grouping.WHOLE_DIRECTORY, is_bound=True),
    CacheKind("jax", "JAX_COMPILATION_CACHE_DIR", is_by_content=True),
    CacheKind("numba", "NUMBA_CACHE_DIR"),
)
NCCL = CacheKind("nccl")  # only on request: a topology of another node would be wrong
_RULED = {kind.name for kind in (*KINDS, NCCL)}
# In a user's own directory of any name. bootseer.env.capture.contents knows them only below `huggingface` and the
# like.
_CREDENTIALS = {"token", "stored_tokens", "credentials", "application_default_credentials.json", "hosts.yml"}


def is_own(kind: CacheKind) -> bool:
    """Return whether the user has named it by --cache-dir: it may contain any files."""
    return kind.name not in _RULED


def is_named_as_credential(path: str) -> bool:
    """Return whether a file of an own directory has a name under which tools store tokens."""
    return path.rpartition("/")[2] in _CREDENTIALS


def is_temporary(name: str) -> bool:
    """Return whether a file or directory of this name exists only while a process writes."""
    return _TEMPORARY.fullmatch(name) is not None


def is_kept(kind: CacheKind, path: str) -> bool:
    """Return whether a file may be kept, by its path in the cache's directory."""
    parts = path.split("/")
    if any(is_temporary(part) for part in parts) or parts[0] in _NOT_TAKEN.get(kind.name, ()):
        return False
    return is_path(path)


def is_path(path: str) -> bool:
    """Return whether a path stays below its directory and is printable."""
    if not path.isprintable() or "\\" in path or any(part in ("", ".", "..") for part in path.split("/")):
        return False
    return all(len(part.encode()) <= 255 for part in path.split("/")) and len(path.encode()) <= MAX_PATH_BYTES


def unit_of(kind: CacheKind, path: str) -> str:
    """Return the unit of a file, as a path in the cache's directory; "" is the directory itself."""
    if kind.grouping is Grouping.WHOLE:
        return ""
    if kind.grouping in (Grouping.DIRECTORY, Grouping.WHOLE_DIRECTORY):
        return path.partition("/")[0]
    directory, slash, name = path.rpartition("/")
    stem = name[:1] + name[1:].partition(".")[0]
    return directory + slash + stem.removesuffix("-cache").removesuffix("-atime")  # jax


def lock_of(kind: CacheKind, path: str) -> str:
    """Return the path of the file that the writer of this one locks (flock); "" if there is none."""
    if kind.name != "inductor":
        return ""
    return f"locks/{path.rpartition('/')[2].partition('.')[0]}.lock"


def is_complete(path: str, size: int, head: bytes, text: bytes | None, tail: bytes) -> bool:
    """Return whether a file appears complete; no process is writing it.

    Args: head: its first 64 bytes. text: the whole content of a small `.json`. tail: its last 64 bytes.
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
    """Check the table of sections, which linkers write last."""
    if len(head) < _ELF64.size:
        return False
    _, bits, order, *_, table, _flags, _header, _, _, entry_bytes, entries, _ = _ELF64.unpack_from(head)
    if (bits, order) != (2, 1):
        return True  # of another architecture: it is not checked
    return bool(table + entry_bytes * entries <= size)


def is_built(times_ns: dict[str, int]) -> bool:
    """Return whether ninja has finished the directory of an extension. `times_ns`: name -> mtime in ns.

    The library must be newer than its inputs. build.ninja and ninja's logs are written at each start.
    """
    made = [at for name, at in times_ns.items() if name.endswith(".so")]
    if not made or "build.ninja" not in times_ns:
        return False
    inputs = [at for name, at in times_ns.items() if not name.endswith(".so") and "ninja" not in name]
    return all(at <= max(made) for at in inputs)


# ---- triton's groups ---------------------------------------------------------------------------------------


def is_group(path: str) -> bool:
    """Return whether it is a file of triton that names others by their absolute paths.

    At another path triton does not find them, and compiles everything again.
    """
    return _GROUP.fullmatch(path.rpartition("/")[2]) is not None


def to_canonical_group(data: bytes) -> bytes | None:
    """Return a group with names in place of paths, so that its bytes do not depend on them. None if invalid."""
    paths = _child_paths(data)
    if paths is None:
        return None
    names = {name: path.rpartition("/")[2] for name, path in paths.items()}
    if not all(is_path(name) for name in names.values()):
        return None
    return _group(names)


def to_local_group(data: bytes, directory: str) -> bytes | None:
    """Return the group for files in `directory`. None if it is invalid."""
    names = to_canonical_group(data)
    if names is None:
        return None
    return _group({name: f"{directory}/{path}" for name, path in (_child_paths(names) or {}).items()})


def _child_paths(data: bytes) -> dict[str, str] | None:
    if len(data) > MAX_JSON_BYTES:
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
