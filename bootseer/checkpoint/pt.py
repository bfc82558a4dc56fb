"""Files of `torch.save` from any store: read in many ranges at once, with tensors as views of the read memory.

`torch.load` alone reads one storage after another and copies each. This module uses its unpickler as well, so
`weights_only` and the results are the same.
"""

from __future__ import annotations

import inspect
import io
import os
import pickle
import zipfile
from typing import Any

import torch

from bootseer.checkpoint.format.read_only_file import MemoryFile
from bootseer.checkpoint.format.saved_tensor import content_start
from bootseer.checkpoint.io.memory import allocate, check_free
from bootseer.checkpoint.io.source import Request, Source
from bootseer.checkpoint.opening import open_source
from bootseer.errors import CheckpointError, IntegrityError, NotFound, first_line

ALIGNMENT_BYTES = 16  # of storages; torch.save gives them 64


def load_pt(
    url: str | os.PathLike[str] | None = None,
    *,
    map_location: Any = "cpu",
    weights_only: bool = True,
    verify: str | None = None,
) -> Any:
    """Load a file of `torch.save`.

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
    """Load one file of an open source, like `load_pt`."""
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
            f"{where}: is more than plain data, or not a torch.save file ({first_line(error)}); if you trust "
            "the writer, load it with weights_only=False"
        ) from error
    except Exception as error:  # a damaged file can cause any error in torch
        raise IntegrityError(f"{where}: is not a torch.save file, or is damaged: {first_line(error)}") from error
    return found


def _load_views(view: memoryview, map_location: Any) -> Any:
    """Load as `torch.load(mmap=True)` does, with `view` in place of a mapped file."""
    with torch.serialization._open_zipfile_reader(MemoryFile(view)) as archive:
        return torch.serialization._load(
            archive,
            map_location,
            torch._weights_only_unpickler,
            overall_storage=torch.frombuffer(view, dtype=torch.uint8).untyped_storage(),
            encoding="utf-8",
        )


def _has_plain_storages(view: memoryview) -> bool:
    """Return whether this torch can use the storages of this zip file in place."""
    if not _can_load_views():
        return False
    try:
        with zipfile.ZipFile(MemoryFile(view)) as archive:
            entries = archive.infolist()
        names = {info.filename.partition("/")[2] for info in entries}
        if "data.pkl" not in names or "constants.pkl" in names:
            return False  # foreign, or TorchScript: torch.load reports the error
        return all(
            content_start(view, info) % ALIGNMENT_BYTES == 0
            for info in entries
            if info.filename.partition("/")[2].startswith("data/") and info.file_size
        )
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError):
        return False


def _can_load_views() -> bool:
    """Return whether this torch has the private functions that are used here."""
    module = torch.serialization
    if not hasattr(module, "_open_zipfile_reader") or not hasattr(torch, "_weights_only_unpickler"):
        return False
    return "overall_storage" in inspect.signature(module._load).parameters
