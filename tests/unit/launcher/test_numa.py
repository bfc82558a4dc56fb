"""NUMA bindings of ranks on made-up nodes, compared with those of torch.numa.binding on the same node."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import ConfigError
from launcher.numa import bound_cpus, format_ranges, numactl_prefix, parse_ranges, read_topology

MODES = ("node", "socket", "exclusive", "core-complex")


class Shape(NamedTuple):
    """A made-up node: two threads a core, CPU numbers as Linux gives them (siblings in the second half)."""

    sockets: int
    nodes_per_socket: int
    cores_per_node: int
    cores_per_cache: int
    gpu_nodes: tuple[int, ...]  # NUMA node of each GPU; -1 as on nodes with one

    @property
    def cores(self) -> int:
        return self.sockets * self.nodes_per_socket * self.cores_per_node


SHAPES = {
    "two sockets": Shape(2, 1, 8, 4, (0, 0, 1, 1)),
    "four nodes": Shape(2, 2, 6, 3, (0, 1, 2, 3, 3)),
    "uneven": Shape(1, 2, 7, 4, (1, 1, 1, 0)),
    "one node": Shape(1, 1, 4, 4, (-1, -1)),
    "crossed": Shape(2, 1, 8, 8, (1, 0, 1, 0)),
}


def write(root: Path, path: str, text: object) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def build(root: Path, shape: Shape) -> str:
    """Writes /sys and /proc of a node."""
    nodes = shape.sockets * shape.nodes_per_socket
    write(root, "sys/devices/system/node/possible", f"0-{nodes - 1}")
    for node in range(nodes):
        first = node * shape.cores_per_node
        cores = set(range(first, first + shape.cores_per_node))
        both = cores | {core + shape.cores for core in cores}
        write(root, f"sys/devices/system/node/node{node}/cpulist", format_ranges(both))
        for core in cores:
            begin = first + (core - first) // shape.cores_per_cache * shape.cores_per_cache
            sharers = set(range(begin, begin + shape.cores_per_cache)) & cores
            for cpu in (core, core + shape.cores):
                base = f"sys/devices/system/cpu/cpu{cpu}"
                write(root, f"{base}/topology/thread_siblings_list", f"{core},{core + shape.cores}")
                write(root, f"{base}/topology/physical_package_id", node // shape.nodes_per_socket)
                write(root, f"{base}/cache/uevent", "")
                caches = ((1, "Data", {core}), (1, "Instruction", {core}), (2, "Unified", {core}))
                for index, (level, kind, who) in enumerate((*caches, (3, "Unified", sharers))):
                    write(root, f"{base}/cache/index{index}/level", level)
                    write(root, f"{base}/cache/index{index}/type", kind)
                    shared = who | {each + shape.cores for each in who}
                    write(root, f"{base}/cache/index{index}/shared_cpu_list", format_ranges(shared))
    for index, node in enumerate(shape.gpu_nodes):
        address = f"0000:{index + 16:02x}:00.0"
        write(root, f"sys/bus/pci/devices/{address}/numa_node", node)
        write(root, f"proc/driver/nvidia/gpus/{address}/information", f"Device Minor: \t {index}")
        write(root, f"dev/nvidia{index}", "")
    return os.fspath(root)


def torchs(
    monkeypatch: pytest.MonkeyPatch, root: str, shape: Shape, allowed: Iterable[int]
) -> Callable[[str, int], set[int]]:
    """torch's computation, which is told of the made-up node instead of this one."""
    from torch.numa import binding

    def below(path: str) -> str:
        return root + path if path.startswith("/sys") else path

    system = SimpleNamespace(
        listdir=lambda path: os.listdir(below(path)), path=os.path, sched_getaffinity=lambda _: set(allowed)
    )
    cuda = SimpleNamespace(
        device_count=lambda: len(shape.gpu_nodes),
        get_device_properties=lambda index: SimpleNamespace(
            pci_domain_id=0, pci_bus_id=index + 16, pci_device_id=0
        ),
    )
    monkeypatch.setattr(binding, "open", lambda path: open(below(path)), raising=False)  # noqa: SIM115
    monkeypatch.setattr(binding, "os", system)
    monkeypatch.setattr(binding, "torch", SimpleNamespace(cuda=cuda))

    def bind(mode: str, gpu: int) -> set[int]:
        numa_options: Any = binding.NumaOptions(binding.AffinityMode(mode))
        found: set[int] = binding._get_logical_cpus_to_bind_to(gpu_index=gpu, numa_options=numa_options)
        return found

    return bind


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("every", [1, 3])
def test_as_torch_binds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: str, every: int) -> None:
    shape = SHAPES[name]
    root = build(tmp_path, shape)
    allowed = [cpu for cpu in range(2 * shape.cores) if every == 1 or cpu % every]
    ours = read_topology({}, root, allowed)
    theirs = torchs(monkeypatch, root, shape, allowed)
    for gpu in range(len(shape.gpu_nodes)):
        assert bound_cpus(mode, gpu, ours) == theirs(mode, gpu)


