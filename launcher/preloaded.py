"""The preloaded process of a node: imports modules once, then forks ranks that have them.

Loaded by inside.py, by path, in the interpreter, environment, folder and sys.path of the ranks; stdlib only, needs
Python 3.8. In: frames of NUL-joined fields on one socket to the guard (a length of four bytes, then the fields).
    modules SIGN+NAME...       once: "?" may be absent, "!" asked for by the user, "~" recorded at an earlier start
                               >PATH before them: a file for what the imports have touched; =WHAT: what the script
                               is known to change without harm; + after them: more come, with
    rest COUNT CHANGE... SIGN+NAME...       once, then: variables, NAME=VALUE or NAME to be unset
    prepare COUNT              ranks will be asked for soon: fork processes that wait to become them (parked)
    fork GUARD_PID PORT SPARE PAIRS NAME=VALUE... RANK...
Out: importing NAME | ready COUNT ABSENT... | failed NAME WHY ALSO... | parked PID... | discarded |
forked KEY MONO_NS... | refused WHY; ranks are the parked processes in order. They are children of a short-lived
process between, so that they become the guard's children, as exec'd ranks are.
"""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

    Call = Tuple[Callable[..., object], Tuple[Any, ...]]

# Read when the driver starts, not when a framework is imported: they may differ between ranks.
READ_LATE = frozenset(
    "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK "
    "BOOTSEER_CHECKPOINT BOOTSEER_CHECKPOINT_URL BOOTSEER_CHECKPOINT_VERSION BOOTSEER_CHECKPOINT_DIGEST "
    "BOOTSEER_ARENA BOOTSEER_SAVE_ARENA "
    "CUDA_CACHE_PATH CUDA_CACHE_MAXSIZE TORCH_EXTENSIONS_DIR BOOTSEER_MARK_PROBES".split()
)
# Read when these modules are imported: until then nobody has seen another value. Of first-step caches, which may
# be known after the preload has begun (Preloader.begin_early).
READ_BY = {
    "TORCHINDUCTOR_CACHE_DIR": ("torch._dynamo.package", "torch._inductor.codecache"),
    "TRITON_CACHE_DIR": ("triton",),
    "TRITON_CACHE_AUTOTUNING": ("triton",),
    "JAX_COMPILATION_CACHE_DIR": ("jax",),
    "NUMBA_CACHE_DIR": ("numba",),
}
# Read by the loader before a program's first instruction. Words before a rank's command bring it into an image and
# exchange these (bootseer/mounts/enter.py): what this process was started with is what the rank has, too.
READ_AT_START = frozenset("LD_LIBRARY_PATH LD_PRELOAD LD_AUDIT".split())
# Threads that survive a fork's preparation and are known to do no harm there: jemalloc's (pyarrow) purges memory
# and is started anew in the child. OpenBLAS's end before a fork by themselves.
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
# Which devices a process sees: READ_LATE, but by what counts them.
VISIBLE = frozenset("CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK".split())
# How torch counts devices. It starts the driver for that, which does not survive a fork.
COUNTS = (
    ("torch._C", "_cuda_getDeviceCount"),
    ("torch._C", "_xpu_getDeviceCount"),
    ("torch.cuda", "_device_count_nvml"),
    ("torch.cuda", "_device_count_amdsmi"),
)
BACKENDS = tuple("torch." + name for name in "cuda xpu mtia npu hpu mlu musa".split())
CUDA_DRIVER, CUDA_NOT_INITIALISED = "libcuda.so.1", 3
# Would start a pool of processes while triton is imported; each rank starts its own when it compiles.
SET_WHILE_IMPORTING = {"TORCH_WARM_POOL": "0"}
CONSOLE = (5, 6, 7)  # the ranks' own standard streams; ours are /dev/null and a bounded file in memory
MORE = "+"  # in place of a module
CHECK_HOLDS_S = 2.0
# After a start processes are forked for the next one, so that it need not wait for forks (10 ms each with torch).
PARK_AFTER_S = 0.2
START_UP = "the start-up of the interpreter"
# What other ranks wait for rank 0's store once it has begun, which may take its time on a busy machine: who comes
# too early tries again only 0.3 to 0.7 s later.
MOST_HEAD_START_S, MOST_BEGIN_S = 0.05, 1.0
MADV_DONTNEED = 4
MADV_HUGEPAGE = 14
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # Linux 5.14
MADV_COLLAPSE = 25  # Linux 6.1
HUGE_PAGE_BYTES = 2 << 20
# For making huge pages: while the first ranks wait, and when nobody does. A page takes 0.3 ms, on some virtual
# machines 6; what is made first saves more at the forks and at the first restart than it costs.
MOST_HUGE_FIRST_S, MOST_HUGE_S = 0.04, 0.05
# Nearly all that imports make stays: with the interpreter's own 700 new objects between collections a third of the
# time in which torch is imported goes into looking for what does not, with 50,000 a sixth.
OBJECTS_BETWEEN_COLLECTIONS = 1000000
MOST_LISTED_PAGES = 1 << 20  # of a mapping
# By the highest byte of what /proc/PID/pagemap says of a page: in memory 0x80, swapped 0x40, of a file 0x20, here
# alone 0x01.
IN_MEMORY = bytes([1 if byte >= 0x40 else 0 for byte in range(256)])
PRESENT = bytes([1 if byte & 0x80 else 0 for byte in range(256)])
COPIED = bytes([1 if byte & 0xA1 == 0x81 else 0 for byte in range(256)])
MOST_COPIED_PAGES = 2048
RESERVE_BYTES, BLOCK_BYTES = 128 << 20, 126976  # of the heap, in huge pages; blocks below malloc's threshold
# inotify tells of what is done to the entries of a folder, on file systems of which no other machine can write to.
IN_CHANGED = 0xFCE  # IN_ALL_EVENTS without those of reading: IN_ACCESS, IN_OPEN, IN_CLOSE_NOWRITE
IN_ONLYDIR = 0x01000000
LOCAL = frozenset(  # by their magic: ext, xfs, btrfs, tmpfs, overlay, f2fs, squashfs, EROFS
    (0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0xF2F52010, 0x73717368, 0xE0F5E1E2)
)
PR_SET_PDEATHSIG, PR_SET_MM, PR_SET_MM_MAP, PR_SET_CHILD_SUBREAPER, SIGKILL = 1, 35, 14, 36, 9


