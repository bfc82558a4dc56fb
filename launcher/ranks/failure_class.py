"""PURE: the class of a failure, and the line of the user's code that it came from.

In: a Failure. Out: a class, the evidence in words, and whether it is certain. The patterns are messages of Linux,
Python, torch 2.13, CUDA, NCCL and Hadoop. The kernel's log counts more than the rank's messages, and these more
than its status; evidence that only fits is marked likely. The classes are those of ByteRobust's taxonomy, made
coarser.
"""

from __future__ import annotations

import re
import signal
from enum import Enum
from typing import NamedTuple

from launcher.ranks import exits
from launcher.ranks.exits import FailureOrigin, classify, find_sign, first_exception, signal_name
from launcher.ranks.kernel_facts import has_device_fault
from launcher.ranks.rank_list import format_ranks
from launcher.rendezvous.messages import Failure, MountFault


class FailureClass(Enum):
    USER = "user"  # the training code, or its arguments
    RESOURCE = "resource"  # memory, disk space, descriptors, threads
    PLATFORM = "platform"  # disks, mounts, storage services
    ACCELERATOR = "accelerator"
    NETWORK = "network"
    NUMERIC = "numeric"  # not a number
    KILLED = "killed"  # by a signal of another process
    STOPPED = "stopped"  # by bootrun
    MOUNT = "mount"  # an environment, image or checkpoint that bootrun has mounted


class Classification(NamedTuple):
    kind: FailureClass
    why: str  # for users, a few words
    is_sure: bool


class _MessagePattern(NamedTuple):
    kind: FailureClass
    pattern: str
    why: str
    is_sure: bool = True


# Short names for tables.
LETTERS = (
    FailureClass.USER,
    FailureClass.RESOURCE,
    FailureClass.PLATFORM,
    FailureClass.ACCELERATOR,
    FailureClass.NETWORK,
    FailureClass.NUMERIC,
)
_U, _R, _P, _A, _N, _F = LETTERS

# The first match counts: special patterns stand above general ones. Each begins with fixed text (speed).
WORDS: tuple[_MessagePattern, ...] = (
    _MessagePattern(
        _U, r"CUDA error: device-side assert", "an assertion in a CUDA kernel, mostly an index out of range"
    ),
    _MessagePattern(
        _R, r"CUDA out of memory|torch\.OutOfMemoryError|CUDA error: out of memory", "out of GPU memory"
    ),
    _MessagePattern(
        _R, r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED", "out of GPU memory", is_sure=False
    ),
    _MessagePattern(
        _A, r"uncorrectable ECC error|Uncorrectable ECC", "an uncorrectable memory error of the accelerator"
    ),
    _MessagePattern(
        _A, r"NVRM: Xid|fallen off the bus|CUDA error: unknown error|GPU is lost", "an accelerator is lost"
    ),
    _MessagePattern(
        _A, r"CUDA-capable device\(s\) is/are busy|no CUDA-capable device|No CUDA GPUs are", "no accelerator"
    ),
    _MessagePattern(
        _A, r"CUDA driver (?:version|initialization failed)|Driver/library version mismatch", "its driver"
    ),
    _MessagePattern(
        _A, r"illegal memory access was encountered|misaligned address", "a wrong address on the GPU", False
    ),
    _MessagePattern(
        _A, r"CUDA error|CUDA failure|CUBLAS_STATUS_|CUDNN_STATUS_|NVML: ", "the accelerator", is_sure=False
    ),
    _MessagePattern(_R, r"No space left on device|Errno 28\]", "no space left on a disk"),
    _MessagePattern(_R, r"Disk quota exceeded|Errno 122\]", "a disk quota is used up"),
    _MessagePattern(_R, r"Too many open files|Errno 24\]", "no file descriptors left"),
    _MessagePattern(_R, r"can't start new thread|pthread_create failed|Errno 11\]", "no threads left"),
    _MessagePattern(
        _R, r"insufficient shared memory|unable to (?:open|allocate) shared memory", "no shared memory left"
    ),
    _MessagePattern(
        _R, r"is killed by signal: Killed", "a data loader's worker was killed: out of memory?", is_sure=False
    ),
    _MessagePattern(
        _R, r"MemoryError|std::bad_alloc|DefaultCPUAllocator: |Cannot allocate memory", "out of memory"
    ),
    _MessagePattern(
        _P, r"Stale file handle|Transport endpoint is not connected", "a file system is no longer available"
    ),
    _MessagePattern(_P, r"Input/output error|Errno 5\]", "a disk or file system reports errors"),
    _MessagePattern(_P, r"Read-only file system|Errno 30\]", "a file system has become read-only", is_sure=False),
    _MessagePattern(_P, r"org\.apache\.hadoop\.|BlockMissingException|StandbyException", "HDFS"),
    _MessagePattern(
        _N, r"Name or service not known|failure in name resolution|gaierror", "name resolution failed"
    ),
    _MessagePattern(_N, r"Network is unreachable|No route to host|Network is down", "the network is unreachable"),
    _MessagePattern(_N, r"ibv_[a-z_]+ failed|NET/IB ?: |Got completion .{0,40} error", "RDMA"),
    _MessagePattern(
        _N, r"ncclSystemError|NCCL .{0,80}unhandled system error", "NCCL: a system call or the network", False
    ),
    _MessagePattern(_F, r"FloatingPointError|returned nan values in its", "not a number"),
    _MessagePattern(_F, r"(?:[Ll]oss|[Gg]radients?) (?:is|are|was|were) (?:nan|NaN|not finite)", "not a number"),
    _MessagePattern(
        _F, r"[Nn]on-?finite (?:loss|grad)|(?:nan|NaN) (?:loss|gradient|encountered|detected)", "not a number"
    ),
)

