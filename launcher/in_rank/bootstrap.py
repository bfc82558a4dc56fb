"""The rank bootstrap: installs the requested hooks in a rank, then becomes the user's script.

Run by path, in the interpreter of the ranks, which need not have bootseer (MODE: script, module or run-path):
    python -u bootstrap.py MODE EVENTS_FILE RUN_ID NODE RANK ATTEMPT PAGE_FILE TARGET ARGS...
    python -u bootstrap.py preload PRELOADED_FILE FD MODE TARGET ARGS...   (forks ranks: fork_server.py)
Stdlib only, and almost only modules that every interpreter has loaded: each rank pays for others. Needs Python
3.8; it parses in 3.4 and later, where it runs TARGET without hooks. Special cases (no such script, a syntax error)
are left to the plain interpreter too. A script can see of the bootstrap: one frame below its own; the module
_bootseer_rank; log files that survive a full disk; with compile caches, replaced functions of inductor; and with a
stats page (class Page) a hook of torch's optimizers, two signal handlers and a descriptor.
"""

_TEMPLATE = dict(globals())  # names in __main__ before a script's first statement

import os  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, Callable, Dict, List, Optional, Tuple

NAME = "_bootseer_rank"
IS_PROGRAM = _TEMPLATE["__name__"] == "__main__"
if IS_PROGRAM:
    __name__ = NAME  # classes below belong to this name

RUN_PATH = "import runpy,sys;sys.argv=sys.argv[1:];runpy.run_path(sys.argv[0],run_name='__main__')"
HEARTBEAT_EVERY_NS = 1000000000
FIRST_BEATS = 16
MAX_PACKERS = 64
FIRST_STEPS = 12
LEVEL_RESTS_NS = 1000000000
FULL = (28, 122)  # ENOSPC, EDQUOT: module errno is not loaded at start
MAX_ERROR_CHARS = 100000
EARLY = "Before the script's first statement:\n"
REGULAR, FILE_TYPE = 0o100000, 0o170000  # stat.S_ISREG is Python code

# Layout of the stats page; launcher/ranks/stats_page.py reads and describes it.
PAGE_HEAD = b"BOOTRANK\4\0\0\0"
PAGE_BYTES, END_AT, PULSE_AT, LOST_AT = 512, 29, 32, 504
MAX_NOTES, TEXT_NOTE = LOST_AT - PULSE_AT - 32, 0xFFFF
RING_MAGIC = b"BOOTRING"  # behind the page, if collectives are to be traced (launcher/in_rank/tracer.py)
MAX_STEP = 1 << 55
# All signals below 32 have a meaning, and C libraries use 32 to 34. Users of real-time signals (profilers with
# PAPI, HPCToolkit, message queues) count up from SIGRTMIN. Valgrind uses the last one.
STACKS_SIGNAL = 59
MAIN_SIGNAL = 58  # for the stack of the main thread only: other threads may run meanwhile
HIGH_FD, SPARED_FDS = 1000, 24  # for scripts that close 3 to 255, and for small limits


# ---- events ------------------------------------------------------------------------------------------------


class Events:
    """Appends events of this process to a file; never raises, and writes nothing in forked children."""

    def __init__(self, path: str, run_id: str, node: str, rank: int, attempt: int) -> None:
        self.path = path
        self.pid = os.getpid()
        self.is_torn = False
        self.who = '"run_id":%s,"node":%s,"rank":%d,"attempt":%d' % (quote(run_id), quote(node), rank, attempt)

    def write(self, stage: "Optional[str]", kind: str, name: str, more: str = "") -> None:
        """Write one event; `more` is JSON text of further fields, with a comma in front."""
        if not self.path or os.getpid() != self.pid:
            return
        line = '{"v":1,"wall_ns":%d,"mono_ns":%d,%s,"stage":%s,"kind":"%s","name":"%s"%s}\n' % (
            time.time_ns(),
            time.monotonic_ns(),
            self.who,
            '"%s"' % stage if stage else "null",
            kind,
            name,
            more,
        )
        data = line.encode("utf-8", "backslashreplace")
        if self.is_torn:
            data = b"\n" + data
        try:
            # Opened for each event: a kept descriptor could be closed by the script and its number be reused.
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                self.is_torn = True
                self.is_torn = os.write(fd, data) < len(data)
            finally:
                os.close(fd)
        except OSError:
            pass


def quote(text: str) -> str:
    """Encode a JSON string; module json takes 5 ms to load."""
    if text.isprintable() and '"' not in text and "\\" not in text:
        return '"%s"' % text
    parts = []
    for char in text:
        if char in '"\\':
            char = "\\" + char
        elif not char.isprintable() and ord(char) < 0x10000:
            char = "\\u%04x" % ord(char)
        parts.append(char)
    return '"%s"' % "".join(parts)


def plain_value(value: "Any") -> str:
    """Encode a number or a text as JSON; null for other values: a tensor would have to be waited for."""
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value) if value - value == 0 else "null"
    return quote(value[:1000]) if isinstance(value, str) else "null"


def measured_value(value: "Any") -> str:
    """Encode a metric as `plain_value` does, but NaN and infinity, which JSON lacks, as text."""
    if isinstance(value, float) and value - value != 0:
        return '"%s"' % float.__repr__(value)
    return plain_value(value)


# ---- the stats page ----------------------------------------------------------------------------------------


