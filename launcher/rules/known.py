"""PURE: the built-in rules: known errors in the output of ranks, reported at once (`report`).

Texts are those of torch 2.13, NCCL, CUDA, libc, CPython and Hadoop, without errors that only follow the loss of
another rank. Each rule has fixed texts (hints); only a text that contains one of them is searched.
"""

from __future__ import annotations

from launcher.ranks.failure_class import LETTERS, FailureClass
from launcher.rules.rule import Rule

_U, _R, _P, _A, _N, _F = LETTERS

# Before the last line of a traceback; torch writes the rank there.
_HEAD = r"^(?:\[rank\d{1,7}\]: ?)?"


def _known(name: str, kind: FailureClass | None, pattern: str, *hints: str) -> Rule:
    return Rule(name, pattern, hints=hints, kind="" if kind is None else kind.value)


BUILTIN_RULES: tuple[Rule, ...] = (
    # ---- accelerators ----
    _known(
        "gpu-out-of-memory",
        _R,
        r"(?:CUDA|HIP|XPU) out of memory\. Tried|CUDA error: out of memory|STATUS_ALLOC_FAILED",
        "out of memory. Tried",
        "CUDA error: out of memory",
        "STATUS_ALLOC_FAILED",
    ),
    _known("gpu-assertion", _U, r"device-side assert triggered", "device-side assert triggered"),
    _known(
        "gpu-memory-error",
        _A,
        r"[Uu]ncorrectable (?:ECC|NVLink) error (?:was )?(?:encountered|detected)|DRAM ECC error",
        "correctable ECC error",
        "correctable NVLink error",
        "DRAM ECC error",
    ),
    _known(
        "gpu-lost",
        _A,
        r"NVRM: Xid \(|fallen off the bus|GPU is lost\.|CUDA error: (?:unknown error|unspecified launch failure)",
        "NVRM: Xid (",
        "fallen off the bus",
        "GPU is lost",
        "CUDA error: un",
    ),
    _known(
        "gpu-not-there",
        _A,
        r"[Nn]o CUDA-capable device is detected|No CUDA GPUs are available|CUDA-capable device\(s\) is/are busy",
        "CUDA-capable device",
        "No CUDA GPUs are available",
    ),
    _known(
        "gpu-driver",
        _A,
        r"CUDA driver version is insufficient|NVIDIA driver on your system is too old|CUDA driver initialization "
        r"failed|Driver/library version mismatch|CUDA error: system (?:not yet initialized|has unsupported)",
        *("CUDA driver ", "NVIDIA driver on your", "Driver/library version", "CUDA error: system"),
    ),
    _known(
        "cuda-error",
        _A,
        r"CUDA error: (?!out of memory|device-side assert|un|no CUDA-capable|all CUDA-capable|CUDA-capable|"
        r"system |CUDA driver |CUBLAS_STATUS_ALLOC)|cuDNN error: CUDNN_STATUS_(?!ALLOC)",
        "CUDA error: ",
        "cuDNN error: ",
    ),
    # ---- collectives and network ----
    _known(
        "collective-timeout",
        _N,
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (?:recv|send) operation",
        "Watchdog caught collective operation timeout",
        "Timed out waiting",
    ),
    _known(
        "nccl-error",
        _N,
        r"\b(?:ncclSystemError|ncclInternalError|ncclUnhandledCudaError|ncclInvalidUsage): ",
        *("ncclSystemError", "ncclInternalError", "ncclUnhandledCudaError", "ncclInvalidUsage"),
    ),
    _known(
        "rdma",
        _N,
        r"NET/IB ?: .{0,60}Got (?:completion .{0,80}(?:status=|error)|async event)|ibv_\w+ failed with error",
        "NET/IB",
        " failed with error",
    ),
    _known(
        "store-timeout",
        _N,
        r"client socket has timed out after \d+ms while trying to connect|Timed out after \d+ seconds waiting for "
        r"clients|Gloo connectFullMesh failed",
        *("client socket has timed out", "seconds waiting for clients", "connectFullMesh failed"),
    ),
    _known(
        "name-not-resolved",
        _N,
        r"Name or service not known|[Tt]emporary failure in name resolution|gaierror: \[Errno",
        *("Name or service not known", "emporary failure in name resolution", "gaierror: "),
    ),
    _known(
        "no-route",
        _N,
        r"(?:\[Errno \d+\]|: ) ?(?:No route to host|Network is unreachable|Network is down)",
        *("No route to host", "Network is unreachable", "Network is down"),
    ),
    _known(
        "port-in-use",
        None,
        r"\[Errno 98\] Address already in use|EADDRINUSE|errno: 98 - Address already in use",
        "Address already in use",
        "EADDRINUSE",
    ),
    # ---- resources of a node ----
    _known(
        "out-of-memory",
        _R,
        r"DefaultCPUAllocator: (?:can't|not enough)|\[Errno 12\] Cannot allocate memory|std::bad_alloc|"
        r"ArrayMemoryError: Unable|" + _HEAD + r"MemoryError(?:$|: )",
        *("DefaultCPUAllocator: ", "[Errno 12]", "std::bad_alloc", "MemoryError"),
    ),
    _known(
        "worker-killed",
        _R,
        r"DataLoader worker \(pid\S* \d[\d, ]*\) is killed by signal: Killed",
        "is killed by signal",
    ),
    _known(
        "shared-memory",
        _R,
        r"caused by insufficient shared memory|unable to (?:allocate|open|resize|mmap) shared memory",
        *("insufficient shared memory", "unable to "),
    ),
    _known(
        "no-threads",
        _R,
        r"can't start new thread|Thread creation failed: Resource|pthread_create failed",
        *("can't start new thread", "Thread creation failed", "pthread_create failed"),
    ),
    _known(
        "no-descriptors", _R, r"\[Errno 2[34]\] Too many open files|: Too many open files", "oo many open files"
    ),
    _known(
        "disk-full",
        _R,
        r"(?:\[Errno 28\]|:) No space left on device|\(os error 28\)",
        "No space left",
        "os error 28",
    ),
    _known(
        "disk-quota",
        _R,
        r"(?:\[Errno 122\]|:) Disk quota exceeded|\(os error 122\)",
        "quota exceeded",
        "os error 122",
    ),
    _known(
        "disk-error",
        _P,
        r"(?:\[Errno 5\]|:) Input/output error|(?:\[Errno 121\]|:) Remote I/O error",
        "Input/output error",
        "Remote I/O error",
    ),
    _known("read-only-disk", _P, r"(?:\[Errno 30\]|:) Read-only file system", "Read-only file system"),
    _known(
        "mount-lost",
        _P,
        r"Stale (?:NFS )?file handle|Transport endpoint is not connected|(?:\[Errno 112\]|:) Host is down|"
        r"nfs: server \S+ not responding",
        *("Stale ", "Transport endpoint is not", "Host is down", "nfs: server"),
    ),
    _known(
        "hdfs",
        _P,
        r"org\.apache\.hadoop\.[\w.$]+Exception\b|Could not obtain block: B[PK]|BlockMissingException|"
        r"Operation category \w+ is not supported in state standby|Name node is in safe mode",
        *(
            "org.apache.hadoop.",
            "Could not obtain block",
            "BlockMissingException",
            "Operation category",
            "safe mode",
        ),
    ),
    # ---- the program ----
    _known(
        "import-error",
        _U,
        _HEAD + r"(?:ModuleNotFoundError: No module named |ImportError: )|error while loading shared libraries: ",
        *("ModuleNotFoundError: ", "ImportError: ", "loading shared libraries"),
    ),
    _known("crash", _U, r"^Fatal Python error: (?!Aborted)", "Fatal Python error: "),
    _known(
        "damaged-checkpoint",
        _P,
        r"PytorchStreamReader failed (?:reading|finding)|SafetensorError: Error while deserializing header",
        "PytorchStreamReader failed",
        "SafetensorError: ",
    ),
    _known(
        "not-a-number",
        _F,
        r"(?i)(?<![\w-])(?:[a-z]{0,12}[_ ])?(?:loss|grad[_ ]?norm)['\"]?(?: is|\s*[:=])\s*(?:tensor\()?-?nan\b|"
        r"(?<![\w-])(?:loss|grad[_ ]?norm)\s+-?nan(?=\s*(?:$|[,;|)\]}])|\s+\d)|"
        r"returned nan values in its \d+th output|"
        r"\bnan (?:loss|in (?:local )?grad(?:ient)?(?: norm)?)\b(?! *[:=])",
        *("nan", "NaN", "NAN", "Nan"),
    ),
    # ---- numbers of heartbeats ----
    _known("heartbeat-not-a-number", _F, r"^heartbeat .*\bloss=-?(?:nan|inf)\b", "=nan", "=-nan", "inf"),
    # With a gradient scaler (mixed precision) some norms are infinite at first; it skips those steps.
    _known("heartbeat-gradient", _F, r"^heartbeat .*\bgrad_norm=(?P<norm>\S+)", "grad_norm=")._replace(
        metric="norm", must_be_finite=True, times=10
    ),
    _known("heartbeat-loss-jumps", _F, r"^heartbeat .*\bloss=(?P<loss>\S+)", "heartbeat ")._replace(
        metric="loss", must_not_jump=5.0, times=5
    ),
)
