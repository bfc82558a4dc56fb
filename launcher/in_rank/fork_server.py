"""The fork server of a node: imports modules once, then forks ranks that have them.

Loaded by bootstrap.py, by path, in the interpreter, environment, directory and sys.path of the ranks; stdlib only,
needs Python 3.8. In: frames of NUL-joined fields on one socket to the supervisor (four-byte length, fields).
    modules SIGN+NAME...       once: "?" may be absent, "!" requested by the user, "~" recorded at an earlier start
                               >PATH before them: a file for the list of accessed files; =WHAT: what the script
                               may change safely; + after them: more modules follow, with
    rest COUNT CHANGE... SIGN+NAME...       once, then: variables, NAME=VALUE or NAME to be unset
    prepare COUNT              ranks will be requested soon: fork standby processes, which wait to become ranks
    fork GUARD_PID PORT SPARE PAIRS NAME=VALUE... RANK...
Out: importing NAME | ready COUNT ABSENT... | failed NAME WHY ALSO... | parked PID... | discarded |
forked KEY MONO_NS... | refused WHY; ranks are the standby processes in order. Their parent is a short-lived
intermediate process, so that they become the supervisor's children, as exec'd ranks are.
"""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

    Call = Tuple[Callable[..., object], Tuple[Any, ...]]

# The driver reads these when it starts, after the import of a framework: they may differ between ranks.
READ_LATE = frozenset(
    "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK "
    "BOOTSEER_CHECKPOINT BOOTSEER_CHECKPOINT_URL BOOTSEER_CHECKPOINT_VERSION BOOTSEER_CHECKPOINT_DIGEST "
    "BOOTSEER_ARENA BOOTSEER_SAVE_ARENA "
    "CUDA_CACHE_PATH CUDA_CACHE_MAXSIZE TORCH_EXTENSIONS_DIR BOOTSEER_MARK_PROBES".split()
)
# Variables of compile caches. These modules read them when they are imported. Until then the values can change,
# since the caches can become known after the preload has begun (Preloader.begin_early).
READ_BY = {
    "TORCHINDUCTOR_CACHE_DIR": ("torch._dynamo.package", "torch._inductor.codecache"),
    "TRITON_CACHE_DIR": ("triton",),
    "TRITON_CACHE_AUTOTUNING": ("triton",),
    "JAX_COMPILATION_CACHE_DIR": ("jax",),
    "NUMBA_CACHE_DIR": ("numba",),
}
# The loader reads these before a program's first instruction. The command that enters an image exchanges them
# (bootseer/mounts/sandbox/enter.py), so a rank gets the values with which this process was started.
READ_AT_START = frozenset("LD_LIBRARY_PATH LD_PRELOAD LD_AUDIT".split())
# Threads that survive the preparation of a fork and are harmless: jemalloc's (pyarrow) purges memory and is
# restarted in the child. OpenBLAS's threads end before a fork by themselves.
HARMLESS_THREADS = frozenset(["jemalloc_bg_thd"])
HARMLESS_DEVICES = (
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
    "/dev/pts/",
    "/dev/shm/",
)
# Variables that select visible devices: in READ_LATE, unless an import has counted devices.
VISIBLE = frozenset("CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK".split())
# Functions by which torch counts devices. They start the driver, which does not survive a fork.
COUNTS = (
    ("torch._C", "_cuda_getDeviceCount"),
    ("torch._C", "_xpu_getDeviceCount"),
    ("torch.cuda", "_device_count_nvml"),
    ("torch.cuda", "_device_count_amdsmi"),
)
BACKENDS = tuple("torch." + name for name in "cuda xpu mtia npu hpu mlu musa".split())
CUDA_DRIVER, CUDA_NOT_INITIALISED = "libcuda.so.1", 3
# The import of triton would start a pool of processes; each rank starts its own when it compiles.
SET_WHILE_IMPORTING = {"TORCH_WARM_POOL": "0"}
CONSOLE = (5, 6, 7)  # the ranks' standard streams; this process has /dev/null and a bounded file in memory
MORE = "+"  # in place of a module
CHECK_HOLDS_S = 2.0
# After a start, processes are forked for the next one, which then does not wait for forks (10 ms each with torch).
PARK_AFTER_S = 0.2
START_UP = "the start-up of the interpreter"
# How long other ranks wait for rank 0's store after it has begun, which can be slow on a busy machine. A rank that
# connects too early retries only after 0.3 to 0.7 s.
MAX_HEAD_START_S, MAX_BEGIN_S = 0.05, 1.0
MADV_DONTNEED = 4
MADV_HUGEPAGE = 14
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1
HUGE_PAGE_BYTES = 2 << 20
# Time for making huge pages: while the first ranks wait, and when no rank waits. A page takes 0.3 ms, on some
# virtual machines 6; the first ones save more at the forks and at the first restart than they cost.
MAX_HUGE_FIRST_S, MAX_HUGE_S = 0.04, 0.05
# Nearly all objects that imports make are kept. With the interpreter's default of 700 new objects between
# collections, garbage collection takes a third of torch's import time; with 50,000, a sixth.
OBJECTS_BETWEEN_COLLECTIONS = 1000000
MAX_LISTED_PAGES = 1 << 20  # of a mapping
# Bits in the highest byte of a page's entry in /proc/PID/pagemap: 0x80 in memory, 0x40 swapped, 0x20 of a file,
# 0x01 only in this process.
IN_MEMORY = bytes([1 if byte >= 0x40 else 0 for byte in range(256)])
PRESENT = bytes([1 if byte & 0x80 else 0 for byte in range(256)])
COPIED = bytes([1 if byte & 0xA1 == 0x81 else 0 for byte in range(256)])
MAX_COPIED_PAGES = 2048
RESERVE_BYTES, BLOCK_BYTES = 128 << 20, 126976  # of the heap, in huge pages; blocks below malloc's threshold
# inotify reports all changes to a directory's entries only on file systems that no other machine can write to.
IN_CHANGED = 0xFCE  # IN_ALL_EVENTS without those of reading: IN_ACCESS, IN_OPEN, IN_CLOSE_NOWRITE
IN_ONLYDIR = 0x01000000
LOCAL = frozenset(  # magic numbers: ext, xfs, btrfs, tmpfs, overlay, f2fs, squashfs, EROFS
    (0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0xF2F52010, 0x73717368, 0xE0F5E1E2)
)
PR_SET_PDEATHSIG, PR_SET_MM, PR_SET_MM_MAP, PR_SET_CHILD_SUBREAPER, SIGKILL = 1, 35, 14, 36, 9


def serve(arguments: "List[str]", inside: "Dict[str, Any]", template: "Dict[str, Any]") -> "Call":
    """Serve until the supervisor ends. Returns only in ranks: the call that runs the script.

    Args: arguments: FD MODE TARGET ARGS...; inside: the names of bootstrap.py; template: those of a fresh
    __main__.
    """
    number, mode, target = arguments[:3]
    process = _Preloaded(int(number), mode, target, arguments[3:], inside, template)
    try:
        process.preload()
        call = process.serve()
    except _Failed as failed:
        process.end_with(failed)
    except _GuardGone:
        os._exit(0)
    except OSError:
        os._exit(1)
    return call


class _GuardGone(Exception):
    """The supervisor has closed the connection."""


class _Failed(Exception):
    """Ranks must not be forked from this process."""

    def __init__(self, name: str, why: str, *also: str) -> None:
        """Args: also: modules that import it, and are to be left out with it."""
        Exception.__init__(self, name, why)
        self.name = name
        self.why = why
        self.also = also


