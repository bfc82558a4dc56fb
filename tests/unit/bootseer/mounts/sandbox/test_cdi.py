"""CDI specifications: what nvidia-ctk writes, what other tools might, and what nobody should."""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.mounts.sandbox.binds import Bind
from bootseer.mounts.sandbox.cdi import DeviceEdits, find_devices
from bootseer.mounts.sandbox.cdi_files import LIBRARIES, read_devices
from bootseer.mounts.sandbox.shared_library import find_soname

LIB = "/usr/lib/x86_64-linux-gnu"
OPTIONS = ["ro", "nosuid", "nodev", "rbind", "rprivate"]


def mount(path: str, host: str = "") -> dict[str, object]:
    return {"hostPath": host or path, "containerPath": path, "options": OPTIONS}


def hook(*args: str) -> dict[str, object]:
    return {"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", *args]}


# As `nvidia-ctk cdi generate` 1.17 writes it for two GPUs, shortened.
SPEC: dict[str, Any] = {
    "cdiVersion": "0.5.0",
    "kind": "nvidia.com/gpu",
    "devices": [
        {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}},
        {"name": "1", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia1"}]}},
        {
            "name": "all",
            "containerEdits": {
                "deviceNodes": [{"path": "/dev/nvidia0"}, {"path": "/dev/nvidia1", "hostPath": "/dev/nvidia1"}]
            },
        },
    ],
    "containerEdits": {
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes": [{"path": "/dev/nvidiactl"}, {"path": "/dev/nvidia-uvm"}],
        "hooks": [
            hook("create-symlinks", "--link", f"libcuda.so.1::{LIB}/libcuda.so",
                 f"--link=../libnvidia-allocator.so.1::{LIB}/gbm/nvidia-drm_gbm.so"),
            hook("update-ldcache", "--folder", LIB),
            hook("enable-cuda-compat", "--host-driver-version", "555.42"),
        ],
        "mounts": [mount(f"{LIB}/libcuda.so.555.42.02"), mount("/usr/bin/nvidia-smi", "/opt/driver/nvidia-smi"),
                   mount("/run/nvidia-persistenced/socket")],
    },
}  # fmt: skip


def test_what_a_node_of_gpus_needs() -> None:
    found = find_devices([("/etc/cdi/nvidia.json", SPEC)])
    assert found.names == ("all",)
    assert found.environ == {"NVIDIA_VISIBLE_DEVICES": "void"}
    assert found.binds == (
        Bind(f"{LIB}/libcuda.so.555.42.02", f"{LIB}/libcuda.so.555.42.02", True, True),
        Bind("/opt/driver/nvidia-smi", "/usr/bin/nvidia-smi", True, True),
        Bind("/run/nvidia-persistenced/socket", "/run/nvidia-persistenced/socket", True, True),
    )
    assert found.links == (
        ("libcuda.so.1", f"{LIB}/libcuda.so"),
        ("../libnvidia-allocator.so.1", f"{LIB}/gbm/nvidia-drm_gbm.so"),
    )
    assert [note.split(":")[1] for note in found.notes] == [
        " the hook update-ldcache is not run", " the hook enable-cuda-compat is not run",
    ]  # fmt: skip


def test_without_one_for_all_each_device_counts() -> None:
    devices = [
        {"name": str(number), "containerEdits": {"env": [f"GPU{number}=1"], "mounts": [mount(f"/x{number}")]}}
        for number in (0, 1)
    ]
    found = find_devices([("a", {**SPEC, "devices": devices, "containerEdits": {}})])
    assert found.names == ("0", "1") and set(found.environ) == {"GPU0", "GPU1"} and len(found.binds) == 2


def test_other_kinds_are_not_ours() -> None:
    assert (
        find_devices([("a", {**SPEC, "kind": "example.com/net"}), ("b", []), ("c", None), ("d", {})])
        == DeviceEdits()
    )


def test_devices_under_other_names_are_reported() -> None:
    edits = {"deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/run/nvidia/driver/dev/nvidia0"}]}
    found = find_devices([("a", {**SPEC, "containerEdits": edits})])
    assert any("/run/nvidia/driver/dev/nvidia0" in note for note in found.notes)


@pytest.mark.parametrize(
    "edits",
    [
        {"mounts": [mount("/")]},
        {"mounts": [mount("/proc/sys")]},
        {"mounts": [mount("/dev/null")]},
        {"mounts": [mount("/run/bootseer/rank/bootstrap.py")]},
        {"mounts": [mount("/a/../etc/passwd")]},
        {"mounts": [mount("relative")]},
        {"mounts": [{"hostPath": "/x"}]},
        {"mounts": "x"},
        {"mounts": [5]},
        {"env": ["NOVALUE"]},
        {"env": ["A=1\n"]},
        {"env": [["A"]]},
        {"hooks": [{"path": "/x", "args": ["x", "create-symlinks", "--link", "nothing"]}]},
        {"hooks": [{"path": "/x", "args": ["x", "create-symlinks", "--link", "a::../up"]}]},
        {"deviceNodes": [{}]},
        {"mounts": [mount(f"/m{number}") for number in range(10_001)]},
    ],
)
def test_what_nobody_should_write_is_reported_and_left_out(edits: dict[str, object]) -> None:
    found = find_devices([("/etc/cdi/x.json", {**SPEC, "containerEdits": edits})])
    assert found.notes
    assert not found.binds and not found.links and "A" not in found.environ


