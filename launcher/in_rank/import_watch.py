"""State that modules read at import, and its changes: recorded in one start, verified in later ones.

Loaded by bootstrap.py and fork_server.py, by path, beside them; standard library only, needs Python 3.8. Watch
records the order of imports, the importers, and which modules read or change variables, files and other process
state. Its lines go to bootrun, which decides which modules a later start may import before the script
(ranks/fork/import_plan.py). Sentry is for forked ranks: at the script's first import of a preloaded module, it
compares the state that the module has read with the present state.
"""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Set, Tuple

    Use = Tuple[str, str, bool]  # module, object, and whether the module changes it

NAME = __name__  # of the rank-side code, as ranks see it
# Variables that differ between the ranks of a job, or between its attempts.
PER_RANK = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT "
    "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_ERROR_FILE".split()
)
MAIN = "__main__"
# They search directories of sys.path for modules and installed packages.
FINDERS = (
    "<frozen importlib._bootstrap_external>",
    "importlib/metadata/__init__.py",
    "importlib_metadata/__init__.py",
)
IS_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python3.", "/lib64/python3.")
# Files of the machine, and files of imported modules.
ELSEWHERE = ("/proc/", "/sys/", "/dev/")
CODE = (".py", ".pyc", ".so")
MAX_S = 600.0  # after that the recording is not needed
MAX_LOOKS = 64  # samples of the interpreter's state, of about 0.2 ms each
MAX_USES = 100000
MAX_KEY_CHARS = 4096
FORKS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec")
# Read by native code, at the latest when a library is loaded. (ranks/fork/policy.py lists those of Python code.)
NATIVE_VARIABLES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "MKLDNN_", "DNNL_", "ONEDNN_", "OPENBLAS_", "GOTO_", "BLIS_", "VECLIB_"),
    *("NVPL_", "GFORTRAN_", "ATEN_", "KINETO_", "TORCH", "PYTORCH_", "ARROW_", "RUST_LOG", "TF_", "XLA_", "GRPC_"),
    *("MUJOCO_", "PYOPENGL_", "LC_", "LANG", "TZ", "TMPDIR"),
)
# Have such prefixes, but are read only when they are needed.
NATIVE_LATER = (
    *("TORCH_NCCL_", "TORCH_GLOO_", "TORCHELASTIC_", "TORCH_EXTENSIONS_", "TORCH_HOME", "TORCHINDUCTOR_"),
    *("TORCH_CUDA_ARCH_LIST", "PYTORCH_ENABLE_MPS_FALLBACK", "TF_ENABLE_"),
)
MAX_CHECKED_FILES = 64
OF_TORCH = ("TORCH", "PYTORCH_", "ATEN_", "KINETO_")
# Packages and modules that iterate over all variables, and the prefix of those that they use.
TAKES = {"fsspec.config": "FSSPEC", "tqdm": "TQDM_", "dask": "DASK_"}


def is_native(variable: str) -> bool:
    """Return whether native libraries may read a variable when they are loaded."""
    return variable.startswith(NATIVE_VARIABLES) and not variable.startswith(NATIVE_LATER)


def takes(who: str) -> str:
    """Return the prefix of the variables that a module uses when it iterates over all; "" for any."""
    return next((start for name, start in TAKES.items() if who == name or who.startswith(name + ".")), "")


# ---- the acting module -----------------------------------------------------------------------------------------


_IMPORTLIB = frozenset(
    ("_frozen_importlib", "_frozen_importlib_external", "importlib._bootstrap", "importlib._bootstrap_external")
)
# Of the imports that run, in any thread.
_IMPORT_LOCKS = getattr(sys.modules["_frozen_importlib"], "_module_locks", None)


def find_importing(frame: "Any") -> str:
    """Return the module whose import executes this frame, directly or by calls; the script, if none does."""
    if _IMPORT_LOCKS is not None and not _IMPORT_LOCKS:
        return MAIN  # without walking the frames: a compiler may import ten thousand times from deep calls
    modules = sys.modules
    while frame is not None:
        name = frame.f_globals.get("__name__")
        # An access to the code calls all audit hooks, and most frames are those of importlib.
        if type(name) is str and name not in _IMPORTLIB and frame.f_code.co_name == "<module>" and name in modules:
            return name
        frame = frame.f_back
    return MAIN


