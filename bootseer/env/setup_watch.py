"""Watches what set-up commands look up, read, list and make, by notifications of the kernel. Stdlib only.

    fd = begin(...)                      # in the child, before it becomes a command
    watch = Watch(rules, is_ended)       # in the process above it
    watch.serve(fd)                      # whenever the descriptor is readable
    watch.report()

Each call that names a file waits until this process has noted the name and what is there at that moment, then it
goes on as if nothing had been. So what is noted is what there was before the commands changed it, also names that
were not there. No data passes through here. If this process is killed, its commands cannot name files any more.

What counts: names below the roots (the working folder) and whatever else is no part of the system, of an
interpreter's environment or of a cache. What the commands have made themselves is no input of theirs.
"""

from __future__ import annotations

import array  # noqa: F401  socket.send_fds needs it when nothing can be imported any more
import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import re
import stat
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bootseer.env.watch_calls import (
    ANSWER,
    CREATE,
    FOLLOW,
    HERE,
    LIST,
    LOOK,
    MACHINES,
    MAKE,
    MOVE,
    NEW_LISTENER,
    NOTICE_BYTES,
    OPEN,
    OPEN2,
    RECEIVE,
    RUN,
    SET_FLAGS,
    SPEC_ALLOW,
    SYNC_WAKE_UP,
    WAIT_KILLABLE,
    Call,
    Notice,
    instructions,
    let_go,
    program,
    read_notice,
)

MOST_TOUCHED = 50_000  # names that count
MOST_DONE = 500_000  # names that were seen, whether or not they count
MOST_OPEN = 200  # memories of processes that are held open
MOST_NAMES = 20_000  # of one folder that is listed
MOST_HASHED_BYTES = 1 << 20  # a file up to this is read at its first touch, so that what it was then is known
PATH_BYTES, MOST_PATH_BYTES = 256, 4096

_NO_NEW_PRIVILEGES, _FILTER = 38, 1
_AT_FDCWD = (1 << 32) - 100
_WRITES = os.O_WRONLY | os.O_RDWR
_TOOLS = frozenset(
    (*(b".hg", b".svn", b".tox", b".nox", b".mypy_cache", b".ruff_cache", b".pytest_cache"), b".ipynb_checkpoints")
)
_CACHED = re.compile(rb"^(.*/)__pycache__/([^/]+?)\.[^/.]+(?:\.opt-\d)?\.pyc$")
_SYSTEM = (
    *(b"/usr/", b"/lib/", b"/lib32/", b"/lib64/", b"/libx32/", b"/bin/", b"/sbin/", b"/proc/", b"/sys/", b"/dev/"),
    *(b"/run/", b"/var/", b"/etc/", b"/boot/", b"/snap/", b"/nix/store/", b"/gnu/store/"),
)
# Settings of installers count wherever they lie.
SETTINGS = (
    *(b"/pip.conf", b"/uv.toml", b"/.condarc", b"/condarc", b"/.mambarc", b"/.pydistutils.cfg"),
    *(b"/pypoetry/config.toml", b"/pdm/config.toml", b"/.python-version"),
)
# What they read outside the roots is theirs: the key has the machine's own compilers in another way.
_COMPILERS = re.compile(
    rb"(cc1\w*|collect2|lto1|lto-wrapper|as|ld(\.\w+)?|[\w.-]*-?(gcc|g\+\+|c\+\+|cc|clang|clang\+\+)(-[\d.]+)?|ar|nm"
    rb"|strip|nvcc|cicc|ptxas|cudafe\+\+|fatbinary|nvlink|hipcc|rustc|cargo|cmake|ninja|make|pkg-config|ldconfig"
    rb"|gfortran|f951|cython)"
)
_PYTHON = re.compile(rb"(python|pypy)[\d.]*t?")
# Where repositories and interpreters begin is looked up in every folder above.
_NO_INPUT = re.compile(rb"/(\.git|lib/python\d+\.zip)$")
_FETCHED = re.compile(rb"\b(upload-pack|pack-objects)\b")  # what git runs where something is fetched from
_OF_USERS = re.compile(rb"/(root|home/[^/]+)/\.")
_OTHERWISE = 1 << 16
_BY_HAND = frozenset((b"-W", b"-X", b"--check-hash-based-pycs"))  # options of Python that take a word


