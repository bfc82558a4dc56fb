"""PURE: whether a checkpoint file is complete by its format, and which facts it has about other files.

In: ranges of the file (`Parts`): headers, record tables, ends, never the tensors. Out: `Facts`; `IncompleteFile`
gives the fault. A name proves nothing: a file that does not parse as its format is not complete. Only the bytes of
tensors, which have no structure, are accepted unread if they are all present.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from bootseer.checkpoint.format import pickle_data
from bootseer.checkpoint.format.array_formats import check_gguf, check_npy
from bootseer.checkpoint.format.file_parts import Cursor, IncompleteFile, Parts, RangesNeeded, number
from bootseer.checkpoint.format.read_only_file import ReadOnlyFile
from bootseer.checkpoint.format.tensor_index import header_bytes, parse_header
from bootseer.errors import IntegrityError

MAX_JSON_BYTES = 32 << 20
MAX_PICKLE_BYTES = 64 << 20  # of a pickle that is read for its promises
MAX_SAMPLES = 8  # records of one file whose first bytes are read
PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".th", ".pkl", ".pickle", ".pt2", ".tar", ".nemo")
ZIPPED = (".npz", ".keras")
HDF5 = (".h5", ".hdf5")
# Formats that store tensors: a checkpoint has at least one file of them.
WEIGHTS = (
    ".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".th", ".tar", ".pt2", ".nemo", ".distcp", ".gguf", ".msgpack",
    ".npy", *ZIPPED, *HDF5,
)  # fmt: skip
# Small files that are never empty when their saver has ended.
NEVER_EMPTY = (".yaml", ".yml", ".model", ".toml", ".tiktoken", ".distcp")
NEVER_EMPTY_NAMES = (
    "vocab.txt",
    "merges.txt",
    "latest",
    "latest_checkpointed_iteration.txt",
    "commit_success.txt",
)
# Files of Orbax and Zarr: JSON without the suffix.
JSON_NAMES = ("_METADATA", "_CHECKPOINT_METADATA", "_sharding", ".zarray", ".zgroup", ".zattrs")
_JSON_DIRECTORY = "array_metadatas"
_FLAX = re.compile(r"checkpoint_\d+")  # a file of flax.training.checkpoints
_OF_TORCH = re.compile(r"pytorch_|adapter_|diffusion_|optimizer|scheduler|training_args")
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh", b"\x04\x22\x4d\x18")
_HDF5_START = b"\x89HDF\r\n\x1a\n"
_ARCHIVE = "data.pkl"


class Facts(NamedTuple):
    """The contents of a complete file."""

    kind: str
    tensors: Collection[str] | None = None  # names; None if the format does not give them
    value: Any = None  # of JSON, or of a pickle (pickle_data.py)


def parse(name: str, parts: Parts) -> Facts | None:
    """Parse a file; return None if its format is unknown. Raises: IncompleteFile; RangesNeeded."""
    if not parts.size:
        if is_known(name):
            raise IncompleteFile("is empty")
        return None
    parser = _find(name)
    if parser is not None:
        return parser(name.rpartition("/")[2], parts)
    if is_known(name) and not parts.get(0, min(512, parts.size)).strip(b"\0"):
        raise IncompleteFile("contains only zeros")
    return None


def is_known(name: str) -> bool:
    """Return whether files of this name can be inspected."""
    base = name.rpartition("/")[2]
    return _find(name) is not None or base.endswith(NEVER_EMPTY) or base in NEVER_EMPTY_NAMES


def _find(name: str) -> Callable[[str, Parts], Facts] | None:
    above, _, base = name.rpartition("/")
    if base in JSON_NAMES or above.rpartition("/")[2] == _JSON_DIRECTORY:
        return _json
    if _FLAX.fullmatch(base):
        return _msgpack
    if base == "latest":
        return _pointer
    return next((parser for suffixes, parser in _PARSERS if base.endswith(suffixes)), None)


# ---- formats -------------------------------------------------------------------------------------------------


def _safetensors(base: str, parts: Parts) -> Facts:
    try:
        end = header_bytes(parts.get(0, min(8, parts.size)), parts.size, base)
        header = parse_header(parts.get(0, end), parts.size, base)
    except IntegrityError as error:
        why = _describe_content(parts)
        raise IncompleteFile(why or str(error).removeprefix(f"{base}: ")) from error
    return Facts("safetensors", header.tensors.keys())


def _pointer(_base: str, parts: Parts) -> Facts:
    data = parts.get(0, min(parts.size, 4096))
    if not data.strip(b"\0"):
        raise IncompleteFile("contains only zeros")
    return Facts("text", value=data.decode("utf-8", "replace").strip())


def _json(_base: str, parts: Parts) -> Facts:
    if parts.size > MAX_JSON_BYTES:
        start, end = parts.get(0, 64).lstrip()[:1], parts.get(parts.size - 64, 64).rstrip()[-1:]
        if (start, end) not in ((b"{", b"}"), (b"[", b"]")):
            raise IncompleteFile("is not JSON, or ends too early")
        return Facts("json")
    try:
        return Facts("json", value=json.loads(parts.get(0, parts.size)))
    except (ValueError, RecursionError) as error:
        raise IncompleteFile(
            _describe_content(parts) or f"is not JSON, or ends too early ({str(error)[:80]})"
        ) from error


def _pickled(base: str, parts: Parts) -> Facts:
    head = parts.get(0, min(512, parts.size))
    if head.startswith(b"PK\3\4"):
        return _zip(base, parts)
    if head[:1] == b"\x80" and len(head) > 1 and 2 <= head[1] <= 5:
        return _pickle(base, parts)
    if head.startswith(_HDF5_START):
        return _hdf5(base, parts)
    if head[257:262] == b"ustar":
        return _tar(base, parts)
    if head.startswith(_COMPRESSED):
        return Facts("compressed")  # its contents are unknown
    why = _describe_content(parts)
    if why:
        raise IncompleteFile(why)
    if base.endswith((".pkl", ".pickle")) and parts.size <= MAX_PICKLE_BYTES:
        return _pickle(base, parts)  # of protocol 0 or 1
    if base.endswith((".bin", ".tar", ".nemo")) and _OF_TORCH.match(base) is None:
        return Facts("unknown")  # many programs write raw bytes under such names
    raise IncompleteFile("is neither a torch.save zip file nor a pickle")


def _zip(_base: str, parts: Parts) -> Facts:
    entries = _zip_entries(parts)
    by_name = {info.filename.partition("/")[2]: info for info in entries}
    if _ARCHIVE not in by_name:
        for info in entries:
            if not info.file_size and not info.is_dir():
                raise IncompleteFile(f"has an empty record: {info.filename[:80]}")
        return Facts("zip")
    if not by_name[_ARCHIVE].file_size:
        raise IncompleteFile(f"has an empty record: {_ARCHIVE}")
    for name in ("version", "byteorder"):
        if name in by_name and not by_name[name].file_size:
            raise IncompleteFile(f"has an empty record: {name}")
    value, storages = _zip_pickle(parts, by_name[_ARCHIVE])
    for each in storages:
        record = by_name.get(f"data/{each.key}")
        if record is None:
            if each.size and each.location != "meta":
                raise IncompleteFile(f"lacks a record that its pickle names: data/{each.key}")
        elif each.size is not None and record.file_size != each.size:
            raise IncompleteFile(f"has {record.file_size} bytes in the record data/{each.key}, not {each.size}")
    return Facts("torch", _keys(value), value)


def _zip_entries(parts: Parts) -> list[zipfile.ZipInfo]:
    """Return the records, after a check that they do not overlap; probe some of them."""
    try:
        with zipfile.ZipFile(_SeekableParts(parts)) as archive:
            entries: list[zipfile.ZipInfo] = archive.infolist()
            end = archive.start_dir
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError) as error:
        raise IncompleteFile("has no zip directory at its end: it was not written completely") from error
    if not entries:
        raise IncompleteFile("is a zip file without records")
    entries.sort(key=lambda info: info.header_offset)
    ends = [info.header_offset for info in entries[1:]] + [end]
    for info, limit in zip(entries, ends, strict=True):
        if info.header_offset + 30 + len(info.orig_filename) + info.compress_size > limit:
            raise IncompleteFile(f"has a record that overlaps the next one: {info.filename[:80]}")
    looked_at = _samples(entries)
    parts.need([(info.header_offset, 30) for info in looked_at])
    for info in looked_at:
        if parts.get(info.header_offset, 4) != b"PK\3\4":
            raise IncompleteFile(f"has no record where its directory places {info.filename[:80]}")
    return entries


def _zip_pickle(parts: Parts, info: zipfile.ZipInfo) -> tuple[Any, list[pickle_data.Storage]]:
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > MAX_PICKLE_BYTES:
        return None, []
    head = info.header_offset
    start = head + 30 + number(parts, head + 26, 2) + number(parts, head + 28, 2)
    inner = Parts.of(parts.get(start, info.file_size))
    try:
        return pickle_data.read(Cursor(inner))
    except IncompleteFile as torn:
        raise IncompleteFile(f"contains a pickle that {torn}") from None


def _pickle(_base: str, parts: Parts) -> Facts:
    """Parse one pickle, or an old torch.save file without zip: five pickles, then the storages."""
    if parts.size > MAX_PICKLE_BYTES and not _is_old_torch(parts):
        if parts.get(parts.size - 1, 1) != b".":
            raise IncompleteFile("is a pickle that lacks its end")
        return Facts("pickle")
    source = Cursor(parts, piece_bytes=1 << 20)
    value, _ = pickle_data.read(source)
    if value != _TORCH_MAGIC:
        return Facts("pickle", _keys(value), value)
    for _ in range(2):
        pickle_data.read(source)
    value, storages = pickle_data.read(source)
    keys, _ = pickle_data.read(source)
    sizes = {each.key: each.size for each in storages}
    at = source.at
    for key in keys if isinstance(keys, list) else ():
        size = sizes.get(str(key))
        if size is None:
            return Facts("torch", _keys(value), value)
        at += 8 + size
    if at > parts.size:
        raise IncompleteFile(f"ends at byte {parts.size}, its tensors at {at}")
    return Facts("torch", _keys(value), value)


def _is_old_torch(parts: Parts) -> bool:
    try:
        return bool(pickle_data.read(Cursor(parts))[0] == _TORCH_MAGIC)
    except IncompleteFile:
        return False
    except RangesNeeded:
        return False  # the first pickle of such a file is short


def _hdf5(_base: str, parts: Parts) -> Facts:
    """Check the end that the superblock gives. Source: HDF5 File Format Specification 3.0, II.A."""
    head = parts.get(0, min(64, parts.size))
    if not head.startswith(_HDF5_START) or len(head) < 64:
        raise IncompleteFile(_describe_content(parts) or "is not an HDF5 file")
    version = head[8]
    if version <= 1:
        width, at = head[13], 24 + (4 if version else 0) + 2 * head[13]
    else:
        width, at = head[9], 12 + 2 * head[9]
        if version >= 3 and head[11] & 1:
            raise IncompleteFile("was never closed by its writer")
    if width not in (4, 8):
        raise IncompleteFile("is not an HDF5 file")
    end = int.from_bytes(head[at : at + width], "little")
    if end > parts.size:
        raise IncompleteFile(f"ends at byte {parts.size}, its contents at {end}")
    return Facts("hdf5")


def _tar(_base: str, parts: Parts) -> Facts:
    at = 0
    while True:
        if at == parts.size and at:
            return Facts("tar")
        head = parts.get(at, 512)
        if head == bytes(512):
            return Facts("tar")
        size = head[124:136]
        try:
            length = int.from_bytes(size[4:], "big") if size[0] & 0x80 else int(size.strip(b" \0") or b"0", 8)
        except ValueError as error:
            raise IncompleteFile(f"has no tar header at byte {at}") from error
        at += 512 + -(-length // 512) * 512


def _msgpack(_base: str, parts: Parts) -> Facts:
    """Check one MessagePack value, without decoding its contents."""
    end = _msgpack_end(parts)
    if end != parts.size:
        raise IncompleteFile(f"has {parts.size} bytes, but its value has {end}")
    return Facts("msgpack")


def _msgpack_end(parts: Parts) -> int:
    at, waiting = 0, 1
    while waiting:
        waiting -= 1
        code = parts.get(at, 1)[0]
        at += 1
        if code <= 0x7F or code >= 0xE0 or code in (0xC0, 0xC2, 0xC3):
            continue
        if code <= 0x8F:
            waiting += 2 * (code & 15)
        elif code <= 0x9F:
            waiting += code & 15
        elif code <= 0xBF:
            at += code & 31
        elif code in _MSGPACK:
            kind, width = _MSGPACK[code]
            if kind == "fixed":
                at += width
                continue
            count = int.from_bytes(parts.get(at, width), "big")
            at += width
            if kind == "bytes":
                at += count
            elif kind == "ext":
                at += count + 1
            else:
                waiting += count * (2 if kind == "map" else 1)
        else:
            raise IncompleteFile("is not MessagePack")
        if at > parts.size or waiting > parts.size - at:
            raise IncompleteFile(f"ends at byte {parts.size}, before its value does")
    return at


_MSGPACK = (
    {0xC4 + each: ("bytes", 1 << each) for each in range(3)}
    | {0xC7 + each: ("ext", 1 << each) for each in range(3)}
    | {0xCA: ("fixed", 4), 0xCB: ("fixed", 8)}
    | {start + each: ("fixed", 1 << each) for each in range(4) for start in (0xCC, 0xD0)}
    | {0xD4 + each: ("fixed", 1 + (1 << each)) for each in range(5)}
    | {0xD9 + each: ("bytes", 1 << each) for each in range(3)}
    | {start + each: (kind, 2 << each) for each in range(2) for start, kind in ((0xDC, "array"), (0xDE, "map"))}
)


def _gguf(_base: str, parts: Parts) -> Facts:
    check_gguf(parts)
    return Facts("gguf")


def _npy(_base: str, parts: Parts) -> Facts:
    check_npy(parts)
    return Facts("npy")


_PARSERS: Sequence[tuple[str | tuple[str, ...], Callable[[str, Parts], Facts]]] = (
    (".safetensors", _safetensors),
    (".json", _json),
    (ZIPPED, _zip),
    (HDF5, _hdf5),
    (".msgpack", _msgpack),
    (".gguf", _gguf),
    (".npy", _npy),
    (PICKLED, _pickled),
)


# ---- help ----------------------------------------------------------------------------------------------------


class _SeekableParts(ReadOnlyFile):
    """A file object for zipfile."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.size)
        self._parts = parts

    def fill(self, offset: int, target: memoryview) -> None:
        target[:] = self._parts.get(offset, len(target))


def _keys(value: Any) -> Collection[str] | None:
    """Return the names in a state dict."""
    return value.keys() if isinstance(value, dict) else None


def _samples(entries: list[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
    """Return the first, the last, and some records in between."""
    if len(entries) <= MAX_SAMPLES:
        return entries
    step = (len(entries) - 1) / (MAX_SAMPLES - 1)
    return [entries[round(index * step)] for index in range(MAX_SAMPLES)]


def _describe_content(parts: Parts) -> str:
    """Describe content that often replaces a file by mistake; "" for other bytes."""
    head = parts.get(0, min(512, parts.size))
    if not head.strip(b"\0"):
        return "contains only zeros"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:64].lower()
    if text.startswith(b"version https://git-lfs"):
        return "is a git-lfs pointer, not the file itself"
    if re.match(rb"<(!doctype|html|\?xml|head|body|error)", text):
        return "is a server's page or error message (HTML or XML), not the file itself"
    return ""