def _packages(name: str) -> "List[str]":
    """Return the packages that contain a module."""
    return [name[:place] for place, letter in enumerate(name) if letter == "."]


def find_module_frame(frame: "Any", name: str) -> "Any":
    """Return the frame of a module's execution that has called this one; None if there is none."""
    while frame is not None and (frame.f_code.co_name != "<module>" or frame.f_globals.get("__name__") != name):
        frame = frame.f_back
    return frame


def _find_line(frame: "Any") -> int:
    """Return the line of an import statement at module level; 0 for one in a function."""
    while frame is not None and (
        frame.f_code.co_filename.startswith("<frozen importlib")
        or frame.f_globals.get("__name__") in ("importlib", NAME)
    ):
        frame = frame.f_back
    is_own = frame is not None and frame.f_code.co_name == "<module>"
    return frame.f_lineno or 0 if is_own else 0


def _pose_as(function: "Any", plain: "Any") -> "Any":
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        if hasattr(plain, name):
            setattr(function, name, getattr(plain, name))
    return function


def _make_hook(handlers: "Dict[str, Any]") -> "Callable[[str, Tuple[Any, ...]], None]":
    find = handlers.get

    def hook(event: str, args: "Tuple[Any, ...]") -> None:
        handler = find(event)
        if handler is not None:
            try:
                handler(args)
            except Exception:
                pass

    return hook


def _origin(name: str) -> str:
    module = sys.modules.get(name)
    origin = getattr(getattr(module, "__spec__", None), "origin", None) or getattr(module, "__file__", None)
    return origin if isinstance(origin, str) else ""


def _is_outside(path: str) -> bool:
    """Return whether a file belongs neither to the machine nor to installed libraries."""
    if path.startswith(ELSEWHERE) or path.endswith(CODE):
        return False
    if path.endswith(".zip") and "/lib/python3" in path:
        return False  # the zipped standard library, which importers search too
    return not any(each in path for each in IS_LIBRARY)


class SpecWatch:
    """Calls `imported` with its spec and a frame, whenever one of these modules is imported once more.

    Import statements read from the spec of a loaded module whether it is still being initialised. The class
    changes nothing else of the module or of its spec.
    """

    def __init__(
        self, imported: "Callable[[Any, Any], None]", again: "Optional[List[Tuple[Any, str]]]" = None
    ) -> None:
        """Args: again: gets the importing and the imported module, in place of a call: for fork servers, with ten
        thousands of imports, where access to the frame's code would also call audit hooks."""
        get_frame = sys._getframe

        def get(spec: "Any") -> bool:
            try:
                imported(spec, get_frame(1))
            except Exception:
                pass  # no frame at the interpreter's end
            return spec.__dict__.get("_initializing", False)  # type: ignore[no-any-return]

        def keep(spec: "Any") -> bool:
            try:
                again.append((get_frame(1).f_globals.get("__name__"), spec.name))  # type: ignore[union-attr]
            except Exception:
                pass
            return spec.__dict__.get("_initializing", False)  # type: ignore[no-any-return]

        def put(spec: "Any", value: bool) -> None:
            spec.__dict__["_initializing"] = value

        self.plain = sys.modules["_frozen_importlib"].ModuleSpec  # type: Any
        names = {
            "__module__": self.plain.__module__,
            "_initializing": property(get if again is None else keep, put),
        }
        self._watched = type("ModuleSpec", (self.plain,), names)  # type: Any
        self._specs = []  # type: List[Any]

    def add(self, names: "List[str]") -> None:
        modules, plain = sys.modules, self.plain
        for name in names:
            spec = getattr(modules.get(name), "__dict__", {}).get("__spec__")  # type: Any
            if type(spec) is plain and spec.name == name:
                try:
                    spec.__class__ = self._watched
                    self._specs.append(spec)
                except TypeError:
                    pass  # an unknown Python version

    def restore(self) -> None:
        """Restore all specs."""
        for spec in self._specs:
            spec.__class__ = self.plain
        del self._specs[:]


