"""The stats page of a rank: a file in memory with the rank's step counts, readable without the rank's help.

launcher/in_rank/bootstrap.py (class Page) writes it, and explains how a torn read is detected; this module makes
and reads it. All numbers are little endian; behind the page faulthandler appends the stacks of the rank's threads
(stacks.py):
    0  8  magic BOOTRANK            28  1  signal that requests stacks, 0: no handler
    8  4  version                   29  1  status that the script passed to sys.exit; 0: none, or success
   12  4  pid; 0: not opened yet    30  1  1: steps are counted
                                    31  1  signal that requests the stack of the main thread alone, or 0
                                    32  5  steps and heartbeats so far
                                    37  1  minimum time of most steps, as a level; 0: not known
                                    38  1  their time now; level n is 2^(n/8) microseconds
   16  8  ident of the main thread  40  8  monotonic ns of the last one
   24  4  descriptor for stacks     48  8  its number + 2^55, for heartbeats; 0: none was given
                                    56  8  the sum of the words at 32, 40, 48, multiplied by 1, 5, 7
   64  440  records of heartbeats, the newest at the end, older ones before it while they fit; a record:
             8  its number, from 1 on
             n  names of metrics as a JSON list, their values (doubles, 8 each), the heartbeat's number (8);
                or the fields of its event, as JSON with a comma in front
             8  monotonic ns
             2  bytes of the names, or 0xFFFF: it has fields
             2  bytes of the whole record
             8  its number again: if a record is read while it is written, the two differ
  504    8  bytes of output that its log files could not store
It is a memfd, given to the rank by its path below /proc. It has no name, so no file is left behind if a process is
killed, and no full or unresponsive disk can delay a step. Ranks in images may not follow that path and get a file
in /dev/shm, whose name they remove; else the supervisor removes it at its end, else the next job of this user. If
the rank cannot open it, the page stays empty and nothing is known.
"""

from __future__ import annotations

import os
import time

from bootseer.light_typing import Callable, NamedTuple

MAGIC = b"BOOTRANK"
RING_MAGIC = b"BOOTRING"
VERSION = 4
PAGE_BYTES = 512
NAMED_DIRECTORY = "/dev/shm"  # noqa: S108
_PULSE_END = _NOTES_AT = 64
_LOST_AT = 504
_END_AT = 29
_NAME = "bootseer-page-"
_OLD_S = 60.0  # a running rank has removed the name by then
_MAX_PID = (1 << 31) - 1  # that system calls take
_NO_STEP = 1 << 55
_MAX_STEPS = (1 << 40) - 1
_NOTE_END_BYTES = 20
_MIN_NOTE_BYTES = 8 + _NOTE_END_BYTES
_HAS_FIELDS = 0xFFFF
_TRIES = 5  # a rank is hardly within a write five times in a row


class StatsPage(NamedTuple):
    """The content of a rank's stats page."""

    pid: int
    main_thread: int  # ident, as faulthandler prints it
    stacks_fd: int  # the rank's own descriptor of this file
    stacks_signal: int  # 0: it has no handler
    counts: bool  # steps are counted, even if there is none yet
    steps: int
    step_ns: int  # of the monotonic clock; 0: none yet
    step: int | None  # the number given with the last heartbeat
    min_s: float = 0.0  # minimum time of most steps; 0: not known
    takes_s: float = 0.0  # time of most steps now
    main_signal: int = 0  # requests the main thread's stack alone; 0: it has no handler


class HeartbeatRecord(NamedTuple):
    number: int  # from 1 on
    mono_ns: int
    body: bytes  # as in the stats page
    names_bytes: int  # length of the names in `body`; -1: it has fields


class StatsPageFile(NamedTuple):
    """The paths of a stats page; both "" for none."""

    path: str  # for the agent, while the file is open
    given: str  # for the rank


NO_STATS_PAGE = StatsPageFile("", "")


class StatsPages:
    """The stats pages of an attempt's ranks on this node; the last attempt's stay until there are new ones."""

    def __init__(self) -> None:
        self._fds: list[int] = []
        self._named: list[str] = []

    def renew(
        self, count: int, is_named: bool, ring: bytes = b"", on_named: Callable[[], object] = lambda: None
    ) -> list[StatsPageFile]:
        """Make new pages; NO_PAGE where none can be made.

        Args: is_named: for ranks that may not follow /proc; ring: bytes to write behind each page (ring.py);
            on_named: called when `names` are known, before files of these names exist.
        """
        self.close()
        if not is_named:
            return [self._make("", ring) for _ in range(count)]
        _remove_left()
        self._named = [f"{NAMED_DIRECTORY}/{_NAME}{os.urandom(8).hex()}" for _ in range(count)]
        on_named()
        return [self._make(name, ring) for name in self.names]

    def read(self) -> list[StatsPage | None]:
        """Read each page; None where no rank has opened it."""
        return [read_page(fd) for fd in self._fds]

    @property
    def have_heartbeats(self) -> bool:
        """Whether a rank has written heartbeat records."""
        return any(read_heartbeats(fd, 0) for fd in self._fds)

    @property
    def names(self) -> list[str]:
        """Paths of the named pages, before they are made, and until their rank removes the name."""
        return self._named[:]

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        for path in self._named:
            try:
                os.unlink(path)
            except OSError:
                pass  # its rank has done so
        self._fds, self._named = [], []

    def _make(self, name: str, ring: bytes) -> StatsPageFile:
        try:
            if name:
                fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            else:
                fd = os.memfd_create("bootseer-page", os.MFD_CLOEXEC)
            self._fds.append(fd)
            # Written, not only extended: memory that is not allocated yet could be missing when the rank writes.
            data = (MAGIC + VERSION.to_bytes(4, "little")).ljust(PAGE_BYTES, b"\0") + ring
            if os.pwrite(fd, data, 0) < len(data):
                return NO_STATS_PAGE
        except OSError:
            return NO_STATS_PAGE
        path = f"/proc/{os.getpid()}/fd/{fd}"
        return StatsPageFile(path, name or path)


