"""One tensor as written by `torch.save`, found in its bytes without `torch.load`, so without a copy.

In: a zip file with a single plain tensor, such as each item of a DCP file; its two ends are enough. Out: type,
shape and the position of its elements; None for all other content, which `torch.load(weights_only=True)` then
loads or refuses. The bytes are not trusted: the pickle can name four things, and none of them has side effects.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any, NamedTuple

import torch

from bootseer.checkpoint.format.read_only_file import MemoryFile, ReadOnlyFile

LOCAL_HEADER_BYTES = 30
END_BYTES = 8192  # of either end of an item: the pickle is in the first, the directory in the last
MAX_PICKLE_BYTES = 64 << 10
MAX_ENTRIES = 64

_STORAGES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_DTYPES: dict[str, torch.dtype] = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}


class SavedTensor(NamedTuple):
    """A contiguous tensor and its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: memoryview  # as many bytes as shape and dtype need

    def as_bytes(self) -> torch.Tensor:
        """Return the elements as bytes: a longer last dimension, or one dimension; valid at any address."""
        flat = torch.frombuffer(self.data, dtype=torch.uint8)
        return flat.view(*self.shape[:-1], self.shape[-1] * self.dtype.itemsize) if self.shape else flat


class SavedLayout(NamedTuple):
    """The position of a contiguous tensor's elements in its item."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes
    size: int  # bytes


def find_tensor(item: memoryview) -> SavedTensor | None:
    """Return the tensor in `item`, or None if it is not a plain, contiguous, little-endian one."""
    found = find_layout(MemoryFile(item), len(item))
    return None if found is None else SavedTensor(found.dtype, found.shape, item[found.start :][: found.size])


def find_layout(item: io.RawIOBase, length: int) -> SavedLayout | None:
    """Find the tensor without its elements: `item` may raise OSError for all but its ends."""
    try:
        with zipfile.ZipFile(item) as archive:
            entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if len(entries) > MAX_ENTRIES or "data.pkl" not in entries or "data/1" in entries:
            return None
        order = entries.get("byteorder")
        if order is not None and _content(item, order) != b"little":
            return None
        found = _Unpickler(io.BytesIO(_content(item, entries["data.pkl"]))).load()
        data = entries["data/0"]
        start = _start(_read(item, data.header_offset, LOCAL_HEADER_BYTES), data)
    except Exception:  # a foreign or damaged file: torch.load reports the error
        return None
    if start + data.file_size > length:
        return None
    return _plain(found, start, data.file_size)


class EndsFile(ReadOnlyFile):
    """An item of which only the two ends were read."""

    def __init__(self, head: memoryview, tail: memoryview, length: int) -> None:
        super().__init__(length)
        self._head, self._tail = head, tail
        self._tail_start = length - len(tail)

    def fill(self, offset: int, target: memoryview) -> None:
        end = offset + len(target)
        if end <= len(self._head):
            target[:] = self._head[offset:end]
        elif offset >= self._tail_start:
            target[:] = self._tail[offset - self._tail_start : end - self._tail_start]
        else:
            raise OSError("not read")


class _Rebuilt(NamedTuple):
    dtype: torch.dtype | None
    storage: Any
    offset: Any
    shape: Any
    stride: Any


class _Storage(NamedTuple):
    dtype: torch.dtype | None  # None: untyped
    key: Any
    count: Any  # elements, or bytes if untyped


def _rebuild_v2(storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, hooks: Any, *more: Any) -> Any:
    return None if more or hooks else _Rebuilt(None, storage, offset, shape, stride)


def _rebuild_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, hooks: Any, dtype: Any, *more: Any
) -> Any:
    is_plain = not more and not hooks and isinstance(dtype, torch.dtype)
    return _Rebuilt(dtype, storage, offset, shape, stride) if is_plain else None


class _Unpickler(pickle.Unpickler):
    """Accepts the names that a plain tensor needs, and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return _rebuild_v2
        if module == "torch._utils" and name == "_rebuild_tensor_v3":
            return _rebuild_v3
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch.storage" and name == "UntypedStorage":
            return "untyped"
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module == "collections" and name == "OrderedDict":
            return tuple  # of hooks: must be empty
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _location, count = pid
        if kind != "storage" or not (dtype == "untyped" or isinstance(dtype, torch.dtype)):
            raise pickle.UnpicklingError("no storage")
        return _Storage(None if dtype == "untyped" else dtype, key, count)


def _plain(found: Any, start: int, size: int) -> SavedLayout | None:
    if not isinstance(found, _Rebuilt) or not isinstance(found.storage, _Storage) or found.storage.key != "0":
        return None
    dtype = found.dtype or found.storage.dtype
    shape, stride = found.shape, found.stride
    if dtype is None or found.offset != 0 or not isinstance(shape, tuple) or not isinstance(stride, tuple):
        return None
    if len(shape) != len(stride):
        return None
    expected = 1
    for count, step in zip(reversed(shape), reversed(stride), strict=True):
        if type(count) is not int or type(step) is not int or count < 1:
            return None  # also an empty tensor: it has no elements to map
        if step != expected and count != 1:
            return None
        expected *= count
    return SavedLayout(dtype, shape, start, size) if expected * dtype.itemsize == size else None


def content_start(item: memoryview, info: zipfile.ZipInfo) -> int:
    """Return the start of a stored entry's bytes. Raises: ValueError unless they are uncompressed and complete."""
    start = _start(item[max(0, info.header_offset) :][:LOCAL_HEADER_BYTES], info)
    if start + info.file_size > len(item):
        raise ValueError("past the end")
    return start


def _start(head: memoryview | bytes, info: zipfile.ZipInfo) -> int:
    """Return the start from the local header of a stored entry. Raises: ValueError."""
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.header_offset < 0:
        raise ValueError("compressed")
    if len(head) != LOCAL_HEADER_BYTES or bytes(head[:4]) != b"PK\3\4":
        raise ValueError("no local header")
    lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    return info.header_offset + LOCAL_HEADER_BYTES + lengths


def _content(item: io.RawIOBase, info: zipfile.ZipInfo) -> bytes:
    if info.file_size > MAX_PICKLE_BYTES:
        raise ValueError("too long")
    return _read(item, _start(_read(item, info.header_offset, LOCAL_HEADER_BYTES), info), info.file_size)


def _read(item: io.RawIOBase, offset: int, length: int) -> bytes:
    item.seek(offset)
    data = item.read(length)
    if data is None or len(data) != length:
        raise ValueError("past the end")
    return data