# Exceptions that the same code raises again on the same input: a restart does not help. RuntimeError is not one of
# them, as torch raises it for everything.
USER_EXCEPTIONS = frozenset(
    {
        "ArithmeticError",
        "AssertionError",
        "AttributeError",
        "BufferError",
        "FileExistsError",
        "FileNotFoundError",
        "ImportError",
        "IndentationError",
        "IndexError",
        "IsADirectoryError",
        "KeyError",
        "LookupError",
        "ModuleNotFoundError",
        "NameError",
        "NotADirectoryError",
        "NotImplementedError",
        "PermissionError",
        "RecursionError",
        "SyntaxError",
        "TabError",
        "TypeError",
        "UnboundLocalError",
        "UnicodeDecodeError",
        "UnicodeEncodeError",
        "UnicodeError",
        "ValueError",
        "ZeroDivisionError",
    }
)

# How a failed read of a mount appears to a process that reads or maps the file.
_UNREADABLE = re.compile(
    r"[Ii]nput/output error|Errno 5\]|Transport endpoint is not connected|Errno 107\]|Stale file handle|"
    r"[Ss]oftware caused connection abort|Bus error|cannot read file data"
)
# Exceptions of importing code: an unreadable module later appears missing or incomplete.
_OF_IMPORTS = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "NameError", "SyntaxError"})
MOUNTED = {"env": "the environment", "image": "the image", "checkpoint": "the mounted checkpoint"}

_EARLY = "Before the script's first statement:\n"  # as bootstrap.py writes it
_NOT_COMPILED = frozenset({"SyntaxError", "IndentationError", "TabError"})
CERTAIN, LIKELY, GUESS = "certain", "likely", "guess"
MAX_WHERE_CHARACTERS = 300
_FRAME = re.compile(r'^\s*File "([^"\n]{1,500})", line (\d+)', re.MULTILINE)
_RAISED = re.compile(r"^([A-Za-z_][\w.]{0,200}?)(?::|$)", re.MULTILINE)
_NOT_USERS = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python3|^<frozen |^<string>$"
    r"|/(?:launcher/in_rank|bootseer/rank)/bootstrap\.py$"
)
_compiled: list[tuple[_MessagePattern, re.Pattern[str]]] = []


