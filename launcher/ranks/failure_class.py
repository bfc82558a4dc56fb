"""PURE: to which class a failure belongs, and which line of the user's code it came from.

In goes a Failure, out come a class, the evidence in words, and whether it is sure. What is looked for are the
words of Linux, Python, torch 2.13, CUDA, NCCL and Hadoop. The kernel's word counts more than the rank's, the
rank's more than its status; what only fits is said to be likely. The classes are those of ByteRobust's taxonomy,
made coarser (ours).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from launcher.exclusion import MachineFault
from launcher.ladder import Fault
from launcher.ranks import exits
from launcher.ranks.exits import Kind, classify, find_sign, first_exception, signal_name
from launcher.ranks.kernel_facts import has_device_fault
from launcher.rendezvous.messages import Failure, MountFault


class FailureClass(Enum):
    """Whose matter a failure is."""

    USER = "user"  # the training code, or how it was called
    RESOURCE = "resource"  # memory, disk space, descriptors, threads
    PLATFORM = "platform"  # disks, mounts, storage services
    ACCELERATOR = "accelerator"
    NETWORK = "network"
    NUMERIC = "numeric"  # not a number
    KILLED = "killed"  # by somebody else's signal
    STOPPED = "stopped"  # by bootrun
    MOUNT = "mount"  # files that bootrun shows: an environment, image or checkpoint that it has mounted


class Verdict(NamedTuple):
    """What a failure is taken for."""

    kind: FailureClass
    why: str  # for people, a few words
    is_sure: bool


class _Words(NamedTuple):
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

# The first that fits counts: what is special stands above what is general. Each begins with fixed text (speed).
WORDS: tuple[_Words, ...] = (
    _Words(_U, r"CUDA error: device-side assert", "an assertion in a CUDA kernel, mostly an index out of range"),
    _Words(_R, r"CUDA out of memory|torch\.OutOfMemoryError|CUDA error: out of memory", "out of GPU memory"),
    _Words(_R, r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED", "out of GPU memory", is_sure=False),
    _Words(_A, r"uncorrectable ECC error|Uncorrectable ECC", "an uncorrectable memory error of the accelerator"),
    _Words(_A, r"NVRM: Xid|fallen off the bus|CUDA error: unknown error|GPU is lost", "an accelerator is lost"),
    _Words(_A, r"CUDA-capable device\(s\) is/are busy|no CUDA-capable device|No CUDA GPUs are", "no accelerator"),
    _Words(_A, r"CUDA driver (?:version|initialization failed)|Driver/library version mismatch", "its driver"),
    _Words(_A, r"illegal memory access was encountered|misaligned address", "a wrong address on the GPU", False),
    _Words(_A, r"CUDA error|CUDA failure|CUBLAS_STATUS_|CUDNN_STATUS_|NVML: ", "the accelerator", is_sure=False),
    _Words(_R, r"No space left on device|Errno 28\]", "no space left on a disk"),
    _Words(_R, r"Disk quota exceeded|Errno 122\]", "a disk quota is used up"),
    _Words(_R, r"Too many open files|Errno 24\]", "no file descriptors left"),
    _Words(_R, r"can't start new thread|pthread_create failed|Errno 11\]", "no threads left"),
    _Words(_R, r"insufficient shared memory|unable to (?:open|allocate) shared memory", "no shared memory left"),
    _Words(_R, r"is killed by signal: Killed", "a data loader's worker was killed: out of memory?", is_sure=False),
    _Words(_R, r"MemoryError|std::bad_alloc|DefaultCPUAllocator: |Cannot allocate memory", "out of memory"),
    _Words(_P, r"Stale file handle|Transport endpoint is not connected", "a file system that went away"),
    _Words(_P, r"Input/output error|Errno 5\]", "a disk or file system gives errors"),
    _Words(_P, r"Read-only file system|Errno 30\]", "a file system has become read-only", is_sure=False),
    _Words(_P, r"org\.apache\.hadoop\.|BlockMissingException|StandbyException", "HDFS"),
    _Words(_N, r"Name or service not known|failure in name resolution|gaierror", "a name is not resolved"),
    _Words(_N, r"Network is unreachable|No route to host|Network is down", "the network is not there"),
    _Words(_N, r"ibv_[a-z_]+ failed|NET/IB ?: |Got completion .{0,40} error", "RDMA"),
    _Words(_N, r"ncclSystemError|NCCL .{0,80}unhandled system error", "NCCL: a system call or the network", False),
    _Words(_F, r"FloatingPointError|returned nan values in its", "not a number"),
    _Words(_F, r"(?:[Ll]oss|[Gg]radients?) (?:is|are|was|were) (?:nan|NaN|not finite)", "not a number"),
    _Words(_F, r"[Nn]on-?finite (?:loss|grad)|(?:nan|NaN) (?:loss|gradient|encountered|detected)", "not a number"),
)

# Exceptions that the same code raises again on the same input: a restart does not help. RuntimeError is none, as
# torch says everything by it.
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

# What a read of a mount that fails looks like to who reads, or maps.
_UNREADABLE = re.compile(
    r"[Ii]nput/output error|Errno 5\]|Transport endpoint is not connected|Errno 107\]|Stale file handle|"
    r"[Ss]oftware caused connection abort|Bus error|cannot read file data"
)
# Of code that imports: a module that could not be read is found missing, or half there, later.
_OF_IMPORTS = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "NameError", "SyntaxError"})
MOUNTED = {"env": "the environment", "image": "the image", "checkpoint": "the mounted checkpoint"}

_EARLY = "Before the script's first statement:\n"  # as inside.py writes it
_NOT_COMPILED = frozenset({"SyntaxError", "IndentationError", "TabError"})
CERTAIN, LIKELY, GUESS = "certain", "likely", "guess"
MOST_WHERE_CHARACTERS = 300
_FRAME = re.compile(r'^\s*File "([^"\n]{1,500})", line (\d+)', re.MULTILINE)
_RAISED = re.compile(r"^([A-Za-z_][\w.]{0,200}?)(?::|$)", re.MULTILINE)
_NOT_USERS = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3|^<frozen |^<string>$|/launcher/inside\.py$")
_compiled: list[tuple[_Words, re.Pattern[str]]] = []


def get_ready() -> None:
    """What the first call would have to do is done now."""
    exits.get_ready()
    if not _compiled:
        _compiled.extend((words, re.compile(words.pattern)) for words in WORDS)


def classify_failure(failure: Failure) -> Verdict:
    """The class of a failure, with what tells it."""
    if failure.stopped_by_us:
        return Verdict(FailureClass.STOPPED, "bootrun ended it", True)
    if failure.oom == "yes":
        return Verdict(_R, "out of memory: the kernel killed it", True)
    if has_device_fault(failure.kernel):
        return Verdict(_A, "the kernel's log has an Xid of the driver", True)
    if classify(failure) is Kind.CONSEQUENCE:
        sign = find_sign(failure)
        assert sign is not None
        if failure.early:
            return Verdict(_U, f"{early_end(failure)}; others lost it ({sign.what})", False)
        return Verdict(_N, f"another rank was not there any more ({sign.what})", False)
    text = first_exception(failure.message, failure.traceback, failure.stderr_tail)
    if failure.mounts and (verdict := _of_mounts(failure, text)) is not None:
        return verdict
    words = _find_words(text)
    if words is not None:
        return Verdict(words.kind, words.why, words.is_sure)
    raised = _raised(text)
    if failure.status < 0 and not (raised and failure.traceback):  # with it, the signal came after the exception
        return _by_signal(failure)
    if raised in USER_EXCEPTIONS:
        return Verdict(_U, raised, not failure.mounts)
    if raised:
        return Verdict(_U, raised, False)
    return Verdict(_U, f"exit status {failure.status}", False)


def _of_mounts(failure: Failure, text: str) -> Verdict | None:
    """Of a rank whose node could not read what bootrun has mounted; None: it failed by something else."""
    what = " and ".join(dict.fromkeys(MOUNTED.get(each.what, each.what) for each in failure.mounts))
    why = f"{what} could not be read"
    if _UNREADABLE.search(text) or failure.status in (-signal.SIGBUS, 128 + signal.SIGBUS):
        return Verdict(FailureClass.MOUNT, why, True)
    raised = _raised(text)
    if _find_words(text) is not None or (raised in USER_EXCEPTIONS and raised not in _OF_IMPORTS):
        return None
    return Verdict(FailureClass.MOUNT, why, False)


def mount_line(fault: MountFault) -> str:
    """For people: which mount, and why."""
    return f"reads of {MOUNTED.get(fault.what, fault.what)} fail: {fault.why}"


def early_end(failure: Failure) -> str:
    """Of whom a failure may be the consequence, in words."""
    from launcher.ranks.report import format_ranks

    plural = "s" if len(failure.early) > 1 else ""
    return f"rank{plural} {format_ranks(failure.early)} had ended before, with status 0"


def how_sure(failure: Failure, verdict: Verdict) -> tuple[str, str]:
    """How sure the class of a failure is, and why; said alike on the console and on the page."""
    if failure.oom == "yes" or has_device_fault(failure.kernel):
        return CERTAIN, "the kernel's log says so"
    if verdict.kind is FailureClass.MOUNT and verdict.is_sure:
        return CERTAIN, "whoever serves the mount says that reads of it have failed, and the rank says so"
    says_words = bool(failure.message or failure.traceback or failure.stderr_tail)
    by = "its signal" if failure.status < 0 else "its own words" if says_words else "its exit status"
    if verdict.is_sure:
        return CERTAIN, f"{by} says so" if by != "its own words" else f"{by} say so"
    if failure.status >= 0 and verdict.why == f"exit status {failure.status}":
        return GUESS, "nothing but the exit status tells of it"
    return LIKELY, f"{by} fit{'s' if by != 'its own words' else ''}, and other causes would look the same"


def repeated_errors(failure: Failure) -> list[str]:
    """What would come again in another attempt, if it was in the one before, too."""
    damages = [mount_line(each) for each in failure.mounts if each.is_damage]
    if damages and classify_failure(failure).kind is FailureClass.MOUNT:
        return damages
    found = certain_user_error(failure)
    return [found] if found else []


def error_before_script(failure: Failure) -> str:
    """An error before the script's first statement, or of a file that cannot be compiled; "" for others."""
    if failure.stopped_by_us or classify_failure(failure).kind is not _U:
        return ""
    text = first_exception(failure.message, failure.traceback, failure.stderr_tail)
    is_early = failure.traceback.startswith(_EARLY)
    places = _FRAME.findall(text)
    # Not of text that a script has evaluated.
    is_file = _raised(text) in _NOT_COMPILED and bool(places) and places[-1][0].startswith("/")
    if not is_early and not is_file:
        return ""
    return where(failure) or failure.message.partition("\n")[0][:MOST_WHERE_CHARACTERS] or _raised(text)