class Page:
    """The stats page: a file in memory in which bootrun reads the rank's progress, also if it hangs or is dead.

    Stacks are written behind the page: of all threads at STACKS_SIGNAL, of the main thread at MAIN_SIGNAL.
    faulthandler writes them in the signal handler, without the interpreter's lock. A handler that the script sets
    replaces it. Raises OSError and others if there is no such file: then the rank runs without a page.
    """

    def __init__(self, path: str) -> None:
        # Verify the file first: a path of another /proc may name a file of another process.
        found = os.stat(path)
        if found.st_mode & FILE_TYPE != REGULAR or found.st_size < PAGE_BYTES:
            raise ValueError(path)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        low = []  # numbers of closed standard streams, which stay closed
        try:
            while fd <= 2:
                low.append(fd)
                fd = os.dup(fd)
            if os.pread(fd, PAGE_BYTES, 0)[: len(PAGE_HEAD)] != PAGE_HEAD:
                raise ValueError(path)
            os.lseek(fd, 0, 2)  # stacks come behind the page
            fd = self.fd = _move_high(fd)
        except BaseException:
            os.close(fd)
            raise
        finally:
            for each in low:
                os.close(each)
        if not path.startswith("/proc/"):
            try:
                os.unlink(path)  # no other process needs the name, and bootrun may be gone
            except OSError:
                pass
        signum = main = 0
        try:
            register = _import_apart("faulthandler").register
            register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)
            signum = STACKS_SIGNAL
            register(MAIN_SIGNAL, file=fd, all_threads=False, chain=False)
            main = MAIN_SIGNAL
        except Exception:
            pass
        self.pulse, self.beat, forget = _make_pulse(fd)
        os.register_at_fork(after_in_child=forget)
        head = sys.modules["_thread"].get_ident() | fd << 64 | signum << 96 | main << 120
        os.pwrite(fd, head.to_bytes(16, "little"), 16)
        self.pid = os.getpid()
        os.pwrite(fd, self.pid.to_bytes(4, "little"), 12)  # last: from now on the page is valid

    def ended(self, value: SystemExit) -> None:
        """Record the status of a failed script: the interpreter's end can take long."""
        try:
            code = value.code
            status = code & 0xFF if isinstance(code, int) else code is not None
            if status and os.getpid() == self.pid and os.pread(self.fd, len(PAGE_HEAD), 0) == PAGE_HEAD:
                os.pwrite(self.fd, bytes((status,)), END_AT)
        except Exception:
            pass  # the script has closed it, or the exception is unusual

    def counts(self) -> None:
        """Record that steps are counted from now on: until then their absence is no sign of a hang."""
        try:
            os.pwrite(self.fd, b"\1", 30)
        except OSError:
            pass  # the script has closed it


def open_page(path: str) -> "Optional[Page]":
    """Open the page; return None if that fails: a rank does not need it."""
    try:
        return Page(path)
    except Exception:
        return None


def _make_pulse(fd: int) -> "Tuple[Callable[..., None], Callable[..., bool], Callable[[], None]]":
    """Return functions that count a step, count a heartbeat with its number, and stop counting in a forked child.

    A pulse is four words of 8 bytes: the count, the time of the last one, MAX_STEP plus the last step number (0:
    none), and a checksum: the first word, five times the second and seven times the third. From bit 40 on, the
    first word has the minimum and the present duration of a step, as levels of an eighth of an octave. A level is
    that of most steps, not the mean, so that an occasional evaluation does not change it. A reader may see new and
    old words during a write; then the checksum is wrong, as the count grows by one and the time by hundreds, and
    it reads again. The file is mapped at the first pulse: then the script's use of descriptors does not matter.
    Writes by the kernel, each with a check that the descriptor is still this file, would take three times as long.
    All words are written at once: a killed or stopped rank leaves no partial pulse.
    """
    one = 1 | 1 << 192
    a_ns = 1 << 64 | 5 << 192
    a_step = 1 << 128 | 7 << 192
    a_level, a_low = 1 << 48 | 1 << 240, 1 << 40 | 1 << 232
    pulses = said = took = 0  # pulses: their words, all but the time, added up
    levels = [int(1000 * 2 ** (place / 8)) for place in range(257)]  # ns
    last = due = level = low = run = 0
    by_beats = is_lost = False
    now_ns, here, noted = time.monotonic_ns, slice(PULSE_AT, PULSE_AT + 32), slice(PULSE_AT, LOST_AT)
    found = os.fstat(fd)
    which = found.st_ino, found.st_dev
    page = None  # type: Any

    def pulse(*_step: "Any") -> None:
        nonlocal pulses, last
        pulses += one
        now = now_ns()
        if not by_beats:
            if now >= due:
                follow(now - last, now)
            last = now
        try:
            page[here] = (pulses + now * a_ns).to_bytes(32, "little")
        except TypeError:  # not mapped yet
            map_page()
            page[here] = (pulses + now * a_ns).to_bytes(32, "little")

    def beat(step: "Any", now: int, notes: bytes = b"") -> bool:
        """Count a heartbeat as `pulse` does, without calling it: calls are expensive here.

        Args: now: the time; notes: bytes to write behind the pulse, up to LOST_AT. Returns: whether all was
        written.
        """
        nonlocal pulses, last, said, by_beats, due, level, low, run, took
        pulses += one
        if not by_beats:  # each optimizer's steps may be only a part of one
            pulses -= took
            by_beats, last, due, level, low, run, took = True, 0, 0, 0, 0, 0, 0
        if now >= due:
            follow(now - last, now)
        last = now
        if type(step) is int and -MAX_STEP < step < MAX_STEP:
            pulses -= said
            said = (step + MAX_STEP) * a_step
            pulses += said
        if page is None:
            map_page()
        if notes:
            page[noted] = (pulses + now * a_ns).to_bytes(32, "little") + notes
        else:
            page[here] = (pulses + now * a_ns).to_bytes(32, "little")
        return not is_lost

    def follow(gap: int, now: int) -> None:
        """Adapt the level to the duration of most steps, faster with more longer or shorter steps in a row.

        Once a step has taken as long as the level, it stays the same for LEVEL_RESTS_NS.
        """
        nonlocal due, level, low, run, took, pulses
        if gap == now:  # the first one: its begin is unknown
            return
        if not level:
            level = 255
            while level > 1 and gap < levels[level]:
                level -= 1
        elif gap >= levels[level + 1]:
            run = run + 1 if run > 0 else 1
            end = min(255, level + (1 if run == 1 else 2 if run == 2 else 4))
            while level < end and gap >= levels[level + 1]:
                level += 1
        else:
            run = run - 1 if run < 0 else -1
            end = max(1, level - (1 if run == -1 else 2 if run == -2 else 4))
            while level > end and gap < levels[level]:
                level -= 1
        if gap < levels[level + 1] and (gap >= levels[level] or level == 1):
            run = 0
            if pulses % (1 << 40) > FIRST_STEPS:  # the first ones may only fill a queue
                low = level if not low or level < low else low
                due = now + LEVEL_RESTS_NS
        pulses -= took
        took = level * a_level + low * a_low
        pulses += took

    def map_page() -> None:
        nonlocal page
        try:
            found = os.fstat(fd)
            if (found.st_ino, found.st_dev) == which:
                page = map_file(fd, PAGE_BYTES)
                return
        except Exception:
            pass  # the script has closed it, or this interpreter has no ctypes
        forget()

    def forget() -> None:
        nonlocal page, is_lost
        page, is_lost = memoryview(bytearray(PAGE_BYTES)), True

    return pulse, beat, forget