def compile_patterns() -> None:
    """Compile the patterns now, so that the first call need not."""
    exits.compile_patterns()
    if not _compiled:
        _compiled.extend((words, re.compile(words.pattern)) for words in WORDS)


def classify_failure(failure: Failure) -> Classification:
    """Return the class of a failure, with the evidence."""
    if failure.stopped_by_us:
        return Classification(FailureClass.STOPPED, "bootrun ended it", True)
    if failure.oom == "yes":
        return Classification(_R, "out of memory: the kernel killed it", True)
    if has_device_fault(failure.kernel):
        return Classification(_A, "the kernel's log has an Xid of the driver", True)
    if classify(failure) is FailureOrigin.CONSEQUENCE:
        sign = find_sign(failure)
        assert sign is not None
        if failure.early:
            return Classification(
                _U, f"{describe_early_end(failure)}; other ranks lost the connection ({sign.what})", False
            )
        return Classification(_N, f"another rank was gone ({sign.what})", False)
    text = first_exception(failure.message, failure.traceback, failure.stderr_tail)
    if failure.mounts and (verdict := _of_mounts(failure, text)) is not None:
        return verdict
    words = _find_words(text)
    if words is not None:
        return Classification(words.kind, words.why, words.is_sure)
    raised = _raised(text)
    if failure.status < 0 and not (raised and failure.traceback):  # with it, the signal came after the exception
        return _by_signal(failure)
    if raised in USER_EXCEPTIONS:
        return Classification(_U, raised, not failure.mounts)
    if raised:
        return Classification(_U, raised, False)
    return Classification(_U, f"exit status {failure.status}", False)


def _of_mounts(failure: Failure, text: str) -> Classification | None:
    """Classify a rank whose node could not read a mount of bootrun; None: it failed for another reason."""
    what = " and ".join(dict.fromkeys(MOUNTED.get(each.what, each.what) for each in failure.mounts))
    why = f"{what} could not be read"
    if _UNREADABLE.search(text) or failure.status in (-signal.SIGBUS, 128 + signal.SIGBUS):
        return Classification(FailureClass.MOUNT, why, True)
    raised = _raised(text)
    if _find_words(text) is not None or (raised in USER_EXCEPTIONS and raised not in _OF_IMPORTS):
        return None
    return Classification(FailureClass.MOUNT, why, False)


def mount_line(fault: MountFault) -> str:
    """Return a line for users: which mount, and why."""
    return f"reads of {MOUNTED.get(fault.what, fault.what)} fail: {fault.why}"


def describe_early_end(failure: Failure) -> str:
    """Return the ranks of which a failure may be the consequence, in words."""
    plural = "s" if len(failure.early) > 1 else ""
    return f"rank{plural} {format_ranks(failure.early)} had ended before, with status 0"


def certainty_of(failure: Failure, verdict: Classification) -> tuple[str, str]:
    """Return the certainty of a failure's class, and why; the same on the console and in the failure record."""
    if failure.oom == "yes" or has_device_fault(failure.kernel):
        return CERTAIN, "the kernel's log shows it"
    if verdict.kind is FailureClass.MOUNT and verdict.is_sure:
        return CERTAIN, "the server of the mount and the rank both report failed reads"
    says_words = bool(failure.message or failure.traceback or failure.stderr_tail)
    by = "its signal" if failure.status < 0 else "its messages" if says_words else "its exit status"
    if verdict.is_sure:
        return CERTAIN, f"{by} shows it" if by != "its messages" else f"{by} show it"
    if failure.status >= 0 and verdict.why == f"exit status {failure.status}":
        return GUESS, "nothing but the exit status is known"
    return LIKELY, f"{by} fit{'s' if by != 'its messages' else ''}, but other causes are possible"


