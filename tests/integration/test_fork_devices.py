"""Imports that touch an accelerator: which of them leave the process fit to be forked, and what is said of others.

The accelerator is a device file that any machine has, NVIDIA's driver a library of some lines, and torch a package
with the names by which the real one counts devices (a CPU build has none of them). On a GPU the same is tried with
the real ones: tests/integration/test_gpu.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench import fork_fallbacks
from bench.fork_fallbacks import DEVICE, RUNS, Case
from tests import support

# As torch has it: counting starts the driver, which keeps the device open and does not survive a fork.
TORCH = {
    "modules/torch/__init__.py": "from torch import _C, cuda",
    "modules/torch/_C.py": f"""
import os
in_bad_fork = False
def note_fork():
    global in_bad_fork
    in_bad_fork = True
def _cuda_getDeviceCount():
    open("counted-%d" % os.getpid(), "w").close()
    os.register_at_fork(after_in_child=note_fork)
    globals()["held"] = os.open("{DEVICE}", os.O_RDONLY | os.O_NONBLOCK)
    return len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(","))
original = _cuda_getDeviceCount
""",
    "modules/torch/cuda.py": """
import os, torch
_initialized = False
def _device_count_nvml():
    globals()["held"] = os.pipe()
    return -1
def _is_in_bad_fork():
    return torch._C.in_bad_fork
def is_available():
    return torch._C._cuda_getDeviceCount() > 0
def device_count():
    count = _device_count_nvml()
    return torch._C._cuda_getDeviceCount() if count < 0 else count
""",
}
# What a rank has to find that was forked after imports which count devices.
FINDS = """
import culprit, torch
assert culprit.FOUND == (True, 2), culprit.FOUND
assert not torch.cuda._is_in_bad_fork()
assert torch._C._cuda_getDeviceCount is torch._C.original
assert not hasattr(torch._C, "held") and not hasattr(torch.cuda, "held")
"""
COUNTS = "import torch\nFOUND = (torch.cuda.is_available(), torch.cuda.device_count())"
DRIVER = """
static int started;
int cuInit(unsigned flags) { started = flags == 0; return flags ? 1 : 0; }
int cuDeviceGetCount(int *count) { *count = 1; return started ? 0 : 3; }
"""
STARTS_DRIVER = "import ctypes; driver = ctypes.CDLL('libcuda.so.1')\nassert driver.cuInit({}) == {}"


def run(case: Case, tmp_path: Path, environ: Mapping[str, str] | None = None) -> None:
    reason = case.why_not()
    if reason:
        support.lacking(reason)
    outcome = fork_fallbacks.run_case(case, os.fspath(tmp_path), {**support.clean_environ(), **(environ or {})})
    assert not outcome.problem, f"{outcome.problem}\n{outcome.output}"


def counting(name: str, says: str, how: str, script: str = RUNS, **more: object) -> Case:
    """A library of which an import asks torch for its devices."""
    files = {**TORCH, "modules/culprit.py": COUNTS, "script.py": script}
    why_not = fork_fallbacks._needs_device(DEVICE)
    made = Case(name, says, files, "none,torch,culprit", how=(how,), why_not=why_not)
    return made._replace(**more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a libcuda.so.1 that knows whether it was started."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        support.lacking("no C compiler, for a fake of NVIDIA's driver")
    directory = tmp_path_factory.mktemp("driver")
    (directory / "driver.c").write_text(DRIVER)
    library = directory / "libcuda.so.1"
    words = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, directory / "driver.c"]
    subprocess.run(words, check=True, timeout=60)
    return os.fspath(directory)


def test_devices_are_counted_elsewhere_and_ranks_forked(tmp_path: Path) -> None:
    run(counting("counts devices", "", "fork", FINDS + RUNS), tmp_path)
    counted = len(list(tmp_path.glob("counted-*")))
    assert counted == 1  # once, whoever asks


def test_who_counts_has_seen_which_are_visible(tmp_path: Path) -> None:
    """Ranks that each see a device of their own would count another number."""
    case = counting(
        "counts devices, of which each rank has one",
        "CUDA_VISIBLE_DEVICES differs from what modules were preloaded with",
        "exec",
        options=("--virtual-local-rank",),
        environ={"CUDA_VISIBLE_DEVICES": "4,5"},
    )
    run(case, tmp_path)


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_a_script_that_chooses_devices_has_them_counted_by_itself(name: str, tmp_path: Path) -> None:
    script = f'import os\nos.environ["{name}"] = os.environ["LOCAL_RANK"]\n' + RUNS
    run(counting("counts devices", f"culprit opens {DEVICE} when it is imported", "exec", script), tmp_path)


def test_torch_that_refuses_to_start_in_a_fork(tmp_path: Path) -> None:
    """Nothing is open any more; torch says so only in the fork."""
    case = counting("counted devices", "torch.cuda does not work in a forked process", "exec")
    text = "import os, torch\ntorch._C.original()\nos.close(torch._C.held)"
    run(case._replace(files={**case.files, "modules/culprit.py": text}), tmp_path)


def test_a_driver_that_was_started_and_has_nothing_open(driver: str, tmp_path: Path) -> None:
    case = fork_fallbacks._culprit(
        "starts the driver", "culprit starts CUDA when it is imported", STARTS_DRIVER.format(0, 0)
    )
    run(case, tmp_path, {"LD_LIBRARY_PATH": driver})


def test_a_driver_that_is_loaded_only(driver: str, tmp_path: Path) -> None:
    """As `import torch` does with CUDA 13."""
    case = fork_fallbacks._culprit("loads the driver", "", STARTS_DRIVER.format(1, 1), how=("fork",))
    run(case, tmp_path, {"LD_LIBRARY_PATH": driver})


# A node with a GPU, to whoever looks into its /dev: a file that is as /dev/null.
GPU_NODE = """
mount -t tmpfs tmpfs "$1" && cd "$1" && cp -a /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty .
for name in pts shm; do mkdir $name && mount --bind /dev/$name $name; done
for name in nvidiactl nvidia0 kfd; do cp -a /dev/null $name; done
cd / && mount --move "$1" /dev && cd "$2" && shift 2 && exec "$@"
"""


@pytest.mark.system
def test_auto_forks_where_there_is_an_accelerator(program: support.Programs, tmp_path: Path) -> None:
    if os.geteuid():
        support.lacking("a /dev of its own needs root")
    (tmp_path / "dev").mkdir()
    script = tmp_path / "script.py"
    script.write_text("import os  # and no torch\nprint(os.path.exists('/dev/nvidia0'))")
    words = [support.BOOTRUN, "--preload", "none", "--log-dir", tmp_path / "logs", "--nproc-per-node", 2, script]
    run = program("unshare", "-m", "sh", "-ec", GPU_NODE, "sh", tmp_path / "dev", tmp_path, *words)
    assert (run.status, run.stdout) == (0, "True\nTrue\n"), run.stderr
    assert fork_fallbacks.started_by(os.fspath(tmp_path), 0, 2) == "fork"


def test_of_what_is_opened_the_device_is_named(tmp_path: Path) -> None:
    text = f"import os\npipes = os.pipe()\ndevice = os.open('{DEVICE}', os.O_RDONLY | os.O_NONBLOCK)"
    case = fork_fallbacks._culprit(
        "opens pipes and a device",
        f"culprit opens {DEVICE} when it is imported",
        text,
        why_not=fork_fallbacks._needs_device(DEVICE),
    )
    run(case, tmp_path)
