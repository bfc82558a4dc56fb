"""`BootseerWriter`: torch.distributed.checkpoint saves striped versions to any store.

Every rank writes its files into the version that the coordinator has named; the coordinator commits it last, so a
save is there whole or not at all, and an older one is never touched. Inside are the files that torch's own writer
would have written: `bootseer ckpt unstripe` gives a folder that torch's own reader loads.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future as Done
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from bootseer import aio
from bootseer.checkpoint import dcp_metadata
from bootseer.checkpoint.committing import collect_garbage, commit, new_version
from bootseer.checkpoint.dcp_versions import DCP_VERSION
from bootseer.checkpoint.inputs import MemoryInput
from bootseer.checkpoint.manifest import StripedFile
from bootseer.checkpoint.opening import is_checkpoint_url
from bootseer.checkpoint.writer import Geometry, VersionWriter, default_geometry
from bootseer.errors import CheckpointError, ConfigError
from bootseer.storage import open_store

FILE_BYTES = 1 << 30  # of one file: what a rank whose tensors are on a GPU has in memory, times FILES_AT_ONCE
FILES_AT_ONCE = 2
BUFFER_BYTES = 256 << 20  # of units on their way; every rank of a node has so many
SMALL_BYTES = 64 << 10  # writes of torch.save up to here are copied, larger ones are the tensor's own memory
FILES_ENTRY = "bootseer.files"  # name of the result in which a rank tells the coordinator what it wrote


@dataclasses.dataclass
class _Placement:
    """Where a rank writes; the coordinator sends it along with the plan."""

    url: str
    version: str
    rank: int

    def __setstate__(self, state: dict[str, Any]) -> None:
        # With the planner's `enable_plan_caching` a rank gets to see an old plan instead of this one, so its
        # arrival has to be enough.
        self.__dict__.update(state)
        _announced[self.url] = self.version


_announced: dict[str, str] = {}  # url -> version of the save that is under way


class BootseerWriter(StorageWriter):  # type: ignore[misc]  # torch is not typed here
    """Args:
    url: the checkpoint's folder; each save makes a new version in it.
    step: the training step, for listings.
    keep: how many of the newest versions stay after a save; None keeps all.
    unit_bytes, stripes: how files are cut, instead of the store's default.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        step: int | None = None,
        keep: int | None = None,
        unit_bytes: int | None = None,
        stripes: int | None = None,
    ) -> None:
        super().__init__()
        self._url = os.fspath(url)
        self.step = step
        self._keep = keep
        self._unit_bytes = unit_bytes
        self._stripes = stripes
        self._version = ""
        self.save_id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> str:
        return self._url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_checkpoint_url(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._url = os.fspath(checkpoint_id)
        self._version = ""
        self.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        del is_coordinator, args
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "BootseerWriter publishes one version of all ranks: save with use_collectives=True, the default"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._version = aio.run_sync(_name_version(self._url))
        _announced[self._url] = self._version
        return [
            dataclasses.replace(plan, storage_data=_Placement(self._url, self._version, rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        placement = plan.storage_data
        version = _announced.pop(self._url, None)
        if not isinstance(placement, _Placement) or version is None:
            raise CheckpointError(
                f"{self._url}: this rank was not told which version to write: is the url the same on all ranks?"
            )
        results: list[WriteResult] = []
        written: list[StripedFile] = []
        for done, file in self._write_files(plan.items, planner, version, placement.rank):
            results += done
            written.append(file)
        told = msgspec.json.encode(written)
        results.append(WriteResult(MetadataIndex(FILES_ENTRY, index=placement.rank), 0, told))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: list[StripedFile] = []
        where: dict[MetadataIndex, Any] = {}
        for result in (result for of_rank in results for result in of_rank):
            if result.index.fqn == FILES_ENTRY and isinstance(result.storage_data, bytes):
                files += msgspec.json.decode(result.storage_data, type=list[StripedFile])
            else:
                where[result.index] = result.storage_data
        if DCP_VERSION is not None:
            metadata.version = DCP_VERSION
        metadata.storage_data = where
        metadata.storage_meta = self.storage_meta()
        aio.run_sync(self._commit(pickle.dumps(metadata), files))

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    # ---- files ------------------------------------------------------------------------------------------------

    def _write_files(
        self, items: Sequence[WriteItem], planner: SavePlanner, version: str, rank: int
    ) -> Iterator[tuple[list[WriteResult], StripedFile]]:
        """The planner is asked in the calling thread; files are written in others, a few at a time."""
        store = open_store(self._url)
        prefix = f"r{rank:05d}-"
        writer = VersionWriter(
            store, "", version, geometry=self._geometry(store), prefix=prefix, buffer_bytes=BUFFER_BYTES
        )
        pending: deque[tuple[list[WriteResult], Done[StripedFile]]] = deque()
        try:
            with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="checkpoint-save") as pool:
                for number, members in enumerate(_split(items)):
                    name = f"__{rank}_{number}.distcp"
                    results, buffers = _serialise(members, planner, name)
                    if len(pending) == FILES_AT_ONCE:
                        earlier, done = pending.popleft()
                        yield earlier, done.result()
                    pending.append((results, pool.submit(_add, writer, name, buffers)))
                    del buffers
                while pending:
                    earlier, done = pending.popleft()
                    yield earlier, done.result()
        finally:
            aio.run_sync(store.aclose())

    async def _commit(self, metadata: bytes, files: list[StripedFile]) -> None:
        store = open_store(self._url)
        try:
            writer = VersionWriter(store, "", self._version, geometry=self._geometry(store), prefix="m-")
            files.append(await writer.add(dcp_metadata.NAME, MemoryInput([metadata])))
            await commit(store, "", self._version, files, step=self.step)
            if self._keep is not None:
                await collect_garbage(store, "", keep=self._keep)
        finally:
            await store.aclose()

    def _geometry(self, store: Any) -> Geometry:
        return default_geometry(store, self._unit_bytes, self._stripes)


async def _name_version(url: str) -> str:
    store = open_store(url)
    try:
        return await new_version(store)
    finally:
        await store.aclose()


def _add(writer: VersionWriter, name: str, buffers: list[memoryview | bytes]) -> StripedFile:
    return aio.run_sync(writer.add(name, MemoryInput(buffers)))


def _split(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Items of one file each, in the planner's order."""
    members: list[WriteItem] = []
    total = 0
    for item in items:
        size = _size_of(item)
        if members and total + size > FILE_BYTES:
            yield members
            members, total = [], 0
        members.append(item)
        total += size
    if members:
        yield members


def _size_of(item: WriteItem) -> int:
    if item.tensor_data is None:
        data = getattr(item, "bytes_io_data", None)  # of torch 2.7 and later
        return data.nbytes if data else 0
    return int(item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize)


def _serialise(
    items: Sequence[WriteItem], planner: SavePlanner, name: str
) -> tuple[list[WriteResult], list[memoryview | bytes]]:
    """The bytes of a file as torch's own writer would write it; those of tensors are not copied."""
    sink = _Sink()
    results: list[WriteResult] = []
    # Plain objects first, as in torch's writer.
    for item in sorted(items, key=lambda item: item.type != WriteItemType.BYTE_IO):
        start = sink.size
        data = planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            sink.write(data.getbuffer())
        else:
            sink.save(data)
        info = _StorageInfo(name, start, sink.size - start)
        results.append(WriteResult(item.index, sink.size - start, info))
    return results, sink.finish()


class _Sink:
    """Takes what `torch.save` writes, and remembers a tensor's own memory instead of copying it."""

    def __init__(self) -> None:
        self.size = 0
        self._buffers: list[memoryview | bytes] = []
        self._small = bytearray()
        self._tensor: torch.Tensor | None = None

    def save(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach().cpu()
        if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            tensor = tensor.clone()  # only the view is saved, not all that it is a view of
        self._tensor = tensor
        torch.save(tensor, self)
        self._tensor = None

    def write(self, data: memoryview | bytes) -> int:
        count = len(data)
        own = None if self._tensor is None or count <= SMALL_BYTES else _own_memory(self._tensor, data)
        if own is None:
            self._small += data
        else:
            self._flush_small()
            self._buffers.append(own)
        self.size += count
        return count

    def flush(self) -> None:
        """Part of what torch.save asks of a file."""

    def finish(self) -> list[memoryview | bytes]:
        self._flush_small()
        return self._buffers

    def _flush_small(self) -> None:
        if self._small:
            self._buffers.append(bytes(self._small))
            self._small.clear()


def _own_memory(tensor: torch.Tensor, data: memoryview | bytes) -> memoryview | None:
    """The tensor's memory that `data` is a view of; it keeps the tensor alive. None: it is other memory."""
    import numpy

    storage = tensor.untyped_storage()
    at = numpy.frombuffer(data, numpy.uint8).__array_interface__["data"][0] - storage.data_ptr()
    if at < 0 or at + len(data) > storage.nbytes():
        return None
    whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))
    return memoryview(whole.numpy())[at : at + len(data)]