def repeated_errors(failure: Failure) -> list[str]:
    """Return errors that would recur in another attempt, if the previous one had them, too."""
    damages = [mount_line(each) for each in failure.mounts if each.is_damage]
    if damages and classify_failure(failure).kind is FailureClass.MOUNT:
        return damages
    found = certain_user_error(failure)
    return [found] if found else []


def error_before_script(failure: Failure) -> str:
    """Return an error before the script's first statement, or of a file that cannot be compiled; else ""."""
    if failure.stopped_by_us or classify_failure(failure).kind is not _U:
        return ""
    text = first_exception(failure.message, failure.traceback, failure.stderr_tail)
    is_early = failure.traceback.startswith(_EARLY)
    places = _FRAME.findall(text)
    # Not of code that a script has evaluated.
    is_file = _raised(text) in _NOT_COMPILED and bool(places) and places[-1][0].startswith("/")
    if not is_early and not is_file:
        return ""
    return error_location(failure) or failure.message.partition("\n")[0][:MAX_WHERE_CHARACTERS] or _raised(text)


def error_location(failure: Failure) -> str:
    """Return the exception and the line of the user's code that it came from: "KeyError at /job/train.py:41".

    The innermost frame that is not of an installed package; "" if it is not known.
    """
    text = first_exception(failure.message, failure.traceback, failure.stderr_tail)
    frames = [(path, line) for path, line in _FRAME.findall(text) if not _NOT_USERS.search(path)]
    raised = _raised(text)
    if not frames or not raised:
        return ""
    path, line = frames[-1]
    return f"{raised} at {path}:{line}"[:MAX_WHERE_CHARACTERS]


def certain_user_error(failure: Failure) -> str:
    """Return `error_location`, if the code is certainly the cause and would fail there again; else ""."""
    if failure.stopped_by_us or (failure.status < 0 and not failure.traceback):
        return ""
    text = first_exception(failure.message, failure.traceback, failure.stderr_tail)
    if _raised(text) not in USER_EXCEPTIONS:  # decides most cases without the other patterns
        return ""
    verdict = classify_failure(failure)
    return error_location(failure) if verdict.kind is _U and verdict.is_sure else ""


def _by_signal(failure: Failure) -> Classification:
    name = signal_name(failure.status)
    if name == "SIGKILL":
        if failure.oom == "maybe":
            return Classification(_R, "SIGKILL, and the kernel has ended processes that were out of memory", False)
        if failure.oom == "no":
            return Classification(FailureClass.KILLED, "SIGKILL, and not by the kernel's OOM killer", True)
        return Classification(FailureClass.KILLED, "SIGKILL; whether memory ran out is not known here", False)
    if name == "SIGBUS":  # rarely a wrong address, which gives SIGSEGV
        return Classification(
            _P, "SIGBUS: a mapped file was truncated, or its disk is full or reports errors", False
        )
    if name in ("SIGSEGV", "SIGILL", "SIGFPE", "SIGABRT", "SIGTRAP", "SIGSYS"):
        return Classification(_U, f"{name} in native code", False)
    if name in ("SIGXCPU", "SIGXFSZ"):
        return Classification(_R, f"{name}: a limit of the process", True)
    return Classification(FailureClass.KILLED, f"{name} from another process", name != "SIGPIPE")


def _find_words(text: str) -> _MessagePattern | None:
    if not text:
        return None
    compile_patterns()
    return next((words for words, pattern in _compiled if pattern.search(text)), None)


def _raised(text: str) -> str:
    """Return the name of the exception in the last line that begins with one."""
    names = [name for name in _RAISED.findall(text) if name.endswith(("Error", "Exception", "Interrupt", "Exit"))]
    return str(names[-1]).rpartition(".")[2] if names else ""