def map_file(fd: int, length: int) -> "memoryview":
    """Map the first `length` bytes of a file for reading and writing, permanently.

    Does not use module mmap, which keeps its own descriptor before Python 3.13. Raises: OSError, ImportError, ...
    """
    ctypes = _import_apart("ctypes")  # torch has loaded it
    function, pointer = ctypes.CDLL(None).mmap, ctypes.c_void_p
    function.restype = pointer
    function.argtypes = [pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    address = function(None, length, 3, 1, fd, 0)  # PROT_READ | PROT_WRITE, MAP_SHARED
    if address in (None, pointer(-1).value):
        raise OSError("mmap")
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def _move_high(fd: int, below: int = 0) -> int:
    """Move a descriptor to a number that scripts rarely close; `below`: so much lower than that of the page."""
    high = min(HIGH_FD, os.sysconf("SC_OPEN_MAX") - SPARED_FDS) - below
    while high > fd:
        try:
            os.fstat(high)
        except OSError:
            os.dup2(fd, high, False)
            os.close(fd)
            return high
        high -= 1
    return fd


def _import_apart(name: str, known: "Dict[str, Any]" = {}) -> "Any":
    """Import a module of the standard library, not the script's of that name; leave sys.modules unchanged."""
    if name in sys.modules:
        return sys.modules[name]
    if name in known:
        return known[name]
    path, before, library = sys.path[:], set(sys.modules), os.path.dirname(os.__file__)
    try:
        sys.path[:] = [folder for folder in path if folder == library or folder.endswith("/lib-dynload")]
        module = known[name] = __import__(name)
        return module
    finally:
        for added in set(sys.modules) - before:
            del sys.modules[added]
        sys.path[:] = path


# ---- first step --------------------------------------------------------------------------------------------


class FirstStep:
    """Detects the end of `import torch` and of the first optimizer step; the first heartbeat counts as well.

    With a page it counts each optimizer step there. It is in sys.meta_path only to be called. Specs and loaders
    are unchanged, and no frame of the bootstrap is below torch's: an import ends when importlib drops the lock of
    the module.
    """

    def __init__(self, events: Events, page: "Optional[Page]" = None) -> None:
        self._events = events
        self._page = page
        self._locks = {}  # type: Dict[str, Any]
        self._handle = None  # type: Any
        self._is_hooked = self._is_traced = False
        self._step_ended = None  # type: Optional[Callable[[], None]]
        self.is_done = False

    def install(self) -> None:
        is_there = "torch.optim.optimizer" in sys.modules
        if is_there:
            self._guarded(self._trace)
            self._guarded(self._hook)
        if not is_there or watch is not None:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, *_where: "Any") -> None:
        """Return "not found here": part of the protocol of sys.meta_path."""
        if watch is not None:
            watch.find_spec(name)
        if name == "torch" or name == "torch.optim.optimizer":
            self._guarded(self._watch, name)

    def done(self, how: str) -> None:
        """Write the event of the first step, once."""
        if not self.is_done:
            self.is_done = True
            self._guarded(self._list_imports)  # before the event, as its reader reads the list then
            self._events.write("first_step", "instant", how)

    def _list_imports(self) -> None:
        """Write the files that this start has used, which the next one may preload or prefetch."""
        path = self._events.path
        if os.getpid() != self._events.pid or not path.endswith(".jsonl") or os.environ.get("LOCAL_RANK") != "0":
            return
        if watch is not None:
            watch.remove()
            write_private(path[:-6] + ".uses", "".join(watch.lines()))
        write_private(path[:-6] + ".imports", "".join(list_start()))

    def _guarded(self, function: "Callable[..., None]", *args: "Any") -> None:
        try:
            function(*args)
        except Exception as error:
            self._events.write(None, "instant", "not_observed", ',"error":' + quote(repr(error)[:1000]))

    def _watch(self, name: str) -> None:
        locks = sys.modules["_frozen_importlib"]._module_locks
        lock = locks[name]() if name in locks else None
        if lock is None or name in self._locks:
            return  # a search for the module without an import
        if name == "torch":
            self._events.write("import", "begin", "torch", ',"span":"torch"')
            ended = self._torch_ended
        else:
            ended = self._optimizer_ended
        # repeated for a second import after a failed one
        self._locks[name] = sys.modules["_weakref"].ref(lock, lambda _: self._guarded(ended))

    def _torch_ended(self) -> None:
        del self._locks["torch"]
        failed = "" if "torch" in sys.modules else ',"error":"the import failed"'
        self._events.write("import", "end", "torch", ',"span":"torch"' + failed)
        if not failed:
            self._guarded(self._trace)
            self._retire()

    def _optimizer_ended(self) -> None:
        del self._locks["torch.optim.optimizer"]
        self._hook()

    def _trace(self) -> None:
        """Trace collectives if bootrun has made a ring buffer for them (launcher/in_rank/tracer.py)."""
        fd = -1 if self._page is None else self._page.fd
        if fd < 0 or self._is_traced or os.pread(fd, len(RING_MAGIC), PAGE_BYTES) != RING_MAGIC:
            return
        self._is_traced = True
        self._step_ended = load_beside("tracer")["install"](fd, _import_apart, map_file)

    def _hook(self) -> None:
        if self._is_hooked or "torch.optim.optimizer" not in sys.modules:
            return
        optimizer = sys.modules["torch.optim.optimizer"]  # type: Any
        hook = self._make_hook() if self._page is None else self._make_counter(self._page)
        hook.__dict__["_torchdynamo_disable"] = True  # torch.compile calls it and does not trace it
        self._handle = optimizer.register_optimizer_step_post_hook(hook)
        self._is_hooked = True
        if self._page is not None:
            self._page.counts()

    def _make_counter(self, page: Page) -> "Callable[..., None]":
        pulse, is_first = page.pulse, True

        def after_step(*_step: "Any") -> None:
            nonlocal is_first
            pulse()
            if self._step_ended is not None:
                self._step_ended()
            if is_first:
                is_first = False
                self._guarded(self.done, "optimizer_step")
                self._retire()

        return after_step

    def _make_hook(self) -> "Callable[..., None]":
        def after_step(*_step: "Any") -> None:
            handle, self._handle = self._handle, None
            if handle is not None:
                self._guarded(self.done, "optimizer_step")
                # torch iterates over its hooks; this one is removed when that frame is gone.
                sys._getframe(1).f_locals[NAME] = _AtEnd(handle.remove)
                self._retire()

        return after_step

    def _retire(self) -> None:
        # In place, and not while another thread may iterate over the list.
        if watch is not None and not self.is_done:
            return
        if self._is_hooked and self in sys.meta_path and sys.modules["_thread"]._count() == 0:
            sys.meta_path.remove(self)


