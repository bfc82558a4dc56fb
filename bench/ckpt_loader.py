"""One load of one checkpoint in a fresh process: `python -m bench.ckpt_loader LOADER PATH`.

Writes "ready" when everything is imported, waits for a line (further variables, JSON), loads, touches every page
of every tensor once, and prints one JSON line: seconds, CPU seconds (of this process and what it started),
bytes, moments, and the digest of every tensor (of name, type, shape and bytes). Digests, and the making of
tensors from what a reader of bare bytes gave, are not timed. PATH is a file, a folder or a URL, whatever LOADER
loads; empty for `arena`, which looks into its environment.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

PAGE_BYTES = 4096
RANGE_BYTES = 16 << 20  # of readers that are told what to ask for
RANGES_AT_ONCE = 8
Tensors = Mapping[str, torch.Tensor]


class Loader(NamedTuple):
    """`load` is timed; `to_tensors` makes tensors of what it gave, where that is bytes."""

    load: Callable[[str], Any]
    to_tensors: Callable[[Any], Tensors] | None = None


def bootseer() -> Loader:
    """Our loader of safetensors files: local ones, of any store, or the arena of this node."""
    from bootseer.checkpoint.safetensors import load_file

    return Loader(load_file)


def bootseer_http() -> Loader:
    """The same over HTTP; what fsspec imports before it is timed, we do as well."""
    for module in ("aio", "checkpoint.io.direct", "checkpoint.versions.resolve", "storage.http.store"):
        importlib.import_module(f"bootseer.{module}")
    return bootseer()


def bootseer_pt() -> Loader:
    """Our loader of files written by torch.save."""
    from bootseer.checkpoint import load_pt

    return Loader(load_pt)


def bootseer_dcp() -> Loader:
    """dcp.load with our reader."""
    from bootseer.checkpoint.dcp.api import BootseerReader

    return Loader(lambda path: load_dcp(BootseerReader(path)))


def arena() -> Loader:
    """What a rank does whose node has loaded the checkpoint: attach and take views."""
    from bootseer.checkpoint.safetensors import load_file

    return Loader(lambda path: load_file(path or None))


def safetensors() -> Loader:
    """safetensors' own loader, which maps the file."""
    from safetensors.torch import load_file

    return Loader(load_file)


def runai() -> Loader:
    """runai-model-streamer as its documentation has it, with its defaults."""
    from runai_model_streamer import SafetensorsStreamer

    streamer = SafetensorsStreamer()  # never closed: it lives as long as the tensors

    def load(path: str) -> Tensors:
        streamer.__enter__()
        streamer.stream_file(path)
        return dict(streamer.get_tensors())

    return Loader(load)


def fastsafetensors() -> Loader:
    """fastsafetensors without a GPU."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    kept: list[Any] = []  # tensors may lie in its buffers

    def load(path: str) -> Tensors:
        loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
        loader.add_filenames({0: [path]})
        buffer = loader.copy_files_to_device()
        kept.extend((loader, buffer))
        return {name: buffer.get_tensor(name) for name in loader.get_keys()}

    return Loader(load)


def torch_load() -> Loader:
    """torch.load."""
    return Loader(lambda path: torch.load(path, map_location="cpu", weights_only=True))


def torch_mmap() -> Loader:
    """torch.load that maps the file."""
    return Loader(lambda path: torch.load(path, map_location="cpu", weights_only=True, mmap=True))


def torch_dcp() -> Loader:
    """dcp.load with torch's reader."""
    from torch.distributed.checkpoint import FileSystemReader

    return Loader(lambda path: load_dcp(FileSystemReader(path)))


def load_dcp(reader: Any) -> Tensors:
    """All tensors of a DCP checkpoint into memory made for them, without a process group."""
    from torch.distributed import checkpoint

    entries = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


def fsspec_http() -> Loader:
    """fsspec's cat_ranges over HTTP: bytes only."""
    import fsspec
    from fsspec.config import conf

    conf["nofiles_gather_batch_size"] = RANGES_AT_ONCE
    system = fsspec.filesystem("http")

    def load(url: str) -> list[bytes]:
        starts, ends = to_ranges(system.info(url)["size"])
        parts: list[bytes] = system.cat_ranges([url] * len(starts), starts, ends)
        return parts

    return Loader(load, join)


def obstore_http() -> Loader:
    """obstore's get_range over HTTP in threads: bytes only. (Its get_ranges joins neighbours to one request.)"""
    import obstore
    from obstore.store import HTTPStore

    def load(url: str) -> list[Any]:
        base, _, name = url.rpartition("/")
        store = HTTPStore.from_url(base, client_options={"allow_http": True})
        starts, ends = to_ranges(obstore.head(store, name)["size"])

        def get(span: tuple[int, int]) -> Any:
            return obstore.get_range(store, name, start=span[0], end=span[1])

        with ThreadPoolExecutor(RANGES_AT_ONCE) as pool:
            return list(pool.map(get, zip(starts, ends, strict=True)))

    return Loader(load, join)


def to_ranges(size: int) -> tuple[list[int], list[int]]:
    """Starts and ends of the ranges of a file."""
    starts = list(range(0, size, RANGE_BYTES))
    return starts, [min(start + RANGE_BYTES, size) for start in starts]


def join(parts: list[Any]) -> Tensors:
    """The tensors of a safetensors file that came in parts."""
    from safetensors.torch import load

    found: Tensors = load(b"".join(parts))
    return found


LOADERS: dict[str, Callable[[], Loader]] = {
    made.__name__: made
    for made in (
        bootseer,
        bootseer_http,
        bootseer_pt,
        bootseer_dcp,
        arena,
        safetensors,
        runai,
        fastsafetensors,
        torch_load,
        torch_mmap,
        torch_dcp,
        fsspec_http,
        obstore_http,
    )
}


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory, as bytes in a row."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def touch(tensors: Tensors) -> int:
    """Reads one byte of each page of each tensor."""
    total = 0
    for tensor in tensors.values():
        flat = to_bytes(tensor)
        if len(flat):
            total += int(flat[::PAGE_BYTES].sum()) + int(flat[-1])
    return total


def digest(tensors: Tensors) -> dict[str, str]:
    """The sum of each tensor, by its name."""
    found = {}
    for name, tensor in tensors.items():
        made = hashlib.sha256(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        made.update(memoryview(to_bytes(tensor).numpy()))
        found[name] = made.hexdigest()
    return found


def cpu_s() -> float:
    """CPU time so far of this process, all its threads, and of what it started and has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main(argv: list[str]) -> int:
    """Loads once."""
    name, path = argv
    loader = LOADERS[name]()
    print("ready", flush=True)
    if not (line := sys.stdin.readline()):
        return 1  # the bench is gone
    os.environ.update(json.loads(line))
    began_cpu_s = cpu_s()
    began_ns = time.monotonic_ns()
    loaded = loader.load(path)
    if loader.to_tensors is None:
        touch(loaded)
    ended_ns = time.monotonic_ns()
    used_cpu_s = cpu_s() - began_cpu_s
    tensors = loaded if loader.to_tensors is None else loader.to_tensors(loaded)
    answer = {
        "seconds": (ended_ns - began_ns) / 1e9,
        "cpu_s": used_cpu_s,
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        "began_ns": began_ns,
        "ended_ns": ended_ns,
        "digests": digest(tensors),
    }
    print(json.dumps(answer), flush=True)
    os._exit(0)  # some readers keep threads that wait for ever


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
