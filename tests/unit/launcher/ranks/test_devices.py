"""Counting devices below a root of our own, and the variables that make them visible."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from bootseer.errors import ConfigError
from launcher.ranks.devices import (
    Gpu,
    count_cpus,
    count_devices,
    count_gpus,
    find_program,
    list_visible_gpus,
    parse_visible,
    torch_kinds,
    visible_device_of,
)

UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"]


def write(root: Path, path: str, text: str = "") -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def add_nvidia(root: Path, count: int = 4, uuids: bool = True) -> str:
    """A node with NVIDIA's driver."""
    for index in range(count):
        uuid = UUIDS[index] if uuids else "GPU-????????-????"
        write(
            root,
            f"proc/driver/nvidia/gpus/0000:{index + 1:02x}:00.0/information",
            f"Model: \t\t H200\nIRQ:   \t\t 95\nGPU UUID: \t {uuid}\nDevice Minor: \t {index}\n",
        )
        write(root, f"dev/nvidia{index}")
    write(root, "dev/nvidiactl")
    return os.fspath(root)


def add_amd(root: Path, count: int = 2) -> str:
    """A node with two CPU sockets in KFD's topology, then GPUs."""
    nodes = "sys/class/kfd/kfd/topology/nodes"
    for number in range(2):
        write(root, f"{nodes}/{number}/properties", "cpu_cores_count 64\nsimd_count 0\n")
    for index in range(count):
        write(
            root,
            f"{nodes}/{index + 2}/properties",
            f"simd_count 304\ndomain 0\nlocation_id {(index + 3) << 8}\n"
            f"drm_render_minor {128 + index}\nunique_id {0xABC0 + index}\n",
        )
        write(root, f"dev/dri/renderD{128 + index}")
    return os.fspath(root)


def add_intel(root: Path, name: str, address: str, tiles: int = 0, vendor: str = "0x8086") -> str:
    device = f"sys/devices/pci/{address}"
    write(root, f"{device}/vendor", vendor + "\n")
    for tile in range(tiles):
        write(root, f"{device}/tile{tile}/gt0/id")
    link = root / "sys/class/drm" / name / "device"
    link.parent.mkdir(parents=True)
    link.symlink_to(root / device)
    write(root, f"dev/dri/{name}")
    return os.fspath(root)


def test_cpus_are_those_this_process_may_use(tmp_path: Path) -> None:
    assert count_devices("cpu", {"BOOTSEER_DEVICE_COUNT": "99"}, os.fspath(tmp_path)) == count_cpus()
    assert count_cpus() == len(os.sched_getaffinity(0))


def test_cpus_as_torchrun_counts_them() -> None:
    from torch.distributed.run import determine_local_world_size

    assert count_devices("cpu", os.environ) == determine_local_world_size("cpu")


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4), ("", 0), ("-1", 0), ("0,1", 2), ("3", 1), ("0,9,1", 1), ("9", 0), ("0,1,0", 0), ("1gpu,2x", 2),
        ("0,-1,2", 1), (" 0 , 2 ", 2), ("GPU-bb", 1), ("GPU-aa11,GPU-cc44", 2), ("GPU-aa", 0),
        ("GPU-aa11,GPU-zz", 1), ("GPU-aa11,GPU-aa11", 0), ("GPU-aa11,1", 1), ("NoDevFiles", 0), ("MIG-x,MIG-y", 1),
        ("MIG-GPU-aa11/1/0", 1),
    ],
)  # fmt: skip
def test_visible_gpus(tmp_path: Path, visible: str | None, count: int) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environ, add_nvidia(tmp_path)) == count


@pytest.mark.parametrize(
    "visible",
    ["", "-1", "0,1", "0,1,0", "1gpu,2x", "x", "0,,1", "GPU-a,GPU-b", "GPU-a,GPU-a", "GPU-a,1", "MIG-a,MIG-b,x",
     "+1,2", "-0", "0,-1,3", " 1 , 2"],
)  # fmt: skip
def test_the_variable_is_read_as_torch_reads_it(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert parse_visible(visible) == torch.cuda._parse_visible_devices()


def test_gpus_without_device_files_do_not_count(tmp_path: Path) -> None:
    root = add_nvidia(tmp_path)
    (tmp_path / "dev/nvidia0").unlink()
    (tmp_path / "dev/nvidia2").unlink()
    assert count_gpus({}, root) == 2
    assert [gpu.uuid for gpu in list_visible_gpus({}, root)] == ["GPU-aa22", "GPU-cc44"]
    assert list_visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, root) == [Gpu("0000:04:00.0", "GPU-cc44")]


def test_device_files_alone_count(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        write(tmp_path, f"dev/{name}")
    root = os.fspath(tmp_path)
    assert count_gpus({}, root) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "1"}, root) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, root) == 2  # UUIDs cannot be compared
    assert list_visible_gpus({}, root) == []


def test_uuids_that_the_driver_does_not_tell(tmp_path: Path) -> None:
    root = add_nvidia(tmp_path, uuids=False)
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, root) == 2
    assert count_gpus({}, root) == 4


