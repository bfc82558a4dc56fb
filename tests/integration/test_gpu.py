"""What only a GPU can show: ranks that are forked and make their context afterwards, the driver's own figures.

Skipped where there is none; `bench/gpu.sh` runs them on a machine that has one. One GPU suffices.
"""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.fork import find_fork_server, read_events
from launcher.ranks import devices
from tests import support

pytestmark = pytest.mark.gpu

DEADLINE_S = 55.0
# Computes on the GPU, and says what it finds; all that is said has to be the same in forked and in exec'd ranks.
COMPUTES = """
import os, sys, torch
rank = int(os.environ["RANK"])
assert not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()
assert torch._C._cuda_getDeviceCount.__name__ == "_cuda_getDeviceCount", "it is torch's own"
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.manual_seed(7)
made = torch.randn(256, 256, device=device)
found = (made @ made).double().sum().item()
own = torch.empty(1 << 20, device=device, pin_memory=False).fill_(rank)
stream = torch.cuda.Stream(device)
with torch.cuda.stream(stream):
    twice = own * 2
stream.synchronize()
pinned = torch.ones(1 << 16).pin_memory()
says = [torch.cuda.device_count(), torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device),
        round(found, 3), twice[5].item(), pinned.to(device, non_blocking=True).sum().item(),
        torch.backends.cudnn.version(), str(torch.cuda.current_stream(device).cuda_stream)]
if sys.argv[1:] == ["twice"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
print(rank, says, flush=True)
"""


def how_of(directory: str) -> list[str]:
    """How ranks were started, in all attempts."""
    events = read_events(os.path.join(directory, "logs"))
    return [event["attrs"]["how"] for event in events if event["name"] == "rank_started"]


def run(bootrun: support.Programs, *words: object, env: dict[str, str | None] | None = None) -> support.Run:
    given = ["--log-dir", "logs", *(str(word) for word in words)]
    return bootrun(*given, env={"OMP_NUM_THREADS": "1", **(env or {})}, deadline_s=DEADLINE_S)


def test_forked_ranks_compute_as_execd_ones(bootrun: support.Programs, script: Callable[..., str]) -> None:
    """By default they are forked, and again after a failure."""
    path = script(COMPUTES)
    forked = run(bootrun, "--nproc-per-node", 2, "--max-restarts", 1, path, "twice")
    assert forked.status == 0, forked.stderr
    assert how_of(bootrun.dir) == ["fork"] * 4, forked.stderr
    execd = bootrun(
        "--fork-ranks", "off", "--nproc-per-node", 2, path, env={"OMP_NUM_THREADS": "1"}, deadline_s=50
    )
    assert sorted(forked.stdout.splitlines()) == sorted(execd.stdout.splitlines()) != []


def test_the_fork_server_process_has_no_device(bootrun: support.Programs, script: Callable[..., str]) -> None:
    text = "import time, torch\ntorch.ones(1, device='cuda')\nopen('there', 'w').close()\ntime.sleep(100)"
    program = bootrun.start("--nproc-per-node", 1, script(text), env={"OMP_NUM_THREADS": "1"})
    support.wait_until(lambda: os.path.exists(os.path.join(bootrun.dir, "there")), DEADLINE_S)
    (pid,) = find_fork_server(program.pid)
    directory = f"/proc/{pid}/fd"
    opened = [os.readlink(f"{directory}/{fd}") for fd in os.listdir(directory)]
    mapped = Path(f"/proc/{pid}/maps").read_text()
    program.signal(15)
    program.wait(30)
    assert not [path for path in opened if "nvidia" in path]
    assert "/dev/nvidia" not in mapped


@pytest.mark.parametrize("check", [None, "1"])
def test_imports_that_count_devices_are_forked(
    bootrun: support.Programs, script: Callable[..., str], check: str | None
) -> None:
    """Those of inductor do so; with the variable torch asks NVML instead of CUDA."""
    text = (
        "import torch._inductor.runtime.benchmarking as made\nassert made.use_experimental_benchmarker\n"
        + COMPUTES
    )
    words = ("--preload", "torch._inductor.runtime.benchmarking", "--nproc-per-node", 2, script(text))
    found = run(bootrun, *words, env={"PYTORCH_NVML_BASED_CUDA_CHECK": check})
    assert found.status == 0, found.stderr
    assert how_of(bootrun.dir) == ["fork"] * 2, found.stderr


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nHELD = torch.ones(1, device='cuda')",
        "import torch\nNAME = torch.cuda.get_device_name()",
        "import ctypes\nassert ctypes.CDLL('libcuda.so.1').cuInit(0) == 0",
        "import ctypes\nassert ctypes.CDLL('libnvidia-ml.so.1').nvmlInit_v2() == 0",
    ],
    ids=["context", "properties", "driver", "nvml"],
)
def test_an_import_that_opens_the_device_is_named(
    bootrun: support.Programs, script: Callable[..., str], tmp_path: Path, text: str
) -> None:
    (tmp_path / "culprit.py").write_text(text)
    words = (
        "--preload",
        "culprit",
        "--nproc-per-node",
        1,
        script("import culprit\n" + COMPUTES.replace("is_initialized()", "_is_in_bad_fork()")),
    )
    found = run(bootrun, *words, env={"PYTHONPATH": os.fspath(tmp_path)})
    assert found.status == 0, found.stderr
    assert how_of(bootrun.dir) == ["exec"]
    assert "ranks are exec'd, not forked: culprit " in found.stderr


