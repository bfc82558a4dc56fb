"""Whether ranks are forked, which modules are imported first, and what a script does that prevents it. Pure.

In: the flags, the environment, the text of the script, and the record of an earlier start. Out: a plan, a list of
modules, or the reason to exec. In doubt the decision is exec, which is always right, only slower. fork_server.py
checks what really happened while importing; this module checks only what can be known before.
"""

from __future__ import annotations

from bootseer.light_stdlib import Enum
from bootseer.light_typing import Collection, Iterable, Mapping, NamedTuple

FRAMEWORKS = frozenset({"torch"})  # worth a fork server
MAX_MODULES = 20_000  # a start with all of transformers has 5,000
MAX_NAME_CHARS = 200
_MAX_NAMED = 3  # variables in one reason


class ForkMode(Enum):
    AUTO = "auto"
    RESTARTS = "restarts"
    ON = "on"
    OFF = "off"


class ForkPlan(NamedTuple):
    """How the ranks of this start are created."""

    first: bool  # fork the first attempt
    restarts: bool  # fork later attempts; in auto only if `first`, or if this start's own record uses a framework
    at_once: bool  # start the fork server at time zero, not after the first step
    reason: str  # why they are exec'd, to be printed; "" for no message


EXEC = ForkPlan(first=False, restarts=False, at_once=False, reason="")
FORK = ForkPlan(first=True, restarts=True, at_once=True, reason="")
FORK_LATER = ForkPlan(first=False, restarts=True, at_once=False, reason="")


def plan(
    mode: ForkMode,
    obstacle: str,
    mentions_framework: bool,
    record_modules: tuple[str, ...] | None,
    doubt: str,
    trouble: str = "",
) -> ForkPlan:
    """Decide how ranks are created.

    Args: obstacle: find_obstacle's; mentions_framework: the script's text has one, or it cannot be read (-m);
        record_modules: imports of an earlier start that may come early, None for no record; doubt: why it is
        unknown what imports would see, if there is no record; trouble: why no module is worth preloading, by the
        record. The user overrules both by requesting forks.
    """
    if mode is ForkMode.OFF:
        return EXEC
    if obstacle:
        return EXEC if mode is ForkMode.AUTO else EXEC._replace(reason=obstacle)
    if mode is ForkMode.ON:
        return FORK
    if mode is ForkMode.RESTARTS:
        return FORK_LATER
    if trouble:
        return FORK_LATER._replace(reason=trouble)
    if record_modules is not None:
        return FORK if uses_framework(record_modules) else FORK_LATER
    if mentions_framework and doubt:
        return FORK_LATER._replace(reason=doubt)
    return FORK if mentions_framework else FORK_LATER


def find_trouble(left_out: Mapping[str, str]) -> str:
    """Return why ranks import a framework themselves, as a clause; "" if they do not."""
    for name in FRAMEWORKS:
        if name in left_out:
            within = [why for each, why in left_out.items() if why and _is_within(each, FRAMEWORKS)]
            return left_out[name] or next(iter([*within, *filter(None, left_out.values())]), f"{name} is left out")
    return ""


def uses_framework(modules: Iterable[str]) -> bool:
    """Return whether a fork server makes a start faster that imported these."""
    return any(name.partition(".")[0] in FRAMEWORKS for name in modules)


def mentions_framework(source: str) -> bool:
    """Return whether a script's text contains the name of a framework."""
    return any(name in source for name in FRAMEWORKS)


# ---- commands that can only be exec'd ------------------------------------------------------------------------