class Rules(NamedTuple):
    """Where the names lie that count. Folders without links, no `/` at the end."""

    roots: tuple[bytes, ...]  # what lies below counts, whatever it is
    literal: tuple[tuple[bytes, bytes], ...] = ()  # another name of a root, and the root
    never: tuple[bytes, ...] = ()  # what lies below does not count: targets, the store, caches
    files: frozenset[bytes] = frozenset()  # that do not count: the log
    home: bytes = b""  # of its folders that begin with a dot nothing counts, but settings
    temporary: tuple[bytes, ...] = ()  # names there that are not there are nobody's
    targets: tuple[bytes, ...] = ()
    programs: frozenset[bytes] = frozenset()  # folders of PATH: of the machine, but below the roots
    makes: bool = True  # False: of what the commands make nobody tells, and they read of it only what is temporary
    began_ns: int = 0  # by the clock of files
    only_roots: bool = False  # the commands run in an image: else only what it has of the node at the same path is


def make_rules(given: Mapping[str, Any]) -> Rules:
    """As an order carries them."""

    def many(name: str) -> tuple[bytes, ...]:
        return tuple(map(os.fsencode, given.get(name, ())))

    return Rules(
        roots=many("roots"),
        literal=tuple((os.fsencode(one), os.fsencode(other)) for one, other in given.get("literal", ())),
        never=many("never"),
        files=frozenset(many("files")),
        home=os.fsencode(given.get("home", "")),
        temporary=many("temporary"),
        targets=many("targets"),
        programs=frozenset(many("programs")),
        makes=bool(given.get("makes", True)),
        began_ns=int(given.get("began_ns", 0)),
        only_roots=bool(given.get("only_roots")),
    )


# ---- the child ------------------------------------------------------------------------------------------------


