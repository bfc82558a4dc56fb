"""`bootseer.checkpoint.open(url)`: a pinned version of a checkpoint, its files and its tensors by name.

With no URL it is the checkpoint that the launcher loads (`--load-checkpoint`), from this node's arena where there
is one. safetensors files and DCP folders have tensors by name; files of `torch.save` are loaded whole. torch is
imported when the first tensor is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from bootseer.checkpoint.memory import allocate, check_free
from bootseer.checkpoint.opening import Opened, open_source
from bootseer.checkpoint.source import Request, SourceFile
from bootseer.errors import CheckpointError, NotFound

if TYPE_CHECKING:
    from torch import Tensor

DCP_METADATA = ".metadata"
PT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS_SUFFIX = ".safetensors"

Keys = Iterable[str] | Callable[[str], bool] | None


class _Tensors(Protocol):
    """Tensors by name, of one kind of files."""

    names: list[str]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """All of them or none."""


class Checkpoint:
    """One version, which never changes while this is open. Tensors live on after it is closed."""

    def __init__(self, opened: Opened, keys: Keys, weights_only: bool) -> None:
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
        """Of a striped checkpoint; "" for files as they are."""
        return self._opened.source.version

    @property
    def digest(self) -> str:
        """The same on all nodes that opened the same version."""
        return self._opened.source.digest

    @property
    def files(self) -> Mapping[str, SourceFile]:
        """Below what was opened, by path."""
        files, path = self._opened.source.files, self._opened.path
        if not path:
            return files
        if path in files:
            return {path: files[path]}
        return {name[len(path) + 1 :]: file for name, file in files.items() if name.startswith(f"{path}/")}

    def keys(self) -> list[str]:
        """Names of tensors, without those that the filter leaves out."""
        return list(self._index().names)

    def tensor(self, name: str) -> Tensor:
        return self.tensors([name])[name]

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Several at once, which is faster than one by one. None: all of them."""
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
        """Returns when a tensor or a file is in this node's memory: asking for it is then no wait any more."""
        if name in self._waited:
            return
        if name in self.files:
            self._waited[name] = self._view(name)
        else:
            self._waited.update(self.tensors([name]))

    def read_into(self, path: str, offset: int, buffer: Any) -> None:
        """Fills a writable buffer with bytes of a file."""
        target = memoryview(buffer).cast("B")
        self._opened.source.read([Request(self._inside(path), offset, target)])

    def load(self, path: str) -> Any:
        """A file: tensors by name of a safetensors file, the object of a file of torch.save, else its bytes."""
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
        """Counts: at least `requests` and `read_bytes`, from the store by this process."""
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
                    f"{self.url}: has no safetensors files and no DCP metadata, so no tensors by name; load one: "
                    f"{', '.join(sorted(names)[:3])}"
                )
        return self._tensors


class _SafetensorsTensors:
    def __init__(self, opened: Opened, keys: Keys) -> None:
        from bootseer.checkpoint.safetensors import TensorFiles, select

        self._files = TensorFiles(opened.source, opened.path)
        self.names = select(self._files.where, keys)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return self._files.read(names)


class _DcpTensors:
    def __init__(self, opened: Opened, keys: Keys, weights_only: bool) -> None:
        from bootseer.checkpoint.dcp_reader import BootseerReader
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
    """Opens a checkpoint.

    Args:
        url: a path or URL; of a folder, the newest complete version in it. None: what the launcher loads.
        keys: names, or a function that says for a name whether it is wanted. Other tensors are not read.
        version: of a striped checkpoint, instead of the newest complete one.
        verify: "units" (each unit that is read whole), "sampled", "full" (every byte) or "none"; by default what
            suits the store.
        weights_only: False lets files of torch.save and DCP run code.
    Raises: NotFound; CheckpointError; IntegrityError.
    """
    return Checkpoint(open_source(url, verify=verify, version=version), keys, weights_only)