# ---- recording -------------------------------------------------------------------------------------------------


class Watch:
    """See the module's docstring. Times are ticks: a counter of recorded events."""

    def __init__(self, is_whole: bool, takes_rank: "Optional[Callable[[str, str, Any], bool]]" = None) -> None:
        """
        Args:
            is_whole: also record changes of the interpreter by the script, and names imported from packages.
            Without
                it the cost is 1 % of the imports.
            takes_rank: called with a module, the variable of PER_RANK that it reads, and a frame; if it returns
                True, the read is not recorded in `rank_reads`.
        """
        self.tick = 0
        self.begun = {}  # type: Dict[str, Tuple[int, str, int]]  # tick, importer, line of the user's code
        self.needs = set()  # type: Set[Tuple[str, str]]  # importer, imported module
        self.again = []  # type: List[Tuple[Any, str]]  # importer, loaded module; unless whole
        self.uses = {}  # type: Dict[Use, List[int]]  # the first and the last tick
        self.rank_reads = {}  # type: Dict[Tuple[str, str, int], None]  # module, variable of PER_RANK, line
        self.back = {}  # type: Dict[str, int]  # changed object, tick since which it has its first value again
        self._takes_rank = takes_rank
        self._is_whole = is_whole
        self._is_on = False
        self._end_s = time.monotonic() + MAX_S
        self.is_cut = False
        self._specs = SpecWatch(self._note_again, None if is_whole else self.again)
        self._begun = []  # type: List[str]  # modules whose specs are not watched yet
        self._first = {}  # type: Dict[bytes, bytes]  # variables
        self._first_folder = ""
        self._libraries = {NAME: True, MAIN: False}
        self._environs = []  # type: List[Tuple[Any, Any, Any]]
        self._folders = []  # type: List[Tuple[str, Any, Any]]
        self._state = {}  # type: Dict[str, Any]
        self._looks = 0
        self._unit = ""  # the module that the script imports at the moment
        self._lock = None  # type: Any
        self._builtins = {}  # type: Dict[str, Any]
        self._handlers = {}  # type: Dict[str, Callable[[Tuple[Any, ...]], None]]

    def install(self, finder: "Any" = None) -> None:
        """Start recording. Args: finder: one in sys.meta_path that forwards its calls; None: there is none."""
        if self._is_whole:
            for name in ("_locale", "_signal"):
                self._builtins[name] = _import_apart(name)
            self._find_names = make_name_finder(_import_apart("opcode").opmap)
        try:
            self._first_folder = os.getcwd()
        except OSError:
            pass  # the working directory is gone
        self._is_on = True
        for environ in (os.environ, getattr(os, "environb", None)):
            if environ is not None:
                self._environs.append((environ, environ.encodekey, environ.decodekey))
                environ.encodekey = _pose_as(self._noting(environ.encodekey), environ.encodekey)
                environ.decodekey = _pose_as(self._noting_all(environ.decodekey), environ.decodekey)
        for name in ("getcwd", "getcwdb"):
            plain = getattr(os, name)
            self._folders.append((name, plain, _pose_as(self._noting_folder(plain), plain)))
            setattr(os, *self._folders[-1][::2])
        self._handlers = self._make_handlers()
        sys.addaudithook(_make_hook(self._handlers))
        if finder is None:
            sys.meta_path.insert(0, self)
        self._first = dict(_data_of(os.environ))
        if self._is_whole:
            self._specs.add(list(sys.modules))
            self._state = self._look()
        # Otherwise modules that are there already are not watched: what they have read is not known anyway.

    def remove(self) -> None:
        """Restore all changes; the audit hook cannot be removed, and returns at once."""
        if not self._is_on:
            return
        self._is_on = False
        self._handlers.clear()  # the hook stays, and must not keep objects alive
        for environ, encode, decode in self._environs:
            environ.encodekey, environ.decodekey = encode, decode
        for name, plain, instead in self._folders:
            if getattr(os, name) is instead:
                setattr(os, name, plain)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._specs.restore()
        self._lock = None

    def chain(self, name: str) -> "List[str]":
        """Return a module and its importers."""
        found = []  # type: List[str]
        while name in self.begun and name not in found:
            found.append(name)
            name = self.begun[name][1]
        return found

    def dependents(self, name: str) -> "List[str]":
        """Return the imported modules that import a module or are in it, directly or indirectly.

        Of a package in the result, omit its parts.
        """
        wanted_by = {}  # type: Dict[str, List[str]]
        for who, needed in [*self.needs, *self.again]:
            wanted_by.setdefault(needed, []).append(str(who))
        for each in self.begun:
            wanted_by.setdefault(each.rpartition(".")[0], []).append(each)
        found = {name: None}
        queue = [name]
        while queue:
            for who in wanted_by.get(queue.pop(0), ()):
                if who in self.begun and who not in found:
                    found[who] = None
                    queue.append(who)
        names = [who for who in found if who != name and not any(each in found for each in _packages(who))]
        return sorted(names, key=lambda who: self.begun[who][0])

    def use_all(self, variables: "Any") -> None:
        """Record variables that the module in import has used unobserved."""
        who = find_importing(sys._getframe(1))
        for name in variables:
            self.use(who, "env:" + name, False)

    # ---- imports

    def find_spec(self, name: str, *_where: "Any") -> None:
        """Return "not found here": part of the protocol of sys.meta_path."""
        if self._is_on:
            try:
                if self._is_whole and time.monotonic() > self._end_s:
                    self.is_cut = True
                    self.remove()
                    return
                self._note_begin(name)
            except Exception:
                pass

    def _note_begin(self, name: str) -> None:
        frame = sys._getframe(2)
        who = find_importing(frame)
        self.tick += 1
        line = 0 if not self._is_whole or self._is_library(who) else _find_line(frame)
        self.begun.setdefault(name, (self.tick, who, line))
        self.needs.add((who, name))
        self._watch_begun()
        self._begun.append(name)
        if not self._is_whole:
            return
        if not self._unit and not self._is_library(who):
            self._compare(who)
            self._await_end(name)

    def _watch_begun(self) -> None:
        """Watch modules whose import has begun; some replace themselves in sys.modules at its end."""
        modules, locks = sys.modules, sys.modules["_frozen_importlib"]._module_locks
        there = [name for name in self._begun if name in modules]
        self._specs.add(there)
        self._begun = [name for name in self._begun if name in locks and name not in there]

    def _note_again(self, spec: "Any", frame: "Any") -> None:
        """Record the import of a loaded module."""
        who = find_importing(frame)
        if who == MAIN:
            return
        needs, name = self.needs, spec.name
        needs.add((who, name))
        if spec.submodule_search_locations is not None:
            for part in self._find_names(frame):
                if name + "." + part in sys.modules:
                    needs.add((who, name + "." + part))

    def _is_library(self, who: str) -> bool:
        if who not in self._libraries:
            origin = _origin(who)
            self._libraries[who] = not origin.startswith("/") or any(each in origin for each in IS_LIBRARY)
        return self._libraries[who]

    # ---- variables, files, directories

    def use(self, who: str, what: str, is_change: bool) -> None:
        self.tick += 1
        ticks = self.uses.get((who, what, is_change))
        if ticks is not None:
            ticks[1] = self.tick
        elif len(self.uses) < MAX_USES and len(what) < MAX_KEY_CHARS and "\n" not in what and "\t" not in what:
            self.uses[who, what, is_change] = [self.tick, self.tick]

    def _note_value(self, what: str, is_first: bool) -> None:
        """Record whether an object that was just changed has its first value again."""
        if is_first:
            self.back[what] = self.tick
        else:
            self.back.pop(what, None)

    def _noting(self, encode: "Any") -> "Any":
        get_frame = sys._getframe

        def encodekey(name: "Any") -> "Any":
            key = encode(name)
            who = find_importing(get_frame(1))
            text = name if type(name) is str else os.fsdecode(key)
            if text in PER_RANK and who != NAME:
                self._note_rank(who, text, get_frame(1))
            self.use(who, "env:" + text, False)
            return key

        return encodekey

    def _note_rank(self, who: str, variable: str, frame: "Any") -> None:
        if who == MAIN and self._is_whole:
            return  # the script may read it in each step
        if self._takes_rank is None or not self._takes_rank(who, variable, frame):
            module = find_module_frame(frame, who)
            self.rank_reads[who, variable, 0 if module is None else module.f_lineno or 0] = None

    def _noting_all(self, decode: "Any") -> "Any":
        get_frame = sys._getframe

        def decodekey(key: "Any") -> "Any":
            self.use(find_importing(get_frame(1)), "env:*", False)
            return decode(key)

        return decodekey

    def _noting_folder(self, plain: "Any") -> "Any":
        get_frame = sys._getframe

        def getcwd() -> "Any":
            if self._is_on:
                self.use(find_importing(get_frame(1)), "cwd", False)
            return plain()

        return getcwd

    def _make_handlers(self) -> "Dict[str, Callable[[Tuple[Any, ...]], None]]":
        get_frame = sys._getframe
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

        def note_open(args: "Tuple[Any, ...]") -> None:
            path, _, flags = args
            if type(flags) is int:
                self._note_file(path, bool(flags & writes), get_frame(2))

        def note_folder(args: "Tuple[Any, ...]") -> None:
            self._note_file(args[0], False, get_frame(2))

        def note_change(args: "Tuple[Any, ...]") -> None:
            for path in args[:2]:
                if type(path) in (str, bytes):
                    self._note_file(path, True, get_frame(2))

        def note_variable(args: "Tuple[Any, ...]") -> None:
            what = "env:" + os.fsdecode(args[0])
            self.use(find_importing(get_frame(2)), what, True)
            self._note_value(what, self._first.get(args[0]) == (args[1] if len(args) > 1 else None))

        def note_chdir(args: "Tuple[Any, ...]") -> None:
            self.use(find_importing(get_frame(2)), "cwd", True)
            self._note_value("cwd", args[0] == self._first_folder != "")

        def note_library(_args: "Tuple[Any, ...]") -> None:
            self.use(find_importing(get_frame(2)), "native", False)

        def note_process(_args: "Tuple[Any, ...]") -> None:
            who = find_importing(get_frame(2))
            self.use(who, "process", True)
            for what in ("env:*", "cwd", "file:*"):
                self.use(who, what, False)

        handlers = {
            "open": note_open,
            "os.listdir": note_folder,
            "os.scandir": note_folder,
            "os.putenv": note_variable,
            "os.unsetenv": note_variable,
            "os.chdir": note_chdir,
            "ctypes.dlopen": note_library,
        }  # type: Dict[str, Callable[[Tuple[Any, ...]], None]]
        for name in ("remove", "rename", "mkdir", "rmdir", "link", "symlink", "truncate"):
            handlers["os." + name] = note_change
        for name in FORKS:
            handlers[name] = note_process
        return handlers

    def _note_file(self, path: "Any", is_change: bool, frame: "Any") -> None:
        if type(path) is bytes:
            path = os.fsdecode(path)
        if path is None:
            path = "."
        if type(path) is not str:
            return
        is_absolute = path.startswith("/")
        if is_absolute and not _is_outside(path):
            return  # nearly all; before the access to a frame's code, which calls all audit hooks
        if frame is not None and frame.f_code.co_filename.endswith(FINDERS):
            return
        who = find_importing(frame)
        if not is_absolute:
            self.use(who, "cwd", False)
            path = os.getcwd() + "/" + path
        self.use(who, "file:" + path, is_change)

    # ---- the interpreter

    def _await_end(self, name: str) -> None:
        """Wait for the end of an import: importlib drops the lock of the module then."""
        locks = sys.modules["_frozen_importlib"]._module_locks
        lock = locks[name]() if name in locks else None
        if lock is not None:
            self._unit = name
            self._lock = sys.modules["_weakref"].ref(lock, lambda _: self._note_end(name))

    def _note_end(self, name: str) -> None:
        self._unit = ""
        if self._is_on:
            try:
                self._compare(name)
            except Exception:
                pass

    def _compare(self, who: str) -> None:
        """Record changes of the interpreter's state since the last sample as changes by `who`."""
        if self._looks == MAX_LOOKS:
            self._looks += 1
            self.use(who, "unknown", True)
        if self._looks > MAX_LOOKS:
            return
        self._looks += 1
        before, now = self._state, self._look()
        self._state = now
        loggers = before.pop("loggers")
        for what, value in before.items():
            if value != now.get(what, value):
                self.use(who, what, True)
        for name, value in now["loggers"].items():
            if value != loggers.get(name, PLAIN_LOGGER):
                self.use(who, "logger:" + name, True)

    def _look(self) -> "Dict[str, Any]":
        modules = sys.modules  # type: Dict[str, Any]
        found = {
            "argv": tuple(sys.argv),
            "path": tuple(sys.path),
            "finders": [id(each) for each in (*sys.meta_path, *sys.path_hooks) if type(each).__module__ != NAME],
            "recursion": sys.getrecursionlimit(),
            "streams": [id(getattr(sys, name, None)) for name in ("stdin", "stdout", "stderr")],
            "hooks": [id(getattr(sys, name, None)) for name in ("excepthook", "unraisablehook", "displayhook")],
            "builtins": {name: id(value) for name, value in vars(modules["builtins"]).items() if name != "_"},
            "locale": self._builtins["_locale"].setlocale(6, None),
            "signals": [id(self._builtins["_signal"].getsignal(each)) for each in range(1, 32)],
            "loggers": {},
        }  # type: Dict[str, Any]
        for name, look in LOOKS.items():
            module = modules.get(name)
            if module is not None:
                try:
                    what, value = look(module)
                    found[what] = value
                except Exception:
                    pass  # partly imported, or a version that keeps it elsewhere
        return found

    # ---- results

    def lines(self) -> "List[str]":
        """Return the records: begun TICK BY LINE NAME ORIGIN of __main__ and each module, in the order of imports;
        needs MODULE MODULE... by their places in that list; uses FIRST LAST MODULE CHANGE WHAT; rank MODULE
        VARIABLE LINE; back SINCE WHAT."""
        names = {MAIN: 0}
        lines = ["begun\t0\t\t0\t%s\t%s\n" % (MAIN, _origin(MAIN))]
        for name, (tick, who, line) in list(self.begun.items()):
            origin = _origin(name)
            if not {"\n", "\t"}.intersection(name + origin):
                names[name] = len(names)
                lines.append("begun\t%d\t%s\t%d\t%s\t%s\n" % (tick, who, line, name, origin))
        needed = {}  # type: Dict[int, List[str]]
        for who, name in list(self.needs):
            if who in names and name in names:
                needed.setdefault(names[who], []).append(str(names[name]))
        lines += ["needs\t%d\t%s\n" % (who, "\t".join(found)) for who, found in needed.items()]
        changed = set()  # type: Set[str]
        for (who, what, is_change), (first, last) in list(self.uses.items()):
            if who != NAME:
                changed.add(what)
                lines.append("uses\t%d\t%d\t%d\t%d\t%s\n" % (first, last, names.get(who, 0), is_change, what))
        lines += [
            "rank\t%d\t%s\t%d\n" % (names.get(who, 0), name, number) for who, name, number in list(self.rank_reads)
        ]
        lines += ["back\t%d\t%s\n" % (since, what) for what, since in list(self.back.items()) if what in changed]
        if not self.is_cut:
            lines.append("end\n")
        return lines