class _AtEnd:
    """Calls a function when it is deleted."""

    def __init__(self, function: "Callable[[], object]") -> None:
        self._function = function

    def __del__(self) -> None:
        try:
            self._function()
        except Exception:
            pass


def list_start() -> "List[str]":
    """Return the trace of the imports so far: NAME FILE of modules that a later start may preload; for prefetching
    the FILE of other modules, each searched FOLDER, and the path of the bytecode of /a/x.py.

    Begin with the newest module: in a forked rank, access to a preloaded module would copy its memory.
    """
    lines = []
    names = reversed(sys.modules)
    for name in [next(names) for _ in range(len(sys.modules) - listed[0])]:
        spec = getattr(sys.modules[name], "__spec__", None)
        origin = getattr(spec, "origin", None)
        if not isinstance(origin, str):
            continue
        # Without modules on a path that the script adds: another file could be imported instead.
        is_plain = name not in known_modules and origin.startswith(known_folders)
        if is_plain and getattr(spec, "name", None) == name:
            lines.append("%s\t%s\n" % (name, origin))
        elif origin.startswith("/"):
            lines.append("\tfile\t%s\n" % origin)
    found = sys.path_importer_cache
    folders = reversed(found)
    for folder in [next(folders) for _ in range(len(found) - listed[1])]:
        if found[folder] is not None and folder.startswith("/"):
            lines.append("\tfolder\t%s\n" % folder)
    lines.reverse()
    if opened is not None:
        lines += opened.list()
    try:
        cached = sys.modules["_frozen_importlib_external"].cache_from_source("/a/x.py")
        lines.append("\tbytecode\t%s\n" % cached)
    except NotImplementedError:
        pass  # this interpreter writes no bytecode
    return lines


def watch_imports(events: Events) -> None:
    """Record imports in local rank 0, if bootrun has requested it by an empty file."""
    global watch
    path = events.path
    try:
        if os.environ.get("LOCAL_RANK") != "0" or not path.endswith(".jsonl"):
            return
        if os.stat(path[:-6] + ".uses").st_size == 0:
            watch = load_beside("import_watch")["Watch"](True)
            watch.install(FirstStep)  # which forwards its calls
    except Exception:
        pass


def has_stepped() -> bool:
    """Return whether the first step is over."""
    return first_step is not None and first_step.is_done


def load_beside(name: str, known: "Dict[str, Dict[str, Any]]" = {}) -> "Dict[str, Any]":
    """Load another file beside this one, and return its names; use its bytecode if this one was compiled."""
    if name in known:
        return known[name]
    folder, _, own = os.path.abspath(_TEMPLATE.get("__file__") or __file__).rpartition("/")
    compiled = folder + "/" + name + own[len("bootstrap") :] if own.endswith(".pyc") else ""
    if folder.endswith("/__pycache__"):
        folder = folder[: -len("/__pycache__")]
    path, code = folder + "/" + name + ".py", None
    if compiled:
        try:
            found = os.stat(path)
            stamp = [(int(each) & 0xFFFFFFFF).to_bytes(4, "little") for each in (0, found.st_mtime, found.st_size)]
            with open(compiled, "rb", 0) as file:
                data = file.readall() or b""
            if data[4:16] == b"".join(stamp):
                code = sys.modules["marshal"].loads(data[16:])
        except (OSError, ValueError, EOFError, TypeError):
            pass
    if code is None:
        with open(path, "rb", 0) as file:
            code = compile(file.readall() or b"", path, "exec", 0, True)
    names = known[name] = {"__name__": NAME}
    exec(code, names)
    return names


class Opened:
    """Records files that are opened for reading, and directories that are listed, during a start.

    An audit hook cannot be removed: it is installed only in the one recorded start of a job, and returns at once
    after the first step.
    """

    MAX_FILES = 200000
    WRITING = 3  # bits of O_WRONLY and O_RDWR

    def __init__(self) -> None:
        self._found = {}  # type: Optional[Dict[Tuple[str, str], None]]

    def install(self) -> None:
        sys.addaudithook(self._make_hook())

    def begin(self, is_wanted: bool) -> None:
        """Start again in a forked rank: the fork server has reported its own files already."""
        self._found = {} if is_wanted else None

    def list(self) -> "List[str]":
        """Return the lines, and stop recording."""
        found, self._found = self._found, None
        here = os.getcwd() + "/"
        return ["\t%s\t%s\n" % (what, path if path[:1] == "/" else here + path) for what, path in found or ()]

    def _make_hook(self) -> "Callable[[str, Tuple[Any, ...]], None]":
        most, writing = self.MAX_FILES, self.WRITING
        importing = "<frozen importlib._bootstrap_external>"

        def hook(event: str, args: "Tuple[Any, ...]") -> None:
            found = self._found
            if found is None:
                return
            if event == "open" and len(args) == 3:
                path, _, flags = args
                if type(path) is str and type(flags) is int and not flags & writing and len(found) < most:
                    # The next start does not read a source that is compiled now: it finds bytecode.
                    if path[-3:] != ".py" or sys._getframe(1).f_code.co_filename != importing:
                        found["open", path] = None
            elif event == "import" or event == "ctypes.dlopen":  # libraries cause no "open" event
                path = args[1 if event == "import" else 0]
                if type(path) is str and path[:1] == "/" and len(found) < most:
                    found["open", path] = None
            elif (event == "os.listdir" or event == "os.scandir") and len(args) == 1:
                if type(args[0]) is str and len(found) < most:
                    found["folder", args[0]] = None

        return hook