class _Rank:
    """One rank of a request: KEY STDOUT STDERR WORDS WORD... PAIRS NAME=VALUE..."""

    def __init__(self, fields: "List[str]", inside: str) -> None:
        self.key, self.stdout, self.stderr = fields[:3]
        pairs = 4 + int(fields[3])
        end = pairs + 1 + int(fields[pairs])
        before = max(0, fields[4:pairs].index(inside) - 2)
        self.argv = fields[
            4 + before : pairs
        ]  # as an exec'd rank's: python -u bootstrap.py MODE ... TARGET ARGS...
        self.is_entered = before > 0  # words before that make an exec'd rank enter this process's environment
        self.environ = _to_environ(fields[pairs + 1 : end])
        self.fields = fields[:end]


class _Preloaded:
    """The fork server's state."""

    def __init__(
        self,
        fd: int,
        mode: str,
        target: str,
        args: "List[str]",
        inside: "Dict[str, Any]",
        template: "Dict[str, Any]",
    ) -> None:
        self.fd = fd
        self.mode = mode
        self.target = target
        self.args = args
        self.inside = inside
        self.template = template
        self.ctypes = _import_apart("ctypes")
        self.libc = _load_libc(self.ctypes)
        for each in (fd, *CONSOLE):
            os.set_inheritable(each, False)
        self.fds = _open_fds()
        self.cwd = _get_cwd()
        self.script = b""  # type: Optional[bytes]  # the script's text, None if it cannot be read
        self.comm = _read_text("/proc/self/comm").rstrip("\n")
        self.start_environ = dict(os.environ)
        self.import_changes = {}  # type: Dict[str, Optional[str]]
        self.watch = None  # type: Any  # over the use of variables by imports
        self.sentry = None  # type: Any
        self.allowed = []  # type: List[str]
        self.tasks = set(os.listdir("/proc/self/task"))
        self.suspect = ""  # the module during whose import a thread last appeared
        self.listing_path = ""  # the file for the list of what imports have accessed
        self.listing = ""
        self.files = _Files(self.ctypes, self.libc)
        self.checked_s = 0.0
        self.parked = []  # type: List[int]
        self.parked_pid = self.first_pid = 0  # of the first standby process, and of the first rank
        self.read = []  # type: List[Tuple[int, int]]  # pages that the first rank has read: address and bytes
        self.copied = []  # type: List[Tuple[int, int]]
        self.spare = 0  # standby processes to fork for the next attempt
        self.is_in_huge_pages = False  # or its time limit has passed
        self.has_files_mapped = True  # those that imports have read
        self.has_forked = False
        self.last_request = []  # type: List[str]
        self.last_environ = {}  # type: Dict[str, str]  # of the first rank in the latest request
        self.is_fit = False  # the result of a check after ranks were forked
        self.counts = None  # type: Optional[List[Tuple[Any, str, Any, Any]]]
        self.has_counted = False  # an import has counted devices
        self.driver = None  # type: Any
        self.select = _import_apart("select")
        # With SIGCHLD ignored, exit statuses of children are lost. Ranks get the setting that an exec'd rank has.
        self.signal = _import_apart("_signal")
        self.is_deaf = self.signal.getsignal(self.signal.SIGCHLD) == self.signal.SIG_IGN
        if self.is_deaf:
            self.signal.signal(self.signal.SIGCHLD, self.signal.SIG_DFL)
        self.gc = _import_apart("gc")
        _write_text("/proc/self/comm", "bootrun-preload")

    # ---- frames ----------------------------------------------------------------------------------------------

    def send(self, *fields: str) -> None:
        data = _frame(_encode([field.replace("\0", " ") for field in fields]))
        while data:
            data = data[os.write(self.fd, data) :]

    def receive(self) -> "List[str]":
        size = int.from_bytes(self._read(4), "little")
        return [os.fsdecode(field) for field in self._read(size).split(b"\0")]

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self.fd, min(size, 1 << 20))
            if not part:
                raise _GuardGone
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def end_with(self, failed: "_Failed") -> None:
        """Report the failure and wait: the supervisor ends this process and those that imports have started."""
        try:
            self.send("failed", failed.name, failed.why, *failed.also)
            while True:
                self.receive()
        except (_GuardGone, OSError):
            os._exit(0)

    # ---- importing -------------------------------------------------------------------------------------------

    def preload(self) -> None:
        """Import the modules of the first request, and check the effects of each import."""
        entries = self.receive()[1:]
        if entries and entries[0].startswith(">"):
            self.listing_path = entries.pop(0)[1:]
            self.inside["opened"] = self.inside["Opened"]()
            self.inside["opened"].install()
        self.allowed = [entry[1:] for entry in entries if entry.startswith("=")]
        entries = [entry for entry in entries if not entry.startswith("=")]
        if os.getsid(0) != os.getpid():
            raise _Failed("", "PYTHON_EXEC names a program that starts the interpreter as its child")
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # to also find daemons that an import starts
        self._look(START_UP)
        if sys.gettrace() or sys.getprofile():
            raise _Failed("", "a debugger or profiler is active in the interpreter")
        self.script = self._read_script()
        top = self._reserve_huge_pages()
        self._pose_as_rank()
        os.environ.update(SET_WHILE_IMPORTING)
        imports = self.inside["load_beside"]("import_watch")
        self.per_rank = imports["PER_RANK"]
        values = self.inside["load_beside"]("rank_values")
        self.rank_values = values["RankValues"](self.per_rank, imports["find_module_frame"])
        self.watch = imports["Watch"](False, self.rank_values.take)
        self.watch.install()
        self.gc.collect()
        self.gc.freeze()  # older objects go first: freezing puts young ones in front
        thresholds = self.gc.get_threshold()
        rarely = (max(OBJECTS_BETWEEN_COLLECTIONS, thresholds[0]), *thresholds[1:])
        if thresholds[0]:
            self.gc.set_threshold(*rarely)
        absent = self._import_all(entries)
        self._look_for_uses()
        self._stop_counting()
        self.watch.remove()
        self.libc.free(top)  # memory that imports did not need is returned to the system
        self.sentry = imports["Sentry"](self.watch, self.allowed)
        self._settle()
        if self.gc.get_threshold() == rarely:  # else an import has set its own
            self.gc.set_threshold(*thresholds)
        self.send("ready", str(len(sys.modules)), *absent)

    def _import_all(self, entries: "List[str]") -> "List[str]":
        """Import all entries. Returns: the absent ones."""
        absent = []
        for entry in entries:
            sign, name = entry[:1], entry[1:]
            if entry == MORE:
                self.send("importing", "")
                absent += self._import_all(self._await_rest())
                break
            if name in sys.modules:
                continue
            self.send("importing", name)
            if not self._import(sign, name):
                absent.append(name)
            self._look(name)
            if self.counts is None and "torch" in sys.modules:
                self.counts = [] if self._chooses_devices() else self._count_apart()
        self.send("importing", "")
        return absent

    def _await_rest(self) -> "List[str]":
        """Set variables that no module has read yet to the ranks' values. Returns: further modules to import."""
        fields = self.receive()
        end = 2 + int(fields[1])
        for change in fields[2:end]:
            name, sign, value = change.partition("=")
            is_read = name not in READ_LATE and any(each in sys.modules for each in READ_BY.get(name, ("sys",)))
            if not is_read:
                _put(os.environ, name, value if sign else None)
                _put(self.start_environ, name, value if sign else None)
        return fields[end:]

    def _pose_as_rank(self) -> None:
        """Set up what the script's imports see: its arguments, directory and __main__."""
        bare = self.inside["bare_command"](self.mode, self.target, self.args, [sys.executable, "-u"])
        first = {"script": self.target, "module": "-m", "run-path": self.target}[self.mode]
        self.inside["_set_argv"](first, self.args, bare)
        path0 = None
        if self.mode == "script":
            path = self.inside["_absolute"](self.target)
            path0 = path if self.inside["_find_importer"](path) is not None else None
        self.own_path = list(sys.path)
        self.inside["_set_path0"](self.mode, self.target, path0)
        self.argv = list(sys.argv)
        self.main = sys.modules["__main__"] = type(sys)("__main__")
        self.main.__dict__.update(self.template)
        if self.mode == "script" and path0 is None:
            self.main.__file__ = path
            self.main.__loader__ = sys.modules["_frozen_importlib_external"].SourceFileLoader("__main__", path)
        else:
            for name in ("__file__", "__cached__"):
                self.main.__dict__.pop(name, None)
            self.main.__loader__ = sys.modules["_frozen_importlib"].BuiltinImporter

    def _import(self, sign: str, name: str) -> bool:
        try:
            __import__(name)
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name is not None
            if missing and sign != "!" and (name + ".").startswith(str(error.name) + "."):
                return False
            if missing:
                raise _Failed(name, "cannot be imported: no module named %s" % error.name)
            raise _Failed(name, "cannot be imported: %s" % _first_line(str(error)))
        except SystemExit as error:
            raise _Failed(name, "exits when it is imported (%s)" % _first_line(str(error.code)))
        except BaseException as error:
            self._look_for_uses()
            said = _first_line(str(error))
            raise _Failed(name, "raises when it is imported: %s%s" % (type(error).__name__, said and ": " + said))
        return True

    def _chooses_devices(self) -> bool:
        """Return whether the script selects visible devices, possibly before its imports.

        The text of a module (-m) is not known, as in fork/policy.py.
        """
        return self.script is None or any(name.encode() in self.script for name in VISIBLE)

    def _read_script(self) -> "Optional[bytes]":
        """Return the script's text, b"" for a module (-m), None if it cannot be read."""
        if self.mode == "module":
            return b""
        try:
            with open(self.target, "rb") as file:
                return file.read()
        except OSError:
            return None

    def _count_apart(self) -> "List[Tuple[Any, str, Any, Any]]":
        """Make imports that count torch's devices use the answer of a fork, in which the driver is started.

        Returns: the replaced functions: module, name, the original and the replacement.
        """
        replaced = []
        for module, name in COUNTS:
            place = sys.modules.get(module)
            count = getattr(place, name, None)
            if callable(count):
                replaced.append((place, name, count, self._counting(count)))
                setattr(*replaced[-1][:2], replaced[-1][3])
        return replaced

    def _counting(self, count: "Any") -> "Any":
        known = []  # type: List[int]

        def counted() -> "Any":
            if not known:
                self.has_counted = True
                self.watch.use_all(VISIBLE)
                number = _ask_fork(count)
                if number is None:
                    return count()
                known.append(number)
            return known[0]

        return counted

    def _stop_counting(self) -> None:
        for place, name, count, instead in self.counts or ():
            if getattr(place, name, None) is instead:
                setattr(place, name, count)

    def _look(self, name: str) -> None:
        """Raise `_Failed` if the import of `name` did something that each rank has to do itself."""
        when = "" if name == START_UP else " when it is imported"
        now = _open_fds()
        if len(now) > len(self.fds):
            self.gc.collect()  # garbage may keep files open
            now = _open_fds()
        for fd, where in self.fds.items():
            if now.get(fd) != where:
                raise _Failed(name, "closes or replaces descriptor %d%s" % (fd, when))
        self.libc.fflush(None)
        printed = os.lseek(1, 0, 1)
        if printed:
            text = os.pread(1, min(printed, 200), 0).decode("utf-8", "replace")
            raise _Failed(name, "prints%s: %s" % (when, _first_line(text)))
        if sys.modules["_thread"]._count():
            raise _Failed(name, "starts a thread%s" % when)
        tasks = set(os.listdir("/proc/self/task"))
        if not tasks <= self.tasks:
            self.suspect = name
        self.tasks = tasks
        if self.watch is not None:
            self._look_for_rank(name)
        if _has_children():
            raise _Failed(name, "starts a process%s" % when)
        opened = [where for fd, where in now.items() if fd not in self.fds]
        if opened:
            opened.sort(key=_is_device, reverse=True)
            raise _Failed(name, "opens %s%s and keeps it open" % (opened[0], when))
        if self._is_driver_started():
            raise _Failed(name, "starts CUDA%s" % when)
        backend = _find_started()
        if backend:
            raise _Failed(name, "initialises %s%s" % (backend, when))
        if _get_cwd() != self.cwd:
            raise _Failed(name, "changes the working directory%s" % when)

    def _look_for_rank(self, name: str) -> None:
        """Raise if an import reads a value that differs between ranks, and ranks cannot recompute the results."""
        for who, variable, _ in self.watch.rank_reads:
            also = self.watch.chain(who)
            # Another module may have set the same attribute differently before.
            used = [each for each, _ in self.rank_values.find_used()]
            raise _Failed(also[0] if also else name, "reads %s when it is imported" % variable, *also[1:], *used)

    def _look_for_uses(self) -> None:
        """Raise if a module has used such a value; after all imports, when all dependents are known."""
        used = self.rank_values.find_used()
        if used:
            others = [who for who, _ in used[1:]]
            also = [name for who, _ in used for name in self.watch.dependents(who)]
            raise _Failed(used[0][0], "reads %s when it is imported" % used[0][1], *others, *also)

    def _settle(self) -> None:
        """Check after the last import that this process can be forked, and prepare it."""
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        for key, value in SET_WHILE_IMPORTING.items():
            if os.environ.get(key) == value:
                _put(os.environ, key, self.start_environ.get(key))
        for key in set(os.environ) | set(self.start_environ):
            if os.environ.get(key) != self.start_environ.get(key):
                self.import_changes[key] = os.environ.get(key)
        pid = os.fork()  # also for the threads that libraries end before a fork
        if pid == 0:
            os._exit(_find_refusing())
        refusing = os.waitpid(pid, 0)[1] >> 8
        for _ in range(50):  # a joined thread may remain visible for a moment
            threads = self._unknown_threads()
            if not threads:
                break
            time.sleep(0.002)
        else:
            raise _Failed(self.suspect, "leaves a thread (%s) when it is imported" % threads[0])
        trouble = self._find_device_state()
        if not trouble and refusing:
            trouble = "%s does not work in a forked process" % BACKENDS[refusing - 1]
        if trouble:
            raise _Failed("", trouble)
        self._take_stamps()
        if self.listing_path:
            self.listing = self._list_touched()
        self.gate = self.inside["load_beside"]("store_gate")
        self.is_gated = self.gate["has_place"]() and b"TCPStore" not in (self.script or b"")
        self.inside["known_modules"] = frozenset(sys.modules)
        self.inside["listed"] = (len(sys.modules), len(sys.path_importer_cache))
        self.socket = _import_apart("_socket")
        modules = [module for module in list(sys.modules.values()) if isinstance(module, type(sys))]
        same = _import_apart(
            "_operator"
        ).is_  # not id(), which raises an event for the audit hook that the watch has left
        self.main_places = [  # for example multiprocessing and dill keep the script's module
            (place, name)
            for place in [sys.modules, *map(vars, modules)]
            if True in map(same, place.values(), [self.main] * len(place))
            for name, value in list(place.items())
            if value is self.main
        ]
        self.gc.freeze()  # a collection in a rank does not touch, and so does not copy, shared pages
        self.inside["thaw"] = _make_thaw(self.gc)
        self._use_huge_pages(MAX_HUGE_FIRST_S)

    def _reserve_huge_pages(self) -> int:
        """Make glibc's heap grow in huge pages from the start, since a later conversion copies each page.

        Returns: a block at the top of the heap, to be freed after the imports; 0 for none.
        """
        if not hasattr(self.libc, "malloc_trim"):
            return 0  # another C library
        blocks = [0] * (RESERVE_BYTES // BLOCK_BYTES)
        for place in range(len(blocks)):  # in a list of fixed size: one that grows would lie between the blocks
            blocks[place] = self.libc.malloc(BLOCK_BYTES - 16) or 0
        first = len(blocks) - 1
        while first and blocks[first] - blocks[first - 1] == BLOCK_BYTES:
            first -= 1  # lower blocks reuse freed memory, or are not in the heap
        for block in blocks[:-1]:
            self.libc.free(block)
        self.libc.malloc_trim(0)  # none of it stays in memory
        low, high = -(-blocks[first] // HUGE_PAGE_BYTES), blocks[-1] // HUGE_PAGE_BYTES
        if low < high:
            self.libc.madvise(low * HUGE_PAGE_BYTES, (high - low) * HUGE_PAGE_BYTES, MADV_HUGEPAGE)
        return blocks[-1]

    def _use_huge_pages(self, max_s: float) -> None:
        """Move this process's memory to huge pages where the kernel can: each fork, and at a restart each end of a
        rank, traverses all shared pages. Once ranks run, stop when a request arrives."""
        if self.is_in_huge_pages:
            return
        end_s = time.monotonic() + max_s
        with open("/proc/self/maps", "rb", 0) as file:
            lines = file.readall().splitlines()
        for line in sorted(lines, key=lambda line: line.endswith(b"[heap]")):
            words = line.split()
            if words[1] != b"rw-p" or (len(words) > 5 and words[5] != b"[heap]"):
                continue
            low, high = [int(word, 16) for word in words[0].split(b"-")]
            for place in range(-(-low // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, high, HUGE_PAGE_BYTES):
                if place + HUGE_PAGE_BYTES > high:
                    break
                if time.monotonic() > end_s:
                    self.is_in_huge_pages = self.has_forked
                    return
                if self.has_forked and self._is_asked():
                    return
                self.libc.madvise(place, HUGE_PAGE_BYTES, MADV_COLLAPSE)  # on failure the page stays as it is
        self.is_in_huge_pages = True

    def _list_touched(self) -> str:
        """Return what imports have accessed, for the access trace of this start; call before files are unmapped.

        For libraries: the pages mapped in this process, by the kernel's list, in units of 4 KiB.
        """
        try:
            lines = self.inside["list_start"]()
            page_bytes = os.sysconf("SC_PAGE_SIZE")
            units = page_bytes // 4096
            with open("/proc/self/maps", "rb", 0) as file:
                mappings = file.readall().splitlines()
            with open("/proc/self/pagemap", "rb", 0) as pagemap:
                for mapping in mappings:
                    words = mapping.split(None, 5)
                    if len(words) < 6 or words[4] == b"0" or not words[5].startswith(b"/"):
                        continue
                    low, high = [int(word, 16) // page_bytes for word in words[0].split(b"-")]
                    if high - low > MAX_LISTED_PAGES:
                        continue
                    pagemap.seek(low * 8)
                    flags = (pagemap.read((high - low) * 8) or b"")[7::8].translate(IN_MEMORY)
                    first = int(words[2], 16) // page_bytes
                    ranges = [
                        "%d+%d" % ((first + start) * units, (end - start) * units) for start, end in _runs(flags)
                    ]
                    if ranges:
                        lines.append("\ttouched\t%s\t%s\n" % (os.fsdecode(words[5]), ",".join(ranges)))
            return "".join(lines)
        except Exception:
            return ""  # only the next start's read-ahead misses these files

    def _learn(self) -> None:
        """Record which pages the first rank has read or copied so far: other ranks will need the same."""
        self.read, self.copied = [], []
        left, size = MAX_COPIED_PAGES, os.sysconf("SC_PAGE_SIZE")
        try:
            with open("/proc/%d/maps" % self.first_pid, "rb", 0) as file:
                mappings = file.readall().splitlines()
            with open("/proc/%d/pagemap" % self.first_pid, "rb", 0) as pagemap:
                for mapping in mappings:
                    words = mapping.split(None, 5)
                    low, high = [int(word, 16) // size for word in words[0].split(b"-")]
                    is_written = words[1] == b"rw-p"
                    is_file = words[1] in (b"r--p", b"r-xp") and words[4] != b"0"
                    if not (is_written or is_file) or high - low > MAX_LISTED_PAGES:
                        continue
                    pagemap.seek(low * 8)
                    flags = (pagemap.read((high - low) * 8) or b"")[7::8].translate(
                        COPIED if is_written else PRESENT
                    )
                    for start, end in _runs(flags):
                        place = (low + start) * size
                        if is_file:
                            self.read.append((place, (end - start) * size))
                        elif left > 0:
                            self.copied.append((place, min(end - start, left) * size))
                            left -= end - start
        except (OSError, ValueError):
            pass  # the rank has ended, or the kernel does not report pages

    def _release_files(self) -> None:
        """Unmap library pages that imports have read: ranks map what they need from the page cache.

        A fork copies no entries of these pages, so that no rank has to wait for this.
        """
        self.has_files_mapped = False
        with open("/proc/self/smaps", "rb", 0) as file:
            lines = file.readall().splitlines()
        place = None  # type: Optional[Tuple[int, int]]
        for line in lines:
            words = line.split()
            if not words[0].endswith(b":"):
                low, _, high = words[0].partition(b"-")
                is_file = words[1] in (b"r--p", b"r-xp") and len(words) > 5 and words[5].startswith(b"/")
                place = (int(low, 16), int(high, 16)) if is_file else None
            elif words[0] == b"Anonymous:" and words[1] == b"0" and place is not None:
                # The mapping was never written to, so nothing is lost.
                self.libc.madvise(place[0], place[1] - place[0], MADV_DONTNEED)

    # ---- checks ----------------------------------------------------------------------------------------------

    def _unknown_threads(self) -> "List[str]":
        names = []
        for task in os.listdir("/proc/self/task"):
            if int(task) != os.getpid():
                name = _read_text("/proc/self/task/%s/comm" % task).rstrip("\n")
                if name not in HARMLESS_THREADS:
                    names.append(name or "?")
        return names

    def _take_stamps(self) -> None:
        """Take stamps of all files that imports have read."""
        paths = {os.path.realpath(sys.executable or "/proc/self/exe")}
        for module in list(sys.modules.values()):
            path = getattr(getattr(module, "__spec__", None), "origin", None)
            if isinstance(path, str) and path.startswith("/"):
                paths.add(path)
        with open("/proc/self/maps", "rb", 0) as file:
            for line in file.readall().splitlines():
                path = os.fsdecode(line[73:])
                if path.startswith("/") and ".so" in path:
                    paths.add(path)
        self.files.take(paths)
        if self.files.fd >= 0:
            self.fds[self.files.fd] = os.readlink("/proc/self/fd/%d" % self.files.fd)

    def _find_trouble(self) -> str:
        """Return why this process must not fork, "" if it may."""
        self.checked_s = time.monotonic()
        changed = self.files.find_change()
        if changed:
            return "%s has changed since it was preloaded" % changed
        threads = self._unknown_threads()
        if threads:
            return "the fork server has a thread (%s)" % threads[0]
        known = set(self.fds.values())
        for fd, where in _open_fds().items():
            if self.fds.get(fd) != where and fd not in self.parked and where not in known:
                return "the fork server has %s open" % where
        if self.is_fit:
            return ""  # except for libraries' fork handlers, no foreign code has run here since
        trouble = self._find_device_state()
        self.is_fit = self.has_forked and not trouble
        return trouble

    def _find_device_state(self) -> str:
        """Return accelerator or framework state that does not survive a fork, as a reason; "" for none."""
        if self._is_driver_started():
            return "CUDA is initialised in the fork server"
        return _find_device(self.fds) or _find_framework_state()

    def _is_driver_started(self) -> bool:
        """Return whether cuInit was called. This queries CUDA's driver, and only if it is loaded."""
        if self.driver is None:
            try:
                self.driver = self.ctypes.CDLL(CUDA_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            except OSError:
                return False
        try:
            return bool(self.driver.cuDeviceGetCount(self.ctypes.create_string_buffer(4)) != CUDA_NOT_INITIALISED)
        except AttributeError:
            return False  # not NVIDIA's driver

    def _find_difference(self, base: "Dict[str, str]", ranks: "List[_Rank]") -> str:
        """Return why these ranks must be exec'd, "" if they can be forked."""
        for place, rank in enumerate(ranks):
            environ = dict(base)
            environ.update(rank.environ)
            if rank.is_entered:
                self._exchange(environ)
            names = {*environ, *self.start_environ}
            if place and not (rank.is_entered or ranks[0].is_entered):
                names = {*rank.environ, *ranks[0].environ}  # they differ from those of the first rank in no other
            for name in names:
                known = name in self.per_rank or (name in READ_LATE and not (self.has_counted and name in VISIBLE))
                if name in READ_BY and name not in self.import_changes:
                    known = not any(module in sys.modules for module in READ_BY[name])
                if not known and environ.get(name) != self.start_environ.get(name):
                    return "%s differs from what modules were preloaded with" % name
        return ""

    # ---- forking ---------------------------------------------------------------------------------------------

    def serve(self) -> "Call":
        """Wait for requests; returns only in ranks."""
        while True:
            call = None
            if (self.spare or self.has_files_mapped) and not self._is_asked(PARK_AFTER_S):
                if self.has_files_mapped:
                    self._release_files()
                if not self.spare:
                    continue
                self._use_huge_pages(MAX_HUGE_S)
                if self._is_asked():
                    continue
                count, self.spare = self.spare, 0
                self._learn()
                call = self._make_ready(count, is_early=True)
                if call is None and self.parked:
                    self._rehearse_fork()
                self.checked_s = 0.0  # too early to count for the fork
            else:
                fields = self.receive()
                if fields[0] == "prepare":
                    call = self._make_ready(int(fields[1]))
                elif fields[0] == "fork":
                    call = self._fork(fields[1:])
            if call is not None:
                return call

    def _is_asked(self, wait_s: float = 0.0) -> bool:
        """Return whether a request has arrived, or arrives within this time."""
        return bool(self.select.select([self.fd], [], [], wait_s)[0])

    def _make_ready(self, count: int, is_early: bool = False) -> "Optional[Call]":
        """Call `_park`, or discard all standby processes if this process must not fork."""
        if self._find_trouble():
            self._discard()
            return None
        return self._park(count, is_early)

    def _park(self, count: int, is_early: bool = False) -> "Optional[Call]":
        """Fork standby processes. Returns: None here; in a process that becomes a rank, its call.

        Args: is_early: no start waits for them yet.
        """
        if len(self.parked) == count:
            return None
        self._discard()
        pipes = [os.pipe() for _ in range(count)]
        first, telling = os.pipe()
        pid = os.fork()
        if pid == 0:
            return self._between([reading for reading, _ in pipes], telling, is_early)
        for reading in [telling, *[reading for reading, _ in pipes]]:
            os.close(reading)
        self.parked = [writing for _, writing in pipes]
        status = os.waitpid(pid, 0)[1]
        self.parked_pid = int(os.read(first, 32) or 0)
        os.close(first)
        if status:
            self._discard()
        return None

    def _discard(self) -> None:
        """End the standby processes by closing their pipes."""
        if self.parked:
            self.send("discarded")
        for fd in self.parked:
            os.close(fd)
        self.parked = []

    def _between(self, pipes: "List[int]", telling: int, is_early: bool) -> "Call":
        """Run the intermediate process: fork, then end, so that the supervisor becomes the parent."""
        between = os.getpid()
        pids = []
        try:
            for fd in pipes:
                pid = os.fork()
                if pid == 0:
                    return self._be_parked(fd, is_early)
                pids.append(str(pid))
            self.send("parked", *pids)
            os.write(telling, pids[0].encode())
            os._exit(0)
        except OSError:
            if os.getpid() != between:
                raise
            os._exit(1)  # this closes the pipes, which ends the forked processes

    def _fork(self, fields: "List[str]") -> "Optional[Call]":
        spare = int(fields[2])
        base_fields, base, ranks = self._parse(fields)
        trouble = self._find_difference(base, ranks)
        if not trouble and (len(self.parked) != len(ranks) or time.monotonic() - self.checked_s > CHECK_HOLDS_S):
            trouble = self._find_trouble()
        for _ in range(2):  # a standby process may have been killed meanwhile
            if trouble:
                break
            call = self._park(len(ranks))
            if call is not None:
                return call
            if len(self.parked) != len(ranks):
                trouble = "they cannot be forked: no more processes or memory"
            elif self._is_parked(ranks):
                self._let_go(fields[0], int(fields[1]), base_fields, ranks)
                self.spare, self.last_request = spare, fields
                return None
            else:
                self._discard()
        self._discard()
        self.send("refused", trouble or "processes made for them were killed")
        return None

    def _parse(self, fields: "List[str]") -> "Tuple[List[str], Dict[str, str], List[_Rank]]":
        """Return the variables that all ranks of a request have, as fields and as a dict, and its ranks."""
        end = 4 + int(fields[3])
        rest, ranks = fields[end:], []
        while rest:
            ranks.append(_Rank(rest, self.template["__file__"]))
            rest = rest[len(ranks[-1].fields) :]
        return fields[3:end], _to_environ(fields[4:end]), ranks

    def _rehearse_fork(self) -> None:
        """Do in advance what a fork does: the first write to each page that standby processes share copies it."""
        self._find_trouble()
        if self.last_request:
            base_fields, base, ranks = self._parse(self.last_request)
            self._find_difference(base, ranks)
            list(self._make_messages(self.last_request[0], 0, base_fields, ranks))

    def _is_parked(self, ranks: "List[_Rank]") -> bool:
        """Return whether each rank has a standby process and openable logs (an exec'd rank reports log errors)."""
        poll = self.select.poll()
        for fd in self.parked:
            poll.register(fd, 0)  # only for the end of the pipe: the process was killed
        try:
            for path in [path for rank in ranks for path in (rank.stdout, rank.stderr) if path]:
                os.close(_open_log(path))
        except OSError:
            return False
        return not poll.poll(0)

    def _let_go(self, guard_pid: str, port: int, base_fields: "List[str]", ranks: "List[_Rank]") -> None:
        told = []  # type: List[str]
        for rank in ranks:
            told += [rank.key, str(time.monotonic_ns())]
        self.send("forked", *told)
        self.last_environ = _to_environ(base_fields[1:])
        self.last_environ.update(ranks[0].environ)
        waiting = list(zip(self.parked, ranks))
        self.parked, self.has_forked, self.first_pid = [], True, self.parked_pid
        if port:
            waiting.sort(key=lambda each: each[1].environ.get("RANK") != "0")
        messages = self._make_messages(guard_pid, port, base_fields, [rank for _, rank in waiting])
        for place, (fd, _) in enumerate(waiting):
            self._write(fd, next(messages))
            if self.is_gated or not (port and place):
                self._write(fd, b"!")
        if port and len(waiting) > 1 and not self.is_gated:
            poll = self.select.poll()
            poll.register(waiting[0][0], 0)  # only for the end of the pipe: a rank closes it when it begins
            self._await_listener(port, lambda: bool(poll.poll(0)))
            for fd, _ in waiting[1:]:
                self._write(fd, b"!")
        for fd, _ in waiting:
            os.close(fd)
        listing, self.listing = self.listing, ""
        if listing:  # no process waits for it
            try:
                self.inside["write_private"](self.listing_path, listing)
            except OSError:
                pass

    def _make_messages(
        self, guard_pid: str, port: int, base_fields: "List[str]", ranks: "List[_Rank]"
    ) -> "Iterator[bytes]":
        """Yield the message to each standby process that tells which rank it is."""
        base = _encode(base_fields)
        for place, rank in enumerate(ranks):
            head = _encode([guard_pid, str(port if self.is_gated else 0), str(place)])
            yield _frame(b"\0".join((head, base, _encode(rank.fields))))

    def _await_listener(self, port: int, has_begun: "Callable[[], bool]") -> None:
        """Wait until a process listens on `port`."""
        until_s, is_begun = time.monotonic() + MAX_BEGIN_S, False
        while time.monotonic() < until_s:
            if not is_begun and has_begun():
                until_s, is_begun = time.monotonic() + MAX_HEAD_START_S, True
            if self.gate["is_listened_on"](self.socket, port):
                return
            time.sleep(0.0005)

    def _write(self, fd: int, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(fd, data) :]
        except OSError:
            pass  # killed meanwhile: the supervisor reports a failed rank

    def _be_parked(self, fd: int, is_early: bool) -> "Call":
        """Run a standby process: set up the state of an exec'd rank, wait for a rank, return its call."""
        os.setsid()
        for copy, number in zip(CONSOLE, (0, 1, 2)):
            os.dup2(copy, number)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != fd:
                try:
                    os.close(int(name))
                except OSError:
                    pass  # the descriptor that listed the directory
        _write_text("/proc/self/comm", "bootrun-parked")
        if self.is_deaf:
            self.signal.signal(self.signal.SIGCHLD, self.signal.SIG_IGN)
        fd = self.fd = self.inside["_move_high"](fd, 1)  # an exec'd rank has the low numbers free
        is_prepared = _renew()
        if is_early:
            self._rehearse()
        try:
            fields = self.receive()
        except _GuardGone:
            os._exit(137)  # not needed, or the fork server was killed right after it had reported this rank
        gate, place, count = map(int, fields[1:4])
        environ = _to_environ(fields[4 : 4 + count])
        rank = _Rank(fields[4 + count :], self.template["__file__"])
        environ.update(rank.environ)
        if rank.is_entered:
            self._exchange(environ)
        self.libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        if os.getppid() != int(fields[0]):
            os._exit(137)
        try:
            for path, number in ((rank.stdout, 1), (rank.stderr, 2)):
                if path:
                    opened = _open_log(path)
                    os.dup2(opened, number)
                    os.close(opened)
            self._set_environ(environ)
            self.rank_values.make_anew()
            _write_text("/proc/self/comm", self.comm)
            self._show_as(rank.argv, environ)
            _renew_clock()
            self.path_now, self.argv_now = list(sys.path), list(sys.argv)
            sys.path[:] = self.own_path
        except Exception:
            is_prepared = False  # the rank is exec'd instead, which shows the error
        call = self._become(rank, environ) if is_prepared else None
        if gate:
            self.gate["install"](self.socket, gate, int(environ.get("LOCAL_WORLD_SIZE", "1")), place)
        os.read(fd, 1)  # also at its end: the supervisor knows this rank, and the fork server was killed
        os.close(fd)
        if call is None:
            os.execve(rank.argv[0], rank.argv, environ)
        self.inside["kept"] = self  # freeing its objects would copy their pages
        return call

    def _rehearse(self) -> None:
        """Run a rank's start once in advance: the first write to a shared page copies it, here some 800 pages at 5
        us each, while no start waits. The script is compiled too; if it has not changed when the rank starts, the
        code is used.
        """
        inside = self.inside
        try:
            if self.mode == "script":
                inside["compiled"] = self._compile()
            environ = self.last_environ or dict(os.environ)
            self._set_environ(environ)
            self._show_as(self.argv, environ)
            events = inside["Events"]("/dev/null", "0" * 36, "rehearsal", 0, 0)
            inside["make_heartbeat"](events, inside["FirstStep"](events))
            events.write("spawn", "instant", "script")
            self._open_blank_page()
        except Exception:
            pass  # a rank repeats all of it
        for advice, places in ((MADV_POPULATE_READ, self.read), (MADV_POPULATE_WRITE, self.copied)):
            for place, size in places:
                self.libc.madvise(place, size, advice)  # pages that are not mapped here stay unmapped

    def _open_blank_page(self) -> None:
        """Open an empty stats page as a rank opens that of bootrun."""
        blank = os.memfd_create("bootseer-blank", os.MFD_CLOEXEC)
        try:
            os.pwrite(blank, self.inside["PAGE_HEAD"].ljust(self.inside["PAGE_BYTES"], b"\0"), 0)
            page = self.inside["open_page"]("/proc/self/fd/%d" % blank)
            if page is not None:
                faulthandler = self.inside["_import_apart"]("faulthandler")
                for name in ("STACKS_SIGNAL", "MAIN_SIGNAL"):
                    faulthandler.unregister(self.inside[name])
                os.close(page.fd)
        finally:
            os.close(blank)

    def _compile(self) -> "Tuple[str, bytes, Any]":
        """Return path, text and code of the script; the code is None if compiling fails or warns."""
        path = self.inside["_absolute"](self.target)
        with open(path, "rb", 0) as file:
            is_regular = os.fstat(file.fileno()).st_mode & 0o170000 == 0o100000
            data = file.readall() if is_regular else b""
        filters = getattr(sys.modules.get("warnings", sys.modules["_warnings"]), "filters")
        filters.insert(0, ("error", None, Warning, None, 0))  # each rank has to print it itself
        try:
            code = compile(data, path, "exec", 0, True)
        except Exception:
            code = None
        finally:
            del filters[0]
        return path, data, code

    def _become(self, rank: "_Rank", environ: "Dict[str, str]") -> "Call":
        mode, events_file, run_id, node, number, attempt, page_file, target = rank.argv[3:11]
        args = rank.argv[11:]
        options = rank.argv[:2]
        inside = self.inside
        try:
            imported_path, imported_argv = self.path_now, self.argv_now
            call = inside["become"](mode, target, args, options, self.template)
            sys.path[:] = imported_path
            if imported_argv != self.argv and sys.argv == self.argv:
                sys.argv[:] = imported_argv
            for place, name in self.main_places:
                if place.get(name) is self.main:
                    place[name] = sys.modules["__main__"]
            inside["install"](inside["Events"](events_file, run_id, node, int(number), int(attempt)), page_file)
            self._arm(rank, events_file, environ)
            return call  # type: ignore[no-any-return]
        except Exception:
            inside["exec_bare"](inside["bare_command"](mode, target, args, options))
            raise AssertionError

    def _arm(self, rank: "_Rank", events_file: str, environ: "Dict[str, str]") -> None:
        """Begin to detect imports that would load another module than the one present."""
        inside, pid = self.inside, os.getpid()
        masked = self.signal.pthread_sigmask(self.signal.SIG_BLOCK, ())
        ignored = [each for each in range(1, 32) if self.signal.getsignal(each) == self.signal.SIG_IGN]

        def is_over() -> bool:
            """Return whether other ranks depend on this one, or it has made a step."""
            distributed = sys.modules.get("torch.distributed")
            is_initialized = getattr(distributed, "is_initialized", bool)
            return bool(os.getpid() != pid or inside["has_stepped"]() or is_initialized())

        def begin_anew(why: str) -> None:
            """Restart this rank with exec, and record the reason for the next start."""
            os.chdir(self.cwd)
            if events_file.endswith(".jsonl"):
                inside["write_private"](events_file[:-6] + ".anew", why + "\n")
                if rank.environ.get("LOCAL_RANK") == "0":
                    inside["write_private"](events_file[:-6] + ".uses", "")
            else:
                os.write(2, ("bootrun: warning: the rank restarts by exec: %s\n" % why).encode("utf-8", "replace"))
            for each in range(1, 32):
                if self.signal.getsignal(each) == self.signal.SIG_IGN and each not in ignored:
                    self.signal.signal(each, self.signal.SIG_DFL)
            self.signal.pthread_sigmask(self.signal.SIG_SETMASK, masked)
            self.libc.fflush(None)
            os.execve(rank.argv[0], rank.argv, environ)

        self.sentry.arm(os.path.basename(self.target), is_over, begin_anew)

    def _exchange(self, environ: "Dict[str, str]") -> None:
        """Change a rank's environment as entering an image does."""
        for name in READ_AT_START:
            _put(environ, name, self.start_environ.get(name))

    def _set_environ(self, environ: "Dict[str, str]") -> None:
        """Set the environment in the order of an exec'd rank; variables set by imports come last."""
        wanted = dict(environ)
        for name, value in self.import_changes.items():
            _put(wanted, name, value)
        if list(os.environ) != list(wanted):  # else it has been rehearsed, and few values differ
            os.environ.clear()
        for name, value in wanted.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    def _show_as(self, argv: "List[str]", environ: "Dict[str, str]") -> None:
        """Set /proc/PID/cmdline and environ, where the kernel allows it (CONFIG_CHECKPOINT_RESTORE)."""
        words = b"".join([os.fsencode(word) + b"\0" for word in argv])
        pairs = b"".join([os.fsencode("%s=%s" % item) + b"\0" for item in environ.items()])
        data = words + pairs
        stat = _read_text("/proc/self/stat").rpartition(")")[2].split()
        start = self.libc.malloc(len(data))  # for as long as the process lives
        if not start:
            return
        self.libc.memcpy(start, data, len(data))
        fields = [int(stat[field - 3]) for field in (26, 27, 45, 46, 47)]
        fields += [self.libc.sbrk(0), int(stat[28 - 3]), start, start + len(words), start + len(words)]
        fields += [start + len(data), 0, 0xFFFFFFFF << 32]  # no new auxiliary vector, no new file of the program
        packed = b"".join([field.to_bytes(8, "little") for field in fields])
        self.libc.prctl(PR_SET_MM, PR_SET_MM_MAP, packed, len(packed), 0)


def _make_thaw(gc: "Any") -> "Callable[[], None]":
    """Return a function that unfreezes objects, so that a rank frees at its end what an exec'd rank frees.

    C++ bindings report each object that is left (nanobind, and so triton).
    """
    marker = []  # type: List[Any]  # younger than all frozen objects, whose count is slow

    def thaw() -> None:
        try:
            is_kept = all(each is not marker for each in gc.get_objects())  # the script has frozen, too
        except Exception:  # an audit hook of the script forbids the call
            is_kept = False
        if not is_kept:
            gc.unfreeze()

    return thaw


# ---- the state of a process ------------------------------------------------------------------------------------


def _load_libc(ctypes: "Any") -> "Any":
    """Return the C library with the types of its functions."""
    libc = ctypes.CDLL(None)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    libc.malloc.restype, libc.malloc.argtypes = pointer, [size]
    libc.memcpy.restype, libc.memcpy.argtypes = pointer, [pointer, ctypes.c_char_p, size]
    libc.sbrk.restype, libc.sbrk.argtypes = pointer, [ctypes.c_ssize_t]
    libc.free.restype, libc.free.argtypes = None, [pointer]
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim.argtypes = [size]
    libc.fflush.argtypes = [pointer]
    libc.madvise.argtypes = [pointer, size, ctypes.c_int]
    return libc


def _import_apart(name: str) -> "Any":
    """Import a module without leaving it or its imports in sys.modules: scripts find only preloaded modules."""
    before, path, library = set(sys.modules), sys.path[:], os.path.dirname(os.__file__)
    sys.path[:] = [folder for folder in path if folder == library or folder.endswith("/lib-dynload")]
    try:
        return __import__(name)
    finally:
        sys.path[:] = path
        for added in set(sys.modules) - before:
            del sys.modules[added]


def _open_fds() -> "Dict[int, str]":
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink("/proc/self/fd/" + name)
        except OSError:
            pass  # the descriptor that listed the directory
    return found


def _runs(flags: bytes) -> "Iterator[Tuple[int, int]]":
    """Yield start and end of each run of ones."""
    end = 0
    while True:
        start = flags.find(1, end)
        if start < 0:
            return
        end = flags.find(0, start)
        end = len(flags) if end < 0 else end
        yield start, end


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _find_device(inherited: "Dict[int, str]") -> str:
    """Return an accelerator or network device that this process has opened, as a reason; "" for none."""
    for fd, where in _open_fds().items():
        if _is_device(where) and inherited.get(fd) != where:
            return "the fork server has opened %s" % where
    with open("/proc/self/maps", "rb", 0) as file:
        mapped = _mapped_device(file.readall())
    return mapped and "the fork server has mapped %s" % mapped


def _mapped_device(maps: bytes) -> str:
    """Return the first device among mappings, "" for none. A mapped device may be closed already."""
    at = maps.find(b" /dev/")
    while at >= 0:
        where = os.fsdecode(maps[at + 1 : maps.index(b"\n", at)])
        if _is_device(where):
            return where
        at = maps.find(b" /dev/", at + 1)
    return ""


def _is_device(path: str) -> bool:
    return path.startswith("/dev/") and not path.startswith(HARMLESS_DEVICES)


def _find_started() -> str:
    """Return a torch backend that was initialised; "" for none."""
    for name in BACKENDS:
        if getattr(sys.modules.get(name), "_initialized", False) is True:
            return name
    return ""


def _find_refusing() -> int:
    """Return, in a fork, the number (from 1) of the first torch backend that refuses forks; 0 for none."""
    for place, name in enumerate(BACKENDS, 1):
        try:
            if sys.modules[name]._is_in_bad_fork():
                return place
        except Exception:
            pass  # the backend is absent, or this version cannot report it
    return 0


def _ask_fork(count: "Any") -> "Optional[int]":
    """Return `count()` of a fork; None after an error, which this process then raises itself."""
    reading, writing = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        pid = -1
    if pid == 0:
        try:
            os.write(writing, b"%d" % count())
        finally:
            os._exit(0)
    os.close(writing)
    found = os.read(reading, 32)
    os.close(reading)
    if pid > 0:
        os.waitpid(pid, 0)
    return int(found) if found else None


def _find_framework_state() -> str:
    """Return framework state that does not survive a fork, as a reason; "" for none."""
    backend = _find_started()
    if backend:
        return "%s is initialised in the fork server" % backend
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and getattr(distributed, "is_available", bool)() and distributed.is_initialized():
        return "torch.distributed is initialised in the fork server"
    if sys.gettrace() or sys.getprofile():
        return "a debugger or profiler is active in the fork server"
    return ""


def _stamp(found: os.stat_result) -> int:
    """Return a value that changes when a file changes."""
    return hash((found.st_mtime_ns, found.st_ino, found.st_size))


def _identity(found: os.stat_result) -> int:
    """Return a value that changes when another directory replaces this one."""
    return hash((found.st_ino, found.st_dev))


class _Files:
    """Files that must not change. Where the kernel reports changes, files are not checked one by one: that takes
    1.5 us a file, and torch has 2,000 files."""

    def __init__(self, ctypes: "Any", libc: "Any") -> None:
        self._ctypes, self._libc = ctypes, libc
        self.fd = -1  # inotify's
        self._is_told = False  # an event in a watched directory is not checked yet
        self._watched = _Stamps()
        self._folders = _Stamps()  # identities of the watched directories, which can be replaced
        self._unwatched = _Stamps()

    def take(self, paths: "Iterable[str]") -> None:
        """Begin to watch these files."""
        entries = {}  # type: Dict[bytes, List[bytes]]
        for path in map(os.fsencode, sorted(paths)):
            folder, _, name = path.rpartition(b"/")
            if not (b"\0" in path or b"\n" in path):
                entries.setdefault(folder + b"/", []).append(name)
        self.fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for folder, names in entries.items():
            # Watched before the stamps are taken, so that later changes cause events.
            is_watched = self._watch(folder)
            try:
                if is_watched:
                    self._folders.add(folder, b"", _identity(os.stat(folder)))
                fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            for name in names:
                try:
                    found = os.stat(name, dir_fd=fd)
                except OSError:
                    continue
                # A file with another name can be changed through it, in a directory that is not watched.
                is_told = is_watched and (found.st_nlink == 1 or self._add(folder + name, 0))
                (self._watched if is_told else self._unwatched).add(folder, name, _stamp(found))
            os.close(fd)

    def _watch(self, folder: bytes) -> bool:
        """Watch a directory. Returns: whether the kernel reports all changes in it."""
        if self.fd < 0:
            return False
        found = self._ctypes.create_string_buffer(256)  # a struct statfs: its first word is the type
        word_bytes = self._ctypes.sizeof(self._ctypes.c_long)
        if self._libc.statfs(folder, found) or int.from_bytes(found.raw[:word_bytes], sys.byteorder) not in LOCAL:
            return False
        return self._add(folder, IN_ONLYDIR)

    def _add(self, path: bytes, flags: int) -> bool:
        return bool(self._libc.inotify_add_watch(self.fd, path, IN_CHANGED | flags) >= 0)

    def find_change(self) -> str:
        """Return a file that has changed; "" for none."""
        changed = self._unwatched.find_change()
        if not changed and (self._read() or self._folders.find_change()):
            changed = self._watched.find_change()
            self._is_told = bool(changed)  # else the event was about another file
        return changed

    def _read(self) -> bool:
        """Read events. Returns: whether files have to be checked."""
        try:
            while self.fd >= 0 and os.read(self.fd, 1 << 16):
                self._is_told = True
        except OSError:
            pass  # no more events
        return self._is_told


class _Stamps:
    """Stamps of files or directories, in few objects: checking thousands of objects would copy their pages."""

    def __init__(self) -> None:
        self._folder = b""
        self._paths, self._stamps = bytearray(), bytearray()

    def add(self, folder: bytes, name: bytes, stamp: int) -> None:
        """Add a stamp, directory by directory. Args: folder: ends with a slash; name: b"" for the folder."""
        if folder != self._folder:
            self._paths += b"\n" + folder if self._paths else folder
            self._folder = folder
        if name:
            self._paths += b"\0" + name
        self._stamps += stamp.to_bytes(8, "little", signed=True)

    def find_change(self) -> str:
        """Return the first changed file; "" for none. Lookups relative to the directory are faster by a third."""
        stat, open_folder, close = os.stat, os.open, os.close
        stamps, at = memoryview(self._stamps).cast("q"), 0
        for line in bytes(self._paths).split(b"\n") if self._paths else ():
            path, *names = line.split(b"\0")
            try:
                if not names:
                    if _identity(stat(path)) != stamps[at]:
                        return os.fsdecode(path)
                    at += 1
                    continue
                fd = open_folder(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                return os.fsdecode(path)
            try:
                for name in names:
                    if _stamp(stat(name, dir_fd=fd)) != stamps[at]:
                        return os.fsdecode(path + name)
                    at += 1
            except OSError:
                return os.fsdecode(path + name)
            finally:
                close(fd)
        return ""


def _open_log(path: str) -> int:
    umask = os.umask(0o077)
    os.umask(umask & ~0o700)  # bootrun reads the log
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    finally:
        os.umask(umask)


# ---- what a fresh interpreter would have ---------------------------------------------------------------------


def _renew() -> bool:
    """Renew streams, seeds, keys and ids that processes must not share. Returns: whether streams were renewed."""
    try:
        _renew_streams()
    except Exception:
        return False
    _renew_state()
    return True


def _renew_streams() -> None:
    """Make sys.stdin, stdout and stderr as the interpreter would make them for these descriptors."""
    io = sys.modules["_io"]  # type: Any
    for name, fd in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        old = getattr(sys, "__%s__" % name, None)  # type: Any
        if type(old) is not io.TextIOWrapper:
            continue
        raw = io.FileIO(fd, "wb" if fd else "rb", closefd=False)
        raw.name = "<%s>" % name
        buffer = raw if fd else io.BufferedReader(raw)
        new = io.TextIOWrapper(buffer, old.encoding, old.errors, "\n", old.line_buffering, old.write_through)
        new.mode = "w" if fd else "r"
        if getattr(sys, name, None) is old:
            setattr(sys, name, new)
        setattr(sys, "__%s__" % name, new)


def _renew_state() -> None:
    """Renew seeds, keys and ids that processes must not share. Modules random, ssl and uuid do so themselves."""
    modules = sys.modules  # type: Dict[str, Any]
    for renew in (_renew_numpy, _renew_torch, _renew_multiprocessing, _renew_threading):
        try:
            renew(modules)
        except Exception:
            pass  # this version keeps it elsewhere


def _renew_clock() -> None:
    """Renew values that count from a process's start."""
    try:
        _renew_logging(sys.modules)
    except Exception:
        pass  # this version keeps it elsewhere


def _renew_numpy(modules: "Dict[str, Any]") -> None:
    if "numpy.random" in modules:
        modules["numpy.random"].seed()


def _renew_torch(modules: "Dict[str, Any]") -> None:
    if "torch" in modules:
        modules["torch"].default_generator.seed()


def _renew_multiprocessing(modules: "Dict[str, Any]") -> None:
    if "multiprocessing.process" in modules:
        modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def _renew_threading(modules: "Dict[str, Any]") -> None:
    if "threading" in modules:
        modules["threading"].main_thread()._native_id = os.getpid()


def _renew_logging(modules: "Dict[str, Any]") -> None:
    if "logging" in modules:
        logging = modules["logging"]
        logging._startTime = type(logging._startTime)(
            time.time_ns() if type(logging._startTime) is int else time.time()
        )


# ---- small things --------------------------------------------------------------------------------------------


def _encode(fields: "List[str]") -> bytes:
    return b"\0".join([os.fsencode(field) for field in fields])


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def _to_environ(pairs: "List[str]") -> "Dict[str, str]":
    return dict([pair.split("=", 1) for pair in pairs])


def _put(environ: "Any", name: str, value: "Optional[str]") -> None:
    if value is None:
        environ.pop(name, None)
    else:
        environ[name] = value


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:200] if lines else ""


def _get_cwd() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""  # it was removed


def _read_text(path: str) -> str:
    with open(path, "rb", 0) as file:
        return (file.readall() or b"").decode("utf-8", "replace")


def _write_text(path: str, text: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode("utf-8", "replace"))
        finally:
            os.close(fd)
    except OSError:
        pass
