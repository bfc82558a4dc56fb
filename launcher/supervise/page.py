"""The page of a rank: a file in memory where the rank counts its steps, and that is read without asking the rank.

Written by launcher/inside.py (class Page), which says why a read that is torn shows; made and read here. All
numbers are little endian; behind the page faulthandler appends the stacks of the rank's threads (stacks.py):
    0  8  magic BOOTRANK            28  1  signal that asks for stacks, 0: no handler
    8  4  version                   29  1  status that the script gave sys.exit; 0: none, or a success
   12  4  pid; 0: not opened yet    30  1  1: something counts steps
                                    31  1  signal that asks for the stack of the main thread alone, or 0
                                    32  5  steps and heartbeats so far
                                    37  1  how long most steps took at the least, as a level; 0: not known
                                    38  1  and how long they take now; level n is 2^(n/8) microseconds
   16  8  ident of the main thread  40  8  monotonic ns of the last one
   24  4  descriptor for stacks     48  8  its number + 2^55, of heartbeats; 0: none was given
                                    56  8  the words at 32, 40, 48 times 1, 5, 7, added up
   64  440  notes of heartbeats, the newest at the end, older ones before it as far as there is room; of a note:
             8  its number, from 1 on
             n  names of metrics as a JSON list, their values (doubles, 8 each), the heartbeat's number (8);
                or the fields of its event, as JSON with a comma in front
             8  monotonic ns
             2  bytes of the names, or 0xFFFF: it has fields
             2  bytes of all of the note
             8  its number once more: of a note that is read while it is written these differ
  504    8  bytes of output that its log files did not take
A memfd, given to the rank by its path below /proc: it has no name, so nothing is left of it whoever is killed; no
disk that is full or does not answer can hold up a step. Ranks in images may not follow that path and get a file in
/dev/shm, whose name they take away; else the guard does so at its end, else the next job of this user. Where the
rank cannot open it, it stays as it was made, and nothing is known.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from bootseer.light_typing import NamedTuple

MAGIC = b"BOOTRANK"
RING_MAGIC = b"BOOTRING"
VERSION = 4
PAGE_BYTES = 512
NAMED_FOLDER = "/dev/shm"  # noqa: S108
_PULSE_END = _NOTES_AT = 64
_LOST_AT = 504
_END_AT = 29
_NAME = "bootseer-page-"
_OLD_S = 60.0  # a rank that runs has taken the name away by then
_NO_STEP = 1 << 55
_MOST_STEPS = (1 << 40) - 1
_NOTE_END_BYTES = 20
_LEAST_NOTE_BYTES = 8 + _NOTE_END_BYTES
_HAS_FIELDS = 0xFFFF
_TRIES = 5  # a rank is not in the middle of a write five times in a row


class Page(NamedTuple):
    """What a rank's page says."""

    pid: int
    main_thread: int  # ident, as faulthandler prints it
    stacks_fd: int  # the rank's own descriptor of this file
    stacks_signal: int  # 0: it has no handler
    counts: bool  # something counts steps, be there one by now or not
    steps: int
    step_ns: int  # of the monotonic clock; 0: none yet
    step: int | None  # the number that was given with the last heartbeat
    least_s: float = 0.0  # that most steps took at a time; 0: not known
    takes_s: float = 0.0  # that most steps take now
    main_signal: int = 0  # that asks for the main thread's stack alone; 0: it has no handler


class Note(NamedTuple):
    """Of a heartbeat."""

    number: int  # from 1 on
    mono_ns: int
    body: bytes  # as in the page
    names_bytes: int  # of it; -1: it has fields


class PageFile(NamedTuple):
    """Where it is; both "" for nowhere."""

    path: str  # for the agent, as long as it is kept
    given: str  # for the rank


NO_PAGE = PageFile("", "")


class Pages:
    """The pages of the ranks of one attempt on this node; those of the last one stay until there are new ones."""

    def __init__(self) -> None:
        self._fds: list[int] = []
        self._named: list[str] = []

    def renew(
        self, count: int, is_named: bool, ring: bytes = b"", on_named: Callable[[], object] = lambda: None
    ) -> list[PageFile]:
        """New ones; NO_PAGE where there can be none.

        Args: is_named: for ranks that may not follow /proc; ring: what stands behind each page (ring.py);
            on_named: called when `names` are known, before there are files of these names.
        """
        self.close()
        if not is_named:
            return [self._make("", ring) for _ in range(count)]
        _remove_left()
        self._named = [f"{NAMED_FOLDER}/{_NAME}{os.urandom(8).hex()}" for _ in range(count)]
        on_named()
        return [self._make(name, ring) for name in self.names]

    def read(self) -> list[Page | None]:
        """What each says; None where no rank has opened it."""
        return [read_page(fd) for fd in self._fds]

    @property
    def have_notes(self) -> bool:
        """Whether a rank has left some."""
        return any(read_notes(fd, 0) for fd in self._fds)

    @property
    def names(self) -> list[str]:
        """Paths of those that have one, before they are made, and until their rank takes it away."""
        return self._named[:]

    def close(self) -> None:
        """Gives all up."""
        for fd in self._fds:
            os.close(fd)
        for path in self._named:
            try:
                os.unlink(path)
            except OSError:
                pass  # its rank has done so
        self._fds, self._named = [], []

    def _make(self, name: str, ring: bytes) -> PageFile:
        try:
            if name:
                fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            else:
                fd = os.memfd_create("bootseer-page", os.MFD_CLOEXEC)
            self._fds.append(fd)
            # Written, not only made longer: what is not there yet could be missing when the rank writes.
            data = (MAGIC + VERSION.to_bytes(4, "little")).ljust(PAGE_BYTES, b"\0") + ring
            if os.pwrite(fd, data, 0) < len(data):
                return NO_PAGE
        except OSError:
            return NO_PAGE
        path = f"/proc/{os.getpid()}/fd/{fd}"
        return PageFile(path, name or path)