PLAIN_LOGGER = 0, (), True, False


def _look_at_loggers(logging: "Any") -> "Tuple[str, Any]":
    root = logging.root
    found = {"root": (root.level, tuple(map(id, root.handlers)), root.disabled, root.manager.disable)}
    for name, logger in list(root.manager.loggerDict.items()):
        if "handlers" in logger.__dict__:
            found[name] = logger.level, tuple(map(id, logger.handlers)), logger.propagate, logger.disabled
    return "loggers", found


def _look_at_warnings(warnings: "Any") -> "Tuple[str, Any]":
    return "warnings", [id(each) for each in warnings.filters]


def _look_at_random(random: "Any") -> "Tuple[str, Any]":
    return "random", hash(random.getstate())


def _look_at_numpy(random: "Any") -> "Tuple[str, Any]":
    state = random.get_state()
    return "numpy.random", (state[1].tobytes(), state[2])


def _look_at_processes(context: "Any") -> "Tuple[str, Any]":
    return "start method", id(context._default_context._actual_context)


LOOKS = {
    "logging": _look_at_loggers,
    "warnings": _look_at_warnings,
    "random": _look_at_random,
    "numpy.random": _look_at_numpy,
    "multiprocessing.context": _look_at_processes,
}  # type: Dict[str, Callable[[Any], Tuple[str, Any]]]