def _remove_left() -> None:
    """Remove pages of jobs that were killed with their supervisor before a rank opened its page."""
    now_s = time.time()
    try:
        with os.scandir(NAMED_DIRECTORY) as found:
            for each in found:
                if not each.name.startswith(_NAME):
                    continue
                status = each.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and now_s - status.st_mtime > _OLD_S:
                    os.unlink(each.path)
    except OSError:
        pass  # there is none, or another job does the same


def head_bytes(fd: int) -> int:
    """Return the size of the part before the stacks: page and ring, if there is one. Raises: OSError."""
    found = os.pread(fd, 24, PAGE_BYTES)
    return PAGE_BYTES + _number(found, 16, 8) if found[:8] == RING_MAGIC else PAGE_BYTES


def read_page(fd: int) -> StatsPage | None:
    """Read a stats page; None if no rank has opened it, or it is none."""
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


def read_exit_status(path: str) -> int:
    """Return the status of a failed script's sys.exit; 0: the script did not end so, or unknown."""
    data = _read_whole(path)
    return data[_END_AT] if data else 0


def read_lost_output_bytes(path: str) -> int:
    """Return the number of bytes of output that the rank's log files could not store."""
    data = _read_whole(path)
    return _number(data, _LOST_AT, 8) if data else 0


def _read_whole(path: str) -> bytes:
    """Read the page without its ring; b"" for no page."""
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


def read_heartbeats(fd: int, after: int) -> list[HeartbeatRecord]:
    """Read the records that remain, oldest first. Args: after: the number of the last known one."""
    try:
        data = os.pread(fd, _LOST_AT - _NOTES_AT, _NOTES_AT)
    except OSError:
        return []
    if len(data) < _LOST_AT - _NOTES_AT or _number(data, len(data) - 8, 8) <= after:
        return []
    return [note for note in parse_heartbeats(data) if note.number > after]


def parse_heartbeats(data: bytes) -> list[HeartbeatRecord]:
    """Parse records; omit those truncated, or read while they were written."""
    found: list[HeartbeatRecord] = []
    end = len(data)
    while end >= _MIN_NOTE_BYTES:
        at = end - _NOTE_END_BYTES
        mono_ns, names_bytes = _number(data, at, 8), _number(data, at + 8, 2)
        size, number = _number(data, at + 10, 2), _number(data, at + 12, 8)
        begin = end - size
        is_next = number == found[-1].number - 1 if found else number > 0
        if not is_next or size < _MIN_NOTE_BYTES or begin < 0 or _number(data, begin, 8) != number:
            break
        body = data[begin + 8 : at]
        found.append(HeartbeatRecord(number, mono_ns, body, -1 if names_bytes == _HAS_FIELDS else names_bytes))
        end = begin
    return found[::-1]


def heartbeat_event(note: HeartbeatRecord) -> tuple[object, dict[str, object]] | None:
    """Return number and metrics of the heartbeat; None if a rank has written something else."""
    import json  # takes 5 ms to load, and few ranks send heartbeats
    import struct

    body, names_bytes = note.body, note.names_bytes
    try:
        if names_bytes < 0:
            found = json.loads(b"{" + body.lstrip(b",") + b"}")
            attrs = found.get("attrs", {})
            return (found.get("value"), attrs) if isinstance(attrs, dict) else None
        names = json.loads(body[:names_bytes])
        *values, step = struct.unpack(f"<{len(names)}dq", body[names_bytes:])
        # JSON cannot express NaN and infinity.
        return step, {
            str(name): value if value - value == 0 else repr(value)
            for name, value in zip(names, values, strict=True)
        }
    except (ValueError, TypeError, RecursionError, struct.error):
        return None


def parse_page(data: bytes) -> StatsPage | None:
    """Parse a page; None if it is empty, or was read while it was written."""
    if len(data) < _PULSE_END or data[:8] != MAGIC or _number(data, 8, 4) != VERSION:
        return None
    pid = _number(data, 12, 4)
    if not 0 < pid <= _MAX_PID:
        return None
    steps, step_ns, step, check = (_number(data, at, 8) for at in (32, 40, 48, 56))
    if steps + 5 * step_ns + 7 * step != check:
        return None
    return StatsPage(
        pid=pid,
        main_thread=_number(data, 16, 8),
        stacks_fd=_number(data, 24, 4),
        stacks_signal=data[28],
        counts=data[30] == 1 or steps & _MAX_STEPS > 0,
        steps=steps & _MAX_STEPS,
        step_ns=step_ns,
        step=step - _NO_STEP if step else None,
        min_s=_level_s(data[37]),
        takes_s=_level_s(data[38]),
        main_signal=data[31],
    )


def _level_s(level: int) -> float:
    return 1e-6 * 2 ** (level / 8) if level else 0.0


def _number(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")