def watch_opened(events: Events) -> None:
    """Record opened files in local rank 0, if bootrun has requested it by an empty list."""
    global opened
    path = events.path
    try:
        is_wanted = os.environ.get("LOCAL_RANK") == "0" and path.endswith(".jsonl")
        is_wanted = is_wanted and os.stat(path[:-6] + ".imports").st_size == 0
        if opened is not None:
            opened.begin(is_wanted)
        elif is_wanted:
            opened = Opened()
            opened.install()
    except Exception:
        pass


def write_private(path: str, text: str) -> None:
    """Write a file for bootrun, in place of one of an earlier run in the same directory."""
    try:
        os.unlink(path)
    except OSError:
        pass
    data = text.encode("utf-8", "backslashreplace")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


# ---- compile caches of inductor ----------------------------------------------------------------------------


class Replacing:
    """Replaces parts of a module once it is imported; waits for that as FirstStep does.

    Args: replace: gets the module; it does nothing for unknown versions.
    """

    def __init__(self, module: str, replace: "Callable[[Any], None]") -> None:
        self._module = module
        self._replace = replace
        self._lock = None  # type: Any

    def install(self) -> None:
        if self._module in sys.modules:
            self.replace()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, *_where: "Any") -> None:
        """Return "not found here": part of the protocol of sys.meta_path."""
        if name != self._module or self._lock is not None:
            return
        try:
            locks = sys.modules["_frozen_importlib"]._module_locks
            lock = locks[name]() if name in locks else None
            if lock is not None:
                self._lock = sys.modules["_weakref"].ref(lock, lambda _: self.replace())
        except Exception:
            pass

    def replace(self) -> None:
        try:
            self._replace(sys.modules[self._module])
        except KeyError:
            self._lock = None  # the import failed; there may be another one
            return
        except Exception:
            pass
        if self in sys.meta_path and sys.modules["_thread"]._count() == 0:
            sys.meta_path.remove(self)


def _parameters_of(function: "Any") -> "Tuple[str, ...]":
    code = function.__code__
    return code.co_varnames[: code.co_argcount]  # type: ignore[no-any-return]


def mark_probes(module: "Any") -> None:
    """Let inductor load its test libraries only once per cache.

    At each start inductor runs a process for each set of vector instructions, to test whether a library with them
    can be loaded. That takes a second, half of a first step with cached graphs. Libraries that could be loaded are
    marked in the cache, which is bound to versions and processor. Marked ones are not tested again.
    """
    kind = module.VecISA
    plain = kind._probe_load
    if _parameters_of(plain) != ("self", "output_path"):
        return
    # Its names are in closure cells, as for files.
    mark, system, errors = ".loads", os, OSError

    def probe(isa: "Any", output_path: str) -> "Any":
        path = output_path + mark
        try:
            system.stat(path)
            return True
        except errors:
            pass
        is_loaded = plain(isa, output_path)
        if is_loaded is True:
            try:
                fd = system.open(path, system.O_WRONLY | system.O_CREAT | system.O_CLOEXEC, 0o600)
                try:
                    system.write(fd, b"it loads\n")
                finally:
                    system.close(fd)
            except errors:
                pass
        return is_loaded

    kind._probe_load = probe


def spare_headers(module: "Any") -> None:
    """Let inductor compile no headers for cached kernels.

    Inductor compiles the headers of a kernel before it checks whether the kernel is cached: seconds and 150 MB at
    each start on a fresh node. For a cached kernel, return the header's own name, which is valid for a compiler
    too.
    """
    plain = module._precompile_header
    if _parameters_of(plain.__wrapped__) != ("header", "hashable_cmd_line"):
        return
    frame_of, stat, errors = sys._getframe, os.stat, OSError

    def precompile(header: str, hashable_cmd_line: str, **compile_command: "Any") -> "Any":
        caller = frame_of(1)
        source = caller.f_locals.get("main_path") if caller.f_code.co_name == "load_async" else None
        if isinstance(source, str) and source.endswith(".cpp"):
            try:
                stat(source[:-4] + ".so")
                return header
            except errors:
                pass
        return plain(header, hashable_cmd_line, **compile_command)

    module._precompile_header = precompile


KEEP_CACHES = "BOOTSEER_MARK_PROBES"  # set with compile caches; no key of inductor depends on these
KEPT = (("torch._inductor.cpu_vec_isa", mark_probes), ("torch._inductor.codecache", spare_headers))


# ---- heartbeats --------------------------------------------------------------------------------------------


