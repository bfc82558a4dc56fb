"""`BootseerReader`: torch.distributed.checkpoint loads from any store or from this node's arena.

torch's planner decides which items a rank needs, so resharding (FSDP, DTensor) works as with torch's own reader.
Items are sorted by file and offset, and read in large spans while earlier ones are copied into their targets. An
item that is a plain tensor is parsed without `torch.load`. It reads saves of BootseerWriter and of torch.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import uuid
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from bootseer.checkpoint.dcp import metadata as dcp_metadata
from bootseer.checkpoint.dcp.items import Item, copy_bytes, join, rows_of, shift
from bootseer.checkpoint.dcp.versions import Transforms
from bootseer.checkpoint.format.saved_tensor import (
    END_BYTES,
    EndsFile,
    SavedTensor,
    find_layout,
    find_tensor,
)
from bootseer.checkpoint.io.direct import DirectSource
from bootseer.checkpoint.io.fetching import fetch
from bootseer.checkpoint.io.local_source import LocalSource
from bootseer.checkpoint.io.memory import allocate, check_free
from bootseer.checkpoint.io.source import Request, Source
from bootseer.checkpoint.opening import OpenedSource, is_checkpoint_url, open_source
from bootseer.errors import CheckpointError, IntegrityError, NotFound, SourceChanged, first_line


class BootseerReader(StorageReader):  # type: ignore[misc]  # torch is not typed here
    """Args:
    url: a checkpoint's path or URL. None: the checkpoint that the launcher loads.
    version: a version of a striped checkpoint; by default the newest complete one.
    verify: "units", "sampled", "full" or "none", instead of the store's default.
    weights_only: False lets the checkpoint's objects run code, as torch's own reader does.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        version: str | None = None,
        verify: str | None = None,
        weights_only: bool = True,
    ) -> None:
        super().__init__()
        self._url = url
        self._version = version
        self._verify = verify
        self._weights_only = weights_only
        self._opened: OpenedSource | None = None
        self._digest = ""
        self._is_shared = False
        self._storage_data: dict[Any, Any] = {}
        self._entries: dict[str, Any] = {}
        self._transforms = Transforms()
        self.load_id = str(uuid.uuid4())

    @classmethod
    def of(cls, opened: OpenedSource, *, weights_only: bool = True) -> BootseerReader:
        """Return a reader of a source that is open already, and stays open."""
        reader = cls(opened.source.url, weights_only=weights_only)
        reader._opened, reader._digest, reader._is_shared = opened, opened.source.digest, True
        return reader

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return "" if self._url is None else self._url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_checkpoint_url(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.close()
        if checkpoint_id:
            self._url = checkpoint_id
        self._digest = ""
        self._storage_data = {}
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *_args: Any, **kwargs: Any) -> Metadata:
        opened = self._open()
        name = opened.inside(dcp_metadata.name_of(kwargs.get("rank")))
        file = opened.source.files.get(name)
        if file is None:
            raise NotFound(f"{opened.source.url}: has no {name}; it was not saved by torch.distributed.checkpoint")
        if file.size > dcp_metadata.MAX_BYTES:
            raise IntegrityError(f"{opened.source.url}: {name} has {file.size} bytes: too large for metadata")
        data = memoryview(bytearray(file.size))
        opened.source.read([Request(name, 0, data)])
        found = dcp_metadata.load(data, f"{opened.source.url}: {name}", trusted=not self._weights_only)
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        del is_coordinator  # every rank reads for itself
        if not isinstance(metadata.storage_data, dict):
            raise IntegrityError(f"{self.checkpoint_id}: its metadata does not locate its items")
        self._storage_data = metadata.storage_data
        self._entries = metadata.state_dict_metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        source = self._open().source
        return dataclasses.replace(plan, storage_data=(source.version, source.digest))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        seen = {plan.storage_data for plan in plans}
        if len(seen) > 1:
            names = " and ".join(sorted(version or "an unstriped one" for version, _ in seen))
            raise SourceChanged(
                f"{self.checkpoint_id}: ranks opened different versions ({names}): a save ended meanwhile; "
                "load again, or name one: BootseerReader(url, version=...)"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors in the calling thread. The future is complete, as with torch's reader."""
        opened = self._open()
        items = self._narrow(self._items(plan, opened), opened.source)
        spans, members = join(items)
        # Local files could be mapped as well, but reused memory is faster than fresh mappings.
        is_arena = not isinstance(opened.source, LocalSource | DirectSource)
        with fetch(opened.source, spans, try_map=is_arena) as arriving:
            for fetched in arriving:
                start = spans[fetched.number].start
                for item in members[fetched.number]:
                    view = fetched.view[item.offset - start : item.offset - start + item.length]
                    self._apply(item, view, planner)
        future: Future[None] = Future()
        future.set_result(None)
        self.close()
        return future

    def tensor_names(self) -> list[str]:
        entries = self.read_metadata().state_dict_metadata
        return [name for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)]

    def read_tensors(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return whole tensors, assembled from shards. Raises: NotFound; IntegrityError if a shard is missing."""
        metadata = self.read_metadata()
        self.set_up_storage_reader(metadata, True)
        whole: dict[str, torch.Tensor] = {}
        reads: list[ReadItem] = []
        total = 0
        for name in names:
            entry = metadata.state_dict_metadata.get(name)
            if not isinstance(entry, TensorStorageMetadata):
                raise NotFound(f"{self._open().source.url}: has no tensor {name}")
            if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
                raise IntegrityError(f"{self._open().source.url}: not all of {name} was saved")
            total += entry.size.numel() * entry.properties.dtype.itemsize
            check_free(total, self._open().source.url)
            whole[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            for chunk in entry.chunks:
                index = MetadataIndex(name, chunk.offsets)
                start = torch.Size([0] * len(chunk.sizes))
                reads.append(ReadItem(LoadItemType.TENSOR, index, chunk.offsets, index, start, chunk.sizes))
        self.read_data(LoadPlan(reads), _Whole(whole))
        return whole

    def close(self) -> None:
        """Close connections. A later read opens the same version."""
        if self._is_shared:
            return
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    # ---- items ------------------------------------------------------------------------------------------------

    def _open(self) -> OpenedSource:
        if self._opened is None:
            opened = open_source(self._url, verify=self._verify, version=self._version)
            if self._digest and opened.source.digest != self._digest:
                opened.close()
                raise SourceChanged(f"{self.checkpoint_id}: was replaced while it was loaded; load it again")
            self._opened, self._digest = opened, opened.source.digest
        return self._opened

    def _items(self, plan: LoadPlan, opened: OpenedSource) -> list[Item]:
        found: dict[tuple[str, int, int], Item] = {}
        for read in plan.items:
            info = self._storage_data.get(read.storage_index)
            if info is None:
                raise NotFound(f"{opened.source.url}: its metadata does not locate {read.storage_index.fqn}")
            name, offset, length = info.relative_path, info.offset, info.length
            if not (isinstance(name, str) and isinstance(offset, int) and isinstance(length, int) and length >= 0):
                raise IntegrityError(f"{opened.source.url}: its metadata is invalid for {read.storage_index.fqn}")
            path = opened.inside(name)
            item = found.get((path, offset, length))
            if item is None:
                transforms = getattr(info, "transform_descriptors", None) or ()
                item = found[path, offset, length] = Item(path, offset, length, transforms, [])
            item.reads.append(read)
        return sorted(found.values(), key=lambda item: (item.path, item.offset, item.length))

    def _narrow(self, items: list[Item], source: Source) -> list[Item]:
        """Reduce large tensors to the wanted rows; the ends of their items give the layout."""
        wanted = {
            number: found
            for number, item in enumerate(items)
            if (found := rows_of(item, self._entries)) is not None
        }
        ends = {
            number: (
                allocate(min(END_BYTES, items[number].length)),
                allocate(min(END_BYTES, items[number].length)),
            )
            for number in wanted
        }
        source.read(
            [
                Request(items[number].path, start, end)
                for number, (head, tail) in ends.items()
                for start, end in (
                    (items[number].offset, head),
                    (items[number].offset + items[number].length - len(tail), tail),
                )
            ]
        )
        for number, (first, last) in wanted.items():
            item = items[number]
            layout = find_layout(EndsFile(*ends[number], item.length), item.length)
            if layout is None or not layout.shape or last > layout.shape[0]:
                continue
            row = layout.size // layout.shape[0]
            rows = layout._replace(shape=(last - first, *layout.shape[1:]), start=0, size=(last - first) * row)
            reads = [shift(read, first) for read in item.reads]
            start = item.offset + layout.start + first * row
            items[number] = Item(item.path, start, rows.size, (), reads, rows)
        return sorted(items, key=lambda item: (item.path, item.offset, item.length))

    def _apply(self, item: Item, view: memoryview, planner: LoadPlanner) -> None:
        where = f"{item.path}, bytes {item.offset} to {item.offset + item.length}"
        saved: SavedTensor | None = None
        whole: torch.Tensor | None = None
        if item.transforms:
            stream = self._transforms.undo(item.reads[0], item.transforms, io.BytesIO(view), where)
            view = memoryview(bytearray(stream.read(-1)))
        for read in item.reads:
            if read.type == LoadItemType.BYTE_IO:
                planner.load_bytes(read, self._checked_bytes(view, read, where))
                continue
            if saved is None and whole is None:
                if item.rows is not None:
                    saved = SavedTensor(item.rows.dtype, item.rows.shape, view)
                else:
                    saved = find_tensor(view)
                if saved is None:
                    whole = _load_tensor(view, where)
            target = planner.resolve_tensor(read).detach()
            if not (saved is not None and copy_bytes(saved, read, target)):
                if whole is None:
                    assert saved is not None
                    whole = torch.frombuffer(bytearray(saved.data), dtype=saved.dtype).view(saved.shape)
                part = narrow_tensor_by_index(whole, read.storage_offsets, read.lengths)
                if part.size() != target.size():
                    raise IntegrityError(
                        f"{where}: {read.storage_index.fqn} has shape {tuple(part.size())}, "
                        f"not {tuple(target.size())}"
                    )
                target.copy_(part)
            planner.commit_tensor(read, target)

    def _checked_bytes(self, view: memoryview, read: ReadItem, where: str) -> io.BytesIO:
        """Verify bytes that torch's planner would unpickle unchecked."""
        data = io.BytesIO(view)
        if self._weights_only:
            try:
                torch.load(data, map_location="cpu", weights_only=True)
            except Exception as error:
                raise CheckpointError(
                    f"{where}: {read.storage_index.fqn} is more than plain data ({first_line(error)}); if you "
                    "trust the writer, load with BootseerReader(url, weights_only=False)"
                ) from error
            data.seek(0)
        return data


class _Whole(DefaultLoadPlanner):  # type: ignore[misc]
    """Puts shards in their places in whole tensors."""

    def __init__(self, whole: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._whole = whole

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return narrow_tensor_by_index(
            self._whole[read_item.dest_index.fqn], read_item.dest_offsets, read_item.lengths
        )

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the data is in its place already."""


def _load_tensor(view: memoryview, where: str) -> torch.Tensor:
    try:
        found = torch.load(io.BytesIO(view), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise IntegrityError(f"{where}: is not a saved tensor, or is damaged: {first_line(error)}") from error
    if not isinstance(found, torch.Tensor):
        raise IntegrityError(f"{where}: is a {type(found).__name__}, not a tensor")
    return found
