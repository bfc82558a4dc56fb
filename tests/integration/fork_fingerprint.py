"""A rank's program: writes down everything that a script can see of its process, as JSON.

Arguments: FOLDER MODULE,... STATUS. Writes FOLDER/RANK-ATTEMPT.json: {"start": facts, "after": facts once these
modules are imported, "unique": values that no two processes may share}. The first attempt ends with STATUS, later
ones with 0. Stdlib only and Python 3.8, as it runs in the ranks' interpreters; test_fork_same.py compares.
"""

_first = list(globals().items())  # before anything of its own exists
import sys  # noqa: E402

_modules = list(sys.modules)

import os  # noqa: E402
import time  # noqa: E402


def main():
    directory, modules, status = sys.argv[1:4]
    start = {**see_interpreter(_modules), **see_process()}
    for name in modules.split(",") if modules else []:
        __import__(name)
    found = {"start": start, "after": {**see_interpreter(sys.modules), **see_process()}, "unique": see_unique()}
    import json

    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    path = os.path.join(directory, "{}-{}.json".format(os.environ["RANK"], attempt))
    with open(path + ".part", "w") as file:
        json.dump(found, file, default=repr)
    os.rename(path + ".part", path)
    until_s = time.monotonic() + 60  # the first to fail would end the others
    while len([name for name in os.listdir(directory) if name.endswith("-" + attempt + ".json")]) < int(
        os.environ["WORLD_SIZE"]
    ):
        if time.monotonic() > until_s:
            sys.exit("the other ranks have not written theirs")
        time.sleep(0.002)
    sys.exit(int(status) if attempt == "0" else 0)


# ---- the interpreter -----------------------------------------------------------------------------------------

_SEEN_APART = {
    *("modules", "path_importer_cache", "meta_path", "path_hooks", "flags", "orig_argv", "argv", "path"),
    *("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__"),
}
_SYS_FUNCTIONS = (
    *("getrecursionlimit", "getswitchinterval", "getdlopenflags", "gettrace", "getprofile", "get_asyncgen_hooks"),
    *("getdefaultencoding", "getfilesystemencoding", "getfilesystemencodeerrors", "exc_info", "is_finalizing"),
    "get_int_max_str_digits",
)


def see_interpreter(modules):
    """What Python says."""
    facts = {}
    facts["sys.modules"] = sorted(modules)
    facts["sys.argv"] = sys.argv
    facts["sys.orig_argv"] = getattr(sys, "orig_argv", None)
    facts["sys.path"] = sys.path
    facts["sys.path_hooks"] = [plain(hook) for hook in sys.path_hooks]
    facts["sys.meta_path"] = [plain(finder) for finder in sys.meta_path]
    facts["sys.path_importer_cache"] = sorted(sys.path_importer_cache)
    facts["sys.flags"] = repr(sys.flags)
    for name, value in vars(sys).items():
        if name not in _SEEN_APART:
            facts["sys." + name] = plain(value)
    for name in _SYS_FUNCTIONS:
        if hasattr(sys, name):
            facts["sys." + name] = plain(getattr(sys, name)())
    facts["__main__"] = [[name, plain(value)] for name, value in _first]
    facts["__main__ types"] = [[name, type(value).__name__] for name, value in _first]
    facts["__main__.__loader__"] = [getattr(__loader__, name, None) for name in ("name", "path")]
    facts["__main__ is this"] = sys.modules["__main__"].__dict__ is globals()
    alias = sys.modules.get("__mp_main__")
    facts["__mp_main__ is __main__"] = alias is None or alias.__dict__ is globals()
    facts["__main__ type"] = type(sys.modules["__main__"]).__name__
    facts["__builtins__"] = __builtins__ is sys.modules["builtins"]
    facts["builtins"] = sorted(vars(sys.modules["builtins"]))
    facts["frames"] = frames_below(sys._getframe(2))
    facts["cwd"] = os.getcwd()
    facts["os.environ"] = [[name, value] for name, value in os.environ.items()]
    facts["os.environb"] = [[os.fsdecode(name), os.fsdecode(value)] for name, value in os.environb.items()]
    first_seen = sys.modules["posix"].environ
    facts["posix.environ"] = sorted([os.fsdecode(name), os.fsdecode(first_seen[name])] for name in first_seen)
    facts["os.environ type"] = [type(os.environ).__name__, type(os.environ.encodekey).__name__]
    facts["os.environ functions"] = [os.environ.encodekey.__qualname__, os.environ.decodevalue.__qualname__]
    for name in ("stdin", "stdout", "stderr"):
        facts["sys." + name] = see_stream(name)
    import gc

    facts["gc"] = [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks), len(gc.garbage)]
    facts["gc.get_freeze_count"] = gc.get_freeze_count() > 0
    import warnings

    facts["warnings.filters"] = [plain(each) for each in warnings.filters]
    facts["warnings.showwarning"] = plain(warnings.showwarning)
    import atexit

    facts["atexit"] = atexit._ncallbacks()
    import faulthandler
    import signal
    import threading
    import time

    facts["faulthandler"] = faulthandler.is_enabled()
    numbers = sorted(signal.valid_signals())
    facts["signal handlers"] = [[int(number), plain(signal.getsignal(number))] for number in numbers]
    facts["signal wakeup"] = signal.set_wakeup_fd(-1)
    for name in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF"):
        facts["signal " + name] = signal.getitimer(getattr(signal, name))
    main_thread = threading.main_thread()
    facts["threads of Python"] = [[each.name, each.daemon, type(each).__name__] for each in threading.enumerate()]
    facts["thread identity"] = [
        main_thread is threading.current_thread(),
        main_thread.native_id == os.getpid() == threading.get_native_id(),
        main_thread.ident == threading.get_ident(),
        threading.stack_size(),
    ]
    facts["time zone"] = [time.tzname, time.timezone, time.daylight]
    import locale

    facts["locale"] = [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False)]
    import logging

    facts["logging"] = [plain(logging.root.handlers), logging.root.level, logging.root.disabled]
    import multiprocessing
    import multiprocessing.process

    facts["multiprocessing"] = [
        multiprocessing.get_start_method(allow_none=True),
        multiprocessing.current_process().name,
        multiprocessing.current_process().daemon,
        len(multiprocessing.current_process().authkey),
        len(multiprocessing.active_children()),
        multiprocessing.parent_process() is None,
        multiprocessing.process.ORIGINAL_DIR,
    ]
    import tempfile

    facts["tempfile"] = tempfile.gettempdir()
    import tracemalloc

    facts["tracemalloc"] = tracemalloc.is_tracing()
    return facts


