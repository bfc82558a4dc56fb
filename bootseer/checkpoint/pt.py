"""Files that `torch.save` wrote, from any store: read by many ranges at once, tensors are views of what was read.

`torch.load` alone reads one storage after another and copies each. Its unpickler is used here as well, so what it
admits (`weights_only`) and what comes out are the same.
"""

from __future__ import annotations

import inspect
import io
import os
import pickle
import zipfile
from typing import Any

import torch

from bootseer.checkpoint.memory import MemoryFile, allocate, check_free
from bootseer.checkpoint.opening import open_source
from bootseer.checkpoint.saved_tensor import content_start
from bootseer.checkpoint.source import Request, Source
from bootseer.errors import CheckpointError, IntegrityError, NotFound

ALIGNMENT_BYTES = 16  # of storages; torch.save gives them 64


def load_pt(
    url: str | os.PathLike[str] | None = None,
    *,
    map_location: Any = "cpu",
    weights_only: bool = True,
    verify: str | None = None,
) -> Any:
    """What `torch.save` has put into a file.

    Args:
        weights_only: False lets the file run code; as in torch.load.
        verify: "units", "sampled", "full" or "none" instead of the store's default.
    Raises: CheckpointError for more than plain data; IntegrityError for a damaged file.
    """
    with open_source(url, verify=verify) as opened:
        path = opened.path
        if path not in opened.source.files:
            if path or len(opened.source.files) != 1:
                raise NotFound(
                    f"{opened.source.url}: is not one file; name one, or load it with load_file or dcp.load"
                )
            path = next(iter(opened.source.files))
        return load_from(opened.source, path, map_location=map_location, weights_only=weights_only)


def load_from(source: Source, path: str, *, map_location: Any = "cpu", weights_only: bool = True) -> Any:
    """The same from one file of an open source."""
    where = source.url if source.url.endswith(path) else f"{source.url}: {path}"
    size = source.files[path].size
    view = source.map(path, 0, size)
    if view is None:
        check_free(size, where)
        view = allocate(size, where)
        source.read([Request(path, 0, view)])
    try:
        if weights_only and _has_plain_storages(view):
            found = _load_views(view, map_location)
        else:
            found = torch.load(
                io.BufferedReader(MemoryFile(view)), map_location=map_location, weights_only=weights_only
            )
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{where}: is more than plain data, or no file of torch.save ({_first_line(error)}); if you trust "
            "whoever wrote it, load it with weights_only=False"
        ) from error
    except Exception as error:  # whatever a damaged file makes torch trip over
        raise IntegrityError(f"{where}: is no file of torch.save, or damaged: {_first_line(error)}") from error
    return found


def _load_views(view: memoryview, map_location: Any) -> Any:
    """As `torch.load(mmap=True)` does it, with our memory in the place of a mapped file."""
    with torch.serialization._open_zipfile_reader(MemoryFile(view)) as archive:
        return torch.serialization._load(
            archive,
            map_location,
            torch._weights_only_unpickler,
            overall_storage=torch.frombuffer(view, dtype=torch.uint8).untyped_storage(),
            encoding="utf-8",
        )


def _has_plain_storages(view: memoryview) -> bool:
    """Whether it is a zip file whose storages can be used where they are, by this torch."""
    if not _can_load_views():
        return False
    try:
        with zipfile.ZipFile(MemoryFile(view)) as archive:
            entries = archive.infolist()
        names = {info.filename.partition("/")[2] for info in entries}
        if "data.pkl" not in names or "constants.pkl" in names:
            return False  # foreign, or TorchScript: torch.load has the words for it
        return all(
            content_start(view, info) % ALIGNMENT_BYTES == 0
            for info in entries
            if info.filename.partition("/")[2].startswith("data/") and info.file_size
        )
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError):
        return False


def _can_load_views() -> bool:
    """These are torch's own functions, not its interface: another version may not have them."""
    module = torch.serialization
    if not hasattr(module, "_open_zipfile_reader") or not hasattr(torch, "_weights_only_unpickler"):
        return False
    return "overall_storage" in inspect.signature(module._load).parameters


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).split("\n", 1)[0][:200]