KEYS = ["name", "containerEdits", "mounts", "hooks", "args", "env", "path", "hostPath", "deviceNodes"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["all", "/x", "A=1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=12,
)


@given(json_values, json_values)
def test_nothing_in_a_specification_raises(devices: object, edits: object) -> None:
    found = find_devices([("x", {"kind": "nvidia.com/gpu", "devices": devices, "containerEdits": edits})])
    assert all(bind.target.startswith("/") and ".." not in bind.target.split("/") for bind in found.binds)


# ---- files ---------------------------------------------------------------------------------------------------


def test_specifications_are_read_from_directories(tmp_path: Path) -> None:
    """With links by the names under which programs ask for the libraries that are bound."""
    library = os.path.realpath(next(line.split()[-2] for line in ldd() if "libc.so" in line))
    spec = {**SPEC, "containerEdits": {"mounts": [mount("/usr/lib/driver.so.5", library), mount("/bin/tool")]}}
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "nvidia.json").write_text(json.dumps(spec))
    (tmp_path / "etc" / "README").write_text("no specification")
    found = read_devices((str(tmp_path / "etc"), str(tmp_path / "missing")), str(tmp_path))
    assert found.names == ("all",) and not found.notes
    assert found.links == (("/usr/lib/driver.so.5", f"{LIBRARIES}/libc.so.6"),)


def ldd() -> list[str]:
    return subprocess.run(["ldd", "/bin/sh"], capture_output=True, text=True, check=True).stdout.splitlines()


def test_yaml_is_read_where_it_can_be(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: all\n")
    (tmp_path / "b.yml").write_text(json.dumps({**SPEC, "devices": [{"name": "0"}]}))
    found = read_devices((str(tmp_path),), str(tmp_path))
    try:
        import yaml  # type: ignore[import-untyped]  # noqa: F401
    except ModuleNotFoundError:
        assert found.names == ("0",) and "PyYAML is not installed" in found.notes[0]
    else:
        assert found.names == ("all", "0")


def test_files_that_are_not_trusted(tmp_path: Path) -> None:
    for name, mode in (("open.json", 0o646), ("group.json", 0o664)):
        (tmp_path / name).write_text(json.dumps(SPEC))
        (tmp_path / name).chmod(mode)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    found = read_devices((str(tmp_path),), str(tmp_path))
    assert found.names == () and len(found.notes) == 6
    assert sum("users other than root may write to it" in note for note in found.notes) == 2


def test_a_node_of_gpus_without_a_specification_is_reported(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").write_text("")
    found = read_devices((str(tmp_path / "none"),), str(tmp_path))
    assert "nvidia-ctk cdi generate" in found.notes[0]
    assert read_devices((str(tmp_path / "none"),), str(tmp_path / "none")) == DeviceEdits()


# ---- libraries -----------------------------------------------------------------------------------------------


def test_names_of_this_machines_libraries() -> None:
    """As readelf, or the loader, has them."""
    seen = 0
    for line in ldd():
        name, _, rest = line.strip().partition(" => ")
        if rest.startswith("/"):
            with open(rest.split()[0], "rb") as file:
                data = file.read()
            assert find_soname(lambda offset, size, data=data: data[offset : offset + size]) == name
            seen += 1
    assert seen and ctypes.util.find_library("c")


def test_what_is_no_library() -> None:
    with open("/bin/sh", "rb") as file:
        data = file.read()
    assert find_soname(lambda offset, size: data[offset : offset + size]) == ""
    assert find_soname(lambda offset, size: b"") == ""


@given(st.binary(max_size=300), st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_damaged_libraries_have_no_name_or_a_harmless_one(tail: bytes, place: int, bad: bytes) -> None:
    path = os.path.realpath(next(line.split()[-2] for line in ldd_lines() if "libc.so" in line))
    data = bytearray(read_start(path)) + tail
    data[place : place + len(bad)] = bad
    name = find_soname(lambda offset, size: bytes(data[offset : offset + size]))
    assert "/" not in name and name not in (".", "..")


_cache: dict[str, Any] = {}


def ldd_lines() -> list[str]:
    if "ldd" not in _cache:
        _cache["ldd"] = ldd()
    return list(_cache["ldd"])


def read_start(path: str) -> bytes:
    if path not in _cache:
        with open(path, "rb") as file:
            _cache[path] = file.read(1 << 16)
    return bytes(_cache[path])
