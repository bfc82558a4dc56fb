"""The rules that come with Bootseer: real texts of errors, and lines that only look like them."""

from __future__ import annotations

import errno
import importlib.util
import mmap
import os
import re

import pytest

from launcher.ranks.failure_class import FailureClass
from launcher.rules.engine import RuleEngine, RuleFinding
from launcher.rules.known import BUILTIN_RULES
from tests import support

# As torch 2.13 (c10, ATen, distributed, utils.data), CUDA's cudaGetErrorString, NCCL, CPython, libgomp, numpy,
# glibc's loader and Hadoop 3 write them; the ends of long ones are left out.
SAID = [
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of",
        "gpu-out-of-memory",
    ),
    ("[rank3]: torch.AcceleratorError: CUDA error: out of memory", "gpu-out-of-memory"),
    (
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "gpu-out-of-memory",
    ),
    ("RuntimeError: CUDA error: device-side assert triggered", "gpu-assertion"),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu-memory-error"),
    ("RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution", "gpu-memory-error"),
    ("RuntimeError: CUDA error: unknown error", "gpu-lost"),
    ("RuntimeError: CUDA error: unspecified launch failure", "gpu-lost"),
    ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", "gpu-lost"),
    ("RuntimeError: No CUDA GPUs are available", "gpu-not-there"),
    ("RuntimeError: CUDA error: no CUDA-capable device is detected", "gpu-not-there"),
    ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", "gpu-not-there"),
    ("CUDA driver initialization failed, you might not have a CUDA gpu.", "gpu-driver"),
    ("Failed to initialize NVML: Driver/library version mismatch", "gpu-driver"),
    ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", "gpu-driver"),
    ("RuntimeError: CUDA error: system not yet initialized", "gpu-driver"),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", "cuda-error"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`", "cuda-error"),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "cuda-error"),
    (
        "[E1125 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum",
        "collective-timeout",
    ),
    (
        "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to",
        "collective-timeout",
    ),
    (
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
        "nccl-error",
    ),
    ("ncclUnhandledCudaError: Call to CUDA function failed.", "nccl-error"),
    ("ncclInternalError: Internal check failed.", "nccl-error"),
    (
        "n1:7:9 [0] NCCL WARN NET/IB : mlx5_0:1 Got completion from peer 10.0.0.1<4> with status=12 opcode=0",
        "rdma",
    ),
    ("n1:7:9 [0] NCCL WARN Call to ibv_modify_qp failed with error Connection timed out errno 110", "rdma"),
    (
        "The client socket has timed out after 600000ms while trying to connect to (head, 29500).",
        "store-timeout",
    ),
    (
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients",
        "store-timeout",
    ),
    ("socket.gaierror: [Errno -2] Name or service not known", "name-not-resolved"),
    ("curl: (6) Temporary failure in name resolution", "name-not-resolved"),
    (
        "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "port-in-use",
    ),
    (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
        "out-of-memory",
    ),
    ("MemoryError", "out-of-memory"),
    ("[rank1]: MemoryError: cannot grow", "out-of-memory"),
    ("terminate called after throwing an instance of 'std::bad_alloc'", "out-of-memory"),
    (
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 TiB for an array with shape (1024, 1)",
        "out-of-memory",
    ),
    ("RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. ", "worker-killed"),
    (
        "Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "shared-memory",
    ),
    (
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_3>: Cannot allocate memory (12)",
        "shared-memory",
    ),
    ("RuntimeError: can't start new thread", "no-threads"),
    ("libgomp: Thread creation failed: Resource temporarily unavailable", "no-threads"),
    (
        "OpenBLAS blas_thread_init: pthread_create failed for thread 3 of 64: Resource temporarily unavailable",
        "no-threads",
    ),
    ("[Errno 24] Too many open files: '/data/7.bin'", "no-descriptors"),
    ("thread 'main' panicked: Os { code: 28 } No space left on device (os error 28)", "disk-full"),
    ("cp: error writing '/scratch/a': No space left on device", "disk-full"),
    ("nfs: server filer1 not responding, still trying", "mount-lost"),
    ("ls: cannot access '/mnt/x': Transport endpoint is not connected", "mount-lost"),
    (
        "org.apache.hadoop.hdfs.BlockMissingException: Could not obtain block: BP-1-10.0.0.1-1:blk_107 file=/a",
        "hdfs",
    ),
    (
        "org.apache.hadoop.ipc.RemoteException(...StandbyException): Operation category READ is not supported in",
        "hdfs",
    ),
    ("Cannot create file/a. Name node is in safe mode.", "hdfs"),
    ("ModuleNotFoundError: No module named 'flash_attn'", "import-error"),
    (
        "[rank0]: ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
        "import-error",
    ),
    (
        "python: error while loading shared libraries: libpython3.11.so.1.0: cannot open shared object",
        "import-error",
    ),
    ("Fatal Python error: Segmentation fault", "crash"),
    (
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "damaged-checkpoint",
    ),
    (
        "safetensors_rust.SafetensorError: Error while deserializing header: InvalidHeaderDeserialization",
        "damaged-checkpoint",
    ),
    ("step 10 loss=nan lr=0.1", "not-a-number"),
    ("step 583 loss nan", "not-a-number"),
    ("step 583  loss  NaN  46 ms", "not-a-number"),
    ("epoch 3: train loss nan, val loss 2.1", "not-a-number"),
    ("| step 7 | loss nan | lr 0.1 |", "not-a-number"),
    ("{'loss': nan, 'grad_norm': 1.0, 'learning_rate': 1e-05}", "not-a-number"),
    (" iteration 7/ 100 | lm loss: NaN | loss scale: 1.0 | number of nan iterations: 1 |", "not-a-number"),
    ("Epoch 1: train_loss: tensor(nan)", "not-a-number"),
    ("Loss is nan, stopping training", "not-a-number"),
    ("{'loss': 2.0, 'grad_norm': nan}", "not-a-number"),
    ("RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.", "not-a-number"),
    ("found NaN in local grad norm in backward pass before data-parallel communication", "not-a-number"),
]
# What Python says of an error of the system: [Errno N] and strerror; and what programs in C do.
BY_NUMBER = [
    (errno.ENOSPC, "disk-full"),
    (errno.EDQUOT, "disk-quota"),
    (errno.EIO, "disk-error"),
    (errno.EREMOTEIO, "disk-error"),
    (errno.EROFS, "read-only-disk"),
    (errno.ESTALE, "mount-lost"),
    (errno.ENOTCONN, "mount-lost"),
    (errno.EHOSTDOWN, "mount-lost"),
    (errno.EMFILE, "no-descriptors"),
    (errno.ENFILE, "no-descriptors"),
    (errno.ENOMEM, "out-of-memory"),
    (errno.EADDRINUSE, "port-in-use"),
    (errno.EHOSTUNREACH, "no-route"),
    (errno.ENETUNREACH, "no-route"),
    (errno.ENETDOWN, "no-route"),
]
# Of the installed torch, as they stand in its libraries (those that are searched in no time).
BY_TORCH = [
    ("libc10.so", "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", "out-of-memory"),
    ("libtorch_python.so", "DataLoader worker (pid {}) is killed by signal: {}. ", "worker-killed"),
    ("libtorch_python.so", "This might be caused by insufficient shared memory (shm).", "shared-memory"),
]
HARMLESS = [
    "step 10 loss=2.31 lr=0.1",
    "loss scale: 65536.0 | grad norm: 1.2 | number of skipped iterations: 0 | number of nan iterations: 0 |",
    "check_for_nan_in_loss_and_grad ................. True",
    "skip_nan_loss=True nan_to_num=False",
    "best_val_loss: inf, waiting for the first evaluation",
    "loss: nano-gpt uses cross entropy",
    "loss nan checks: on",
    "no loss nan handling",
    "loss nan-safe mode is off",
    "nan loss: 0, nan grad: 0",
    "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0",
    "retrying after OutOfMemoryError: 3 times at most (--max-oom-retries)",
    "torch.cuda.OutOfMemoryError is handled by halving the batch",
    "Set CUDA_LAUNCH_BLOCKING=1 to find CUDA errors",
    "CUDA driver version: 12.4, CUDA out of memory policy: retry",
    "NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>",
    "n1:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC",
    "NCCL_IB_TIMEOUT=22 TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8929",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed.",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "disk: 412 GB left on device /scratch, quota not exceeded",
    "Input/output errors so far: 0",
    "ImportError is caught: flash_attn is optional",
    "import torch._dynamo  # ModuleNotFoundError if too old",
    "class MemoryErrorHandler registered",
    "hdfs://namenode/run1: org.apache.hadoop.fs.FileSystem is used",
    "safe mode of the sampler is off",
    "Address already in use? then another port is taken",
    "no GPU is lost in this run: 8 of 8",
    "unable to fit the model in shared memory: 2 stages are used",
    "Timed out waiting for the profiler; going on",
    "DataLoader worker (pid 12) exited normally",
    "unable to open the tokenizer cache, making it",
    "The file handle is stale after 60 s",
    "",
]


