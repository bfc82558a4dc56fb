"""PURE: the data in a pickle, without creating any object: every class and function in it stays a name.

In: bytes from untrusted writers. Out: the containers, numbers and texts of the pickle, an `Inert` in place of
every other object, and the storages that a `torch.save` file names. No code of the pickle runs, and no name in it
is resolved.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any, NamedTuple, Protocol

from bootseer.checkpoint.format.file_parts import IncompleteFile, RangesNeeded
from bootseer.errors import first_line

# bytes of one element
STORAGES = {
    "UntypedStorage": 1, "ByteStorage": 1, "CharStorage": 1, "BoolStorage": 1, "ShortStorage": 2, "HalfStorage": 2,
    "BFloat16Storage": 2, "IntStorage": 4, "FloatStorage": 4, "LongStorage": 8, "DoubleStorage": 8,
    "ComplexFloatStorage": 8, "ComplexDoubleStorage": 16, "QInt8Storage": 1, "QUInt8Storage": 1,
    "QInt32Storage": 4, "QUInt4x2Storage": 1, "QUInt2x4Storage": 1,
}  # fmt: skip


class Storage(NamedTuple):
    """The elements of a tensor, which are elsewhere in the file."""

    key: str
    size: int | None  # bytes; None if the type is unknown
    location: str  # "cpu", "meta"


class Inert:
    """A placeholder for an object, or for the result of a function."""

    origin = ""  # "module.name"

    def __new__(cls, *args: Any, **_named: Any) -> Inert:
        found = super().__new__(cls)
        found.args = args
        found.state = {}
        return found

    args: tuple[Any, ...]
    state: dict[Any, Any]

    def __init__(self, *_args: Any, **_named: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        for each in state if isinstance(state, tuple) else (state,):
            if isinstance(each, dict):
                self.state.update(each)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Store an item of a class that is a dictionary."""
        self.state[key] = value

    def append(self, _item: Any) -> None:
        """Ignore an item of a class that is a list."""

    def extend(self, _items: Any) -> None: ...


class _Source(Protocol):
    def read(self, length: int, /) -> bytes: ...
    def readline(self) -> bytes: ...


_PLAIN: dict[tuple[str, str], type] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("__builtin__", "set"): set,  # so named by protocol 2
    ("__builtin__", "frozenset"): frozenset,
    ("torch", "Size"): tuple,
}


class _Reader(pickle.Unpickler):
    def __init__(self, source: _Source) -> None:
        super().__init__(source)
        self.storages: list[Storage] = []
        self._made: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> type:
        found = _PLAIN.get((module, name)) or self._made.get((module, name))
        if found is None:
            found = self._made[module, name] = type("Inert", (Inert,), {"origin": f"{module}.{name}"})
        return found

    def persistent_load(self, pid: Any) -> Inert:
        if isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage":
            kind = getattr(pid[1], "origin", "").rpartition(".")[2]
            width = STORAGES.get(kind)
            size = width * pid[4] if width and isinstance(pid[4], int) else None
            self.storages.append(Storage(str(pid[2]), size, str(pid[3])))
        return Inert()


def read(source: _Source) -> tuple[Any, list[Storage]]:
    """Read the next pickle of `source`. Raises: IncompleteFile; RangesNeeded."""
    reader = _Reader(source)
    try:
        found = reader.load()
    except (IncompleteFile, RangesNeeded):
        raise
    except Exception as error:  # damaged bytes can cause any error
        raise IncompleteFile(f"cannot be read as a pickle ({first_line(error, 80)})") from error
    return found, reader.storages