def see_stream(name):
    stream = getattr(sys, name)
    facts = [str(type(stream)), stream.name, stream.mode, stream.encoding, stream.errors, stream.fileno()]
    facts += [stream.line_buffering, stream.write_through, stream.newlines, stream.isatty(), stream.seekable()]
    facts += [stream.readable(), stream.writable(), stream.closed, repr(stream), type(stream.buffer).__name__]
    facts += [stream.buffer.name, stream.buffer.mode, type(getattr(stream.buffer, "raw", None)).__name__]
    return [*facts, getattr(stream.buffer, "closefd", None), stream is getattr(sys, "__" + name + "__")]


def plain(value):
    """A text of any value, without addresses and without the order of sets."""
    if isinstance(value, (set, frozenset)):
        value = sorted(value)
    parts = repr(value).split(" at 0x")
    return parts[0] + "".join([" at 0x" + part.lstrip("0123456789abcdef") for part in parts[1:]])


def frames_below(frame):
    found = []
    while frame is not None:
        code = frame.f_code
        found.append([os.path.basename(code.co_filename).split(".")[0], code.co_name])
        frame = frame.f_back
    return found


# ---- the process ---------------------------------------------------------------------------------------------

_STATUS_LINES = (
    *("Umask", "Ngid", "Uid", "Gid", "FDSize", "Groups", "VmLck", "VmPin", "THP_enabled", "TracerPid"),
    *("SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
    *("NoNewPrivs", "Seccomp", "Seccomp_filters", "Speculation_Store_Bypass", "Cpus_allowed", "Mems_allowed"),
)
_GETTERS = {
    "PR_GET_DUMPABLE": 3,
    "PR_GET_UNALIGN": 5,
    "PR_GET_KEEPCAPS": 7,
    "PR_GET_TIMING": 13,
    "PR_GET_SECCOMP": 21,
    "PR_GET_SECUREBITS": 27,
    "PR_GET_TIMERSLACK": 30,
    "PR_MCE_KILL_GET": 34,
    "PR_GET_NO_NEW_PRIVS": 39,
    "PR_GET_THP_DISABLE": 42,
    "PR_GET_IO_FLUSHER": 58,
}
_STORING_GETTERS = {"PR_GET_PDEATHSIG": 2, "PR_GET_TSC": 25, "PR_GET_CHILD_SUBREAPER": 37}
_CALLS = {"x86_64": (252, 239), "aarch64": (31, 236)}  # ioprio_get, get_mempolicy
_SYS_IOPRIO_GET, _SYS_GET_MEMPOLICY = _CALLS.get(os.uname().machine, (-1, -1))


def see_process():
    """What the kernel and the C library say."""
    import ctypes
    import resource

    libc = ctypes.CDLL(None)
    pid = os.getpid()
    facts = {}
    status = dict([line.split(":", 1) for line in read("/proc/self/status").splitlines()])
    for name in _STATUS_LINES:
        facts["status " + name] = status.get(name, "").strip()
    stat = read("/proc/self/stat").rpartition(")")[2].split()
    facts["exit signal"] = stat[38 - 3]
    facts["terminal"] = [stat[7 - 3], stat[8 - 3]]
    facts["scheduling"] = [stat[18 - 3], stat[19 - 3], stat[40 - 3], stat[41 - 3]]
    facts["forked without exec"] = bool(int(stat[9 - 3]) & 0x40)
    for name in ("cmdline", "environ", "comm", "cgroup", "oom_score_adj", "loginuid", "sessionid", "setgroups"):
        facts["/proc/self/" + name] = read("/proc/self/" + name).replace("\0", "\n")
    for name in ("personality", "coredump_filter", "uid_map", "gid_map", "limits", "timerslack_ns"):
        facts["/proc/self/" + name] = read("/proc/self/" + name)
    facts["/proc/self/autogroup nice"] = read("/proc/self/autogroup").split()[-1:]
    for name in ("exe", "root", "cwd"):
        facts["/proc/self/" + name] = os.readlink("/proc/self/" + name)
    for name in sorted(os.listdir("/proc/self/ns")):  # of mounts too: their list changes by what others mount
        facts["namespace " + name] = os.readlink("/proc/self/ns/" + name)
    facts["descriptors"] = [[fd, kind, flags] for fd, kind, flags in see_descriptors()]
    facts["identity"] = [os.getsid(0) == pid, os.getpgid(0) == pid, os.getresuid(), os.getresgid(), os.getgroups()]
    facts["parent"] = [read(f"/proc/{os.getppid()}/comm"), read(f"/proc/{os.getppid()}/cmdline")]
    facts["children"] = read(f"/proc/self/task/{pid}/children")
    facts["threads of the kernel"] = sorted(
        [read(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task") if task != str(pid)]
    )
    facts["nice"] = [os.nice(0), os.getpriority(os.PRIO_PGRP, 0)]
    facts["scheduler"] = [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority]
    facts["affinity"] = sorted(os.sched_getaffinity(0))
    facts["memory policy"] = see_memory_policy(ctypes, libc)
    facts["io priority"] = libc.syscall(_SYS_IOPRIO_GET, 1, 0)
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            facts[name] = resource.getrlimit(getattr(resource, name))
    for name, option in _GETTERS.items():
        facts[name] = libc.prctl(option, 0, 0, 0, 0)
    for name, option in _STORING_GETTERS.items():
        stored = ctypes.c_int(-1)
        libc.prctl(option, ctypes.byref(stored), 0, 0, 0)
        facts[name] = stored.value
    facts["environ of C"] = see_environ_of_c(ctypes, libc)
    libc.getenv.restype = ctypes.c_char_p
    facts["getenv"] = [(libc.getenv(name) or b"-").decode() for name in (b"RANK", b"PATH", b"OMP_NUM_THREADS")]
    libc.setlocale.restype = ctypes.c_char_p
    facts["locale of C"] = (libc.setlocale(6, None) or b"").decode()
    stack = (ctypes.c_long * 3)()
    libc.sigaltstack(None, stack)
    facts["signal stack"] = stack[1] & 0xFFFFFFFF
    facts["program break moves"] = bool(libc.sbrk(0)) and libc.sbrk(0) == libc.sbrk(0)
    name = ctypes.c_char_p.in_dll(libc, "program_invocation_name")
    facts["name of the program"] = name.value.decode()
    return facts


def see_descriptors():
    found = []
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            kind = os.readlink("/proc/self/fd/" + name).split(":[")[0]
            flags = read("/proc/self/fdinfo/" + name).split("flags:")[1].split()[0]
        except OSError:
            continue  # the one that listed the folder
        found.append([name, kind, flags])
    return found


def see_memory_policy(ctypes, libc):
    mode = ctypes.c_int(-1)
    libc.syscall(_SYS_GET_MEMPOLICY, ctypes.byref(mode), None, 0, None, 0)
    return mode.value


def see_environ_of_c(ctypes, libc):
    pairs = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
    found = []
    while pairs[len(found)] is not None:
        found.append(os.fsdecode(pairs[len(found)]))
    return found


def read(path):
    try:
        with open(path, "rb", 0) as file:
            return os.fsdecode(file.read() or b"")
    except OSError as error:
        return f"cannot be read: {error.errno}"


# ---- what no two processes share -----------------------------------------------------------------------------


def see_unique():
    """Random values, and what is made of them."""
    import multiprocessing.synchronize
    import random
    import secrets
    import ssl
    import tempfile
    import uuid

    found = {"random": random.random(), "random's state": hash(random.getstate()), "secrets": secrets.token_hex()}
    found.update({"ssl": ssl.RAND_bytes(16).hex(), "os.urandom": os.urandom(16).hex()})
    found.update({"uuid4": str(uuid.uuid4()), "uuid1": str(uuid.uuid1())})
    found["tempfile"] = next(tempfile._get_candidate_names())
    found["authkey"] = bytes(multiprocessing.current_process().authkey).hex()
    found["semaphore"] = multiprocessing.synchronize.SemLock._make_name()
    found["pid"] = os.getpid()
    if "numpy" in sys.modules:
        import numpy.random

        found["numpy.random"] = numpy.random.rand()
        found["numpy.random.default_rng"] = numpy.random.default_rng().random()
    if "torch" in sys.modules:
        import torch

        found["torch.initial_seed"] = torch.initial_seed()
        found["torch.rand"] = torch.rand(1).item()
    return found


if __name__ == "__main__":
    main()