def make_heartbeat(
    events: Events, first_step: FirstStep, page: "Optional[Page]" = None
) -> "Callable[[Any, Dict[str, Any]], None]":
    """Return the function behind bootseer.heartbeat; the first heartbeat counts as first step.

    The first few heartbeats, and then one a second, make an event: rules over metrics (launcher/rules) need some
    to learn the usual values. The page counts all. After the first few, events are notes in the page, which
    bootrun copies to the event file (launcher/monitor/samples/heartbeats.py), so that a training loop never waits
    for a disk.
    """
    count = _count_nowhere if page is None else page.beat
    has_notes = page is not None and bool(events.path)
    due = metrics_due = number = 0
    left = FIRST_BEATS
    kept = bytes(MAX_NOTES)
    packers = {}  # type: Dict[Tuple[str, ...], Tuple[bytes, int, int, Callable[..., bytes]]]
    clock = time.monotonic_ns

    def beat(step: "Any", metrics: "Dict[str, Any]") -> None:
        nonlocal due, metrics_due, number, left, kept
        now = clock()
        # Metrics may come with few heartbeats: those without metrics do not delay them.
        if now < (metrics_due if metrics else due) and not left:
            count(step, now)
            return
        due = now + HEARTBEAT_EVERY_NS
        if metrics:
            metrics_due = due
        if left:
            left -= 1
            count(step, now)
            first_step.done("heartbeat")
        elif has_notes:
            number += 1
            try:
                values = metrics.values()
                for value in values:
                    if type(value) is not float:
                        raise TypeError(value)
                if type(step) is not int:
                    raise TypeError(step)
                names = tuple(metrics)
                text, length, size, pack = packers.get(names) or make_packer(names)
                note = pack(number, text, *values, step, now, length, size, number)
            except Exception:  # unusual values
                note = pack_text(number, now, event_fields(step, metrics))
            if len(note) <= MAX_NOTES:
                # The last ones stay: a reader that reads once a second misses none.
                kept = (kept + note)[-MAX_NOTES:]
                if count(step, now, kept):
                    return
            else:
                count(step, now)
        events.write(None, "scalar", "heartbeat", event_fields(step, metrics))

    def make_packer(names: "Tuple[str, ...]") -> "Tuple[bytes, int, int, Callable[..., bytes]]":
        """Make the packer of notes with these metrics, for an integer step and float values."""
        text = ("[" + ",".join([quote(name) for name in names]) + "]").encode("utf-8", "backslashreplace")
        form = "<Q%ds%ddqQHHQ" % (len(text), len(names))
        struct = _import_apart("_struct")
        if len(packers) >= MAX_PACKERS:
            packers.clear()
        found = packers[names] = text, len(text), struct.calcsize(form), struct.Struct(form).pack
        return found

    return beat


def event_fields(step: "Any", metrics: "Dict[str, Any]") -> str:
    """Return the fields of a heartbeat as JSON with a comma in front."""
    attrs = ",".join([quote(name) + ":" + measured_value(value) for name, value in metrics.items()])
    return ',"value":%s%s' % (plain_value(step), ',"attrs":{%s}' % attrs if attrs else "")


def pack_text(number: int, now_ns: int, fields: str) -> bytes:
    """Pack the note of any heartbeat."""
    text = fields.encode("utf-8", "backslashreplace")
    size = len(text) + 28
    words = (number, 8), (now_ns, 8), (TEXT_NOTE, 2), (size if size < TEXT_NOTE else 0, 2), (number, 8)
    first, *last = [word.to_bytes(length, "little") for word, length in words]
    return first + text + b"".join(last)


def _count_nowhere(_step: "Any", _now_ns: int, _notes: bytes = b"") -> bool:
    return False


def keep_layout(line: str) -> None:
    """Write the layout of bootseer.layout, which bootrun reads if the job hangs; one rank per node suffices."""
    if layout_path and os.getpid() == rank_pid and os.environ.get("LOCAL_RANK") == "0":
        try:
            write_private(layout_path, line)
        except OSError:
            pass


# ---- output ------------------------------------------------------------------------------------------------


def protect_output(events: Events) -> "List[int]":
    """Make sys.stdout and sys.stderr, if they are log files, drop and count output that a full disk rejects.

    Returns: a list for the descriptor of the page, in which bootrun reads the count.
    """
    pages = []  # type: List[int]
    io = sys.modules["_io"]  # type: Any
    file_type = None
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name, None)  # type: Any
        try:
            if (
                type(old) is not io.TextIOWrapper
                or type(old.buffer) is not io.FileIO
                or old is not getattr(sys, "__%s__" % name)
                or old.fileno() != fd
                or os.fstat(fd).st_mode & FILE_TYPE != REGULAR
            ):
                continue
            if file_type is None:
                file_type = _make_file_type(io.FileIO, events, pages)
            raw = file_type(fd, "wb", closefd=False)
            raw.name = old.buffer.name
            new = io.TextIOWrapper(raw, old.encoding, old.errors, "\n", old.line_buffering, old.write_through)
            new.mode = old.mode
        except (OSError, ValueError, AttributeError):
            continue
        setattr(sys, name, new)
        setattr(sys, "__%s__" % name, new)
    return pages


def _make_file_type(base: "Any", events: Events, pages: "List[int]") -> "Any":
    # All its names are in closure cells: objects print even after the interpreter has emptied this module.
    plain_write, full, view, errors = base.write, FULL, memoryview, OSError
    lost = [0, 0]
    read, put, head, at = os.pread, os.pwrite, PAGE_HEAD, LOST_AT

    def report() -> None:
        events.write(
            None, "scalar", "output_lost", ',"value":%d,"unit":"bytes","attrs":{"writes":%d}' % tuple(lost)
        )

    def drop(size: int) -> None:
        lost[0] += size
        lost[1] += 1
        for fd in pages:
            try:
                if read(fd, len(head), 0) == head:  # adds to the losses of the rank's children
                    put(fd, (int.from_bytes(read(fd, 8, at), "little") + size).to_bytes(8, "little"), at)
            except errors:
                pass  # the script has closed it
        if lost[1] == 1:
            try:
                import atexit

                atexit.register(report)
                report()
            except Exception:
                pass

    def write(self: "Any", data: "Any") -> "Any":
        try:
            done = plain_write(self, data)
        except errors as error:
            if error.errno not in full:
                raise
            size = view(data).nbytes
            drop(size)
            return size
        if type(data) is bytes and done is not None and done < len(data):
            return done + write(self, data[done:])
        return done

    return type("FileIO", (base,), {"write": write, "__module__": base.__module__, "__doc__": base.__doc__})


# ---- becoming the script -----------------------------------------------------------------------------------