def _import_apart(name: str) -> "Any":
    """Import a module of the standard library, not the script's of that name; leave sys.modules unchanged."""
    before = set(sys.modules)
    path = sys.path[:]
    try:
        sys.path[:] = [
            os.path.dirname(os.__file__),
            *[folder for folder in path if folder.endswith("/lib-dynload")],
        ]
        return sys.modules.get(name) or __import__(name)
    finally:
        for added in set(sys.modules) - before:
            del sys.modules[added]
        sys.path[:] = path


def make_name_finder(operations: "Dict[str, int]") -> "Callable[[Any], List[str]]":
    """Return a function that returns the names for a frame that executes `from PACKAGE import a, b`.

    Args: operations: of this interpreter (opcode.opmap).
    """
    import_from, extended = operations["IMPORT_FROM"], operations["EXTENDED_ARG"]
    words_of = {}  # type: Dict[int, Tuple[Any, bytes]]  # of a code object, which makes new bytes at each access

    def find_names(frame: "Any") -> "List[str]":
        code = frame.f_code
        found = words_of.get(id(code))
        if found is None:
            found = words_of[id(code)] = code, code.co_code
        names, more, is_stored = [], 0, True  # type: List[str], int, bool
        words = found[1]
        for place in range(frame.f_lasti + 2, len(words) - 1, 2):
            if words[place] == extended:
                more = (more | words[place + 1]) << 8
                continue
            if words[place] == import_from:
                names.append(code.co_names[more | words[place + 1]])
                is_stored = False
            elif is_stored:
                break
            else:
                is_stored = True
            more = 0
        return names

    return find_names


