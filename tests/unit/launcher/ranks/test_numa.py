"""NUMA bindings of ranks on made-up nodes, compared with what torch.numa.binding gives for the same nodes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.numa import binding

from bootseer.errors import ConfigError
from launcher.ranks.numa import bound_cpus, format_ranges, numactl_prefix, parse_ranges, read_topology

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


@pytest.fixture(scope="module")
def root_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Node of that name, each made once: a test that changes one makes its own."""
    return functools.cache(lambda name: build(tmp_path_factory.mktemp("node"), SHAPES[name]))


# What torch.numa.binding 2.13.0 answers for each GPU of these nodes, when the process may use all CPUs ...
ALL_CPUS = (
    ("two sockets", "node", "0-7,16-23 0-7,16-23 8-15,24-31 8-15,24-31"),
    ("two sockets", "socket", "0-7,16-23 0-7,16-23 8-15,24-31 8-15,24-31"),
    ("two sockets", "exclusive", "0-3,16-19 4-7,20-23 8-11,24-27 12-15,28-31"),
    ("two sockets", "core-complex", "0-3,16-19 4-7,20-23 8-11,24-27 12-15,28-31"),
    ("four nodes", "node", "0-5,24-29 6-11,30-35 12-17,36-41 18-23,42-47 18-23,42-47"),
    ("four nodes", "socket", "0-11,24-35 0-11,24-35 12-23,36-47 12-23,36-47 12-23,36-47"),
    ("four nodes", "exclusive", "0-5,24-29 6-11,30-35 12-17,36-41 18-20,42-44 21-23,45-47"),
    ("four nodes", "core-complex", "0-2,24-26 6-8,30-32 12-14,36-38 18-20,42-44 21-23,45-47"),
    ("uneven", "node", "7-13,21-27 7-13,21-27 7-13,21-27 0-6,14-20"),
    ("uneven", "socket", "0-27 0-27 0-27 0-27"),
    ("uneven", "exclusive", "7-9,21-23 10-11,24-25 12-13,26-27 0-6,14-20"),
    ("uneven", "core-complex", "7-10,21-24 11-13,25-27 7-10,21-24 0-3,14-17"),
    ("one node", "node", "0-7 0-7"),
    ("one node", "socket", "0-7 0-7"),
    ("one node", "exclusive", "0-1,4-5 2-3,6-7"),
    ("one node", "core-complex", "0-7 0-7"),
    ("crossed", "node", "8-15,24-31 0-7,16-23 8-15,24-31 0-7,16-23"),
    ("crossed", "socket", "8-15,24-31 0-7,16-23 8-15,24-31 0-7,16-23"),
    ("crossed", "exclusive", "8-11,24-27 0-3,16-19 12-15,28-31 4-7,20-23"),
    ("crossed", "core-complex", "8-15,24-31 0-7,16-23 8-15,24-31 0-7,16-23"),
)

# ... and when it may use only those whose number is no multiple of 3: cores and caches are then of uneven size.
SOME_CPUS = (
    ("two sockets", "exclusive", "1-2,16-17,19 4-5,7,20,22-23 8,10-11,25-26 13-14,28-29,31"),
    ("two sockets", "core-complex", "4-5,7,20,22-23 1-2,16-17,19 8,10-11,25-26 13-14,28-29,31"),
    (
        "four nodes",
        "exclusive",
        "1-2,4-5,25-26,28-29 7-8,10-11,31-32,34-35 13-14,16-17,37-38,40-41 19-20,43-44 22-23,46-47",
    ),
    ("four nodes", "core-complex", "1-2,25-26 7-8,31-32 13-14,37-38 19-20,43-44 22-23,46-47"),
    ("uneven", "exclusive", "7-8,22-23 10-11,25 13,26 1-2,4-5,14,16-17,19-20"),
    ("uneven", "core-complex", "7-8,10,22-23 11,13,25-26 7-8,10,22-23 1-2,14,16-17"),
    ("one node", "exclusive", "1,4-5 2,7"),
    ("one node", "core-complex", "1-2,4-5,7 1-2,4-5,7"),
    ("crossed", "exclusive", "8,10-11,25-26 1-2,16-17,19 13-14,28-29,31 4-5,7,20,22-23"),
)


@pytest.mark.parametrize(("name", "mode", "expected"), ALL_CPUS)
def test_as_torch_binds(root_of: Callable[[str], str], name: str, mode: str, expected: str) -> None:
    shape = SHAPES[name]
    topology = read_topology({}, root_of(name), range(2 * shape.cores))
    found = [format_ranges(bound_cpus(mode, gpu, topology)) for gpu in range(len(shape.gpu_nodes))]
    assert found == expected.split()


@pytest.mark.parametrize(("name", "mode", "expected"), SOME_CPUS)
def test_as_torch_binds_some_cpus(root_of: Callable[[str], str], name: str, mode: str, expected: str) -> None:
    shape = SHAPES[name]
    topology = read_topology({}, root_of(name), [cpu for cpu in range(2 * shape.cores) if cpu % 3])
    found = [format_ranges(bound_cpus(mode, gpu, topology)) for gpu in range(len(shape.gpu_nodes))]
    assert found == expected.split()


@pytest.mark.parametrize("mode", ["node", "socket"])
@pytest.mark.parametrize("name", SHAPES)
def test_only_cpus_this_process_may_use(root_of: Callable[[str], str], name: str, mode: str) -> None:
    shape = SHAPES[name]
    every = read_topology({}, root_of(name), range(2 * shape.cores))
    allowed = frozenset(cpu for cpu in every.allowed if cpu % 3)
    for gpu in range(len(shape.gpu_nodes)):
        assert bound_cpus(mode, gpu, every._replace(allowed=allowed)) == bound_cpus(mode, gpu, every) & allowed


def test_shares_of_a_node_do_not_overlap(root_of: Callable[[str], str]) -> None:
    shape = SHAPES["uneven"]
    topology = read_topology({}, root_of("uneven"), range(2 * shape.cores))
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
    text = format_ranges(numbers)
    assert text == binding._get_ranges_str_from_ints(numbers)
    assert parse_ranges(text) == numbers == binding._get_set_of_int_from_ranges_str(text)


def test_ranges() -> None:
    assert format_ranges([7, 0, 1, 2, 4, 6]) == "0-2,4,6-7"
    assert parse_ranges(" 0-2,4, 6-7\n") == {0, 1, 2, 4, 6, 7}
    assert parse_ranges("\n") == set()