# Variables for a process that is to be observed from its first instruction on, or by itself. A forked rank would
# be observed as part of the fork server, or not at all.
_WATCHERS = {
    "COVERAGE_PROCESS_START": "coverage",
    "COVERAGE_PROCESS_CONFIG": "coverage",
    "COV_CORE_DATAFILE": "coverage",
    "COV_CORE_SOURCE": "coverage",
    "DEBUGPY_": "a debugger",
    "PYDEVD_": "a debugger",
    "PYCHARM_DEBUG": "a debugger",
    "PYTHONPROFILEIMPORTTIME": "import times of each rank",
    "PYTHONVERBOSE": "a line for each import",
    "PYTHONTRACEMALLOC": "tracing of memory",
    "PYTHONPERFSUPPORT": "a profiler",
    "PYTHON_PERF_JIT_SUPPORT": "a profiler",
    "PYTHONDUMPREFS": "a debug build",
    "PYTHONINSPECT": "a prompt after the script",
    "CUDA_INJECTION64_PATH": "a profiler",
    "NVTX_INJECTION64_PATH": "a profiler",
    "NSYS_": "a profiler",
    "NV_NSIGHT_": "a profiler",
    "NV_SANITIZER_": "a checker",
    "ROCP_TOOL_LIB": "a profiler",  # also ROCP_TOOL_LIBRARIES
    "ROCPROF": "a profiler",  # ROCPROFILER_, ROCPROFSYS_
    "HSA_TOOLS_LIB": "a profiler",
    "OMNITRACE_": "a profiler",
    "INTEL_LIBITTNOTIFY": "a profiler",
    "KINETO_USE_DAEMON": "a profiler",  # torch starts it at import
    "TORCH_COMPILE_STROBELIGHT": "a profiler",  # likewise
    "SCALENE": "a profiler",
    "VIZTRACER": "a profiler",
    "MEMRAY": "a profiler",
    "HPCRUN_": "a profiler",
    "SCOREP_ENABLE_": "a profiler",
    "EXTRAE_CONFIG_FILE": "a profiler",
    "CPUPROFILE": "a profiler",
    "HEAPPROFILE": "a profiler",
}
# VS Code sets these in all its terminals, without a debugger.
_HARMLESS = {"PYDEVD_DISABLE_FILE_VALIDATION", "DEBUGPY_ADAPTER_ENDPOINTS"}
_FORK_SERVER_WATCHERS = ("scalene", "memray", "heaptrack", "libprofiler", "ToolsInjection", "ittnotify", "rocprof")


def find_obstacle(
    entry_mode: str, target: str, rank_hooks: bool, numa_binding: str | None, environ: Mapping[str, str]
) -> str:
    """Return why the ranks of this command can only be exec'd, as a clause that names the culprit; "" for none."""
    if entry_mode == "program":
        return "--no-python"
    if not rank_hooks:
        return "--rank-hooks off"
    if numa_binding:
        return f"--numa-binding {numa_binding}"
    if "$" in target:
        return f"{target} can be another file for each rank"
    if entry_mode == "script" and target == "-":
        return "the script comes from standard input"
    return find_watcher(environ)


def find_watcher(environ: Mapping[str, str]) -> str:
    """Return which variable requests a debugger, profiler or coverage, as a clause; "" for none."""
    starts = tuple(_WATCHERS)
    for name, value in environ.items():
        if name.startswith(starts) and value not in ("", "0") and name not in _HARMLESS:
            what = next(what for start, what in _WATCHERS.items() if name.startswith(start))
            return f"{name} requests {what}"
    fork_server = environ.get("LD_PRELOAD", "")
    for part in _FORK_SERVER_WATCHERS:
        if part in fork_server:
            return f"LD_PRELOAD contains a profiler ({part})"
    return ""


# ---- modules that are imported first -------------------------------------------------------------------------

# Not imported before a fork if only a record names them; modules that the user names are tried.
UNSAFE_PACKAGES = frozenset(
    {
        # use an accelerator or its driver when imported, or at the first access
        *("bitsandbytes", "cudf", "cuml", "cupy", "cupyx", "dask_cuda", "deepspeed", "flash_attn", "flashinfer"),
        *("habana_frameworks", "intel_extension_for_pytorch", "numba.cuda", "pycuda", "rmm"),
        *("sgl_kernel", "sglang", "triton", "vllm", "xformers"),
        *("torch_geometric", "torch_mlu", "torch_musa", "torch_npu", "torch_neuronx", "torch_xla", "torch_xmlir"),
        *("libneuronxla", "poptorch", "transformer_engine", "transformer_engine_torch", "unsloth"),
        # start threads or processes, or hold locks across a fork
        *("dgl", "grpc", "horovod", "jax", "jaxlib", "mxnet", "nvidia.dali", "paddle", "pyspark", "ray"),
        *("tensorflow", "tensorflow_text", "tensorstore"),
        "mpi4py",  # MPI_Init when imported: a process is one rank for good
        # change how other modules work, from the time of their import
        *("eventlet", "gevent", "ddtrace", "newrelic", "sitecustomize", "usercustomize"),
        # observe a process
        *("coverage", "debugpy", "line_profiler", "memray", "pydevd", "_pydevd_bundle", "scalene", "viztracer"),
        # for a terminal or a screen
        *("antigravity", "curses", "idlelib", "IPython", "ipykernel", "readline", "rlcompleter", "this"),
        *("tkinter", "_tkinter", "turtle", "turtledemo"),
        # Bootseer's own, and names of the script
        *("bootseer", "launcher", "_bootseer_rank", "__main__", "__mp_main__"),
    }
)


