"""Recording of what set-up commands look up, read, list and make, by notifications of the kernel. Stdlib only.

    fd = begin(...)                      # in the child, before it executes a command
    watch = Watch(rules)                 # in the process above it
    watch.serve(fd)                      # whenever the descriptor is readable
    watch.report()

Each call that names a file waits until this process has recorded the name and the file's present state. Then the
call continues normally. So the record has the state before the commands changed a file, including names that did
not exist. No data passes through here. If this process is killed, its commands cannot name files any more.

Recorded are names below the roots (the working directory), and others that are not part of the system, of an
interpreter's environment or of a cache. Files that the commands have made themselves are not recorded.
"""

from __future__ import annotations

import array  # noqa: F401  socket.send_fds needs it when nothing can be imported any more
import ctypes
import errno
import fcntl
import os
import platform
from typing import Any

from bootseer.env.reads.name_filter import NameFilter
from bootseer.env.reads.name_records import NameRecords, state_of
from bootseer.env.reads.python_directories import ImportListings
from bootseer.env.reads.watch_calls import (
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
    Notification,
    continue_answer,
    instructions,
    program,
    read_notice,
)
from bootseer.env.reads.watch_rules import Rules
from bootseer.env.reads.watched_threads import WatchedThreads

MAX_DONE = 500_000  # processed names, recorded or not

_NO_NEW_PRIVILEGES, _FILTER = 38, 1
_WRITES = os.O_WRONLY | os.O_RDWR


# ---- the child ------------------------------------------------------------------------------------------------


def begin(*, looks: bool, makes: bool = True) -> int:
    """Start watching this process and its descendants. Return a descriptor for `Watch.serve`.

    Without CAP_SYS_ADMIN, programs can no longer gain privileges (sudo).
    Raises: OSError if the kernel or the container does not allow it.
    """
    machine = MACHINES.get(platform.machine())
    if machine is None:
        raise OSError(errno.ENOSYS, f"watching is not supported on {platform.machine()}")
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


# ---- the parent process ---------------------------------------------------------------------------------------


class Watch:
    """The recorder; see the module's docstring."""

    def __init__(self, rules: Rules) -> None:
        machine = MACHINES.get(platform.machine())
        self._arch = 0 if machine is None else machine.arch
        self._calls = {} if machine is None else machine.calls
        self._threads = WatchedThreads()
        self._imports = ImportListings(self._threads, rules.targets)
        self._names = NameFilter(rules, self._threads)
        self._records = NameRecords(rules, self._names, self._miss)
        self._done: set[tuple[object, ...]] = set()
        self._why: dict[str, None] = {}  # why the record is incomplete
        self.calls = 0

    # ---- notifications ---------------------------------------------------------------------------------------

    def take(self, fd: int) -> None:
        """Configure a descriptor of `begin`."""
        try:
            fcntl.ioctl(fd, SET_FLAGS, SYNC_WAKE_UP)
        except OSError:
            pass  # before Linux 6.6

    def serve(self, fd: int) -> bool:
        """Process one notification. Return False after the last one."""
        try:
            notice = read_notice(fcntl.ioctl(fd, RECEIVE, bytes(NOTICE_BYTES)))
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN)  # the caller has ended
        self.calls += 1
        try:
            self._note(notice)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH, errno.ENOTDIR):
                self._miss(f"a name could not be read: {error.strerror}")
        except Exception as error:  # the command continues in any case
            self._miss(f"{type(error).__name__}: {error}")
        try:
            fcntl.ioctl(fd, ANSWER, continue_answer(notice))
        except OSError:
            pass  # the caller has ended
        return True

    def _miss(self, why: str) -> None:
        if len(self._why) < 10:
            self._why[why] = None

    def _note(self, notice: Notification) -> None:
        call = self._calls.get(notice.number)
        if call is None or notice.arch != self._arch:
            self._miss("a program for another processor architecture has run")
            return
        thread, arguments = notice.thread, notice.arguments
        if call.kind == LIST:
            self._list(thread, os.fsencode(os.readlink(f"/proc/{thread}/fd/{arguments[0] & 0xFFFFFFFF}")))
            return
        raw = self._threads.read_text(thread, arguments[call.path])
        if call.kind != MOVE and self._names.is_ignored(raw):
            if call.kind == RUN:
                self._threads.forget(thread)
            return
        path = self._threads.locate(thread, raw, HERE if call.folder == HERE else arguments[call.folder])
        if call.kind == RUN:
            self._threads.forget(thread)
        if call.kind == MOVE:
            new = self._threads.locate(
                thread,
                self._threads.read_text(thread, arguments[call.new_path]),
                HERE if call.new_directory == HERE else arguments[call.new_directory],
            )
            if path is not None and state_of(path) is not None:
                self._records.make(thread, path)
            if new is not None:
                self._records.make(thread, new)
            return
        if path is None:
            return
        flags = 0
        if call.kind == OPEN:
            flags = arguments[call.flags]
        elif call.kind == OPEN2:
            flags = int.from_bytes(self._threads.read(thread, arguments[call.flags], 8), "little")
        self._name(thread, call, flags, path, is_absolute=raw[:1] == b"/")

    def _name(self, thread: int, call: Call, flags: int, path: bytes, *, is_absolute: bool) -> None:
        """Record an access to an absolute path."""
        kind = call.kind
        if kind in (OPEN, OPEN2):
            if flags & os.O_PATH:
                kind = LOOK
            elif flags & os.O_DIRECTORY:
                self._imports.note_open(thread, path, is_absolute=is_absolute)
        mark = (kind, flags & (_WRITES | os.O_CREAT | os.O_EXCL | os.O_TRUNC), path)
        if mark in self._done:
            return
        if len(self._done) < MAX_DONE:
            self._done.add(mark)
        if kind in (MAKE, CREATE):
            if kind == CREATE or state_of(path) is None:
                self._records.make(thread, path)
        elif kind == LOOK:
            self._records.touch(thread, path, "l")
        elif kind == FOLLOW:
            self._records.touch(thread, path, "k")
        elif kind == RUN:
            self._records.touch(thread, path, "r" if state_of(path) is not None else "x")
        else:
            self._open(thread, path, flags)

    def _open(self, thread: int, path: bytes, flags: int) -> None:
        is_there = state_of(path) is not None
        if flags & _WRITES:
            if is_there and not flags & (os.O_TRUNC | os.O_EXCL):
                # The result depends on the earlier content, which matters if a command reads the file.
                self._records.touch(thread, path, "r" if flags & os.O_RDWR else "a")
            if is_there or flags & os.O_CREAT:
                self._records.make(thread, path)
            else:
                self._records.touch(thread, path, "l")
        else:
            self._records.touch(thread, path, "r")

    def _list(self, thread: int, path: bytes) -> None:
        if (LIST, path) in self._done or not path.startswith(b"/"):
            return
        place = self._names.place(thread, path)
        if place is None:
            self._done.add((LIST, path))
            return
        if self._imports.is_import(thread, path):
            self._records.touch(thread, place, "i")
            return
        self._done.add((LIST, path))
        self._records.touch(thread, place, "n")

    # ---- the report ------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return the record in a form for JSON."""
        self._threads.forget_all()
        made = self._records.made
        return {
            "touched": self._records.touched(),
            "made": sorted(map(os.fsdecode, made)),
            "gits": sorted(map(os.fsdecode, self._names.gits)),
            "cloned": sorted(map(os.fsdecode, self._names.cloned - made)),
            "why": list(self._why),
            "calls": self.calls,
        }