def begin(*, looks: bool, makes: bool = True) -> int:
    """From now on this process and all that it starts are watched: a descriptor for `Watch.serve`.

    Without the privilege for it, it takes away that programs gain privileges when they are started (sudo).
    Raises: OSError where the kernel, or who runs this container, does not allow it.
    """
    machine = MACHINES.get(platform.machine())
    if machine is None:
        raise OSError(errno.ENOSYS, f"it is not known for {platform.machine()}")
    data = program(machine, looks=looks, makes=makes)
    buffer = ctypes.create_string_buffer(data, len(data))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("first", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    given = Program(instructions(data), ctypes.addressof(buffer))
    flags = NEW_LISTENER | SPEC_ALLOW | WAIT_KILLABLE
    has_tried = False
    while True:
        fd = int(libc.syscall(machine.seccomp, _FILTER, flags, ctypes.byref(given)))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number == errno.EACCES and not has_tried:
            has_tried = True
            libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        elif number == errno.EINVAL and flags & WAIT_KILLABLE:
            flags &= ~WAIT_KILLABLE  # before Linux 5.19
        else:
            raise OSError(number, os.strerror(number))


# ---- the process above it -------------------------------------------------------------------------------------


class _Touched:
    """A name that counts, and what there was when it was touched first."""

    __slots__ = ("digest", "links", "names", "ops", "was")

    def __init__(self, was: list[int] | None) -> None:
        self.was = was  # kind and mode, inode, size, mtime and ctime in ns; None: nothing
        self.ops = ""
        self.digest = ""  # SHA-256 of a small file that was read
        self.names: list[str] | None = None  # of a folder that was listed; folders end in a slash
        self.links = ""


class Watch:
    """See the module's docstring."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        own = (rules.home + b"/.",) if rules.home else ()
        never = (*(each + b"/" for each in rules.never), *own)
        self._skip = never if rules.only_roots else (*_SYSTEM, *never)
        self._roots = tuple(each + b"/" for each in rules.roots if each != b"/")
        self._above = {above for root in rules.roots for above in _folders_above(root)}
        self._never = frozenset(rules.never)
        machine = MACHINES.get(platform.machine())
        self._arch = 0 if machine is None else machine.arch
        self._calls = {} if machine is None else machine.calls
        self._memories: dict[int, int] = {}
        self._programs: dict[int, tuple[bytes, bool]] = {}  # name, and whether it compiles
        self._environments: dict[bytes, bool] = {}  # folders: whether each is an interpreter's own
        self._bound: dict[bytes, bool] = {}  # folders that are not found below the roots, in an image
        self._done: set[tuple[object, ...]] = set()
        self._touched: dict[bytes, _Touched] = {}
        self._made: set[bytes] = set()
        self._gits: set[bytes] = set()
        self._cloned: set[bytes] = set()  # repositories that git has fetched from
        self._opened: dict[tuple[int, bytes], int] = {}  # by thread and folder: how often, and how (`_OTHERWISE`)
        self._why: dict[str, None] = {}  # why this is not all
        self.calls = 0

    # ---- notifications ---------------------------------------------------------------------------------------

    def take(self, fd: int) -> None:
        """A descriptor of `begin`."""
        try:
            fcntl.ioctl(fd, SET_FLAGS, SYNC_WAKE_UP)
        except OSError:
            pass  # before Linux 6.6

    def serve(self, fd: int) -> bool:
        """One notification; False when there will be none any more."""
        try:
            notice = read_notice(fcntl.ioctl(fd, RECEIVE, bytes(NOTICE_BYTES)))
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN)  # who called is gone
        self.calls += 1
        try:
            self._note(notice)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH, errno.ENOTDIR):
                self._miss(f"a name could not be read: {error.strerror}")
        except Exception as error:  # whatever it is, the command goes on
            self._miss(f"{type(error).__name__}: {error}")
        try:
            fcntl.ioctl(fd, ANSWER, let_go(notice))
        except OSError:
            pass  # who called is gone
        return True

    def _miss(self, why: str) -> None:
        if len(self._why) < 10:
            self._why[why] = None

    def _note(self, notice: Notice) -> None:
        call = self._calls.get(notice.number)
        if call is None or notice.arch != self._arch:
            self._miss("a program for another kind of processor has run")
            return
        thread, arguments = notice.thread, notice.arguments
        if call.kind == LIST:
            self._list(thread, os.fsencode(os.readlink(f"/proc/{thread}/fd/{arguments[0] & 0xFFFFFFFF}")))
            return
        raw = self._read_text(thread, arguments[call.path])
        if call.kind != MOVE and self._is_passed(raw):
            if call.kind == RUN:
                self._forget(thread)
            return
        path = self._locate(thread, raw, HERE if call.folder == HERE else arguments[call.folder])
        if call.kind == RUN:
            self._forget(thread)
        if call.kind == MOVE:
            new = self._locate(
                thread,
                self._read_text(thread, arguments[call.new_path]),
                HERE if call.new_folder == HERE else arguments[call.new_folder],
            )
            if path is not None and self._state(path) is not None:
                self._make(thread, path)
            if new is not None:
                self._make(thread, new)
            return
        if path is None:
            return
        flags = 0
        if call.kind == OPEN:
            flags = arguments[call.flags]
        elif call.kind == OPEN2:
            flags = int.from_bytes(self._read(thread, arguments[call.flags], 8), "little")
        self._name(thread, call, flags, path, is_absolute=raw[:1] == b"/")

    def _name(self, thread: int, call: Call, flags: int, path: bytes, *, is_absolute: bool) -> None:
        """A name, absolute."""
        kind = call.kind
        if kind in (OPEN, OPEN2):
            if flags & os.O_PATH:
                kind = LOOK
            elif flags & os.O_DIRECTORY:
                opened = thread, os.path.realpath(path)
                self._opened[opened] = self._opened.get(opened, 0) + (1 if is_absolute else _OTHERWISE)
        mark = (kind, flags & (_WRITES | os.O_CREAT | os.O_EXCL | os.O_TRUNC), path)
        if mark in self._done:
            return
        if len(self._done) < MOST_DONE:
            self._done.add(mark)
        if kind in (MAKE, CREATE):
            if kind == CREATE or self._state(path) is None:
                self._make(thread, path)
        elif kind == LOOK:
            self._touch(thread, path, "l")
        elif kind == FOLLOW:
            self._touch(thread, path, "k")
        elif kind == RUN:
            self._touch(thread, path, "r" if self._state(path) is not None else "x")
        else:
            self._open(thread, path, flags)

    def _open(self, thread: int, path: bytes, flags: int) -> None:
        is_there = self._state(path) is not None
        if flags & _WRITES:
            if is_there and not flags & (os.O_TRUNC | os.O_EXCL):
                # What comes of the file depends on what was in it: that counts if somebody reads it.
                self._touch(thread, path, "r" if flags & os.O_RDWR else "a")
            if is_there or flags & os.O_CREAT:
                self._make(thread, path)
            else:
                self._touch(thread, path, "l")
        else:
            self._touch(thread, path, "r")

    def _list(self, thread: int, path: bytes) -> None:
        if (LIST, path) in self._done or not path.startswith(b"/"):
            return
        place = self._place(thread, path)
        if place is None:
            self._done.add((LIST, path))
            return
        if self._is_import(thread, path):
            self._touch(thread, place, "i")
            return
        self._done.add((LIST, path))
        self._touch(thread, place, "n")

    # ---- what counts -----------------------------------------------------------------------------------------

    def _is_passed(self, path: bytes) -> bool:
        """Whether a name does not count, told at a glance: most are of the system or of a target."""
        return (
            path.startswith(self._skip)
            and not path.startswith(self._roots)
            and not path.endswith(SETTINGS)
            and path.rpartition(b"/")[0] not in self._above
        )

    def _touch(self, thread: int, path: bytes, op: str) -> None:
        place = self._place(thread, path)
        if place is None:
            return
        found = self._touched.get(place)
        if found is None:
            made = self._made_above(place)
            if made:
                real = os.path.realpath(place)
                if os.path.islink(made) and real != place and not self._made_above(real):
                    self._touch(thread, real, op)  # the commands have made the link alone
                return
            was = self._state(place, follow=op != "k")
            if self._is_passing(place, was is not None):
                return
            if len(self._touched) >= MOST_TOUCHED:
                self._miss(f"more than {MOST_TOUCHED} names were looked up")
                return
            found = self._touched[place] = _Touched(was)
        elif op not in found.ops and self._made_above(place) and not (op == "r" and "a" in found.ops):
            return  # by now it is what the commands have made of it
        if op in found.ops:
            return
        found.ops += op
        if op in "ra" and not found.digest and found.was is not None and stat.S_ISREG(found.was[0]):
            self._hash(place, found)
        elif op == "n":
            self._take_names(place, found)
        elif op == "k":
            try:
                found.links = os.fsdecode(os.readlink(place))
            except OSError:
                found.links = ""

    def _is_passing(self, path: bytes, is_there: bool) -> bool:
        """Whether a name in a folder for temporary files is one of programs' own: nothing, or made by now."""
        temporary = max((each for each in self._rules.temporary if path.startswith(each)), key=len, default=b"")
        if not temporary or self._is_inside(path):
            return False
        if not is_there:
            return os.path.dirname(path) not in self._above and not path.endswith(SETTINGS)
        if self._rules.makes:
            return False  # it was told what was made
        top = temporary + path[len(temporary) :].partition(b"/")[0]
        return os.lstat(top).st_ctime_ns >= self._rules.began_ns

    def _hash(self, path: bytes, found: _Touched) -> None:
        assert found.was is not None
        if found.was[2] > MOST_HASHED_BYTES:
            return
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb", buffering=0) as file:
            found.digest = hashlib.file_digest(file, "sha256").hexdigest()

    def _take_names(self, path: bytes, found: _Touched) -> None:
        names = []
        with os.scandir(path) as entries:
            for entry in entries:
                if os.path.join(path, entry.name) not in self._made:
                    end = "/" if entry.is_dir(follow_symlinks=False) else ""
                    names.append(os.fsdecode(entry.name) + end)
                if len(names) > MOST_NAMES:
                    self._miss(f"{os.fsdecode(path)} has more than {MOST_NAMES} names")
                    break
        found.names = sorted(names)

    def _make(self, thread: int, path: bytes) -> None:
        """The commands make, or replace, what has this name."""
        place = self._place(0, path, thread)
        if place is not None and not self._made_above(place):
            self._made.add(place)

    def _made_above(self, path: bytes) -> bytes:
        """The name itself, or the folder that it is in, that the commands have made; b"" for none."""
        made = self._made
        while len(path) > 1:
            if path in made:
                return path
            path = path.rpartition(b"/")[0]
        return b""

    def _is_inside(self, path: bytes) -> bool:
        return path.startswith(self._roots)

    def _place(self, thread: int, path: bytes, maker: int = 0) -> bytes | None:
        """The name by which it counts; None: it does not count. Args: maker: who makes it, instead of a thread."""
        rules = self._rules
        for literal, root in rules.literal:
            if path == literal or path.startswith(literal + b"/"):
                path = root + path[len(literal) :]
        if path in rules.files:
            return None
        is_inside = path.startswith(self._roots)
        is_above = os.path.dirname(path) in self._above
        if path.startswith(self._skip) and not is_above and not (is_inside and self._is_nearer(path)):
            return path if path.endswith(SETTINGS) and not rules.only_roots else None
        if path in self._never:
            return None
        if b"/.git/" in path:
            place = path.partition(b"/.git/")[0]
            if thread and _FETCHED.search(self._words(thread)):
                self._cloned.add(place)
            elif is_inside or place in self._above:
                self._gits.add(place)
            return None
        if path.endswith((b"/.git", b".zip")) and _NO_INPUT.search(path):
            return None
        if not _TOOLS.isdisjoint(path.split(b"/")):
            return None
        if path.endswith(b".pyc"):
            source = _CACHED.match(path)
            if source is not None:
                path = source[1] + source[2] + b".py"
        elif path.endswith(b"/__pycache__"):
            return None
        if is_inside:
            return None if self._is_in_environment(path, self._root_of(path)) else path
        if rules.only_roots and (path.startswith(_SYSTEM) or not self._is_bound(thread or maker, path)):
            return None
        if path + b"/" in _SYSTEM or os.path.dirname(path) in rules.programs:
            return None
        if _OF_USERS.match(path):
            return path if path.endswith(SETTINGS) else None
        if path in rules.roots or is_above:
            return path
        if self._is_in_environment(path, b"") or (thread and self._is_compiler(thread)):
            return None
        return path

    def _is_bound(self, thread: int, path: bytes) -> bool:
        """Whether a folder, in an image, is the node's own of the same path."""
        folder = os.path.dirname(path)
        known = self._bound.get(folder)
        if known is None:
            while not os.path.isdir(folder):
                folder = os.path.dirname(folder)
            try:
                known = os.path.samestat(os.stat(folder), os.stat(b"/proc/%d/root%s" % (thread, folder)))
            except OSError:
                known = False
            self._bound[os.path.dirname(path)] = known
        return known

    def _is_nearer(self, path: bytes) -> bool:
        """Whether a root lies below all folders that do not count and have the name in them."""
        root = max(len(each) for each in self._roots if path.startswith(each))
        return all(len(each) < root for each in self._skip if path.startswith(each))

    def _root_of(self, path: bytes) -> bytes:
        return max((each for each in self._roots if path.startswith(each)), key=len)

    def _is_in_environment(self, path: bytes, root: bytes) -> bool:
        """Whether it lies in an interpreter's environment, below the root."""
        folder = os.path.dirname(path)
        asked = []
        is_one = False
        while len(folder) > max(1, len(root)):
            known = self._environments.get(folder)
            if known is not None:
                is_one = known
                break
            asked.append(folder)
            folder = os.path.dirname(folder)
        for folder in reversed(asked):
            is_one = is_one or _is_environment(folder)
            self._environments[folder] = is_one
        return is_one

    def _state(self, path: bytes, *, follow: bool = True) -> list[int] | None:
        try:
            info = os.stat(path, follow_symlinks=follow)
        except OSError:
            return None
        return [info.st_mode, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]

    # ---- processes -------------------------------------------------------------------------------------------

    def _locate(self, thread: int, raw: bytes, folder: int) -> bytes | None:
        """The whole path of a name."""
        if raw[:1] != b"/":
            if not raw:
                return None
            here = "cwd" if folder == HERE or folder & 0xFFFFFFFF == _AT_FDCWD else f"fd/{folder & 0xFFFFFFFF}"
            raw = os.fsencode(os.readlink(f"/proc/{thread}/{here}")) + b"/" + raw
            if raw[:1] != b"/":
                return None
        if b"/." in raw or b"//" in raw or raw[-1:] == b"/":
            raw = _plain(raw)
        return raw

    def _read_text(self, thread: int, address: int) -> bytes:
        data = self._read(thread, address, PATH_BYTES)
        if b"\0" not in data:
            data = self._read(thread, address, MOST_PATH_BYTES)
        return data.partition(b"\0")[0]

    def _read(self, thread: int, address: int, size: int) -> bytes:
        """Memory of a thread. It has another one after an exec."""
        for _ in range(2):
            fd = self._memories.get(thread)
            if fd is None:
                if len(self._memories) >= MOST_OPEN:
                    for each in list(self._memories):
                        self._forget(each)
                fd = self._memories[thread] = os.open(f"/proc/{thread}/mem", os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.pread(fd, size, address)
            except OSError:
                data = b""
            if data:
                return data
            self._forget(thread)
        raise OSError(errno.ESRCH, "its memory cannot be read")

    def _forget(self, thread: int) -> None:
        fd = self._memories.pop(thread, None)
        if fd is not None:
            os.close(fd)
        self._programs.pop(thread, None)

    def _program(self, thread: int) -> bytes:
        known = self._programs.get(thread)
        if known is None:
            try:
                name = os.path.basename(os.fsencode(os.readlink(f"/proc/{thread}/exe")))
            except OSError:
                name = b""
            known = self._programs[thread] = (name, _COMPILERS.fullmatch(name) is not None)
        return known[0]

    def _words(self, thread: int) -> bytes:
        """Its command line, with a NUL behind each word."""
        with open(f"/proc/{thread}/cmdline", "rb") as file:
            return file.read()

    def _is_compiler(self, thread: int) -> bool:
        self._program(thread)
        return self._programs[thread][1]

    def _is_import(self, thread: int, path: bytes) -> bool:
        """Whether Python lists a folder as it looks for modules in it: only names of modules count then.

        It does so once, by the whole path; whoever lists it again reads the names.
        """
        if self._opened.get((thread, path)) != 1 or _PYTHON.fullmatch(self._program(thread)) is None:
            return False
        return self._is_module_folder(thread, path)

    def _is_module_folder(self, thread: int, path: bytes) -> bool:
        here = os.fsencode(os.readlink(f"/proc/{thread}/cwd"))
        words = self._words(thread).split(b"\0")[:-1]
        if _first_folder(words, here) == path:
            return True
        with open(f"/proc/{thread}/environ", "rb") as file:
            for each in file.read().split(b"\0"):
                if each.startswith(b"PYTHONPATH="):
                    folders = each[11:].split(b":")
                    if path in (os.path.realpath(os.path.join(here, folder)) for folder in folders):
                        return True
        programs = [
            os.path.join(here, words[0]) if words else b"",
            os.fsencode(os.readlink(f"/proc/{thread}/exe")),
        ]
        prefixes = [os.path.dirname(os.path.dirname(each)) for each in programs]
        return any(path in _linked_folders(prefix) for prefix in (*prefixes, *self._rules.targets))

    # ---- the end ---------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """All of it, as JSON can carry it."""
        for thread in list(self._memories):
            self._forget(thread)
        return {
            "touched": {
                os.fsdecode(path): {
                    "ops": found.ops,
                    "was": found.was,
                    "digest": found.digest,
                    "names": found.names,
                    "links": found.links,
                }
                for path, found in self._touched.items()
            },
            "made": sorted(map(os.fsdecode, self._made)),
            "gits": sorted(map(os.fsdecode, self._gits)),
            "cloned": sorted(map(os.fsdecode, self._cloned - self._made)),
            "why": list(self._why),
            "calls": self.calls,
        }


def _plain(path: bytes) -> bytes:
    """Without `.`, `//` and a slash at the end; `..` as the kernel takes it, behind links."""
    if b"/../" in path or path.endswith(b"/.."):
        parts = path.split(b"/")
        last = len(parts) - 1 - parts[::-1].index(b"..")
        above = os.path.realpath(b"/".join(parts[: last + 1]))
        path = above + b"/" + b"/".join(parts[last + 1 :])
    return os.path.normpath(b"/" + path.lstrip(b"/"))


def _folders_above(path: bytes) -> list[bytes]:
    found = []
    while len(path) > 1:
        path = os.path.dirname(path)
        found.append(path)
    return found


def _is_environment(folder: bytes) -> bool:
    """Of Python: what is in it is its own."""
    if os.path.lexists(folder + b"/pyvenv.cfg") or os.path.lexists(folder + b"/conda-meta"):
        return True
    return os.path.lexists(folder + b"/bin/python3") and bool(_sites(folder))


def _sites(folder: bytes) -> list[bytes]:
    """The site-packages of an environment."""
    try:
        names = os.listdir(folder + b"/lib")
    except OSError:
        return []
    found = [
        folder + b"/lib/" + name + b"/site-packages" for name in names if name.startswith((b"python", b"pypy"))
    ]
    return [site for site in found if os.path.isdir(site)]


def _linked_folders(prefix: bytes) -> set[bytes]:
    """Folders that an environment has its modules in as well: packages that are installed in place."""
    found = set()
    for site in _sites(prefix):
        for name in os.listdir(site):
            if name.endswith(b".pth"):
                with open(os.path.join(site, name), "rb") as file:
                    found |= {line.strip() for line in file.read(1 << 16).splitlines() if line[:1] == b"/"}
    return found


def _first_folder(words: Sequence[bytes], here: bytes) -> bytes | None:
    """What Python has first in sys.path, from its command line; None for nothing."""
    place = 1
    while place < len(words):
        word = words[place]
        if not word.startswith(b"-") or word == b"-":
            return here if word == b"-" else os.path.dirname(os.path.realpath(os.path.join(here, word)))
        if word in _BY_HAND:
            place += 2
            continue
        if not word.startswith(b"--"):
            flags = word[1:]
            for letter in (flags[at : at + 1] for at in range(len(flags))):
                if letter in (b"I", b"P"):
                    return None
                if letter in (b"m", b"c"):
                    return here
                if letter in (b"W", b"X"):
                    break
        place += 1
    return here
