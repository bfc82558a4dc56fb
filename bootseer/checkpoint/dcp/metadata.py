"""The `.metadata` of a DCP directory, which is a pickle, read as data.

torch loads it with the plain unpickler, so any writer of the file can run code in every rank. This unpickler
creates only the records that torch itself writes; any other name is an error that gives the name.
"""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from bootseer.checkpoint.dcp import versions as dcp_versions
from bootseer.errors import CheckpointError, IntegrityError

NAME = ".metadata"
MAX_BYTES = 4 << 30

_RECORDS = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_PROPERTIES = ("torch.distributed.checkpoint.metadata", "TensorProperties")
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_BUILTINS = {"set": set, "frozenset": frozenset, "bytearray": bytearray, "complex": complex}


def name_of(rank: int | None) -> str:
    """Return the file's name; with `rank`, that of a rank's own file in a save without collectives."""
    return NAME if rank is None else f"__{rank}{NAME}"


def load(data: bytes | memoryview, where: str, *, trusted: bool = False) -> Metadata:
    """Load metadata.

    Args:
        trusted: the user vouches for the file; it is loaded as torch does, which can run any code.
    Raises: IntegrityError if it is not DCP metadata; CheckpointError for classes that are not torch's own;
        FormatVersion for records that only another torch has.
    """
    try:
        found = (_Trusting if trusted else _Unpickler)(io.BytesIO(data)).load()
    except _RefusedError as error:
        newer = dcp_versions.newer_name(error.module, error.name, where)
        if newer is not None:
            raise newer from error
        raise CheckpointError(
            f"{where}: names {error}, which metadata of torch.distributed.checkpoint does not need; if you trust"
            " the writer, open it with weights_only=False"
        ) from error
    except Exception as error:
        raise IntegrityError(f"{where}: is not metadata of torch.distributed.checkpoint, or is damaged") from error
    if not isinstance(found, Metadata) or not isinstance(found.state_dict_metadata, dict):
        raise IntegrityError(f"{where}: is not metadata of torch.distributed.checkpoint")
    dcp_versions.complete(found)
    return found


class _RefusedError(Exception):
    """A name that is not in the allow list."""

    def __init__(self, module: str, name: str) -> None:
        super().__init__(f"{module}.{name}")
        self.module, self.name = module, name


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _find(module, name)
        if found is None:
            raise _RefusedError(module, name)
        return found


class _Trusting(pickle.Unpickler):
    """Loads all that torch loads, also records of another torch version."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == _PROPERTIES:
            return dcp_versions.Properties
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError) as error:
            raise _RefusedError(module, name) from error


def _find(module: str, name: str) -> Any:
    match "builtins" if module == "__builtin__" else module:  # so named by protocol 2
        case "torch.distributed.checkpoint.metadata" if name == "TensorProperties":
            return dcp_versions.Properties
        case "torch.distributed.checkpoint.metadata" if name in _RECORDS:
            return getattr(metadata, name)
        case "torch.distributed.checkpoint.filesystem" if name == "_StorageInfo":
            return filesystem._StorageInfo
        case "torch" if name == "Size":
            return torch.Size
        case "torch" if name in _DTYPES:
            return _DTYPES[name]
        case "torch.serialization" if name == "_get_layout":
            return _layout
        case "collections" if name == "OrderedDict":
            return collections.OrderedDict
        case "builtins" if name == "getattr":
            return _member  # how Python 3.11.2 pickles a member of an enum
        case "builtins" if name in _BUILTINS:
            return _BUILTINS[name]
        case "pathlib" | "pathlib._local" if name in ("Path", "PosixPath", "PurePosixPath"):
            return pathlib.PurePosixPath  # where it was saved
    return None


def _layout(name: str) -> torch.layout:
    return _LAYOUTS[name]


def _member(kind: Any, name: str) -> Any:
    if kind is not metadata._MEM_FORMAT_ENCODING:
        raise _RefusedError("builtins", "getattr")
    return kind[name]