def names(line: str) -> list[str]:
    engine = RuleEngine(BUILTIN_RULES, [0], 1, 0.0)
    return [each.rule.name for each in engine.read(0, [line], 1.0) if isinstance(each, RuleFinding)]


@pytest.mark.parametrize(("line", "name"), SAID)
def test_real_texts(line: str, name: str) -> None:
    assert names(line) == [name]


@pytest.mark.parametrize(("number", "name"), BY_NUMBER)
def test_errors_of_the_system(number: int, name: str) -> None:
    said = os.strerror(number)
    assert names(f"OSError: [Errno {number}] {said}: '/mnt/x'") == [name]
    if number not in (errno.ENOMEM, errno.EADDRINUSE):
        assert names(f"tar: /mnt/x: {said}") == [name]


@pytest.mark.parametrize(("library", "text", "name"), BY_TORCH)
def test_texts_of_the_installed_torch(library: str, text: str, name: str) -> None:
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        support.lacking("torch is not installed")
    path = os.path.join(found.submodule_search_locations[0], "lib", library)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        assert data.find(text.encode()) >= 0, "torch says it otherwise now"
    assert names(text.replace("{}", "4711", 1).replace("{}", "Killed")) == [name]


@pytest.mark.parametrize("line", HARMLESS)
def test_what_only_looks_like_it(line: str) -> None:
    assert names(line) == []


def test_each_rule_has_a_text_and_only_reports() -> None:
    shown = {name for _, name in SAID} | {name for _, name in BY_NUMBER}
    assert shown | {"heartbeat-not-a-number", "heartbeat-gradient", "heartbeat-loss-jumps"} == {
        rule.name for rule in BUILTIN_RULES
    }
    assert len({rule.name for rule in BUILTIN_RULES}) == len(BUILTIN_RULES)
    for rule in BUILTIN_RULES:
        assert rule.action == "report" and rule.hints and (rule.is_alarm or rule.metric)
        assert rule.kind in ("", *(kind.value for kind in FailureClass))


def test_no_pattern_is_found_without_one_of_its_hints() -> None:
    """Hints only save time: with them and without, the same is found."""
    for line in [*(line for line, _ in SAID), *HARMLESS]:
        for rule in BUILTIN_RULES:
            if re.search(rule.pattern, line):
                assert any(hint in line for hint in rule.hints), (rule.name, line)
