"""--numa-binding: the CPUs near the GPU of a local rank, as a numactl command before the rank's command.

In: the mode, the local rank, the environment and the root of the file system (/sys and /proc are read below it, so
tests can use their own). Out: words for the command line. The four modes are those of torch's numa/binding.py:
node, socket, exclusive, core-complex.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from bootseer.errors import ConfigError
from launcher.ranks.devices import find_program, list_visible_gpus


class Topology(NamedTuple):
    """A node's hardware: the root of sysfs, the NUMA nodes of the GPUs, and the CPUs that this process may use."""

    root: str
    gpu_nodes: tuple[int, ...]  # NUMA node of each visible GPU
    allowed: frozenset[int]


def numactl_prefix(
    mode: str,
    local_rank: int,
    environ: Mapping[str, str] | None = None,
    root: str = "/",
    allowed: Iterable[int] | None = None,
) -> list[str]:
    """Return the words before a rank's command. Raises: ConfigError if the rank cannot be bound."""
    environ = os.environ if environ is None else environ
    if find_program("numactl", environ) is None:
        raise ConfigError("--numa-binding needs the program numactl, which is not in PATH: install it")
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    cpus = bound_cpus(mode, local_rank, read_topology(environ, root, allowed))
    return ["numactl", f"--physcpubind={format_ranges(cpus)}"]


def read_topology(environ: Mapping[str, str], root: str, allowed: Iterable[int]) -> Topology:
    """Return the topology with the NUMA node of each visible GPU."""
    gpus = list_visible_gpus(environ, root)
    nodes = [max(0, int(_read(root, f"sys/bus/pci/devices/{gpu.pci}/numa_node"))) for gpu in gpus]
    return Topology(root, tuple(nodes), frozenset(allowed))


def bound_cpus(mode: str, gpu: int, topology: Topology) -> set[int]:
    """Return the CPUs for the rank that uses this GPU."""
    if gpu >= len(topology.gpu_nodes):
        raise ConfigError(
            f"--numa-binding needs a GPU for each local rank: there is none for local rank {gpu} "
            f"({len(topology.gpu_nodes)} visible in /proc/driver/nvidia/gpus, /sys/bus/pci or /sys/class/kfd); "
            "lower --nproc-per-node, make more visible or leave the flag out"
        )
    modes: dict[str, Callable[[int, Topology], set[int]]] = {
        "node": _bind_node,
        "socket": _bind_socket,
        "exclusive": _bind_exclusive,
        "core-complex": _bind_core_complex,
    }
    cpus = modes[mode](gpu, topology)
    if not cpus:
        raise ConfigError(
            f"--numa-binding {mode}: this process may use no CPU of NUMA node {topology.gpu_nodes[gpu]}, "
            f"where the GPU of local rank {gpu} is; widen its CPU affinity or leave the flag out"
        )
    return cpus


def parse_ranges(text: str) -> set[int]:
    """Parse sysfs ranges such as `0-2,4`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part.strip():
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found


def format_ranges(numbers: Iterable[int]) -> str:
    """Return the shortest ranges, such as `0-2,4`, for these numbers."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


# ---- modes ---------------------------------------------------------------------------------------------------


def _bind_node(gpu: int, topology: Topology) -> set[int]:
    return _node_cpus(topology.gpu_nodes[gpu], topology)


def _bind_socket(gpu: int, topology: Topology) -> set[int]:
    """Return the CPUs of all NUMA nodes of the GPU's socket."""
    own = _node_cpus(topology.gpu_nodes[gpu], topology)
    if not own:
        return own
    socket = _socket(min(own), topology)
    nodes = parse_ranges(_read(topology.root, "sys/devices/system/node/possible"))
    parts = [_node_cpus(node, topology) for node in nodes if _has_cpus(node, topology)]
    return set().union(*(part for part in parts if part and _socket(min(part), topology) == socket))


def _bind_exclusive(gpu: int, topology: Topology) -> set[int]:
    """Return a share of the physical cores of the GPU's node; the first shares get the remainder."""
    place, sharers = _place(gpu, topology)
    cpus = _node_cpus(topology.gpu_nodes[gpu], topology)
    cores = _group(cpus, lambda cpu: parse_ranges(_read_cpu(topology, cpu, "topology/thread_siblings_list")))
    ordered = [cores[first] for first in sorted(cores)]
    each, extra = divmod(len(ordered), sharers)
    if ordered and not each:
        raise ConfigError(
            f"--numa-binding exclusive: NUMA node {topology.gpu_nodes[gpu]} has {len(ordered)} usable cores "
            f"for {sharers} GPUs; use --numa-binding node"
        )
    start = place * each + min(place, extra)
    return set().union(*ordered[start : start + each + (place < extra)])


def _bind_core_complex(gpu: int, topology: Topology) -> set[int]:
    """Return the CPUs of one last-level cache; GPUs of a node get its caches in turn, larger ones first."""
    place, _ = _place(gpu, topology)
    cpus = _node_cpus(topology.gpu_nodes[gpu], topology)
    caches = _group(cpus, lambda cpu: _cache_sharers(cpu, topology))
    if not caches:
        return set()
    ordered = sorted(caches.items(), key=lambda item: (-len(item[1]), item[0]))
    return ordered[place % len(ordered)][1]


def _place(gpu: int, topology: Topology) -> tuple[int, int]:
    """Return the GPU's index among the GPUs of its NUMA node, and their number."""
    same = [index for index, node in enumerate(topology.gpu_nodes) if node == topology.gpu_nodes[gpu]]
    return same.index(gpu), len(same)


def _group(cpus: Iterable[int], sharers: Callable[[int], set[int]]) -> dict[int, set[int]]:
    """Group CPUs by the lowest CPU that they share a resource with."""
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(min(sharers(cpu), default=cpu), set()).add(cpu)
    return groups


# ---- sysfs ---------------------------------------------------------------------------------------------------


def _node_cpus(node: int, topology: Topology) -> set[int]:
    listed = parse_ranges(_read(topology.root, f"sys/devices/system/node/node{node}/cpulist"))
    return listed & topology.allowed


def _has_cpus(node: int, topology: Topology) -> bool:
    """Return whether a possible node is present."""
    return os.path.exists(os.path.join(topology.root, f"sys/devices/system/node/node{node}/cpulist"))


def _socket(cpu: int, topology: Topology) -> int:
    return int(_read_cpu(topology, cpu, "topology/physical_package_id"))


def _cache_sharers(cpu: int, topology: Topology) -> set[int]:
    """Return the CPUs that share the cache of the highest level."""
    base = f"sys/devices/system/cpu/cpu{cpu}/cache"
    try:
        names = os.listdir(os.path.join(topology.root, base))
    except OSError:
        raise ConfigError(f"--numa-binding core-complex: /{base} is missing; use --numa-binding node") from None
    highest, sharers = -1, {cpu}
    for name in names:
        if not name.startswith("index") or not name[5:].isdecimal():
            continue
        level = int(_read(topology.root, f"{base}/{name}/level"))
        if level > highest and _read(topology.root, f"{base}/{name}/type").strip() != "Instruction":
            highest = level
            sharers = parse_ranges(_read(topology.root, f"{base}/{name}/shared_cpu_list"))
    return sharers


def _read_cpu(topology: Topology, cpu: int, name: str) -> str:
    return _read(topology.root, f"sys/devices/system/cpu/cpu{cpu}/{name}")


def _read(root: str, path: str) -> str:
    try:
        with open(os.path.join(root, path), encoding="ascii") as file:
            return file.read()
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ConfigError(f"--numa-binding: /{path}: {reason.lower()}; leave the flag out") from None
