"""Starts the daemon of a tree, and its minder: `python -P -m bootseer.mounts.tree_daemon READY LOCK FOLDER`.

    starter        mount_tree: waits for this process, which ends at once, and for a line at READY
      minder       waits for the daemon's end; takes away what it has left mounted; opens nothing of FUSE
        daemon     tree_serving.py: the store, the cache, the mounts, the socket

Settings come by stdin: a URL may hold a password, and everybody sees command lines. LOCK is an open and locked
file, which both processes have: it is free when nothing of them is left. Little is imported before the fork, so
that the minder stays small.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

from bootseer.errors import BootseerError
from bootseer.mounts import cgroup
from bootseer.mounts.tree_places import Place

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(ready: int, lock: int, folder: str) -> NoReturn:
    """`ready`: a pipe; `lock`: of the tree's folder, held."""
    if os.fork():
        os._exit(0)
    place = Place.of_folder(folder)
    os.chdir("/")
    if why := cgroup.leave():  # its starter's end is not that of all who use the tree
        _say(f"{place.folder}: {why}")
    for fd in (ready, lock):
        os.set_inheritable(fd, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until both know what to do with them
    daemon = os.fork()
    if daemon:
        os.close(ready)
        _let_go_of_streams()
        _mind(place, lock, daemon)
    status = 1
    try:
        place.write_state({"minder": os.getppid(), "daemon": os.getpid()})
        from bootseer.mounts import tree_serving

        status = tree_serving.serve(place, ready, SIGNALS)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # threads that hang are not waited for


def _mind(place: Place, lock: int, daemon: int) -> NoReturn:
    """Waits for the daemon's end, and tidies up. Signals are handed on."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        del frame
        os.kill(daemon, number)  # it has not been waited for, so the pid is its own

    for number in SIGNALS:
        signal.signal(number, hand_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.waitid(os.P_PID, daemon, os.WEXITED | os.WNOWAIT)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _, status = os.waitpid(daemon, 0)
    try:
        _tidy(place, lock, os.waitstatus_to_exitcode(status))
    except BootseerError as error:
        _say(f"{place.folder}: {error}")
    finally:
        cgroup.remove()
        os._exit(0)


def _tidy(place: Place, lock: int, status: int) -> None:
    if not place.is_lock(lock):
        return  # the daemon has left in order, and somebody else may be there already
    count = place.clear()
    if status < 0:
        _say(f"{place.folder}: the daemon was killed by signal {-status}; {count} mounts were ended")
    place.remove()


def _say(line: str) -> None:
    try:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} bootseer tree: {line}", file=sys.stderr, flush=True)
    except OSError:
        pass


def _let_go_of_streams() -> None:
    """stdin is the daemon's alone: its end is the starter's."""
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
