"""What the preloaded process finds about itself, where no process is needed to see it."""

from __future__ import annotations

import pytest

from launcher import preloaded

LINE = "7f0000000000-7f0000001000 rw-s 00000000 00:05 42                         {}\n"


@pytest.mark.parametrize(
    "path",
    [
        *("/dev/nvidia0", "/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/renderD128", "/dev/dxg", "/dev/accel/accel0"),
        *("/dev/vfio/17", "/dev/neuron0", "/dev/infiniband/uverbs0", "/dev/davinci_manager", "/dev/hl0"),
    ],
)
def test_a_mapped_device_is_found(path: str) -> None:
    maps = LINE.format("/usr/lib/libc.so.6") + LINE.format("/dev/shm/arena") + LINE.format(path)
    assert preloaded._mapped_device(maps.encode()) == path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "[heap]",
        "/dev/zero (deleted)",
        "/dev/shm/torch_1",
        "/opt/dev/nvidia0",
        "/mnt/a /dev-b",
        "/SYSV0 (deleted)",
    ],
)
def test_what_a_fork_survives_is_no_device(path: str) -> None:
    assert preloaded._mapped_device(LINE.format(path).encode()) == ""
