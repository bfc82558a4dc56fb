"""What the keeper has from the system: a folder of its own, its streams, and children that end with it."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any

from bootseer.checkpoint.lines import LineSocket
from bootseer.checkpoint.rank_mount import clean

FOLDER = "bootseer-arena-"
LOCK_NAME = "lock"
MOUNT_NAME = "mount"
MOST_PARENT_BYTES = 70  # addresses of sockets have at most 107 bytes
MOST_DESCRIPTORS = 1 << 20


class Child:
    """A process that the keeper has forked, and the connection to it."""

    def __init__(self, pid: int, lines: LineSocket) -> None:
        self.pid = pid
        self.lines = lines


def make_folder(base: str = "") -> tuple[str, int]:
    """A folder of our own, locked for as long as we live.

    What killed keepers left goes. Args: base: where; by default it has a path that a socket in it can have.
    """
    if not base:
        parent = tempfile.gettempdir()
        base = parent if len(os.fsencode(parent)) <= MOST_PARENT_BYTES else "/tmp"  # noqa: S108
    sweep(base)
    folder = tempfile.mkdtemp(prefix=FOLDER, dir=base)
    path = os.path.join(folder, LOCK_NAME)
    lock = os.open(path + ".new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(path + ".new", path)  # nobody finds it before it is locked
    return folder, lock


def sweep(base: str) -> None:
    """Takes away what killed keepers of this user have left in a folder. Raises: OSError."""
    with os.scandir(base) as entries:
        old = [entry.path for entry in entries if entry.name.startswith(FOLDER) and _is_ours(entry)]
    for folder in old:
        try:
            lock = os.open(os.path.join(folder, LOCK_NAME), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # it has just been made
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            clean(os.path.join(folder, MOUNT_NAME))
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its keeper lives
        finally:
            os.close(lock)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    except OSError:
        return False


def take_streams() -> LineSocket:
    """Orders and answers; what a library prints goes to stderr, and nobody reads orders but us."""
    orders, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return LineSocket.of_streams(orders, answers)


def die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def allow_descriptors() -> None:
    """As many as we may have: a descriptor for each file, each connection, and all that savers leave."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    top = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < top:
        resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))


def fork_child(work: Callable[[socket.socket], None], be_child: Callable[[], object]) -> Child:
    """Runs `work` in a child that ends with us, after `be_child`. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
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
            die_with_parent()
            be_child()
            work(theirs)
        finally:
            os._exit(1)
    theirs.close()
    return Child(pid, LineSocket(ours))


def end_child(child: Child, selector: selectors.BaseSelector) -> None:
    selector.unregister(child.lines.fd)
    child.lines.close()
    try:
        os.kill(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    os.waitpid(child.pid, 0)


def run_child(connection: socket.socket, work: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> None:
    """The whole life of a child that has an event loop: tells what `work` comes to, and ends the process."""
    try:
        news = asyncio.run(work())
    except BaseException as error:
        news = {"failed": f"{type(error).__name__}: {error}"}
    try:
        connection.setblocking(True)
        connection.sendall(json.dumps(news).encode() + b"\n")
    except OSError:
        pass  # the keeper is gone
    os._exit(0)
