"""Small whole files of the formats that savers use, made without the libraries that read them."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Mapping, Sequence


def safetensors_file(size: int = 100, *names: str) -> bytes:
    """One tensor of so many bytes, or one for each name."""
    wanted = names or ("x",)
    tensors = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [index * size, (index + 1) * size]}
        for index, name in enumerate(wanted)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    return len(header).to_bytes(8, "little") + header + b"\1" * size * len(wanted)


class _Storage:
    """What a pickle of torch's names as a storage."""

    def __init__(self, key: str, count: int) -> None:
        self.pid = ("storage", _Named("torch", "FloatStorage"), key, "cpu", count)


class _Named:
    """A name that is not looked up."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __reduce__(self) -> str:
        raise NotImplementedError


class _Pickler(pickle._Pickler):  # type: ignore[name-defined]
    def persistent_id(self, value: object) -> object:
        return value.pid if isinstance(value, _Storage) else None

    def save(self, value: object, save_persistent_id: bool = True) -> None:
        if isinstance(value, _Named):
            self.write(b"c" + value.module.encode() + b"\n" + value.name.encode() + b"\n")
        else:
            super().save(value, save_persistent_id)


def pt_file(counts: Sequence[int] = (25,), value: Mapping[str, object] | None = None) -> bytes:
    """As torch.save writes it: a storage of floats for each count."""
    memory, content = io.BytesIO(), io.BytesIO()
    state = {f"x{key}": _Storage(str(key), count) for key, count in enumerate(counts)} | dict(value or {})
    _Pickler(content, 2).dump(state)
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("archive/data.pkl", content.getvalue())
        archive.writestr("archive/byteorder", "little")
        for key, count in enumerate(counts):
            archive.writestr(f"archive/data/{key}", b"\1" * 4 * count)
        archive.writestr("archive/version", "3\n")
    return memory.getvalue()


def dcp_metadata(items: Mapping[str, int] | Sequence[tuple[str, int, int]], transforms: bool = True) -> bytes:
    """`.metadata` of a DCP folder: one item for each file and its size, or (path, offset, length)."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    wanted = [(path, 0, size) for path, size in items.items()] if isinstance(items, Mapping) else items
    extra = {"transform_descriptors": ["none"]} if transforms else {}  # then nothing is known of its bytes
    storage = {MetadataIndex(f"{path}:{at}"): _StorageInfo(path, at, size, **extra) for path, at, size in wanted}
    return pickle.dumps(Metadata({}, None, storage))