def where(failure: Failure) -> str:
    """The exception and the line of the user's code that it came from: "KeyError at /job/train.py:41".

    The innermost frame that is not of an installed package. "" where that is not known.
    """
    text = first_exception(failure.message, failure.traceback, failure.stderr_tail)
    frames = [(path, line) for path, line in _FRAME.findall(text) if not _NOT_USERS.search(path)]
    raised = _raised(text)
    if not frames or not raised:
        return ""
    path, line = frames[-1]
    return f"{raised} at {path}:{line}"[:MOST_WHERE_CHARACTERS]


def certain_user_error(failure: Failure) -> str:
    """`where`, if it is certain that the code is to blame and would fail there again; else ""."""
    if failure.stopped_by_us or (failure.status < 0 and not failure.traceback):
        return ""
    text = first_exception(failure.message, failure.traceback, failure.stderr_tail)
    if _raised(text) not in USER_EXCEPTIONS:  # most are told apart by this, without the other patterns
        return ""
    verdict = classify_failure(failure)
    return where(failure) if verdict.kind is _U and verdict.is_sure else ""


def machine_fault(failure: Failure) -> MachineFault | None:
    """What of a failure may be its machine's matter and would come again there; None where nothing is."""
    verdict = classify_failure(failure)
    if not verdict.is_sure or verdict.kind not in (_A, _P, _N):
        return None
    return MachineFault(failure.node, verdict.why, is_grave=verdict.kind is _A)