def choose_modules(
    given: tuple[str, ...], default: tuple[str, ...], record: tuple[str, ...], dropped: Collection[str]
) -> tuple[str, ...]:
    """Choose the modules to import before the fork, in this order, each once.

    Args: given: --preload, where a leading `none` means exactly the following modules; dropped: modules that
        failed earlier; a dropped package excludes all its modules.
    """
    wanted = given[1:] if given[:1] == ("none",) else (*default, *given, *record)
    chosen = dict.fromkeys(name for name in wanted if is_module_name(name) and not _is_within(name, dropped))
    return tuple(chosen)[:MAX_MODULES]


def filter_hot(listing: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Filter a rank's modules at its first step (name, file) for those that a later start may import early.

    Only files of installed libraries: the user's own are edited between two starts and may depend on their order.
    Built-in or frozen modules cost nothing to import.
    """
    import re

    is_library_file = re.compile(r"/(?:site-packages|dist-packages|lib(?:64)?/python3\.\d+t?)/").search
    chosen: dict[str, None] = {}
    for name, origin in listing:
        if is_library_file(origin) and is_module_name(name) and not _is_within(name, UNSAFE_PACKAGES):
            chosen[name] = None
            if len(chosen) == MAX_MODULES:
                break
    return tuple(chosen)


def filter_stored(names: Iterable[str]) -> tuple[str, ...]:
    """Filter names from a store, which another node has chosen by the same rules."""
    return tuple(name for name in names if is_module_name(name) and not _is_within(name, UNSAFE_PACKAGES))


def is_module_name(name: str) -> bool:
    """Return whether it is a dotted name of reasonable length."""
    return len(name) <= MAX_NAME_CHARS and all(part.isidentifier() for part in name.split("."))


def has_within(name: str, modules: Iterable[str]) -> bool:
    """Return whether one of these is the module, or is inside it."""
    return any(each == name or each.startswith(name + ".") for each in modules)


def _is_within(name: str, packages: Collection[str]) -> bool:
    """Return whether a module is one of these, or inside one of these."""
    while name:
        if name in packages:
            return True
        name = name.rpartition(".")[0]
    return False


# ---- the script's use of its environment -----------------------------------------------------------------------

_QUOTED = r"""["'](\w+)["']"""
# One pattern for each form of code. They also match in comments, which costs a fork and breaks nothing.
_CHANGES_ONE = (
    rf"\benvironb?\s*\[\s*b?{_QUOTED}\s*\]\s*\+?=(?!=)"
    rf"|\bdel\s+(?:\w+\.)?environ\s*\[\s*{_QUOTED}"
    rf"|\benviron\s*\.\s*(?:setdefault|pop|__setitem__)\s*\(\s*{_QUOTED}"
    rf"|\b(?:putenv|unsetenv)\s*\(\s*b?{_QUOTED}"
)
_CHANGES_SOME = r"\benviron\s*(?:\.\s*update\s*(?=\()|\|=\s*(?=[{(\w]))"
_NAMES_SOME = rf"""{_QUOTED}\s*:|\b([A-Za-z_]\w*)\s*=(?!=)|\(\s*{_QUOTED}\s*,"""


def find_set_variables(source: str) -> tuple[str, ...]:
    """Return the variables that a script sets or removes by literal names, in the order of the text."""
    if "environ" not in source and "putenv" not in source and "unsetenv" not in source:
        return ()
    import re

    found: list[tuple[int, str]] = []
    for match in re.finditer(_CHANGES_ONE, source):
        found.append((match.start(), match[match.lastindex or 0]))
    changes_some, end = re.compile(_CHANGES_SOME), 0
    while some := changes_some.search(source, end):
        start = some.end()
        end = _find_close(source, start)
        for name in re.finditer(_NAMES_SOME, source[start:end]):
            found.append((start + name.start(), name[name.lastindex or 0]))
    return tuple(dict.fromkeys(name for _, name in sorted(found)))


def _find_close(source: str, start: int) -> int:
    """Find the end of the bracket that opens at or soon after `start`; count brackets within strings, too."""
    depth = 0
    end = min(len(source), start + 10_000)
    for index in range(start, end):
        if source[index] in "([{":
            depth += 1
        elif source[index] in ")]}":
            depth -= 1
            if depth <= 0:
                return index + 1
        elif source[index] == "\n" and depth == 0:
            return index
    return end


# Observed reads while importing torch 2.13, numpy, pyarrow, transformers, datasets, accelerate, pandas and
# matplotlib, by Python (os.environ) or by shared libraries (getenv); and similar names.
_READ_AT_IMPORT = (
    # thread pools and maths libraries, when the library is loaded
    *("OMP_", "GOMP_", "KMP_", "MKL_", "MKLDNN_", "DNNL_", "ONEDNN_", "OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_"),
    *("NVPL_", "GFORTRAN_", "NUMEXPR_", "NPY_", "NUMPY_", "NUMBA_", "SCIPY_", "SKLEARN_", "PANDAS_", "POLARS_"),
    *("ARROW_", "SYMPY_", "MPMATH_", "NETWORKX_"),
    # torch: its config modules and its static objects
    *("TORCH", "PYTORCH_", "ATEN_", "KINETO_", "TRITON_", "INDUCTOR_", "AOT_", "AOTINDUCTOR_", "FX_", "PT2_"),
    *("FAKE_", "PARTITIONER_", "CUTLASS_"),
    # huggingface_hub.constants, transformers.utils, datasets.config and the like
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DATASETS_", "DIFFUSERS_", "ACCELERATE_", "PEFT_", "XFORMERS_"),
    *("USE_TORCH", "USE_TF", "USE_FLAX", "USE_JAX", "USE_HUB_KERNELS", "FSSPEC_", "TOKENIZERS_LOG", "RUST_LOG"),
    # packages that are only preloaded together with others, which also read these
    *("TF_CPP_", "TF_ENABLE_", "XLA_", "JAX_"),
    *("KERAS_", "MPL", "MATPLOTLIB", "PILLOW_", "TQDM_", "OPENCV_", "GRPC_", "PROTOCOL_BUFFERS_"),
    *("MUJOCO_", "PYOPENGL_", "PYGAME_"),
    # directories; language and time
    *("XDG_", "TMPDIR", "LC_", "LANG"),
)
_READ_AT_IMPORT_NAMES = frozenset(
    {"CC", "CXX", "CUDA_HOME", "CUDA_PATH", "CUDNN_HOME", "ROCM_HOME", "HOME", "LOGLEVEL", "TEMP", "TMP", "TZ"}
)
# Have one of these prefixes, but are read at first use.
_READ_LATER = ("TORCH_NCCL_", "TORCH_GLOO_", "TORCHELASTIC_", "TORCH_EXTENSIONS_", "TORCH_FORCE_", "PYTORCH_MPS_")
_READ_LATER_NAMES = frozenset({"HF_TOKEN", "TORCH_HOME", "TORCH_CUDA_ARCH_LIST", "PYTORCH_ENABLE_MPS_FALLBACK"})


def is_read_at_import(name: str) -> bool:
    """Return whether common libraries read this variable at import, so that setting it later is too late.

    Not those read at first use, which a forked rank sets in time: CUDA_VISIBLE_DEVICES (cuInit), NCCL_, GLOO_,
    MASTER_ADDR and similar (init_process_group), TOKENIZERS_PARALLELISM, WANDB_. Nor PYTHON and LD_: these are
    read before the script's first statement, so setting them never has an effect on a rank.
    """
    if name in _READ_LATER_NAMES or name.startswith(_READ_LATER):
        return False
    return name in _READ_AT_IMPORT_NAMES or name.startswith(_READ_AT_IMPORT)


def find_environ_conflict(script_name: str, source: str) -> str:
    """Return why a script that sets variables itself is better not forked, as a clause; "" for no reason."""
    names = [name for name in find_set_variables(source) if is_read_at_import(name)]
    if not names:
        return ""
    shown = ", ".join(names[:_MAX_NAMED])
    if len(names) > _MAX_NAMED:
        shown += f" and {len(names) - _MAX_NAMED} more"
    return f"{script_name} changes {shown} itself, which libraries read when they are imported"