def _remove_left() -> None:
    """Those of jobs that were killed together with their guard before a rank had opened its page."""
    now_s = time.time()
    try:
        with os.scandir(NAMED_FOLDER) as found:
            for each in found:
                if not each.name.startswith(_NAME):
                    continue
                status = each.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and now_s - status.st_mtime > _OLD_S:
                    os.unlink(each.path)
    except OSError:
        pass  # there is none, or another job does the same


def head_bytes(fd: int) -> int:
    """What stands before the stacks: the page, and the ring if there is one. Raises: OSError."""
    found = os.pread(fd, 24, PAGE_BYTES)
    return PAGE_BYTES + _number(found, 16, 8) if found[:8] == RING_MAGIC else PAGE_BYTES


def read_page(fd: int) -> Page | None:
    """None where no rank has opened it, or it is none."""
    for _ in range(_TRIES):
        try:
            data = os.pread(fd, _PULSE_END, 0)
        except OSError:
            return None
        found = parse_page(data)
        if found is not None:
            return found
        if data[:8] != MAGIC or not data[12:16].strip(b"\0"):
            return None
    return None


def read_end(path: str) -> int:
    """The status of sys.exit, where a rank's script is over by it and has failed; 0: not so, or not known."""
    data = _read_whole(path)
    return data[_END_AT] if data else 0


def read_lost(path: str) -> int:
    """Bytes of the rank's output that its log files did not take."""
    data = _read_whole(path)
    return _number(data, _LOST_AT, 8) if data else 0


def _read_whole(path: str) -> bytes:
    """b"" for no page."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        data = os.pread(fd, PAGE_BYTES, 0)
    except OSError:
        return b""
    finally:
        os.close(fd)
    return data if len(data) == PAGE_BYTES and data[:8] == MAGIC else b""


def read_notes(fd: int, after: int) -> list[Note]:
    """Those that are still there, the oldest first. Args: after: the number of the last one that is known."""
    try:
        data = os.pread(fd, _LOST_AT - _NOTES_AT, _NOTES_AT)
    except OSError:
        return []
    if len(data) < _LOST_AT - _NOTES_AT or _number(data, len(data) - 8, 8) <= after:
        return []
    return [note for note in parse_notes(data) if note.number > after]


def parse_notes(data: bytes) -> list[Note]:
    """Without those that are cut off, or that were read while they were written."""
    found: list[Note] = []
    end = len(data)
    while end >= _LEAST_NOTE_BYTES:
        at = end - _NOTE_END_BYTES
        mono_ns, names_bytes = _number(data, at, 8), _number(data, at + 8, 2)
        size, number = _number(data, at + 10, 2), _number(data, at + 12, 8)
        begin = end - size
        is_next = number == found[-1].number - 1 if found else number > 0
        if not is_next or size < _LEAST_NOTE_BYTES or begin < 0 or _number(data, begin, 8) != number:
            break
        body = data[begin + 8 : at]
        found.append(Note(number, mono_ns, body, -1 if names_bytes == _HAS_FIELDS else names_bytes))
        end = begin
    return found[::-1]


def note_event(note: Note) -> tuple[object, dict[str, object]] | None:
    """Number and metrics of the heartbeat; None where a rank has written something else."""
    import json  # takes 5 ms to load, and few ranks have heartbeats
    import struct

    body, names_bytes = note.body, note.names_bytes
    try:
        if names_bytes < 0:
            found = json.loads(b"{" + body.lstrip(b",") + b"}")
            attrs = found.get("attrs", {})
            return (found.get("value"), attrs) if isinstance(attrs, dict) else None
        names = json.loads(body[:names_bytes])
        *values, step = struct.unpack(f"<{len(names)}dq", body[names_bytes:])
        # JSON has no word for what is no number.
        return step, {
            str(name): value if value - value == 0 else repr(value)
            for name, value in zip(names, values, strict=True)
        }
    except (ValueError, TypeError, RecursionError, struct.error):
        return None


def parse_page(data: bytes) -> Page | None:
    """None where nothing is in it, or where it was read while it was written."""
    if len(data) < _PULSE_END or data[:8] != MAGIC or _number(data, 8, 4) != VERSION or not _number(data, 12, 4):
        return None
    steps, step_ns, step, check = (_number(data, at, 8) for at in (32, 40, 48, 56))
    if steps + 5 * step_ns + 7 * step != check:
        return None
    return Page(
        pid=_number(data, 12, 4),
        main_thread=_number(data, 16, 8),
        stacks_fd=_number(data, 24, 4),
        stacks_signal=data[28],
        counts=data[30] == 1 or steps & _MOST_STEPS > 0,
        steps=steps & _MOST_STEPS,
        step_ns=step_ns,
        step=step - _NO_STEP if step else None,
        least_s=_level_s(data[37]),
        takes_s=_level_s(data[38]),
        main_signal=data[31],
    )


def _level_s(level: int) -> float:
    return 1e-6 * 2 ** (level / 8) if level else 0.0


def _number(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")
