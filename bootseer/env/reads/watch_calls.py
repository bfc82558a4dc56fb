"""PURE: the system calls that name files, and a seccomp filter that reports them. Stdlib only.

In: the name of an architecture. Out: its calls by number, a BPF program, and notifications as tuples. Source:
linux/seccomp.h, linux/filter.h, linux/audit.h; numbers of asm/unistd_64.h (x86_64) and asm-generic/unistd.h.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

# Effects of calls on the file that they name.
OPEN, OPEN2, CREATE, LOOK, FOLLOW, RUN, LIST, MAKE, MOVE = (
    *("open", "open2", "create", "look", "follow", "run", "list", "make", "move"),
)
HERE = -1  # no directory argument: relative paths start at the working directory
NONE = -1

RECEIVE, ANSWER, SET_FLAGS = 0xC0502100, 0xC0182101, 0x40082104  # ioctl
NOTICE_BYTES = 80
CONTINUE = 1  # flag of an answer: the call continues normally
NEW_LISTENER, SPEC_ALLOW, WAIT_KILLABLE = 1 << 3, 1 << 2, 1 << 5  # flags of the filter
SYNC_WAKE_UP = 1  # flag of the listener

_EMPTY_PATH = 0x1000  # AT_EMPTY_PATH: the call uses a descriptor
_MADE_AGAIN = 0o1000 | 0o200  # O_TRUNC, O_EXCL
_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _NOTIFY, _FAIL = 0x7FFF0000, 0x7FC00000, 0x00050000
_ENOSYS = 38
_X32 = 0x40000000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in seccomp_data

_notice = struct.Struct("=QIIiIQ6Q")
_answer = struct.Struct("=QqiI")
_instruction = struct.Struct("=HBBI")


class Call(NamedTuple):
    """A system call, with the indexes of its arguments."""

    kind: str
    path: int  # of LIST: a descriptor
    folder: int = HERE
    flags: int = NONE  # of OPEN: those of open(2); of others: those that may have AT_EMPTY_PATH
    new_path: int = NONE  # of MOVE
    new_directory: int = HERE


class Machine(NamedTuple):
    """A processor architecture."""

    arch: int
    seccomp: int  # number of seccomp(2)
    io_uring_setup: int
    calls: dict[int, Call]


class Notification(NamedTuple):
    """A notification of the kernel about a call."""

    id: int
    thread: int
    number: int
    arch: int
    arguments: tuple[int, ...]


_MODERN = {
    "openat": Call(OPEN, 1, 0, 2),
    "openat2": Call(OPEN2, 1, 0, 2),
    "mkdirat": Call(MAKE, 1, 0),
    "symlinkat": Call(MAKE, 2, 1),
    "renameat": Call(MOVE, 1, 0, NONE, 3, 2),
    "renameat2": Call(MOVE, 1, 0, NONE, 3, 2),
    "execve": Call(RUN, 0),
    "execveat": Call(RUN, 1, 0, 4),
    "readlinkat": Call(FOLLOW, 1, 0),
    "getdents64": Call(LIST, 0),
    "newfstatat": Call(LOOK, 1, 0, 3),
    "statx": Call(LOOK, 1, 0, 2),
    "faccessat": Call(LOOK, 1, 0),
    "faccessat2": Call(LOOK, 1, 0, 3),
}
_OLD = {
    "open": Call(OPEN, 0, HERE, 1),
    "creat": Call(CREATE, 0),
    "mkdir": Call(MAKE, 0),
    "symlink": Call(MAKE, 1),
    "rename": Call(MOVE, 0, HERE, NONE, 1),
    "readlink": Call(FOLLOW, 0),
    "getdents": Call(LIST, 0),
    "stat": Call(LOOK, 0),
    "lstat": Call(LOOK, 0),
    "access": Call(LOOK, 0),
}
_X86_64 = {
    "open": 2,
    "stat": 4,
    "lstat": 6,
    "access": 21,
    "execve": 59,
    "getdents": 78,
    "rename": 82,
    "mkdir": 83,
    "creat": 85,
    "symlink": 88,
    "readlink": 89,
    "getdents64": 217,
    "openat": 257,
    "mkdirat": 258,
    "newfstatat": 262,
    "renameat": 264,
    "symlinkat": 266,
    "readlinkat": 267,
    "faccessat": 269,
    "renameat2": 316,
    "execveat": 322,
    "statx": 332,
    "openat2": 437,
    "faccessat2": 439,
}
_AARCH64 = {
    "mkdirat": 34,
    "symlinkat": 36,
    "renameat": 38,
    "faccessat": 48,
    "openat": 56,
    "getdents64": 61,
    "readlinkat": 78,
    "newfstatat": 79,
    "execve": 221,
    "renameat2": 276,
    "execveat": 281,
    "statx": 291,
    "openat2": 437,
    "faccessat2": 439,
}
MACHINES = {
    "x86_64": Machine(0xC000003E, 317, 425, {number: (_MODERN | _OLD)[name] for name, number in _X86_64.items()}),
    "aarch64": Machine(0xC00000B7, 277, 425, {number: _MODERN[name] for name, number in _AARCH64.items()}),
}


def program(machine: Machine, *, looks: bool, makes: bool = True) -> bytes:
    """Return the filter program.

    Args:
        looks: report calls that only look up a name, which are most calls.
        makes: report calls that create or replace files, which are most of the rest.

    Not reported are calls on open files, and hard links, which do not change their file. For programs of another
    architecture (32 bits), all calls are reported. io_uring, whose calls cannot be reported, fails with ENOSYS.
    """
    lines: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, machine.arch),
        (_RETURN, 0, 0, _NOTIFY),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine.arch == MACHINES["x86_64"].arch:
        lines += [(_ABOVE, 0, 1, _X32), (_RETURN, 0, 0, _NOTIFY)]
    lines += [(_EQUAL, 0, 1, machine.io_uring_setup), (_RETURN, 0, 0, _FAIL | _ENOSYS)]
    for number, call in machine.calls.items():
        if (call.kind == LOOK and not looks) or (call.kind in (CREATE, MAKE, MOVE) and not makes):
            continue
        if call.kind == OPEN and not makes:
            lines += [
                (_EQUAL, 0, 4, number),
                (_LOAD, 0, 0, _ARGUMENTS + 8 * call.flags),
                (_ANY_BIT, 0, 1, _MADE_AGAIN),
                (_RETURN, 0, 0, _ALLOW),
                (_RETURN, 0, 0, _NOTIFY),
            ]
            continue
        if call.kind in (LOOK, RUN) and call.flags != NONE:
            lines += [
                (_EQUAL, 0, 4, number),
                (_LOAD, 0, 0, _ARGUMENTS + 8 * call.flags),
                (_ANY_BIT, 0, 1, _EMPTY_PATH),
                (_RETURN, 0, 0, _ALLOW),
                (_RETURN, 0, 0, _NOTIFY),
            ]
        else:
            lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _NOTIFY)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(_instruction.pack(code, yes, no, value) for code, yes, no, value in lines)


def instructions(data: bytes) -> int:
    """Return the number of instructions of a program."""
    return len(data) // _instruction.size


def read_notice(data: bytes) -> Notification:
    """Parse the data of `RECEIVE`."""
    number, thread, _, call, arch, _, *arguments = _notice.unpack(data)
    return Notification(number, thread, call, arch, tuple(arguments))


def continue_answer(notice: Notification) -> bytes:
    """Return the answer that lets the call continue."""
    return _answer.pack(notice.id, 0, 0, CONTINUE)
