"""Host names to addresses without blocking the event loop.

In: a host name. Out: by callback, its addresses or why there are none. A broken name server can hold getaddrinfo
for half a minute, in which the agent must still take signals, so a forked child asks; it dies with this process.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from launcher.loop import EventLoop

_PR_SET_PDEATHSIG = 1


class Address(NamedTuple):
    """An IP address as the socket calls want it."""

    family: int
    host: str
    scope: int = 0  # of link-local IPv6 addresses

    def sockaddr(self, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
        """With this port, for bind and connect."""
        return (self.host, port) if self.family == socket.AF_INET else (self.host, port, 0, self.scope)


Resolved = Callable[[list[Address], str], object]  # addresses, or none and the reason


class Question(NamedTuple):
    """A name that is being looked up."""

    loop: EventLoop
    fd: int
    pid: int

    def cancel(self) -> None:
        """Ends it; the callback is not called any more."""
        self.loop.remove_reader(self.fd)
        os.close(self.fd)
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def address_literal(host: str) -> Address | None:
    """The address that is written out in `host`, None for a name. Localhost needs nobody to be asked either."""
    text = host.strip("[]")
    if text == "localhost":
        return Address(socket.AF_INET, "127.0.0.1")
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            return Address(family, socket.inet_ntop(family, socket.inet_pton(family, text)))
        except OSError:
            continue
    return None


def resolve(loop: EventLoop, host: str, done: Resolved) -> Question | None:
    """Looks up a name; `done` is called from the loop, never from within this call."""
    literal = address_literal(host)
    if literal is not None:
        loop.call_soon(done, [literal], "")
        return None
    parent_pid = os.getpid()
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _be_child(parent_pid, write_fd, host)
    os.close(write_fd)
    os.set_blocking(read_fd, False)
    question = Question(loop, read_fd, pid)
    loop.add_reader(read_fd, _on_answer, question, bytearray(), done)
    return question


def _on_answer(question: Question, answer: bytearray, done: Resolved) -> None:
    try:
        data = os.read(question.fd, 65536)
    except BlockingIOError:
        return
    if data:
        answer += data
        return
    question.loop.remove_reader(question.fd)
    os.close(question.fd)
    try:
        os.waitpid(question.pid, 0)
    except ChildProcessError:
        pass  # reaped by the handler for orphans (first process of a container)
    try:
        addresses, reason = marshal.loads(answer)  # noqa: S302 - from our own child
    except (EOFError, ValueError, TypeError):
        addresses, reason = [], "the look-up ended without an answer"
    done([Address(*each) for each in addresses], reason)


def _be_child(parent_pid: int, write_fd: int, host: str) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # Before anything can block: inherited pipes must not look open when the parent is gone.
        os.closerange(3, write_fd)
        os.closerange(write_fd + 1, os.sysconf("SC_OPEN_MAX"))
        if os.getppid() == parent_pid:
            os.write(write_fd, marshal.dumps(_look_up(host)))
    finally:
        os._exit(0)


def _look_up(host: str) -> tuple[list[tuple[int, str, int]], str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [], getattr(error, "strerror", None) or str(error)
    addresses = [
        (int(family), str(sockaddr[0]), int(sockaddr[3]) if len(sockaddr) == 4 else 0)
        for family, _, _, _, sockaddr in found
        if family in (socket.AF_INET, socket.AF_INET6)
    ]
    return list(dict.fromkeys(addresses)), "" if addresses else "the name has no IP address"
