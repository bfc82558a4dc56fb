"""The process of the checkpoint service: its directory, its streams, and children that end with it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine
from typing import Any

from bootseer.checkpoint.service.rank_mount import clean
from bootseer.ipc.channel import Channel
from bootseer.ipc.framing import encode
from bootseer.linux import processes
from bootseer.linux.child_processes import wait_killed
from bootseer.linux.processes import die_with_parent

DIRECTORY = "bootseer-arena-"
LOCK_NAME = "lock"
MOUNT_NAME = "mount"
MAX_PARENT_BYTES = 70  # addresses of sockets have at most 107 bytes
MAX_DESCRIPTORS = 1 << 20
WRITER_DIED = "the process that writes it to this node's disk has died"
UNFINISHED_S = 3600.0  # a directory that has no lock for longer was left by a killed service


class Child:
    """A process that the service has forked, and the connection to it."""

    def __init__(self, pid: int, lines: Channel) -> None:
        self.pid = pid
        self.lines = lines


Fork = Callable[[Callable[[socket.socket], None]], Child]  # runs a function in a child; raises OSError


class Answers:
    """What the service sends to bootrun."""

    def __init__(self, launcher: Channel) -> None:
        self._launcher = launcher

    def send(self, did: str, **fields: object) -> None:
        self._launcher.send({"did": did, **fields})

    def say(self, text: str) -> None:
        """Send a line for the log."""
        self.send("said", text=text)

    def say_alive(self) -> None:
        """Report that a long operation continues."""
        self.send("alive")


def make_directory(base: str = "") -> tuple[str, int]:
    """Create a private directory, locked for the life of this process; return it and the lock's descriptor.

    Remove the directories of killed services. Args: base: parent directory; by default one with a path short
    enough
        for a socket.
    """
    if not base:
        parent = tempfile.gettempdir()
        base = parent if len(os.fsencode(parent)) <= MAX_PARENT_BYTES else "/tmp"  # noqa: S108
    sweep(base)
    directory = tempfile.mkdtemp(prefix=DIRECTORY, dir=base)
    path = os.path.join(directory, LOCK_NAME)
    lock = -1
    try:
        lock = os.open(path + ".new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(path + ".new", path)  # no process finds it before it is locked
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        if lock >= 0:
            os.close(lock)
        raise
    return directory, lock


def sweep(base: str) -> None:
    """Remove the directories in `base` that killed services of this user have left. Raises: OSError."""
    with os.scandir(base) as entries:
        old = [entry.path for entry in entries if entry.name.startswith(DIRECTORY) and _is_ours(entry)]
    for directory in old:
        try:
            lock = os.open(os.path.join(directory, LOCK_NAME), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            _remove_unfinished(directory)
            continue
        except OSError:
            continue  # no descriptor is left, or it was removed meanwhile
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            clean(os.path.join(directory, MOUNT_NAME))
            shutil.rmtree(directory, ignore_errors=True)
        except OSError:
            pass  # its service is running
        finally:
            os.close(lock)


def _remove_unfinished(directory: str) -> None:
    """Remove a directory without a lock, unless its service is just creating it."""
    try:
        if time.time() - os.stat(directory, follow_symlinks=False).st_mtime > UNFINISHED_S:
            shutil.rmtree(directory, ignore_errors=True)
    except OSError:
        pass  # another service has removed it


def _is_ours(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    except OSError:
        return False


def take_streams() -> Channel:
    """Return the streams of requests and answers; redirect stdin, and stdout to stderr for libraries."""
    orders, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return Channel.of_streams(orders, answers)


def allow_descriptors() -> None:
    """Raise the limit of descriptors: each file, each connection, and all memory from savers needs one."""
    processes.allow_files(MAX_DESCRIPTORS)


def fork_child(work: Callable[[socket.socket], None], be_child: Callable[[], object]) -> Child:
    """Run `work` in a child that ends with this process, after `be_child`. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        try:
            ours.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent(signal.SIGKILL, parent)
            be_child()
            work(theirs)
        finally:
            os._exit(1)
    theirs.close()
    return Child(pid, Channel(ours))


def close_inherited(selector: selectors.BaseSelector) -> None:
    """Close all registered connections in a forked child: they are the parent's.

    Their numbers stay in use, as objects of the parent still name them.
    """
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for key in selector.get_map().values():
        os.dup2(null, key.fd, inheritable=False)
    os.close(null)


def end_child(child: Child, selector: selectors.BaseSelector, *, may_leave: bool = False) -> None:
    """End a child.

    Args: may_leave: one that waits in the kernel, for a file server, is left behind. Not a child that fills the
        arena: its last read may still write there, after the memory has been given to another version.
    """
    selector.unregister(child.lines.fd)
    child.lines.close()
    try:
        os.kill(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    wait_killed(child.pid, None if may_leave else float("inf"))


def run_child(connection: socket.socket, work: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> None:
    """Run a child that has an event loop: report the result of `work`, and end the process."""
    try:
        news = asyncio.run(work())
    except BaseException as error:
        news = {"failed": f"{type(error).__name__}: {error}"}
    try:
        connection.setblocking(True)
        connection.sendall(encode(news))
    except OSError:
        pass  # the service is gone
    os._exit(0)
