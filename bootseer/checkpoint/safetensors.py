"""Safetensors files from any store: reads only the bytes of the requested tensors, without copies.

`load_file` and `safe_open` take a URL or a path: a file, a directory of a sharded model, a striped checkpoint.
Without a URL they take the checkpoint that the launcher loads (`--load-checkpoint`). Tensors of one file share one
area of memory, which lives for as long as any of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from bootseer.checkpoint.format.doubles import find_duplicates
from bootseer.checkpoint.format.tensor_index import (
    DTYPE_BITS,
    MAX_INDEX_BYTES,
    Header,
    TensorEntry,
    header_bytes,
    parse_header,
    parse_weight_map,
)
from bootseer.checkpoint.io.memory import allocate, check_free, place
from bootseer.checkpoint.io.source import Request, Source
from bootseer.checkpoint.opening import OpenedSource, open_source
from bootseer.errors import CheckpointError, DigestMismatch, NotFound
from bootseer.storage.engine.revocable_buffer import address_of

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
HEAD_BYTES = 256 << 10  # of the first read: most headers are shorter, and it takes no longer than reading 8 bytes
GAP_BYTES = 1 << 20  # unwanted bytes that are read rather than starting a new request

Keys = Iterable[str] | Callable[[str], bool] | None

DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name)
    for code, name in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "U16": "uint16",
        "I16": "int16",
        "F16": "float16",
        "BF16": "bfloat16",
        "U32": "uint32",
        "I32": "int32",
        "F32": "float32",
        "U64": "uint64",
        "I64": "int64",
        "F64": "float64",
        "C64": "complex64",
        "F4": "float4_e2m1fn_x2",  # two in a byte
    }.items()
    if hasattr(torch, name)
}


class _Span(NamedTuple):
    """A range of one file that is read at once, and the tensors in it."""

    path: str
    start: int
    end: int
    entries: list[TensorEntry]


class TensorFiles:
    """The tensors of all safetensors files of a source, or of those that `path` names."""

    def __init__(self, source: Source, path: str = "") -> None:
        self._source = source
        self._heads: dict[str, bytes] = {}
        self.headers: dict[str, Header] = {}
        self.where: dict[str, str] = {}  # tensor -> file
        paths, weight_map = self._find(path)
        self._read_headers(paths)
        for file, header in self.headers.items():
            for name in header.tensors:
                if weight_map is not None and weight_map.get(name) != file:
                    continue  # the index decides, as in all loaders of sharded models
                if name in self.where:
                    raise CheckpointError(
                        f"{source.url}: {name} is in {self.where[name]} and in {file}; name one file"
                    )
                self.where[name] = file
        for name in weight_map or {}:
            if name not in self.where:
                raise CheckpointError(f"{source.url}: its index names {name}, which no file has")

    def entry(self, name: str) -> TensorEntry:
        return self.headers[self._file(name)].tensors[name]

    def read(self, names: Iterable[str], device: str | int | torch.device = "cpu") -> dict[str, torch.Tensor]:
        """Read the tensors, all of them or none."""
        wanted = list(dict.fromkeys(names))
        spans = self._spans(wanted)
        areas = self._fill(spans)
        found: dict[str, torch.Tensor] = {}
        for span, area in zip(spans, areas, strict=True):
            for entry in span.entries:
                begin = entry.offset - span.start
                found[entry.name] = to_tensor(area[begin : begin + entry.size], entry.dtype, entry.shape)
        on_cpu = torch.device(device).type == "cpu"
        return {name: found[name] if on_cpu else found[name].to(device) for name in wanted}

    def read_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Read rows [first, last) of a tensor of at least one dimension."""
        entry = self.entry(name)
        row = entry.size // entry.shape[0] if entry.size else 0
        part = entry._replace(
            shape=(last - first, *entry.shape[1:]), offset=entry.offset + first * row, size=(last - first) * row
        )
        span = _Span(self._file(name), part.offset, part.offset + part.size, [part])
        return to_tensor(self._fill([span])[0], part.dtype, part.shape)

    def _file(self, name: str) -> str:
        try:
            return self.where[name]
        except KeyError:
            raise NotFound(f"{self._source.url}: has no tensor {name}") from None

    def _find(self, path: str) -> tuple[list[str], dict[str, str] | None]:
        files = self._source.files
        if path and not path.endswith(INDEX_SUFFIX):
            if path in files:
                return [path], None
            prefix = f"{path}/"
            below = {name for name in files if name.startswith(prefix)}
            if not below:
                raise NotFound(f"{self._source.url}: has no file {path}")
        else:
            prefix = path.rpartition("/")[0] + "/" if "/" in path else ""
            below = {name for name in files if name.startswith(prefix)}
        here = {name for name in below if "/" not in name[len(prefix) :]}
        indexes = (
            [path] if path.endswith(INDEX_SUFFIX) else sorted(name for name in here if name.endswith(INDEX_SUFFIX))
        )
        if len(indexes) == 1:
            weight_map = {name: prefix + file for name, file in self._read_index(indexes[0]).items()}
            missing = sorted(set(weight_map.values()) - set(files))
            if missing:
                raise NotFound(f"{self._source.url}: {missing[0]}, named in its index, is missing")
            return sorted(set(weight_map.values())), weight_map
        paths = sorted(name for name in below - find_duplicates(below) if name.endswith(SUFFIX))
        if not paths:
            raise NotFound(f"{self._source.url}: has no safetensors file")
        return paths, None

    def _read_index(self, path: str) -> dict[str, str]:
        size = self._source.files[path].size
        if size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{self._source.url}: {path} has {size} bytes: too large for an index")
        data = memoryview(bytearray(size))
        self._source.read([Request(path, 0, data)])
        return parse_weight_map(data, f"{self._source.url}: {path}")

    def _read_headers(self, paths: Sequence[str]) -> None:
        sizes = {path: self._source.files[path].size for path in paths}
        heads = {path: allocate(min(HEAD_BYTES, size), "a header") for path, size in sizes.items()}
        self._source.read([Request(path, 0, head) for path, head in heads.items()])
        longer: list[Request] = []
        for path in paths:
            head = heads[path]
            length = header_bytes(head, sizes[path], self._name(path))
            if length > len(head):
                heads[path] = memoryview(bytearray(length))
                heads[path][: len(head)] = head
                longer.append(Request(path, len(head), heads[path][len(head) :]))
            else:
                heads[path] = head[:length]
        self._source.read(longer)
        for path, head in heads.items():
            self._heads[path] = bytes(head)
            self.headers[path] = parse_header(head, sizes[path], self._name(path))

    def _name(self, path: str) -> str:
        return self._source.url if self._source.url.endswith(path) else f"{self._source.url}: {path}"

    def _spans(self, names: Sequence[str]) -> list[_Span]:
        by_file: dict[str, list[TensorEntry]] = {}
        for name in names:
            by_file.setdefault(self._file(name), []).append(self.entry(name))
        spans: list[_Span] = []
        for path, entries in by_file.items():
            entries.sort(key=lambda entry: (entry.offset, entry.size))
            start, end, members = entries[0].offset, entries[0].offset, list[TensorEntry]()
            if self._source.version and start == self.headers[path].data_offset:
                start = 0  # so that the first unit is read whole and can be verified
            for entry in entries:
                if entry.offset > end + GAP_BYTES:
                    spans.append(_Span(path, start, end, members))
                    start, members = entry.offset, []
                members.append(entry)
                end = entry.offset + entry.size
            spans.append(_Span(path, start, end, members))
        return spans

    def _fill(self, spans: Sequence[_Span]) -> list[memoryview]:
        areas = [self._source.map(span.path, span.start, span.end - span.start) for span in spans]
        missing: dict[str, list[int]] = {}
        for index, area in enumerate(areas):
            if area is None:
                missing.setdefault(spans[index].path, []).append(index)
        places: dict[int, int] = {}
        sizes: dict[str, int] = {}
        for path, indexes in missing.items():
            end = 0
            for index in indexes:
                places[index] = place(end, spans[index].start)
                end = places[index] + spans[index].end - spans[index].start
            sizes[path] = end
        check_free(sum(sizes.values()), self._source.url)
        requests: list[Request] = []
        for path, indexes in missing.items():
            memory = allocate(sizes[path], self._name(path))
            for index in indexes:
                span = spans[index]
                area = memory[places[index] : places[index] + span.end - span.start]
                areas[index] = area
                requests.append(Request(path, span.start, area))
        self._source.read(requests)
        filled = [area for area in areas if area is not None]
        for span, area in zip(spans, filled, strict=True):
            head = self._heads[span.path]
            if span.start == 0 and area[: len(head)] != head:
                raise DigestMismatch(f"{self._name(span.path)}: its header changed between two reads")
        return filled


