"""`bootseer.checkpoint.open(url)`: a pinned version of a checkpoint, with its files and its tensors by name.

Without a URL, it opens the checkpoint that the launcher loads (`--load-checkpoint`), from this node's arena if
there is one. safetensors files and DCP directories have tensors by name. torch.save files are loaded whole. torch
is imported at the first read of a tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from bootseer.checkpoint.io.memory import allocate, check_free
from bootseer.checkpoint.io.source import Request, SourceFile
from bootseer.checkpoint.opening import OpenedSource, open_source
from bootseer.errors import CheckpointError, NotFound

if TYPE_CHECKING:
    from torch import Tensor

DCP_METADATA = ".metadata"
PT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS_SUFFIX = ".safetensors"

Keys = Iterable[str] | Callable[[str], bool] | None


class _Tensors(Protocol):
    """Tensors by name, from files of one format."""

    names: list[str]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read all of them or none."""


class Checkpoint:
    """One version, which never changes while this is open. Tensors stay valid after it is closed."""

    def __init__(self, opened: OpenedSource, keys: Keys, weights_only: bool) -> None:
        self._opened = opened
        self._keys = keys
        self._weights_only = weights_only
        self._tensors: _Tensors | None = None
        self._waited: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return self._opened.source.url

    @property
    def version(self) -> str:
        """The version of a striped checkpoint; "" for plain files."""
        return self._opened.source.version

    @property
    def digest(self) -> str:
        """The digest, equal on all nodes that opened the same version."""
        return self._opened.source.digest

    @property
    def files(self) -> Mapping[str, SourceFile]:
        """The files below the opened path, by relative path."""
        files, path = self._opened.source.files, self._opened.path
        if not path:
            return files
        if path in files:
            return {path: files[path]}
        return {name[len(path) + 1 :]: file for name, file in files.items() if name.startswith(f"{path}/")}

    def keys(self) -> list[str]:
        """Return the names of tensors that pass the filter."""
        return list(self._index().names)

    def tensor(self, name: str) -> Tensor:
        return self.tensors([name])[name]

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Read several tensors at once, which is faster than one by one. None: all of them."""
        index = self._index()
        known = set(index.names)
        wanted = list(index.names if names is None else dict.fromkeys(names))
        for name in wanted:
            if name not in known:
                raise NotFound(f"{self.url}: has no tensor {name} (or `keys` leaves it out)")
        ready = {name: self._waited.pop(name) for name in wanted if name in self._waited}
        read = index.read([name for name in wanted if name not in ready])
        return {name: ready[name] if name in ready else read[name] for name in wanted}

    def wait(self, name: str) -> None:
        """Wait until a tensor or a file is in this node's memory, so that reading it does not wait."""
        if name in self._waited:
            return
        if name in self.files:
            self._waited[name] = self._view(name)
        else:
            self._waited.update(self.tensors([name]))

    def read_into(self, path: str, offset: int, buffer: Any) -> None:
        """Fill a writable buffer with bytes of a file."""
        target = memoryview(buffer).cast("B")
        self._opened.source.read([Request(self._inside(path), offset, target)])

    def load(self, path: str) -> Any:
        """Load a file: tensors by name (safetensors), the saved object (torch.save), otherwise its bytes."""
        inside = self._inside(path)
        if path.endswith(SAFETENSORS_SUFFIX):
            from bootseer.checkpoint.safetensors import TensorFiles, select

            files = TensorFiles(self._opened.source, inside)
            return files.read(select(files.where, self._keys if callable(self._keys) else None))
        if path.endswith(PT_SUFFIXES):
            from bootseer.checkpoint.pt import load_from

            return load_from(self._opened.source, inside, weights_only=self._weights_only)
        return bytes(self._waited.pop(path, None) or self._view(path))

    def stats(self) -> dict[str, int]:
        """Return counters: at least `requests` and `read_bytes`, this process's reads from the store."""
        return self._opened.source.statistics()

    def close(self) -> None:
        self._waited.clear()
        self._opened.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _inside(self, path: str) -> str:
        if self._opened.path == path:
            return path
        return self._opened.inside(path)

    def _view(self, path: str) -> memoryview:
        inside = self._inside(path)
        source = self._opened.source
        if inside not in source.files:
            raise NotFound(f"{self.url}: has no file {path}")
        size = source.files[inside].size
        view = source.map(inside, 0, size)
        if view is None:
            check_free(size, f"{self.url}: {path}")
            view = allocate(size)
            source.read([Request(inside, 0, view)])
        return view

    def _index(self) -> _Tensors:
        if self._tensors is None:
            names = self.files
            if any(name.endswith(SAFETENSORS_SUFFIX) for name in names):
                self._tensors = _SafetensorsTensors(self._opened, self._keys)
            elif DCP_METADATA in names:
                self._tensors = _DcpTensors(self._opened, self._keys, self._weights_only)
            else:
                raise CheckpointError(
                    f"{self.url}: has no tensors by name: it has neither safetensors files nor DCP metadata; load "
                    f"single files: {', '.join(sorted(names)[:3])}"
                )
        return self._tensors


class _SafetensorsTensors:
    def __init__(self, opened: OpenedSource, keys: Keys) -> None:
        from bootseer.checkpoint.safetensors import TensorFiles, select

        self._files = TensorFiles(opened.source, opened.path)
        self.names = select(self._files.where, keys)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return self._files.read(names)


class _DcpTensors:
    def __init__(self, opened: OpenedSource, keys: Keys, weights_only: bool) -> None:
        from bootseer.checkpoint.dcp.reader import BootseerReader
        from bootseer.checkpoint.safetensors import select

        self._reader = BootseerReader.of(opened, weights_only=weights_only)
        self.names = select(dict.fromkeys(self._reader.tensor_names()), keys)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return self._reader.read_tensors(list(names))


def open(  # noqa: A001  `bootseer.checkpoint.open`
    url: str | os.PathLike[str] | None = None,
    *,
    keys: Keys = None,
    version: str | None = None,
    verify: str | None = None,
    weights_only: bool = True,
) -> Checkpoint:
    """Open a checkpoint.

    Args:
        url: a path or URL; for a directory, its newest complete version. None: what the launcher loads.
        keys: names, or a function that returns for a name whether to include it. Other tensors are not read.
        version: a version of a striped checkpoint, instead of the newest complete one.
        verify: "units" (each unit that is read whole), "sampled", "full" (every byte) or "none"; the default
            depends on the store.
        weights_only: False lets torch.save and DCP files run code.
    Raises: NotFound; CheckpointError; IntegrityError.
    """
    return Checkpoint(open_source(url, verify=verify, version=version), keys, weights_only)