def become(
    mode: str, target: str, args: "List[str]", options: "List[str]", template: "Dict[str, Any]"
) -> "Tuple[Callable[..., object], Tuple[Any, ...]]":
    """Turn this process into `OPTIONS... TARGET ARGS...` (for mode, see the module docstring).

    Args: options: interpreter and its options; template: names in a script's __main__ at the start.
    Returns: function and arguments; the call runs the script. Call it from as few frames as possible.
    If the script cannot be loaded, it does not return: the plain interpreter takes over.
    """
    bare = bare_command(mode, target, args, options)
    call = None  # type: Optional[Tuple[Callable[..., object], Tuple[Any, ...]]]
    main = type(sys)("__main__")
    names = main.__dict__
    names.clear()
    names.update(template)
    names["__doc__"] = None
    if "__annotations__" in names:
        names["__annotations__"] = {}
    path0 = None  # type: Optional[str]
    if mode == "script":
        path = _absolute(target)
        if _find_importer(path) is not None:
            path0 = path
        else:
            code, is_compiled = _load(path, bare)
            if isinstance(code, Exception):
                call = _fail, (code,)
            loaders = sys.modules["_frozen_importlib_external"]  # type: Any
            loader = loaders.SourcelessFileLoader if is_compiled else loaders.SourceFileLoader
            names["__file__"] = path
            names["__loader__"] = loader("__main__", path)
            if call is None:
                call = exec, (code, names)
    if call is None:
        names.pop("__file__", None)
        names.pop("__cached__", None)
        names["__loader__"] = sys.modules["_frozen_importlib"].BuiltinImporter
    _set_argv({"script": target, "module": "-m", "run-path": "-c"}[mode], args, bare)
    _set_path0(mode, target, path0)
    sys.modules["__main__"] = main
    if call is not None:
        return call
    import runpy

    if mode == "run-path":
        sys.argv[0] = target
        return runpy.run_path, (target, None, "__main__")
    run_module = getattr(runpy, "_run_module_as_main")
    return run_module, ((target, True) if mode == "module" else ("__main__", False))


def bare_command(mode: str, target: str, args: "List[str]", options: "List[str]") -> "List[str]":
    """Return the command that runs the target without the bootstrap."""
    how = {"script": [], "module": ["-m"], "run-path": ["-c", RUN_PATH]}[mode]  # type: List[str]
    return options + how + [target] + args


def exec_bare(command: "List[str]") -> None:
    """Replace this process by the plain interpreter."""
    os.execv(sys.executable or "/proc/self/exe", command)


def _absolute(path: str) -> str:
    """Make a path absolute as the interpreter does for its script: without normalising it."""
    if sys.version_info < (3, 9) or path.startswith("/"):
        return path
    try:
        return os.getcwd() + "/" + path
    except OSError:
        return path


def _find_importer(path: str) -> "Any":
    """Return the importer of a directory or an archive with a __main__, None for a file."""
    for hook in sys.path_hooks:
        try:
            importer = hook(path)
        except ImportError:
            continue
        sys.path_importer_cache[path] = importer
        return importer
    sys.path_importer_cache[path] = None
    return None


def _load(path: str, bare: "List[str]") -> "Tuple[Any, bool]":
    """Return the code of a script, and whether it was compiled before; exec `bare` on any error.

    A pipe cannot be read again: then the code is the exception to raise.
    """
    is_regular = True
    try:
        with open(path, "rb", 0) as file:
            is_regular = os.fstat(file.fileno()).st_mode & FILE_TYPE == REGULAR
            if is_regular or not file.isatty():
                data = file.readall()
                if is_regular and compiled[:2] == (path, data) and compiled[2] is not None:
                    return compiled[2], False
                magic = sys.modules["_frozen_importlib_external"].MAGIC_NUMBER
                if path.endswith(".pyc") or data[:2] == magic[:2]:
                    code = sys.modules["marshal"].loads(data[16:]) if data[:4] == magic else None
                    if type(code) is type(become.__code__):
                        return code, True
                else:
                    return compile(data, path, "exec", 0, True), False
    except Exception as error:
        if not is_regular:
            return error, False
        record_early(error)
    exec_bare(bare)
    raise AssertionError


def _fail(error: Exception) -> None:
    raise error.with_traceback(None)


def _set_argv(first: str, args: "List[str]", bare: "List[str]") -> None:
    sys.argv[:] = [first]
    sys.argv.extend(args)
    original = getattr(sys, "orig_argv", None)
    if original is not None:
        original[:] = bare


def _set_path0(mode: str, target: str, path0: "Optional[str]") -> None:
    """Replace the bootstrap's directory in sys.path by the one that the interpreter would put in front."""
    is_safe = getattr(sys.flags, "safe_path", False) or sys.flags.isolated
    if not is_safe:
        del sys.path[0]
    if path0 is None and not is_safe:
        if mode == "script":
            path0 = os.path.dirname(os.path.realpath(target))
        elif mode == "run-path":
            path0 = ""
        else:
            try:
                path0 = os.getcwd()
            except OSError:
                return
    if path0 is not None:
        sys.path.insert(0, path0)


# ---- the end -----------------------------------------------------------------------------------------------


def record_error(kind: "Any", value: BaseException, traceback: "Optional[TracebackType]") -> None:
    """Write the rank's error file as torch's @record does, unless there is one already.

    Import nothing: modules json and traceback may be files of the user by now.
    """
    if os.getpid() != rank_pid or issubclass(kind, KeyboardInterrupt):
        return
    _write_error(kind, value, traceback)


def record_early(value: BaseException) -> None:
    """Write the error file for an error before the script's first statement."""
    if not isinstance(value, OSError):  # which may be temporary
        _write_error(type(value), value, None, EARLY)


def _write_error(
    kind: "Any", value: BaseException, traceback: "Optional[TracebackType]", heading: str = ""
) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    try:
        printed = sys.modules["_io"].StringIO()
        stderr, sys.stderr = sys.stderr, printed
        try:
            sys.__excepthook__(kind, value, traceback)
        finally:
            sys.stderr = stderr
        text = '{"message":{"message":%s,"extraInfo":{"py_callstack":%s,"timestamp":"%d"}}}' % (
            quote(("%s: %s" % (kind.__name__, value))[:MAX_ERROR_CHARS]),
            quote(heading + printed.getvalue()[-MAX_ERROR_CHARS:]),
            time.time(),
        )
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, text.encode("utf-8", "backslashreplace"))
        finally:
            os.close(fd)
    except Exception:
        pass