def test_places_by_the_bus_where_the_driver_does_not_tell(tmp_path: Path) -> None:
    root = os.fspath(tmp_path)
    devices = (("0000:41:00.0", "0x10de", "0x030200"), ("0000:18:00.0", "0x10de", "0x030000"))
    others = (("0000:18:00.1", "0x10de", "0x040300"), ("0000:03:00.0", "0x1a03", "0x030000"))
    for address, vendor, kind in (*devices, *others):
        write(tmp_path, f"sys/bus/pci/devices/{address}/vendor", vendor + "\n")
        write(tmp_path, f"sys/bus/pci/devices/{address}/class", kind + "\n")
    write(tmp_path, "dev/nvidia0")
    assert list_visible_gpus({}, root) == []  # one of the two is withheld: there is no telling which
    write(tmp_path, "dev/nvidia1")
    assert [gpu.pci for gpu in list_visible_gpus({}, root)] == ["0000:18:00.0", "0000:41:00.0"]
    assert [gpu.pci for gpu in list_visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}, root)] == ["0000:41:00.0"]


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 2),
        ({"ROCR_VISIBLE_DEVICES": "1"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"HIP_VISIBLE_DEVICES": ""}, 0),
        ({"HIP_VISIBLE_DEVICES": "GPU-000000000000abc1"}, 1),
    ],
)
def test_amd(tmp_path: Path, environ: Mapping[str, str], count: int) -> None:
    assert count_gpus(environ, add_amd(tmp_path)) == count


def test_places_of_amd_gpus(tmp_path: Path) -> None:
    gpus = list_visible_gpus({"HIP_VISIBLE_DEVICES": "1"}, add_amd(tmp_path))
    assert [gpu.pci for gpu in gpus] == ["0000:04:00.0"]


def test_intel(tmp_path: Path) -> None:
    root = add_intel(tmp_path, "renderD128", "0000:00:02.0")
    assert count_devices("xpu", {}, root) == 1  # an integrated one, where there is nothing better
    add_intel(tmp_path, "renderD129", "0000:03:00.0", tiles=2)
    add_intel(tmp_path, "renderD130", "0000:04:00.0", tiles=2)
    add_intel(tmp_path, "renderD131", "0000:05:00.0", vendor="0x1a03")
    assert count_devices("xpu", {}, root) == 4
    assert count_devices("xpu", {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, root) == 2
    assert count_devices("xpu", {"ZE_AFFINITY_MASK": "1,2"}, root) == 2
    assert count_devices("xpu", {"ZE_AFFINITY_MASK": "0"}, root) == 1
    assert count_devices("xpu", {"ZE_AFFINITY_MASK": "1.0,1.1"}, root) == 2
    assert count_devices("auto", {}, root, ()) == count_cpus()  # many a desktop has an Intel GPU
    write(tmp_path, "site/torch/version.py", "xpu: Optional[str] = '20250302'\n")
    assert count_devices("auto", {}, root, (f"{root}/site",)) == 4


def test_auto(tmp_path: Path) -> None:
    root = os.fspath(tmp_path)
    assert count_devices("auto", {}, root, ()) == count_cpus()
    add_nvidia(tmp_path)
    assert count_devices("auto", {}, root, ()) == 4
    assert count_devices("auto", {"CUDA_VISIBLE_DEVICES": ""}, root, ()) == count_cpus()
    assert count_devices("auto", {"BOOTSEER_DEVICE_COUNT": "7"}, root, ()) == 7
    assert count_devices("auto", {"BOOTSEER_DEVICE_COUNT": "0"}, root, ()) == count_cpus()
    write(tmp_path, "site/torch/version.py", "cuda: Optional[str] = None\n")
    assert count_devices("auto", {}, root, (f"{root}/site",)) == count_cpus()  # a torch without CUDA


@pytest.mark.parametrize("kind", ["gpu", "xpu"])
def test_none_found_says_where_it_looked(tmp_path: Path, kind: str) -> None:
    root = os.fspath(tmp_path)
    with pytest.raises(ConfigError, match=r"/proc/driver/nvidia|renderD") as error:
        count_devices(kind, {"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}, root)
    assert "=''" in str(error.value)
    assert count_devices(kind, {"BOOTSEER_DEVICE_COUNT": "3"}, root) == 3
    with pytest.raises(ConfigError, match="BOOTSEER_DEVICE_COUNT is 0"):
        count_devices(kind, {"BOOTSEER_DEVICE_COUNT": "0"}, root)
    with pytest.raises(ConfigError, match="BOOTSEER_DEVICE_COUNT=some"):
        count_devices(kind, {"BOOTSEER_DEVICE_COUNT": "some"}, root)


def test_what_torch_was_built_for(tmp_path: Path) -> None:
    assert torch_kinds([os.fspath(tmp_path)]) is None
    write(tmp_path, "torch/version.py", "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n")
    assert torch_kinds(["/none", os.fspath(tmp_path)]) == frozenset({"cuda"})
    write(tmp_path, "torch/version.py", "cuda: Optional[str] = None\nhip: Optional[str] = '7.0'\nxpu = None\n")
    assert torch_kinds([os.fspath(tmp_path)]) == frozenset({"hip"})


def test_a_rank_sees_its_own_device_only() -> None:
    assert visible_device_of({}, 3) == "3"
    assert visible_device_of({"CUDA_VISIBLE_DEVICES": "4, 6,GPU-x"}, 1) == "6"
    assert visible_device_of({"CUDA_VISIBLE_DEVICES": "4,6,GPU-x"}, 2) == "GPU-x"
    assert visible_device_of({"CUDA_VISIBLE_DEVICES": ""}, 0) == ""
    with pytest.raises(ConfigError, match=r"local rank 1 .*CUDA_VISIBLE_DEVICES=4"):
        visible_device_of({"CUDA_VISIBLE_DEVICES": "4"}, 1)


def test_find_program(tmp_path: Path) -> None:
    write(tmp_path, "bin/numactl")
    environ = {"PATH": f"/none:{tmp_path}/bin"}
    assert find_program("numactl", environ) is None  # not executable
    (tmp_path / "bin/numactl").chmod(0o755)
    assert find_program("numactl", environ) == f"{tmp_path}/bin/numactl"
    assert find_program("numactl", {"PATH": ""}) is None