# ---- checking --------------------------------------------------------------------------------------------------


class Sentry:
    """Detects at an import in a forked rank that the module would read other values now.

    It checks only modules that the script, or a module that the rank itself imports, imports directly, each once:
    without changes that costs two microseconds.
    """

    def __init__(self, watch: Watch, allowed: "List[str]") -> None:
        """Make it in the fork server.

        Args: watch: of its imports; allowed: objects that the script may change, as no module reads them later.
        """
        self._specs = SpecWatch(self._check)
        self._watch = watch
        self._needs = {}  # type: Dict[str, List[str]]  # by importer, made on first use
        self._seen = []  # type: List[str]  # verified modules that the script has imported
        self._allowed = frozenset(allowed)
        self._readers = {}  # type: Dict[str, List[str]]
        self._takers = []  # type: List[Tuple[str, str]]  # prefix of variables, module that iterates over all
        self._native = [name for name in watch.begun if _origin(name).endswith(".so")]
        self._cwd_readers = []  # type: List[str]
        self._files = {}  # type: Dict[str, List[Tuple[str, Any]]]  # by each importer of the reader
        count = 0
        for who, what, _ in watch.uses:
            kind, _, rest = what.partition(":")
            if who not in watch.begun:
                continue
            if what == "env:*":
                self._takers.append((takes(who), who))
            elif kind == "env" and rest.startswith(takes(who)):
                self._readers.setdefault(rest, []).append(who)
            elif kind == "native":
                self._native.append(who)
            elif kind == "cwd":
                self._cwd_readers.append(who)
            elif kind == "file" and count < MAX_CHECKED_FILES and not os.path.isdir(rest):
                count += 1
                entry = rest, _stamp(rest)
                for each in watch.chain(who):
                    self._files.setdefault(each, []).append(entry)
        self._specs.add(list(sys.modules))
        self._pid = 0

    def arm(self, script: str, is_over: "Callable[[], bool]", begin_anew: "Callable[[str], None]") -> None:
        """Start the checks, when the script begins.

        Args: is_over: whether the rank cannot start again any more; begin_anew: starts it again, gets the reason.
        """
        self._script = script
        self._is_over = is_over
        self._begin_anew = begin_anew
        self._environ = dict(_data_of(os.environ))
        self._cwd = os.getcwd()
        self._path = list(sys.path)
        self._pid = os.getpid()

    def _check(self, spec: "Any", _frame: "Any") -> None:
        """Check a module within its import statement, where an exception would be lost."""
        if os.getpid() != self._pid:
            return  # a child of the rank, or not armed
        spec.__class__ = self._specs.plain
        if self._is_over():
            self._pid = 0
            return
        name = spec.name
        why = self._find_difference(name)
        if why:
            self._pid = 0
            self._begin_anew(why)
        else:
            self._seen.append(name)

    def _find_difference(self, name: str) -> str:
        environ, before = _data_of(os.environ), self._environ
        if environ != before:
            for key in set(environ) | set(before):
                if environ.get(key) != before.get(key):
                    why = self._find_reader(name, os.fsdecode(key))
                    if why:
                        return why
        for path, stamp in self._files.get(name, ()):
            if _stamp(path) != stamp:
                return "%s reads %s when it is imported, and that has changed" % (name, path)
        try:
            is_elsewhere = bool(self._cwd_readers) and os.getcwd() != self._cwd
        except OSError:
            is_elsewhere = False  # the working directory is gone
        if is_elsewhere and "cwd" not in self._allowed:
            for reader in self._within(name, self._cwd_readers):
                return "%s reads the working directory when it is imported, and %s has changed it" % (
                    reader,
                    self._script,
                )
        return self._find_other_file(name) if sys.path != self._path else ""

    def _within(self, name: str, readers: "Any") -> "List[str]":
        """Return the readers that the import of a module imports, and that no earlier import has imported."""
        if not readers:
            return []
        fresh = self._closure([name]).difference(self._closure(self._seen))
        return [reader for reader in readers if reader in fresh]

    def _closure(self, names: "List[str]") -> "Set[str]":
        if not self._needs:
            for who, needed in self._watch.needs:
                self._needs.setdefault(who, []).append(needed)
            for name, needed in self._watch.again:
                self._needs.setdefault(str(name), []).append(needed)
        found = set()  # type: Set[str]
        queue = list(names)
        while queue:
            name = queue.pop()
            if name not in found:
                found.add(name)
                queue += self._needs.get(name, ())
                queue.append(name.rpartition(".")[0] or name)
        return found

    def _find_reader(self, name: str, variable: str) -> str:
        if "env:" + variable in self._allowed:
            return ""
        takers = [who for start, who in self._takers if variable.startswith(start)]
        for reader in self._within(name, (*self._readers.get(variable, ()), *takers)):
            return "%s reads %s when it is imported, and %s has changed it" % (reader, variable, self._script)
        # Only torch reads torch's variables.
        native = self._native
        if variable.startswith(OF_TORCH):
            native = [each for each in native if each.startswith("torch")]
        if is_native(variable) and self._within(name, native):
            return "native code of %s may read %s when it is loaded, and %s has changed it" % (
                name,
                variable,
                self._script,
            )
        return ""

    def _find_other_file(self, name: str) -> str:
        """Return the reason if a directory that the script has put in front has another module of this name."""
        top = name.partition(".")[0]
        origin = _origin(top)
        if not origin.startswith("/"):
            return ""
        own = os.path.dirname(origin)
        if os.path.basename(origin).startswith("__init__."):
            own = os.path.dirname(own)
        for folder in sys.path:
            if folder == own:
                break
            if type(folder) is str and folder not in self._path:
                for end in ("", ".py"):
                    if os.path.exists(os.path.join(folder, top + end)):
                        return "%s has put %s in front of sys.path, which has another %s" % (
                            self._script,
                            folder,
                            top,
                        )
        return ""


def _data_of(environ: "Any") -> "Dict[bytes, bytes]":
    return environ._data  # type: ignore[no-any-return]


def _stamp(path: str) -> "Any":
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