def load_file(
    url: str | os.PathLike[str] | None = None,
    keys: Keys = None,
    device: str | int | torch.device = "cpu",
    *,
    verify: str | None = None,
) -> dict[str, torch.Tensor]:
    """Load the tensors of a safetensors file, a sharded model's directory or a striped checkpoint.

    Args:
        url: a path or URL. None: the checkpoint that the launcher loads.
        keys: names, or a function that returns for a name whether to include it. Other tensors are not read.
        verify: "units", "sampled", "full" or "none" instead of the store's default.
    Raises: NotFound for names of `keys` that do not exist; IntegrityError. No tensor is returned then.
    """
    with open_source(url, verify=verify) as opened:
        files = TensorFiles(opened.source, opened.path)
        return files.read(select(files.where, keys), device)


class safe_open:  # noqa: N801  named as in safetensors, whose code it may replace
    """Tensors of safetensors files one by one, or parts of them; each is read on request."""

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        framework: str = "pt",
        device: str | int | torch.device = "cpu",
        *,
        keys: Keys = None,
        verify: str | None = None,
    ) -> None:
        if framework not in ("pt", "torch", "pytorch"):
            raise CheckpointError(f"safe_open returns tensors of torch (framework='pt'), not of {framework}")
        self._device = device
        self._opened: OpenedSource = open_source(url, verify=verify)
        try:
            self._files = TensorFiles(self._opened.source, self._opened.path)
            self._keys = select(self._files.where, keys)
        except BaseException:
            self._opened.close()
            raise
        self._known = frozenset(self._keys)

    def keys(self) -> list[str]:
        return sorted(self._keys)

    def offset_keys(self) -> list[str]:
        """Return names in the order of their bytes."""
        return list(self._keys)

    def metadata(self) -> dict[str, str] | None:
        """Return `__metadata__` of the file; of several files, their union."""
        found = [header.metadata for header in self._files.headers.values() if header.metadata is not None]
        return {name: value for each in found for name, value in each.items()} if found else None

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_tensors([name])[name]

    def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Read several tensors at once, which is faster than one by one."""
        wanted = list(self._keys if names is None else names)
        for name in wanted:
            self._check(name)
        return self._files.read(wanted, self._device)

    def get_slice(self, name: str) -> TensorSlice:
        self._check(name)
        return TensorSlice(self._files, name, self._device)

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, name: str) -> None:
        if name not in self._known:
            raise NotFound(f"{self._opened.source.url}: has no tensor {name} (or `keys` leaves it out)")


class TensorSlice:
    """A tensor that is not read yet. An index of its first dimension selects the rows that are read."""

    def __init__(self, files: TensorFiles, name: str, device: str | int | torch.device) -> None:
        self._files = files
        self._name = name
        self._device = device

    def get_shape(self) -> list[int]:
        return list(self._files.entry(self._name).shape)

    def get_dtype(self) -> str:
        return self._files.entry(self._name).dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        shape = self._files.entry(self._name).shape
        first = parts[0] if parts else None
        if isinstance(first, int) and not isinstance(first, bool) and shape:
            row = first + shape[0] if first < 0 else first
            if not 0 <= row < shape[0]:
                raise IndexError(f"{self._name}: row {first} of {shape[0]}")
            found = self._files.read_rows(self._name, row, row + 1)[(0, *parts[1:])]
        elif isinstance(first, slice) and shape:
            start, stop, step = first.indices(shape[0])
            if step < 1:
                raise IndexError(f"{self._name}: the step must be positive, not {step}")
            stop = max(start, stop)
            found = self._files.read_rows(self._name, start, stop)[(slice(None, None, step), *parts[1:])]
        else:
            found = self._files.read([self._name])[self._name][index]
        return found if torch.device(self._device).type == "cpu" else found.to(self._device)


def select(names: Mapping[str, object], keys: Keys) -> list[str]:
    """Return the requested names. Raises: NotFound for a requested name that is not among `names`."""
    if keys is None:
        return list(names)
    if isinstance(keys, str):
        raise CheckpointError("keys must be a list of names or a function, not a single name")
    if callable(keys):
        return [name for name in names if keys(name)]
    wanted = list(dict.fromkeys(keys))
    for name in wanted:
        if name not in names:
            raise NotFound(f"there is no tensor {name}")
    return wanted


def to_tensor(view: memoryview, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor over `view`; over a copy if its address is not aligned for the type."""
    kind = DTYPES.get(dtype)
    if kind is None:
        raise CheckpointError(f"this torch has no type for {dtype}")
    if dtype == "F4" and (not shape or shape[-1] % 2):
        raise CheckpointError(f"F4 has two numbers in a byte, so its last dimension must be even: {list(shape)}")
    dims = (*shape[:-1], shape[-1] // 2) if dtype == "F4" else tuple(shape)
    if not len(view):
        return torch.empty(dims, dtype=kind)
    if address_of(view) % max(1, DTYPE_BITS[dtype] // 8):
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=kind).view(dims)