def test_shares_of_a_node_do_not_overlap(tmp_path: Path) -> None:
    shape = SHAPES["uneven"]
    topology = read_topology({}, build(tmp_path, shape), range(2 * shape.cores))
    shares = [bound_cpus("exclusive", gpu, topology) for gpu in (0, 1, 2)]
    assert set().union(*shares) == bound_cpus("node", 0, topology)
    assert [len(share) for share in shares] == [6, 4, 4]  # 7 cores, two threads each


def test_the_command(tmp_path: Path) -> None:
    root = build(tmp_path, SHAPES["two sockets"])
    program = tmp_path / "bin/numactl"
    program.parent.mkdir()
    program.touch(0o755)
    environ = {"PATH": os.fspath(program.parent)}
    assert numactl_prefix("node", 2, environ, root, range(32)) == ["numactl", "--physcpubind=8-15,24-31"]
    # CUDA_VISIBLE_DEVICES says which GPU the first rank has.
    environ["CUDA_VISIBLE_DEVICES"] = "3,0"
    assert numactl_prefix("exclusive", 0, environ, root, range(32)) == ["numactl", "--physcpubind=8-15,24-31"]
    with pytest.raises(ConfigError, match="none for local rank 2"):
        numactl_prefix("node", 2, environ, root, range(32))
    with pytest.raises(ConfigError, match="numactl"):
        numactl_prefix("node", 0, {"PATH": "/none"}, root, range(32))


def test_nodes_that_cannot_be_used(tmp_path: Path) -> None:
    shape = SHAPES["two sockets"]
    root = build(tmp_path, shape)
    nothing = read_topology({}, root, ())
    for mode in MODES:
        with pytest.raises(ConfigError, match="CPU affinity"):
            bound_cpus(mode, 0, nothing)
    with pytest.raises(ConfigError, match="1 usable cores for 2 GPUs"):
        bound_cpus("exclusive", 0, read_topology({}, root, (0,)))


def test_possible_nodes_that_are_not_there(tmp_path: Path) -> None:
    root = build(tmp_path, SHAPES["two sockets"])
    write(tmp_path, "sys/devices/system/node/possible", "0-7")
    write(tmp_path, "sys/devices/system/node/node5/cpulist", "")  # memory without CPUs
    assert bound_cpus("socket", 0, read_topology({}, root, range(32))) == {*range(8), *range(16, 24)}


def test_what_sysfs_does_not_tell_is_named(tmp_path: Path) -> None:
    root = build(tmp_path, SHAPES["one node"])
    topology = read_topology({}, root, range(8))
    (tmp_path / "sys/devices/system/node/node0/cpulist").unlink()
    with pytest.raises(ConfigError, match="/sys/devices/system/node/node0/cpulist: no such file"):
        bound_cpus("node", 0, topology)


@given(st.sets(st.integers(0, 300)))
def test_ranges_come_back(numbers: set[int]) -> None:
    assert parse_ranges(format_ranges(numbers)) == numbers


def test_ranges() -> None:
    assert format_ranges([7, 0, 1, 2, 4, 6]) == "0-2,4,6-7"
    assert parse_ranges(" 0-2,4, 6-7\n") == {0, 1, 2, 4, 6, 7}
    assert parse_ranges("\n") == set()