def hide_frames(value: BaseException, names: "Dict[str, Any]") -> None:
    """Let sys.excepthook see only the script's frames; call this before `value` leaves the last own frame.

    The interpreter still prints it and sets the exit status. A hook that removes itself replaces the script's.
    `names` are those of its __main__.
    """
    is_missing = not hasattr(sys, "excepthook")
    hook = None if is_missing else sys.excepthook  # type: Any

    def stand_in(kind: "Any", value: BaseException, _traceback: "Any") -> None:
        traceback = value.__traceback__ = sys.last_traceback = _trim(value.__traceback__)
        record_error(kind, value, traceback)
        try:
            if is_missing:
                del sys.excepthook
                sys.stderr.write("sys.excepthook is missing\n")
                sys.__excepthook__(kind, value, traceback)
                return
            sys.excepthook = hook
            hook(kind, value, traceback)  # a hook of None raises, as without the bootstrap
        except SystemExit:
            raise
        except BaseException as error:
            error.__context__ = None
            error.__traceback__ = _trim(error.__traceback__)
            sys.stderr.write("Error in sys.excepthook:\n")
            sys.__excepthook__(type(error), error, error.__traceback__)
            sys.stderr.write("\nOriginal exception was:\n")
            sys.__excepthook__(kind, value, traceback)
        finally:
            forget_file(names)

    if not isinstance(value, SystemExit):
        sys.excepthook = stand_in
        return
    if page is not None:
        page.ended(value)
    last = value.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if isinstance(value.code, str) and last is not None and "runpy" in last.tb_frame.f_code.co_filename:
        record_early(ImportError(value.code.partition(": ")[2]))  # the module to run is missing


def _trim(traceback: "Optional[TracebackType]") -> "Optional[TracebackType]":
    """Remove own frames: those below the script's, and those above if a signal arrived during a write."""
    ours = hide_frames.__code__.co_filename
    while traceback is not None and traceback.tb_frame.f_code.co_filename == ours:
        traceback = traceback.tb_next
    last = traceback
    while last is not None:
        while last.tb_next is not None and last.tb_next.tb_frame.f_code.co_filename == ours:
            last.tb_next = last.tb_next.tb_next
        last = last.tb_next
    return traceback


# ---- start -------------------------------------------------------------------------------------------------


def start(arguments: "List[str]") -> "Tuple[Callable[..., object], Tuple[Any, ...]]":
    """Install the hooks and become the script; the returned call runs it."""
    if arguments[1] == "preload":
        return _preload(arguments[2], arguments[3:])
    mode, events_file, run_id, node, rank, attempt, page_file, target = arguments[1:9]
    args = arguments[9:]
    options = sys.orig_argv[: -len(arguments)] if hasattr(sys, "orig_argv") else _options(len(arguments))
    try:
        if sys.version_info >= (3, 8):
            sys.path_importer_cache.pop(_TEMPLATE["__file__"], None)
            sys.modules[NAME] = sys.modules["__main__"]
            call = become(mode, target, args, options, _TEMPLATE)
            install(Events(events_file, run_id, node, int(rank), int(attempt)), page_file)
            return call
    except Exception:
        pass  # the script must run after any error of the bootstrap
    exec_bare(bare_command(mode, target, args, options))
    raise AssertionError


def _preload(path: str, arguments: "List[str]") -> "Tuple[Callable[..., object], Tuple[Any, ...]]":
    """Become the fork server; return in the ranks that it forks. Any failure ends it: ranks are exec'd."""
    sys.path_importer_cache.pop(_TEMPLATE["__file__"], None)
    sys.modules[NAME] = sys.modules["__main__"]
    with open(path, "rb", 0) as file:
        data = file.readall()
    code = (
        sys.modules["marshal"].loads(data[16:]) if path.endswith(".pyc") else compile(data, path, "exec", 0, True)
    )
    names = {"__name__": NAME}  # type: Dict[str, Any]
    exec(code, names)
    serve = names["serve"]  # type: Callable[..., Tuple[Callable[..., object], Tuple[Any, ...]]]
    del data, code  # memory that a rank frees at its start copies shared pages
    return serve(arguments, globals(), _TEMPLATE)


def install(events: Events, page_file: str = "") -> None:
    """Install the hooks of a rank; its first event marks the begin of its script. Args: page_file: "" for none."""
    global heartbeat, rank_pid, known_modules, known_folders, layout_path, page, first_step
    rank_pid = events.pid
    known_modules = known_modules or frozenset(sys.modules)
    known_folders = tuple([folder + "/" for folder in sys.path if folder])
    pages = protect_output(events)
    page = open_page(page_file) if page_file else None
    if page is not None:
        pages.append(page.fd)
    if events.path:
        watch_opened(events)
        watch_imports(events)
    if events.path.endswith(".jsonl"):
        layout_path = events.path[:-6] + ".layout"
    if events.path or page is not None:
        first_step = FirstStep(events, page)
        first_step.install()
        heartbeat = make_heartbeat(events, first_step, page)
        events.write("spawn", "instant", "script")
    if os.environ.get(KEEP_CACHES) == "1":
        for module, replace in KEPT:
            Replacing(module, replace).install()


heartbeat = None  # type: Optional[Callable[[Any, Dict[str, Any]], None]]
page = None  # type: Optional[Page]
layout_path = ""
rank_pid = 0  # differs from the pids of children that the script forks
known_modules = frozenset()  # type: Any  # before the script; the fork server sets it
known_folders = ()  # type: Tuple[str, ...]
compiled = ("", b"", None)  # type: Tuple[str, bytes, Any]  # a script's path, text and code, compiled in advance
listed = (0, 0)  # number of modules and directories that the fork server has listed
opened = None  # type: Optional[Opened]
first_step = None  # type: Optional[FirstStep]
watch = None  # type: Any  # of imports, in local rank 0 of a recorded start
thaw = None  # type: Optional[Callable[[], None]]  # in a forked rank: undoes gc.freeze, to end like an exec'd one


def _options(count: int) -> "List[str]":
    """Return interpreter and options of this process, for Python versions without sys.orig_argv."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            words = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
        return words[:-count]
    except OSError:
        return [sys.executable, "-u"]


def forget_file(names: "Dict[str, Any]") -> None:
    """Remove the names that the interpreter removes after a script's last statement."""
    names.pop("__file__", None)
    names.pop("__cached__", None)


if IS_PROGRAM:
    _function, _arguments = start(sys.argv)
    _names = _arguments[1] if _function is exec else {}
    try:
        _function(*_arguments)
    except BaseException as _error:
        hide_frames(_error, _names)
        raise
    else:
        forget_file(_names)
    finally:
        if thaw is not None:
            thaw()
        del _function, _arguments, _names
