"""`BootseerWriter`: torch.distributed.checkpoint saves striped versions to any store.

Every rank writes its files into the version that the coordinator has named. The coordinator commits it last, so a
save exists whole or not at all, and an older one is never touched. It contains the files that torch's own writer
would have written: `bootseer ckpt unstripe` creates a directory that torch's own reader loads.
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
from bootseer.checkpoint.dcp import metadata as dcp_metadata
from bootseer.checkpoint.dcp.versions import DCP_VERSION
from bootseer.checkpoint.format.manifest import StripedFile
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.opening import is_checkpoint_url
from bootseer.checkpoint.writing.committing import check_keep, commit, delete_old, new_version
from bootseer.checkpoint.writing.writer import Geometry, VersionWriter, default_geometry
from bootseer.errors import CheckpointError, ConfigError
from bootseer.storage import open_store
from bootseer.tuning import current

FILE_BYTES = 1 << 30  # of one file: a rank with tensors on a GPU holds so many in memory, times FILES_AT_ONCE
FILES_AT_ONCE = 2
BUFFER_PART = 2  # of the buffer of other saves: several ranks of a node write
SMALL_BYTES = 64 << 10  # smaller writes of torch.save are copied, larger ones refer to the tensor's memory
FILES_ENTRY = "bootseer.files"  # name of the result in which a rank reports its files to the coordinator


@dataclasses.dataclass
class _Placement:
    """The version that a rank writes to; the coordinator sends it along with the plan."""

    url: str
    version: str
    rank: int

    def __setstate__(self, state: dict[str, Any]) -> None:
        # With the planner's `enable_plan_caching` a rank sees an old plan instead of this one, so the arrival of
        # this one must suffice.
        self.__dict__.update(state)
        _announced[self.url] = self.version


_announced: dict[str, str] = {}  # url -> version of the running save


class BootseerWriter(StorageWriter):  # type: ignore[misc]  # torch is not typed here
    """Args:
    url: the checkpoint's directory; each save makes a new version in it.
    step: the training step, for listings.
    keep: how many of the newest versions stay after a save; None keeps all.
    unit_bytes, stripes: how files are split, instead of the store's default.
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
        if keep is not None:
            check_keep(keep)
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
                "BootseerWriter publishes one version for all ranks; save with use_collectives=True, the default"
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
                f"{self._url}: this rank did not receive the version to write; use the same url on all ranks"
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
        """Query the planner in the calling thread; write files in others, a few at a time."""
        store = open_store(self._url)
        prefix = f"r{rank:05d}-"
        writer = VersionWriter(
            store,
            "",
            version,
            geometry=self._geometry(store),
            prefix=prefix,
            buffer_bytes=current().checkpoint.save_buffer_bytes // BUFFER_PART,
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
                await delete_old(store, "", keep=self._keep)
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
    """Yield the items of each file, in the planner's order."""
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
    """Return the bytes of a file as torch's own writer would write it, without copying those of tensors."""
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
    """A sink for `torch.save`, which refers to a tensor's own memory instead of copying it."""

    def __init__(self) -> None:
        self.size = 0
        self._buffers: list[memoryview | bytes] = []
        self._small = bytearray()
        self._tensor: torch.Tensor | None = None

    def save(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach().cpu()
        if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            tensor = tensor.clone()  # only the view is saved, not its whole storage
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
        """Do nothing; torch.save requires it of a file."""

    def finish(self) -> list[memoryview | bytes]:
        self._flush_small()
        return self._buffers

    def _flush_small(self) -> None:
        if self._small:
            self._buffers.append(bytes(self._small))
            self._small.clear()


def _own_memory(tensor: torch.Tensor, data: memoryview | bytes) -> memoryview | None:
    """Return the tensor's memory that `data` is a view of, which keeps the tensor alive. None: other memory."""
    import numpy

    storage = tensor.untyped_storage()
    at = numpy.frombuffer(data, numpy.uint8).__array_interface__["data"][0] - storage.data_ptr()
    if at < 0 or at + len(data) > storage.nbytes():
        return None
    whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))
    return memoryview(whole.numpy())[at : at + len(data)]