def test_a_compiled_function_in_forked_ranks(bootrun: support.Programs, script: Callable[..., str]) -> None:
    text = """
import torch
made = torch.compile(lambda x: (x.sin() + 1).sum())(torch.zeros(1000, device="cuda"))
assert made.item() == 1000
"""
    found = run(bootrun, "--nproc-per-node", 2, script(text))
    assert found.status == 0, found.stderr
    assert how_of(bootrun.dir) == ["fork"] * 2, found.stderr


def test_each_rank_sees_its_device(bootrun: support.Programs, script: Callable[..., str]) -> None:
    text = "import os, torch\nprint(os.environ['CUDA_VISIBLE_DEVICES'], torch.cuda.device_count(), flush=True)"
    found = run(
        bootrun, "--virtual-local-rank", "--nproc-per-node", 1, script(text), env={"CUDA_VISIBLE_DEVICES": "0"}
    )
    assert (found.status, found.stdout) == (0, "0 1\n"), found.stderr
    assert how_of(bootrun.dir) == ["fork"], found.stderr


def test_nccl_in_forked_ranks(bootrun: support.Programs, script: Callable[..., str]) -> None:
    """Of two on one GPU NCCL believes that they are on two hosts."""
    text = """
import os, torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("nccl")
total = torch.ones(1, device="cuda")
dist.all_reduce(total)
assert total.item() == 2
dist.destroy_process_group()
"""
    found = run(bootrun, "--nproc-per-node", 2, script(text))
    assert found.status == 0, found.stderr
    assert how_of(bootrun.dir) == ["fork"] * 2, found.stderr


# ---- the driver ----------------------------------------------------------------------------------------------


def count_by_torch(**more: str) -> int:
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **more})
    return int(told.stdout)


def test_devices_are_counted_as_torch_counts_them() -> None:
    count = count_by_torch()
    assert devices.count_devices("gpu", os.environ) == count > 0
    assert devices.count_devices("auto", os.environ) == count
    uuids = devices.ask_nvml()
    assert uuids is not None and len(uuids) >= count and all(uuid.startswith("GPU-") for uuid in uuids)
    for visible in ("0", uuids[0]):
        assert devices.count_devices("gpu", {**os.environ, "CUDA_VISIBLE_DEVICES": visible}) == 1


def test_the_driver_tells_of_health_and_use() -> None:
    from bootseer.health import nvml

    uses = nvml.sample_use("libnvidia-ml.so.1", 2, lambda: None)
    assert uses and all(0 <= use.busy <= 100 and 0 <= use.memory <= 100 and use.power_w > 0 for use in uses)


def test_an_error_of_the_gpu_is_reported_as_one(bootrun: support.Programs, script: Callable[..., str]) -> None:
    """A kernel that writes where nothing is: an Xid that programs cause is no fault of the machine."""
    text = """
import torch
source = 'extern "C" __global__ void far(float* x) { x[1L << 40] = 1; }'
far = torch.cuda._compile_kernel(source, "far")
far((1, 1, 1), (1, 1, 1), (torch.ones(1, device="cuda"),))
torch.cuda.synchronize()
"""
    found = run(bootrun, "--nproc-per-node", 1, script(text))
    assert found.status == 1
    assert "illegal memory access" in found.stderr, found.stderr
    (path,) = glob.glob(os.path.join(bootrun.dir, "logs/*/failure-0.json"))
    with open(path, encoding="utf-8") as file:
        page = json.load(file)
    text = json.dumps(page)
    assert "CUDA error" in text
    kernel = subprocess.run(["dmesg"], capture_output=True, text=True)
    if kernel.returncode == 0 and "NVRM: Xid" in kernel.stdout:
        assert "NVRM: Xid" in text, text
