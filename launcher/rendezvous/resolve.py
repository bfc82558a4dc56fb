"""Resolution of host names without blocking the event loop.

In: a host name. Out: by callback, its addresses or why there are none. A broken name server can block getaddrinfo
for half a minute, while the agent must still handle signals. So a forked child resolves; it dies with this
process.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from launcher.base import children
from launcher.base.loop import EventLoop


class Address(NamedTuple):
    """An IP address as the socket calls expect it."""

    family: int
    host: str
    scope: int = 0  # of link-local IPv6 addresses

    def sockaddr(self, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
        """Return the address with this port, for bind and connect."""
        return (self.host, port) if self.family == socket.AF_INET else (self.host, port, 0, self.scope)


Resolved = Callable[[list[Address], str], object]  # addresses, or none and the reason


class NameQuery(NamedTuple):
    """A name that is being resolved."""

    loop: EventLoop
    fd: int
    pid: int

    def cancel(self) -> None:
        """End the query; the callback is not called any more."""
        self.loop.remove_reader(self.fd)
        os.close(self.fd)
        os.kill(self.pid, signal.SIGKILL)  # not reaped, so the pid is its own
        children.reap_killed(self.pid)


def address_literal(host: str) -> Address | None:
    """Return the literal address in `host`, None for a name. Localhost needs no resolution either."""
    text = host.strip("[]")
    if text == "localhost":
        return Address(socket.AF_INET, "127.0.0.1")
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            return Address(family, socket.inet_ntop(family, socket.inet_pton(family, text)))
        except OSError:
            continue
    return None


def resolve(loop: EventLoop, host: str, done: Resolved) -> NameQuery | None:
    """Resolve a name; `done` is called from the loop, never from within this call."""
    literal = address_literal(host)
    if literal is not None:
        loop.call_soon(done, [literal], "")
        return None
    parent_pid = os.getpid()
    try:
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError:
            os.close(read_fd)
            os.close(write_fd)
            raise
    except OSError as error:
        loop.call_soon(done, [], f"no process can be started: {error.strerror}")
        return None
    if pid == 0:
        _be_child(parent_pid, write_fd, host)
    children.add(pid)
    os.close(write_fd)
    os.set_blocking(read_fd, False)
    question = NameQuery(loop, read_fd, pid)
    loop.add_reader(read_fd, _on_answer, question, bytearray(), done)
    return question


def _on_answer(question: NameQuery, answer: bytearray, done: Resolved) -> None:
    try:
        data = os.read(question.fd, 65536)
    except BlockingIOError:
        return
    if data:
        answer += data
        return
    question.loop.remove_reader(question.fd)
    os.close(question.fd)
    children.reap(question.pid, waits=True)
    try:
        addresses, reason = marshal.loads(answer)  # noqa: S302 - from this process's own child
    except (EOFError, ValueError, TypeError):
        addresses, reason = [], "the resolver ended without an answer"
    done([Address(*each) for each in addresses], reason)


def _be_child(parent_pid: int, write_fd: int, host: str) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        from bootseer.linux.processes import set_death_signal

        set_death_signal(signal.SIGKILL)
        # Before anything can block: inherited pipes must not stay open after the parent has ended.
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