def judge(first: Sequence[Failure]) -> Fault:
    """What the restart ladder wants to know of the failures that may have been the first of an attempt."""
    if not first:
        return Fault("")
    verdict = classify_failure(first[0])
    is_crash = first[0].status < 0 and verdict.kind is _U and not verdict.is_sure
    is_code = verdict.kind is FailureClass.MOUNT or all(certain_user_error(failure) for failure in first)
    return Fault("crash" if is_crash else verdict.kind.value, is_code=is_code)


def _by_signal(failure: Failure) -> Verdict:
    name = signal_name(failure.status)
    if name == "SIGKILL":
        if failure.oom == "maybe":
            return Verdict(_R, "SIGKILL, and the kernel has ended processes that were out of memory", False)
        if failure.oom == "no":
            return Verdict(FailureClass.KILLED, "SIGKILL, and not by the kernel for want of memory", True)
        return Verdict(FailureClass.KILLED, "SIGKILL; whether memory ran out is not known here", False)
    if name == "SIGBUS":  # rarely a wrong address: that is SIGSEGV
        return Verdict(_P, "SIGBUS: a mapped file was cut off, or its disk is full or gives errors", False)
    if name in ("SIGSEGV", "SIGILL", "SIGFPE", "SIGABRT", "SIGTRAP", "SIGSYS"):
        return Verdict(_U, f"{name} in native code", False)
    if name in ("SIGXCPU", "SIGXFSZ"):
        return Verdict(_R, f"{name}: a limit of the process", True)
    return Verdict(FailureClass.KILLED, f"{name} from outside", name != "SIGPIPE")


def _find_words(text: str) -> _Words | None:
    if not text:
        return None
    get_ready()
    return next((words for words, pattern in _compiled if pattern.search(text)), None)


def _raised(text: str) -> str:
    """The name of the exception: of the last line that begins with one."""
    names = [name for name in _RAISED.findall(text) if name.endswith(("Error", "Exception", "Interrupt", "Exit"))]
    return str(names[-1]).rpartition(".")[2] if names else ""
