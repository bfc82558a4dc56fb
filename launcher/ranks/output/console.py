"""The console of bootrun, descriptors 1 and 2, written to without ever waiting for its reader.

In: whole lines, copies of ranks' output and bootrun's own. They go out as fast as the console accepts them. One
batch of copies is held at a time, so memory stays small and the log files are the backlog. A console may share its
open file description with the ranks and the user's shell, so O_NONBLOCK is never set on it. Pipes and terminals
are reopened through /proc, sockets have a flag for each call, and files never make a writer wait.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
import time

from bootseer.light_stdlib import deque
from bootseer.light_typing import TYPE_CHECKING, Callable
from launcher.base.loop import EventLoop

if TYPE_CHECKING:
    import socket

MAX_OWN_LINE_BYTES = 256 << 10  # of bootrun's own lines that wait for a console; more are dropped and counted
_PIPE_PIECE_BYTES = select.PIPE_BUF  # up to this size a write to a pipe is whole or not at all
_TERMINAL_PIECE_BYTES = 512
_PIECE_BYTES = 64 << 10
_FIONREAD = 0x541B
_TIOCOUTQ = 0x5411  # for sockets the same number is SIOCOUTQ


class _Piece:
    """Bytes that wait, initially whole lines, and the number of bytes written."""

    __slots__ = ("copied", "data", "sent")

    def __init__(self, data: bytes, copied: bool) -> None:
        self.data = data
        self.sent = 0
        self.copied = copied  # a copy of a log file, not bootrun's own line


class Sink:
    """A destination of lines. `dead` is the reason why writing has stopped, "" while it works."""

    def __init__(self, loop: EventLoop, fd: int, on_dead: Callable[[Sink], object], owned: bool = False) -> None:
        self._loop = loop
        self._fd = fd
        self._on_dead = on_dead
        self._pieces: deque[_Piece] = deque()
        self._said_bytes = 0
        self._dropped_lines = 0
        self._waiting = False
        self._on_room: Callable[[], object] | None = None
        self._opened_fd = fd if owned else -1
        self._socket: socket.socket | None = None
        self._send_flags = 0
        self._ask_first = False
        self._max_bytes = _PIECE_BYTES
        self._unread = 0  # bytes that the console had and its reader had not, at the last poll
        self.dead = ""
        self.progress_s = loop.time()  # when it last accepted bytes or had none to accept
        try:
            self._open()
        except OSError as error:
            self.dead = error.strerror or str(error)

    def _open(self) -> None:
        mode = os.fstat(self._fd).st_mode
        if stat.S_ISSOCK(mode):
            import socket

            self._send_flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            self._socket = socket.socket(fileno=os.dup(self._fd))
            self._fd = self._socket.fileno()
            return
        terminal = stat.S_ISCHR(mode) and os.isatty(self._fd)
        if not (stat.S_ISFIFO(mode) or terminal):
            return
        self._max_bytes = _PIECE_BYTES if terminal else _PIPE_PIECE_BYTES
        try:
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            self._fd = self._opened_fd = os.open(f"/proc/self/fd/{self._fd}", flags)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a pipe without a reader
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from None
            # Another user's pipe or terminal, or no /proc: small writes, only if there is room for them.
            self._ask_first = True
            self._max_bytes = _TERMINAL_PIECE_BYTES if terminal else _PIPE_PIECE_BYTES

    # ---- in --------------------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Return whether the sink accepts a batch of copies."""
        return not self._pieces and not self.dead

    def has_copies(self) -> bool:
        """Return whether a batch of copies waits."""
        return any(piece.copied for piece in self._pieces)

    def when_room(self, callback: Callable[[], object]) -> None:
        """Call back once, in the loop, when there is room again or the sink is dead."""
        self._on_room = callback

    def copy(self, lines: bytes) -> None:
        """Accept a batch of whole lines of ranks."""
        self._put(_Piece(lines, True))

    def say(self, lines: bytes) -> None:
        """Accept lines of bootrun itself; if too many wait, drop and count them."""
        if self.dead:
            return
        if self._said_bytes + len(lines) > MAX_OWN_LINE_BYTES:
            self._dropped_lines += lines.count(b"\n")
            return
        self._said_bytes += len(lines)
        self._put(_Piece(lines, False))

    def _put(self, piece: _Piece) -> None:
        if self.dead:
            return
        if not self._pieces:
            self.progress_s = self._loop.time()
        self._pieces.append(piece)
        if not self._waiting:
            self._flush()

    # ---- out -------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        try:
            while self._pieces:
                piece = self._pieces[0]
                piece.sent += self._write(piece)
                self.progress_s = self._loop.time()
                if piece.sent == len(piece.data):
                    self._pieces.popleft()
                    if not piece.copied:
                        self._said_bytes -= len(piece.data)
                    if not self._pieces and self._dropped_lines:
                        self._tell_dropped()
        except BlockingIOError:
            self._wait(True)
            return
        except OSError as error:
            self._die(error)
        self._wait(False)
        if self._on_room is not None:
            callback, self._on_room = self._on_room, None
            self._loop.call_soon(callback)

    def _tell_dropped(self) -> None:
        count, self._dropped_lines = self._dropped_lines, 0
        from bootseer.counted import counted

        what = f"{counted(count, 'line')} of bootrun: dropped here, as the console accepted nothing"
        line = f"bootrun: warning: {what}\n".encode()
        self._said_bytes += len(line)
        self._pieces.append(_Piece(line, False))

    def _write(self, piece: _Piece) -> int:
        end = piece.sent + self._max_bytes
        if self._max_bytes == _PIPE_PIECE_BYTES and end < len(piece.data):
            # Whole lines in each write where they fit: other writers of the pipe then cannot tear them.
            end = piece.data.rfind(b"\n", piece.sent, end) + 1 or end
        part = memoryview(piece.data)[piece.sent : end]
        if self._socket is not None:
            return self._socket.send(part, self._send_flags)
        if self._ask_first:
            poll = select.poll()
            poll.register(self._fd, select.POLLOUT)
            if not poll.poll(0):
                raise BlockingIOError
        return os.write(self._fd, part)

    def _wait(self, on: bool) -> None:
        if on != self._waiting:
            self._waiting = on
            if on:
                self._loop.add_writer(self._fd, self._flush)
            else:
                self._loop.remove_writer(self._fd)

    def _die(self, error: OSError) -> None:
        self.dead = error.strerror or str(error)
        self._pieces.clear()
        self._on_dead(self)

    def stalled_s(self) -> float:
        """Return for how many seconds the console has accepted nothing although data waits for it."""
        now_s = self._loop.time()
        if not self._pieces:
            self.progress_s = now_s
        else:
            # A slow reader may read much before there is room for a whole piece.
            unread = self._count_unread()
            if unread < self._unread:
                self.progress_s = now_s
            self._unread = unread
        return now_s - self.progress_s

    def _count_unread(self) -> int:
        import fcntl  # only at the end, with a slow console

        request = _FIONREAD if self._max_bytes == _PIPE_PIECE_BYTES else _TIOCOUTQ
        try:
            return int.from_bytes(fcntl.ioctl(self._fd, request, bytes(4)), sys.byteorder)
        except OSError:
            return 0

    # ---- end -------------------------------------------------------------------------------------------------

    def give_up(self) -> bytes:
        """Withdraw and return the copies that are not written, except the rest of a line that has begun."""
        back = b""
        for piece in list(self._pieces):
            if not piece.copied:
                continue
            begun = piece.sent and piece.data[piece.sent - 1 : piece.sent] != b"\n"
            keep = (piece.data.find(b"\n", piece.sent) + 1 or len(piece.data)) if begun else piece.sent
            back += piece.data[keep:]
            piece.data = piece.data[:keep]
            if keep == piece.sent:
                self._pieces.remove(piece)
        if not self._pieces:
            self._wait(False)
        return back

    def drain(self, stall_s: float) -> bool:
        """Wait until all is written or nothing is for `stall_s`; only for the very end, outside the loop."""
        self._flush()
        give_up_s = time.monotonic() + stall_s
        while self._pieces and (left_s := give_up_s - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self._fd, select.POLLOUT)
            if poll.poll(left_s * 1000):
                before = sum(len(piece.data) - piece.sent for piece in self._pieces)
                self._flush()
                if before != sum(len(piece.data) - piece.sent for piece in self._pieces):
                    give_up_s = time.monotonic() + stall_s
        return not self._pieces

    def close(self) -> None:
        self._wait(False)
        self._pieces.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        elif self._opened_fd >= 0:
            os.close(self._opened_fd)
            self._opened_fd = -1


