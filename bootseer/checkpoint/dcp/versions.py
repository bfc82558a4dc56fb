"""Differences of DCP saves between torch 2.4 and 2.15, so that each of these reads saves of every other.

In: records as a save has them. Out: records of this torch. Derived from the sources of 2.4.1, 2.6.0, 2.9.1,
2.12.0, 2.13.0, 2.14.1 and 2.15.0, and from saves that these made (tests/unit/bootseer/checkpoint/dcp_saves).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from bootseer.errors import CheckpointError, FormatVersion

# The torch version that introduced a type, if later than 2.4.
DTYPES_SINCE = {"float8_e8m0fnu": "2.7", "float4_e2m1fn_x2": "2.8", "bcomplex32": "2.14"}
TRANSFORMS_SINCE = "2.7"
DCP_VERSION = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # torch's number of the format; None before 2.7
STATE_FIELDS = 5  # of a tensor's properties in every version; 2.15 adds its strides


class Properties(metadata.TensorProperties):  # type: ignore[misc]  # torch is not typed here
    """A tensor's properties while they are unpickled; then they become torch's own.

    torch 2.15 pickles six fields, and older versions accept only five. Fields beyond those of this torch do not
    matter for loading.
    """

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        fields = [field.name for field in dataclasses.fields(metadata.TensorProperties)]
        if not isinstance(state, tuple) or len(state) < STATE_FIELDS:
            raise ValueError("a tensor has no properties")
        values = dict(zip(fields, state, strict=False))
        values["memory_format"] = _MEMORY_FORMATS[values["memory_format"].name]
        self.__dict__.update(values)
        self.__class__ = metadata.TensorProperties  # by which dataclasses compare


_MEMORY_FORMATS = {
    "TORCH_CONTIGUOUS_FORMAT": torch.contiguous_format,
    "TORCH_CHANNELS_LAST": torch.channels_last,
    "TORCH_PRESERVE_FORMAT": torch.preserve_format,
}


def complete(found: metadata.Metadata) -> None:
    """Add the fields of later versions to records of an older torch."""
    for record in (found, found.storage_meta):
        if dataclasses.is_dataclass(record) and not isinstance(record, type):
            for field in dataclasses.fields(record):
                if field.default_factory is not dataclasses.MISSING and not hasattr(record, field.name):
                    setattr(record, field.name, field.default_factory())


def newer_name(module: str, name: str, where: str) -> FormatVersion | None:
    """Return the error for a record that this torch lacks but another may have; None if no torch has it."""
    this = torch.__version__
    if module == "torch" and name in DTYPES_SINCE:
        return FormatVersion(
            f"{where}: has tensors of torch.{name}, which need torch {DTYPES_SINCE[name]} or later; this is {this}"
        )
    if module.startswith("torch.distributed.checkpoint.") and not _is_here(module, name):
        return FormatVersion(
            f"{where}: has records of {module}.{name}, which this torch, {this}, lacks; it was saved by"
            " another torch"
        )
    return None


def _is_here(module: str, name: str) -> bool:
    found = sys.modules.get(module)
    return found is not None and hasattr(found, name)


class Transforms:
    """Undoes the transforms of a saved item, if this torch supports any."""

    def __init__(self) -> None:
        kind = getattr(filesystem, "_StorageReaderTransforms", None)
        self._torch_transforms = None if kind is None else kind()

    def undo(self, read: Any, names: Sequence[str], stream: IO[bytes], where: str) -> IO[bytes]:
        """Undo transforms. Raises: FormatVersion if this torch has none; CheckpointError for unknown ones."""
        if self._torch_transforms is None:
            raise FormatVersion(
                f"{where}: is stored by {', '.join(names)}, which needs torch {TRANSFORMS_SINCE} or later; this is"
                f" {torch.__version__}"
            )
        try:
            found: IO[bytes] = self._torch_transforms.transform_load_stream(read, names, stream)
        except (KeyError, ValueError) as error:  # an extension that is not registered
            raise CheckpointError(f"{where}: is stored by {', '.join(names)}: {error}") from error
        return found