def serve(arguments: "List[str]", inside: "Dict[str, Any]", template: "Dict[str, Any]") -> "Call":
    """Serves until the guard is gone; returns only in ranks: the call that runs the script.

    Args: arguments: FD MODE TARGET ARGS...; inside: the names of inside.py; template: of a fresh __main__.
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
    """The guard has closed its end."""


class _Failed(Exception):
    """Ranks must not be forked from here."""

    def __init__(self, name: str, why: str, *also: str) -> None:
        """Args: also: what imports it, and is to be left out with it."""
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
        self.argv = fields[4 + before : pairs]  # as an exec'd rank's: python -u inside.py MODE ... TARGET ARGS...
        self.is_entered = before > 0  # words before that bring an exec'd one to where this process is
        self.environ = _to_environ(fields[pairs + 1 : end])
        self.fields = fields[:end]


class _Preloaded:
    """State of the process."""

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
        self.script = b""  # type: Optional[bytes]  # its text, None if it cannot be read
        self.comm = _read_text("/proc/self/comm").rstrip("\n")
        self.start_environ = dict(os.environ)
        self.import_changes = {}  # type: Dict[str, Optional[str]]
        self.watch = None  # type: Any  # of what imports use
        self.sentry = None  # type: Any
        self.allowed = []  # type: List[str]
        self.tasks = set(os.listdir("/proc/self/task"))
        self.suspect = ""  # imported when a thread appeared last
        self.listing_path = ""  # where what imports have touched is to be told
        self.listing = ""
        self.files = _Files(self.ctypes, self.libc)
        self.checked_s = 0.0
        self.parked = []  # type: List[int]
        self.parked_pid = self.first_pid = 0  # of the first process that is parked, and of the first rank
        self.read = []  # type: List[Tuple[int, int]]  # by that: where, and how many bytes
        self.copied = []  # type: List[Tuple[int, int]]
        self.spare = 0  # processes to park for the next attempt
        self.is_in_huge_pages = False  # or the time for it is over
        self.has_forked = False
        self.last_environ = {}  # type: Dict[str, str]  # of the first rank that was forked last
        self.is_fit = False  # as it was found after ranks had been forked
        self.counts = None  # type: Optional[List[Tuple[Any, str, Any, Any]]]
        self.has_counted = False  # devices, for an import
        self.driver = None  # type: Any
        self.select = _import_apart("select")
        # Where ends of children are ignored nobody learns how they ended; ranks have it as an exec'd one has.
        self.signal = _import_apart("_signal")
        self.is_deaf = self.signal.getsignal(self.signal.SIGCHLD) == self.signal.SIG_IGN
        if self.is_deaf:
            self.signal.signal(self.signal.SIGCHLD, self.signal.SIG_DFL)
        self.gc = _import_apart("gc")
        _write_text("/proc/self/comm", "bootrun-preload")

    # ---- frames ----------------------------------------------------------------------------------------------

    def send(self, *fields: str) -> None:
        data = _pack([field.replace("\0", " ") for field in fields])
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
        """The guard ends this process, together with what an import has started."""
        try:
            self.send("failed", failed.name, failed.why, *failed.also)
            while True:
                self.receive()
        except (_GuardGone, OSError):
            os._exit(0)

    # ---- importing -------------------------------------------------------------------------------------------

    def preload(self) -> None:
        """Imports what the first request names; each import is looked at."""
        entries = self.receive()[1:]
        if entries and entries[0].startswith(">"):
            self.listing_path = entries.pop(0)[1:]
            self.inside["opened"] = self.inside["Opened"]()
            self.inside["opened"].install()
        self.allowed = [entry[1:] for entry in entries if entry.startswith("=")]
        entries = [entry for entry in entries if not entry.startswith("=")]
        if os.getsid(0) != os.getpid():
            raise _Failed("", "PYTHON_EXEC names a program that starts the interpreter as its child")
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # daemons that an import starts are found as well
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
        self.gc.freeze()  # what is older comes first: freezing puts what is young before the rest
        thresholds = self.gc.get_threshold()
        rarely = (max(OBJECTS_BETWEEN_COLLECTIONS, thresholds[0]), *thresholds[1:])
        if thresholds[0]:
            self.gc.set_threshold(*rarely)
        absent = self._import_all(entries)
        self._look_for_uses()
        self._stop_counting()
        self.watch.remove()
        self.libc.free(top)  # what imports did not need goes back to the system
        self.sentry = imports["Sentry"](self.watch, self.allowed)
        self._settle()
        if self.gc.get_threshold() == rarely:  # else an import has set its own
            self.gc.set_threshold(*thresholds)
        self.send("ready", str(len(sys.modules)), *absent)

    def _import_all(self, entries: "List[str]") -> "List[str]":
        """Returns: those that are not there."""
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
        """Variables that nobody has read yet get the values that ranks will have; returns what else to import."""
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
        """What modules find when they are imported by the script: its arguments, folder and its __main__."""
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
        """Whether the script says which devices it sees, which it may do before its imports.

        The text of a module (-m) is not known, as to fork_policy.py.
        """
        return self.script is None or any(name.encode() in self.script for name in VISIBLE)

    def _read_script(self) -> "Optional[bytes]":
        """Its text; that of a module (-m) is not looked for. None if it cannot be read."""
        if self.mode == "module":
            return b""
        try:
            with open(self.target, "rb") as file:
                return file.read()
        except OSError:
            return None

    def _count_apart(self) -> "List[Tuple[Any, str, Any, Any]]":
        """Imports that ask torch how many devices there are have a fork's answer, which starts the driver instead.

        Returns: what was replaced: its module, its name, what it was and what it is.
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
        """Raises when the import of `name` did what each rank would have to do for itself."""
        when = "" if name == START_UP else " when it is imported"
        now = _open_fds()
        if len(now) > len(self.fds):
            self.gc.collect()  # what is open may be so in garbage alone
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
            raise _Failed(name, "changes the working folder%s" % when)

    def _look_for_rank(self, name: str) -> None:
        """Raises when an import reads what differs between ranks, and they cannot make anew what comes of that."""
        for who, variable, _ in self.watch.rank_reads:
            also = self.watch.chain(who)
            # Another one may have made the same attribute in another way before.
            used = [each for each, _ in self.rank_values.find_used()]
            raise _Failed(also[0] if also else name, "reads %s when it is imported" % variable, *also[1:], *used)

    def _look_for_uses(self) -> None:
        """The same, of one that has used what came of it; after all imports, when all dependents are known."""
        used = self.rank_values.find_used()
        if used:
            others = [who for who, _ in used[1:]]
            also = [name for who, _ in used for name in self.watch.dependents(who)]
            raise _Failed(used[0][0], "reads %s when it is imported" % used[0][1], *others, *also)

    def _settle(self) -> None:
        """After the last import: what remains must be fit to be forked."""
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
        for _ in range(50):  # a thread that was joined may be seen for a moment
            threads = self._unknown_threads()
            if not threads:
                break
            time.sleep(0.002)
        else:
            raise _Failed(self.suspect, "leaves a thread (%s) when it is imported" % threads[0])
        trouble = self._find_device_state()
        if not trouble and refusing:
            trouble = "%s does not work in a fork of the preloaded process" % BACKENDS[refusing - 1]
        if trouble:
            raise _Failed("", trouble)
        self._take_stamps()
        if self.listing_path:
            self.listing = self._list_touched()
        self._release_files()
        self.gate = self.inside["load_beside"]("store_gate")
        self.is_gated = self.gate["has_place"]() and b"TCPStore" not in (self.script or b"")
        self.inside["known_modules"] = frozenset(sys.modules)
        self.inside["listed"] = (len(sys.modules), len(sys.path_importer_cache))
        self.socket = _import_apart("_socket")
        modules = [module for module in list(sys.modules.values()) if isinstance(module, type(sys))]
        same = _import_apart(
            "_operator"
        ).is_  # each id() is an event for audit hooks, of which a watch has left one
        self.main_places = [  # multiprocessing and dill keep the script's module, say
            (place, name)
            for place in [sys.modules, *map(vars, modules)]
            if True in map(same, place.values(), [self.main] * len(place))
            for name, value in list(place.items())
            if value is self.main
        ]
        self.gc.freeze()  # a collection in a rank does not touch, and so does not copy, what it shares
        self.inside["thaw"] = _make_thaw(self.gc)
        self._use_huge_pages(MOST_HUGE_FIRST_S)

    def _reserve_huge_pages(self) -> int:
        """Has glibc's heap grow in huge pages from the start, as later each has to be copied.

        Returns: a block at the top of the heap, to be freed after the imports; 0 for none.
        """
        if not hasattr(self.libc, "malloc_trim"):
            return 0  # another C library
        blocks = [0] * (RESERVE_BYTES // BLOCK_BYTES)
        for place in range(len(blocks)):  # one list, as one that grows lies between them
            blocks[place] = self.libc.malloc(BLOCK_BYTES - 16) or 0
        first = len(blocks) - 1
        while first and blocks[first] - blocks[first - 1] == BLOCK_BYTES:
            first -= 1  # what is below had room among what was freed, or is none of the heap
        for block in blocks[:-1]:
            self.libc.free(block)
        self.libc.malloc_trim(0)  # nothing of it is in memory then
        low, high = -(-blocks[first] // HUGE_PAGE_BYTES), blocks[-1] // HUGE_PAGE_BYTES
        if low < high:
            self.libc.madvise(low * HUGE_PAGE_BYTES, (high - low) * HUGE_PAGE_BYTES, MADV_HUGEPAGE)
        return blocks[-1]

    def _use_huge_pages(self, most_s: float) -> None:
        """For its memory, as far as the kernel can: each fork, and at a restart each end of a rank that is waited
        for, goes through all pages that they share. Once ranks run, whoever asks for others does not wait."""
        if self.is_in_huge_pages:
            return
        end_s = time.monotonic() + most_s
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
                self.libc.madvise(place, HUGE_PAGE_BYTES, MADV_COLLAPSE)  # what cannot be done stays as it is
        self.is_in_huge_pages = True

    def _list_touched(self) -> str:
        """What imports have needed, for the recording of this start; to be asked before it is unmapped.

        Of libraries in units of 4 KiB: pages that are in this process, by the kernel's list of them.
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
                    if high - low > MOST_LISTED_PAGES:
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
            return ""  # the next start is not the faster for this one, and that is all

    def _learn(self) -> None:
        """Which pages the first rank has needed for itself until now: others will need them, too."""
        self.read, self.copied = [], []
        left, size = MOST_COPIED_PAGES, os.sysconf("SC_PAGE_SIZE")
        try:
            with open("/proc/%d/maps" % self.first_pid, "rb", 0) as file:
                mappings = file.readall().splitlines()
            with open("/proc/%d/pagemap" % self.first_pid, "rb", 0) as pagemap:
                for mapping in mappings:
                    words = mapping.split(None, 5)
                    low, high = [int(word, 16) // size for word in words[0].split(b"-")]
                    is_written = words[1] == b"rw-p"
                    is_file = words[1] in (b"r--p", b"r-xp") and words[4] != b"0"
                    if not (is_written or is_file) or high - low > MOST_LISTED_PAGES:
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
            pass  # it has ended, or the kernel does not say

    def _release_files(self) -> None:
        """Unmaps what was read of libraries for the imports: ranks map what they need, the page cache has it."""
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
                # Nothing in it was written to, so nothing is lost.
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
        """Of all files that imports have read."""
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
        """Why nothing may be forked from here, "" for nothing."""
        self.checked_s = time.monotonic()
        changed = self.files.find_change()
        if changed:
            return "%s has changed since it was preloaded" % changed
        threads = self._unknown_threads()
        if threads:
            return "the preloaded process has a thread (%s)" % threads[0]
        known = set(self.fds.values())
        for fd, where in _open_fds().items():
            if self.fds.get(fd) != where and fd not in self.parked and where not in known:
                return "the preloaded process has %s open" % where
        if self.is_fit:
            return ""  # but for what libraries do at a fork, nothing foreign has run here since
        trouble = self._find_device_state()
        self.is_fit = self.has_forked and not trouble
        return trouble

    def _find_device_state(self) -> str:
        """What of accelerators and frameworks a fork does not survive, as a reason; "" for nothing."""
        if self._is_driver_started():
            return "CUDA is initialised in the preloaded process"
        return _find_device(self.fds) or _find_framework_state()

    def _is_driver_started(self) -> bool:
        """Whether somebody has called cuInit, by CUDA's driver itself. It is asked only if it is loaded."""
        if self.driver is None:
            try:
                self.driver = self.ctypes.CDLL(CUDA_DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            except OSError:
                return False
        try:
            return bool(self.driver.cuDeviceGetCount(self.ctypes.create_string_buffer(4)) != CUDA_NOT_INITIALISED)
        except AttributeError:
            return False  # not NVIDIA's

    def _find_difference(self, base: "Dict[str, str]", ranks: "List[_Rank]") -> str:
        """Why these ranks must be exec'd, "" for nothing."""
        for rank in ranks:
            environ = dict(base)
            environ.update(rank.environ)
            if rank.is_entered:
                self._exchange(environ)
            for name in set(environ) | set(self.start_environ):
                known = name in self.per_rank or (name in READ_LATE and not (self.has_counted and name in VISIBLE))
                if name in READ_BY and name not in self.import_changes:
                    known = not any(module in sys.modules for module in READ_BY[name])
                if not known and environ.get(name) != self.start_environ.get(name):
                    return "%s differs from what modules were preloaded with" % name
        return ""

    # ---- forking ---------------------------------------------------------------------------------------------

    def serve(self) -> "Call":
        """Waits for requests; returns in ranks."""
        while True:
            call = None
            if self.spare and not self._is_asked(PARK_AFTER_S):
                self._use_huge_pages(MOST_HUGE_S)
                if self._is_asked():
                    continue
                count, self.spare = self.spare, 0
                self._learn()
                call = self._make_ready(count, is_early=True)
                self.checked_s = 0.0  # long before they are needed
            else:
                fields = self.receive()
                if fields[0] == "prepare":
                    call = self._make_ready(int(fields[1]))
                elif fields[0] == "fork":
                    call = self._fork(fields[1:])
            if call is not None:
                return call

    def _is_asked(self, wait_s: float = 0.0) -> bool:
        """Whether a request has come, or comes within this time."""
        return bool(self.select.select([self.fd], [], [], wait_s)[0])

    def _make_ready(self, count: int, is_early: bool = False) -> "Optional[Call]":
        """As `_park`; after trouble not even those are used that were forked before it."""
        if self._find_trouble():
            self._discard()
            return None
        return self._park(count, is_early)

    def _park(self, count: int, is_early: bool = False) -> "Optional[Call]":
        """Forks processes that wait to become ranks; returns only in them, when they do.

        Args: is_early: nobody waits for them yet.
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
        """Parked processes end when their pipes do."""
        if self.parked:
            self.send("discarded")
        for fd in self.parked:
            os.close(fd)
        self.parked = []

    def _between(self, pipes: "List[int]", telling: int, is_early: bool) -> "Call":
        """The process between: forks, then ends, so that the guard is the parent; returns in the ranks."""
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
            os._exit(1)  # the pipes' other ends are closed then

    def _fork(self, fields: "List[str]") -> "Optional[Call]":
        port, spare, count = int(fields[1]), int(fields[2]), int(fields[3])
        base_fields = fields[3 : 4 + count]
        base = _to_environ(base_fields[1:])
        rest, ranks = fields[4 + count :], []
        while rest:
            ranks.append(_Rank(rest, self.template["__file__"]))
            rest = rest[len(ranks[-1].fields) :]
        trouble = self._find_difference(base, ranks)
        if not trouble and (len(self.parked) != len(ranks) or time.monotonic() - self.checked_s > CHECK_HOLDS_S):
            trouble = self._find_trouble()
        for _ in range(2):  # a parked process may have been killed meanwhile
            if trouble:
                break
            call = self._park(len(ranks))
            if call is not None:
                return call
            if len(self.parked) != len(ranks):
                trouble = "they cannot be forked: no more processes or memory"
            elif self._is_parked(ranks):
                self._let_go(fields[0], port, base_fields, ranks)
                self.spare = spare
                return None
            else:
                self._discard()
        self._discard()
        self.send("refused", trouble or "processes made for them were killed")
        return None

    def _is_parked(self, ranks: "List[_Rank]") -> bool:
        """Whether a process for each rank waits and its logs can be opened (an exec'd one says why not)."""
        poll = self.select.poll()
        for fd in self.parked:
            poll.register(fd, 0)  # only for its other end being closed: killed meanwhile
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
        for place, (fd, rank) in enumerate(waiting):
            gate = str(port if self.is_gated and place else 0)
            self._write(fd, _pack([guard_pid, gate, *base_fields, *rank.fields]))
            if self.is_gated or not (port and place):
                self._write(fd, b"!")
        if port and len(waiting) > 1 and not self.is_gated:
            poll = self.select.poll()
            poll.register(waiting[0][0], 0)  # only for its other end being closed, as a rank does when it begins
            self._await_listener(port, lambda: bool(poll.poll(0)))
            for fd, _ in waiting[1:]:
                self._write(fd, b"!")
        for fd, _ in waiting:
            os.close(fd)
        listing, self.listing = self.listing, ""
        if listing:  # nobody waits for it
            try:
                self.inside["write_private"](self.listing_path, listing)
            except OSError:
                pass

    def _await_listener(self, port: int, has_begun: "Callable[[], bool]") -> None:
        """Until somebody listens on `port`."""
        until_s, is_begun = time.monotonic() + MOST_BEGIN_S, False
        while time.monotonic() < until_s:
            if not is_begun and has_begun():
                until_s, is_begun = time.monotonic() + MOST_HEAD_START_S, True
            if self.gate["is_listened_on"](self.socket, port):
                return
            time.sleep(0.0005)

    def _write(self, fd: int, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(fd, data) :]
        except OSError:
            pass  # killed meanwhile: the guard reports it as a rank that failed

    def _be_parked(self, fd: int, is_early: bool) -> "Call":
        """In a new process: becomes what an exec'd rank is, waits for its turn, becomes the script."""
        os.setsid()
        for copy, number in zip(CONSOLE, (0, 1, 2)):
            os.dup2(copy, number)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != fd:
                try:
                    os.close(int(name))
                except OSError:
                    pass  # the one that listed the folder
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
            os._exit(137)  # not needed; or the preloaded process was killed right after it had told of this rank
        gate, count = int(fields[1]), int(fields[2])
        environ = _to_environ(fields[3 : 3 + count])
        rank = _Rank(fields[3 + count :], self.template["__file__"])
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
            is_prepared = False  # what it is will show: it is exec'd
        call = self._become(rank, environ) if is_prepared else None
        if gate:
            self.gate["install"](self.socket, gate, int(environ.get("LOCAL_WORLD_SIZE", "1")))
        os.read(fd, 1)  # its end, too: the guard knows of this rank, and who lets it go was killed meanwhile
        os.close(fd)
        if call is None:
            os.execve(rank.argv[0], rank.argv, environ)
        self.inside["kept"] = self  # to free what it has would copy the pages that have it
        return call

    def _rehearse(self) -> None:
        """What ranks do before their script, once for nothing: at the first write to a page that processes share,
        it is copied, here some 800 at 5 us each, which nobody waits for yet. The script is compiled; where it
        is the same when the rank starts, that counts.
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
            pass  # a rank does it all again
        for advice, places in ((MADV_POPULATE_READ, self.read), (MADV_POPULATE_WRITE, self.copied)):
            for place, size in places:
                self.libc.madvise(place, size, advice)  # what is not mapped here stays so

    def _open_blank_page(self) -> None:
        """As a rank does with that which bootrun gives to it."""
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
        """Path, text and code of the script; the code is None where it is not compiled in silence."""
        path = self.inside["_absolute"](self.target)
        with open(path, "rb", 0) as file:
            is_regular = os.fstat(file.fileno()).st_mode & 0o170000 == 0o100000
            data = file.readall() if is_regular else b""
        filters = getattr(sys.modules.get("warnings", sys.modules["_warnings"]), "filters")
        filters.insert(0, ("error", None, Warning, None, 0))  # each rank has to say it for itself
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
        """From now on it is seen when a module that is imported would be another one than that which is there."""
        inside, pid = self.inside, os.getpid()
        masked = self.signal.pthread_sigmask(self.signal.SIG_BLOCK, ())
        ignored = [each for each in range(1, 32) if self.signal.getsignal(each) == self.signal.SIG_IGN]

        def is_over() -> bool:
            """Others count on this rank, or it has gone far."""
            distributed = sys.modules.get("torch.distributed")
            is_initialized = getattr(distributed, "is_initialized", bool)
            return bool(os.getpid() != pid or inside["has_stepped"]() or is_initialized())

        def begin_anew(why: str) -> None:
            """As an exec'd rank; the next start knows."""
            os.chdir(self.cwd)
            if events_file.endswith(".jsonl"):
                inside["write_private"](events_file[:-6] + ".anew", why + "\n")
                if rank.environ.get("LOCAL_RANK") == "0":
                    inside["write_private"](events_file[:-6] + ".uses", "")
            else:
                os.write(2, ("bootrun: warning: the rank begins anew: %s\n" % why).encode("utf-8", "replace"))
            for each in range(1, 32):
                if self.signal.getsignal(each) == self.signal.SIG_IGN and each not in ignored:
                    self.signal.signal(each, self.signal.SIG_DFL)
            self.signal.pthread_sigmask(self.signal.SIG_SETMASK, masked)
            self.libc.fflush(None)
            os.execve(rank.argv[0], rank.argv, environ)

        self.sentry.arm(os.path.basename(self.target), is_over, begin_anew)

    def _exchange(self, environ: "Dict[str, str]") -> None:
        """What entering an image does to a rank's environment."""
        for name in READ_AT_START:
            _put(environ, name, self.start_environ.get(name))

    def _set_environ(self, environ: "Dict[str, str]") -> None:
        """In the order in which an exec'd rank has it; what imports have set comes last."""
        wanted = dict(environ)
        for name, value in self.import_changes.items():
            _put(wanted, name, value)
        if list(os.environ) != list(wanted):  # else it has been rehearsed: few values are other ones
            os.environ.clear()
        for name, value in wanted.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    def _show_as(self, argv: "List[str]", environ: "Dict[str, str]") -> None:
        """/proc/PID/cmdline and environ, where the kernel lets a process say so (CONFIG_CHECKPOINT_RESTORE)."""
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
    """What makes a rank free at its end what an exec'd one frees: the interpreter collects nothing that is frozen.

    Bindings of C++ tell of each object that is left (nanobind, so triton).
    """
    marker = []  # type: List[Any]  # younger than all that is frozen, which takes long to be counted

    def thaw() -> None:
        try:
            is_kept = all(each is not marker for each in gc.get_objects())  # the script has frozen, too
        except Exception:  # an audit hook of the script lets nobody ask
            is_kept = False
        if not is_kept:
            gc.unfreeze()

    return thaw


# ---- the state of a process ------------------------------------------------------------------------------------


def _load_libc(ctypes: "Any") -> "Any":
    """The C library."""
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
    """A module of which, and of what it imports, no trace is left: scripts find only what was preloaded."""
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
            pass  # the one that listed the folder
    return found


def _runs(flags: bytes) -> "Iterator[Tuple[int, int]]":
    """Where ones stand together: from and to."""
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
    """An accelerator or network device that this process has opened, as a reason; "" for none."""
    for fd, where in _open_fds().items():
        if _is_device(where) and inherited.get(fd) != where:
            return "the preloaded process has opened %s" % where
    with open("/proc/self/maps", "rb", 0) as file:
        mapped = _mapped_device(file.readall())
    return mapped and "the preloaded process has mapped %s" % mapped


def _mapped_device(maps: bytes) -> str:
    """The first device among mappings, "" for none. What is mapped need not be open any more."""
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
    """A backend of torch that was initialised; "" for none."""
    for name in BACKENDS:
        if getattr(sys.modules.get(name), "_initialized", False) is True:
            return name
    return ""


def _find_refusing() -> int:
    """In a fork: the place of the first backend of torch that will not be initialised in forks, counted from 1."""
    for place, name in enumerate(BACKENDS, 1):
        try:
            if sys.modules[name]._is_in_bad_fork():
                return place
        except Exception:
            pass  # it is not there, or in this version does not say
    return 0


def _ask_fork(count: "Any") -> "Optional[int]":
    """What `count()` is in a fork; None for nothing, or an error, which is to be this process's own."""
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
    """State of frameworks that a fork does not survive."""
    backend = _find_started()
    if backend:
        return "%s is initialised in the preloaded process" % backend
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and getattr(distributed, "is_available", bool)() and distributed.is_initialized():
        return "torch.distributed is initialised in the preloaded process"
    if sys.gettrace() or sys.getprofile():
        return "a debugger or profiler is active in the preloaded process"
    return ""


def _stamp(found: os.stat_result) -> int:
    """What changes with a file."""
    return hash((found.st_mtime_ns, found.st_ino, found.st_size))


def _identity(found: os.stat_result) -> int:
    """What changes when another folder takes the place of one."""
    return hash((found.st_ino, found.st_dev))


class _Files:
    """Files that must stay as they are. Where the kernel tells of changes nobody needs to look at each of them:
    that takes 1.5 us a file, of which torch has 2,000."""

    def __init__(self, ctypes: "Any", libc: "Any") -> None:
        self._ctypes, self._libc = ctypes, libc
        self.fd = -1  # inotify's
        self._is_told = True  # of something in a watched folder, which may have been a change; or not asked yet
        self._watched = _Stamps()
        self._folders = _Stamps()  # of these: others may be in their places
        self._unwatched = _Stamps()

    def take(self, paths: "Iterable[str]") -> None:
        """From now on."""
        entries = {}  # type: Dict[bytes, List[Tuple[bytes, os.stat_result]]]
        for path in map(os.fsencode, sorted(paths)):
            folder, _, name = path.rpartition(b"/")
            if b"\0" in path or b"\n" in path:
                continue
            try:
                found = os.stat(path)
            except OSError:
                continue
            entries.setdefault(folder + b"/", []).append((name, found))
        self.fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for folder, files in entries.items():
            is_watched = self._watch(folder)
            if is_watched:
                self._folders.add(folder, b"", _identity(os.stat(folder)))
            for name, found in files:
                # What has another name may be changed by that, in a folder that nobody watches.
                is_told = is_watched and (found.st_nlink == 1 or self._add(folder + name, 0))
                (self._watched if is_told else self._unwatched).add(folder, name, _stamp(found))

    def _watch(self, folder: bytes) -> bool:
        """Whether the kernel tells of all that is done in it."""
        if self.fd < 0:
            return False
        found = self._ctypes.create_string_buffer(256)  # a struct statfs: its first word says of what kind it is
        word_bytes = self._ctypes.sizeof(self._ctypes.c_long)
        if self._libc.statfs(folder, found) or int.from_bytes(found.raw[:word_bytes], sys.byteorder) not in LOCAL:
            return False
        return self._add(folder, IN_ONLYDIR)

    def _add(self, path: bytes, flags: int) -> bool:
        return bool(self._libc.inotify_add_watch(self.fd, path, IN_CHANGED | flags) >= 0)

    def find_change(self) -> str:
        """A file that is not as it was; "" for none."""
        changed = self._unwatched.find_change()
        if not changed and (self._read() or self._folders.find_change()):
            changed = self._watched.find_change()
            self._is_told = bool(changed)  # else it was about another file
        return changed

    def _read(self) -> bool:
        """Whether there is something to be looked for."""
        try:
            while self.fd >= 0 and os.read(self.fd, 1 << 16):
                self._is_told = True
        except OSError:
            pass  # no more
        return self._is_told


class _Stamps:
    """What files, or folders, are like. Few objects, as looking at thousands would copy the pages they are in."""

    def __init__(self) -> None:
        self._folder = b""
        self._paths, self._stamps = bytearray(), bytearray()

    def add(self, folder: bytes, name: bytes, stamp: int) -> None:
        """Those of a folder one after another. Args: folder: ends with a slash; name: b"" for itself."""
        if folder != self._folder:
            self._paths += b"\n" + folder if self._paths else folder
            self._folder = folder
        if name:
            self._paths += b"\0" + name
        self._stamps += stamp.to_bytes(8, "little", signed=True)

    def find_change(self) -> str:
        """The first file that is not as it was; "" for none. From its folder each is found sooner by a third."""
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
    os.umask(umask & ~0o700)  # bootrun reads it
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    finally:
        os.umask(umask)


# ---- what a fresh interpreter would have ---------------------------------------------------------------------


def _renew() -> bool:
    """Streams, seeds, keys and numbers that processes must not share; whether the streams could be had."""
    try:
        _renew_streams()
    except Exception:
        return False
    _renew_state()
    return True


def _renew_streams() -> None:
    """sys.stdin and its fellows as the interpreter would make them for these descriptors."""
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
    """Seeds, keys and numbers that processes must not share. Modules random, ssl and uuid see to it themselves."""
    modules = sys.modules  # type: Dict[str, Any]
    for renew in (_renew_numpy, _renew_torch, _renew_multiprocessing, _renew_threading):
        try:
            renew(modules)
        except Exception:
            pass  # a version that keeps it elsewhere


def _renew_clock() -> None:
    """What counts from the moment at which a process has begun."""
    try:
        _renew_logging(sys.modules)
    except Exception:
        pass  # a version that keeps it elsewhere


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


def _pack(fields: "List[str]") -> bytes:
    data = b"\0".join([os.fsencode(field) for field in fields])
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
        return ""  # it is gone


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