class Console:
    """Descriptors 1 and 2 of bootrun. If both lead to the same file they share a sink, and so an order."""

    def __init__(self, loop: EventLoop, out_fd: int = 1, err_fd: int = 2) -> None:
        self.err = Sink(loop, err_fd, lambda _: None)
        self.out = self.err if _same_place(out_fd, err_fd) else Sink(loop, out_fd, self._tell_dead)
        if self.out.dead:
            self._tell_dead(self.out)

    def stream(self, stream: int) -> Sink:
        """Return the sink of stdout (1) or stderr (2)."""
        return self.out if stream == 1 else self.err

    def say(self, text: str) -> None:
        """Write lines of bootrun itself to stderr, each with its name."""
        self.show("".join(f"bootrun: {line}\n" for line in text.splitlines()))

    def show(self, text: str) -> None:
        """Write text that ends with a newline to stderr as it is."""
        self.err.say(text.encode(errors="backslashreplace"))

    def drain(self, stall_s: float = 2.0) -> bool:
        """Wait for the console while it accepts data, at the very end; return False if data is left."""
        done = self.err.drain(stall_s)
        return (self.out is self.err or self.out.drain(stall_s)) and done

    def close(self) -> None:
        self.err.close()
        if self.out is not self.err:
            self.out.close()

    def _tell_dead(self, sink: Sink) -> None:
        why = f"warning: stdout cannot be written any more ({sink.dead})"
        self.say(f"{why}: ranks' output still goes to the log files")


def _same_place(one_fd: int, other_fd: int) -> bool:
    try:
        one, other = os.fstat(one_fd), os.fstat(other_fd)
    except OSError:
        return False
    return (one.st_dev, one.st_ino, one.st_rdev) == (other.st_dev, other.st_ino, other.st_rdev)
