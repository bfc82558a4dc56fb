"""Mounted trees on this node: listing them, and ending them in any state of their daemons.

A daemon that can answer ends itself. One that is stopped or hangs is ended by other means: first its connection,
so that no reader waits for it, then its processes, then their mounts.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

from bootseer.errors import ConfigError, StorageError
from bootseer.ipc.client import Client, GoneError, NotAnsweringError
from bootseer.mounts.tree_daemon.places import TreeDirectory, check, locate, places

ANSWER_S = 5.0  # a daemon that does not answer for so long is ended by force
END_S = 20.0
LOOK_S = 1.0
_POLL_S = 0.01


class TreeState(NamedTuple):
    """A tree of this user on this node."""

    digest: str
    folder: str
    state: str  # of its daemon: starting, ready, ending, silent (is stopped, or hangs)
    status: dict[str, Any]


def unmount_tree(tree: str, *, force: bool = False, environ: Mapping[str, str] | None = None) -> bool:
    """End the daemon of a tree and its mounts; return False when there are none.

    Args:
        tree: its digest, or the directory where it is mounted.
        force: also while a process holds it: reads there then fail. A daemon that does not answer is always
            ended by force.
    Raises: ConfigError while it is held; StorageError.
    """
    place = find_place(tree, environ=environ)
    return place is not None and unmount(place, force=force)


def find_place(tree: str, *, environ: Mapping[str, str] | None = None) -> TreeDirectory | None:
    """Return where a tree is or would be mounted; None when this user has mounted nothing on this node.

    Args: tree: as for `unmount_tree`.
    Raises: ConfigError for a directory that is not of a tree; StorageError.
    """
    runtime = locate(os.environ if environ is None else environ)
    try:
        check(runtime)
    except FileNotFoundError:
        return None
    if os.path.isabs(tree):
        place = next((each for each in places(runtime) if tree.rstrip("/") in (each.root, each.folder)), None)
        if place is None:
            raise ConfigError(f"{tree}: no tree of this user is mounted there")
        return place
    try:
        return TreeDirectory(runtime, tree)
    except ValueError as error:
        raise ConfigError(f"{tree[:80]!r}: give the tree's digest or mount directory") from error


class Servers:
    """The processes that serve a tree now; they outlive its mounts while they save their data.

    They are held by descriptors, so that a process with a reused pid is never confused with them.
    """

    def __init__(self, place: TreeDirectory) -> None:
        self._fds: list[int] = []
        for pid in place.read_pids():
            try:
                fd = os.pidfd_open(pid)
            except OSError:
                continue  # it has ended
            self._fds.append(fd)
            if not place.has_lock_open(pid):  # checked after the open: it cannot be another process
                os.close(self._fds.pop())

    def wait_end(self, timeout_s: float) -> bool:
        """Return whether all have ended within this time."""
        poll = select.poll()
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        left, end_s = len(self._fds), time.monotonic() + timeout_s
        while left:
            ended = poll.poll(max(0.0, end_s - time.monotonic()) * 1000)
            for fd, _ in ended:
                poll.unregister(fd)
            left -= len(ended)
            if not ended:
                return False
        return True

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._fds:
            os.close(self._fds.pop())


def list_trees(*, environ: Mapping[str, str] | None = None) -> list[TreeState]:
    """List this user's mounted trees. Leftovers of killed daemons are removed. Raises: StorageError."""
    runtime = locate(os.environ if environ is None else environ)
    try:
        check(runtime)
    except FileNotFoundError:
        return []
    states = []
    for place in places(runtime):
        state, status = _probe(place)
        if state:
            states.append(TreeState(place.digest, place.root, state, status))
    return states


# ---- internals -----------------------------------------------------------------------------------------------


def _probe(place: TreeDirectory) -> tuple[str, dict[str, Any]]:
    """Return the state of its daemon, "" if there is none, and its answer."""
    try:
        control = Client.connect(place.control_path, timeout_s=LOOK_S)
        if control is not None:
            with control:
                said = control.ask("status", timeout_s=LOOK_S)
                return str(said.get("state")), said
    except NotAnsweringError:
        return "silent", {}
    except GoneError:
        pass
    lock = place.try_claim()
    if lock < 0:
        return "starting", {}
    _remove_leftovers(place, lock)
    return "", {}


def unmount(place: TreeDirectory, *, force: bool) -> bool:
    if not os.path.isdir(place.folder):
        return False
    try:
        control = Client.connect(place.control_path, timeout_s=ANSWER_S)
        if control is not None:
            with control:
                control.ask("stop", force=force, timeout_s=ANSWER_S)
    except GoneError:
        pass
    except NotAnsweringError:
        _end_by_force(place)
    end_s = time.monotonic() + END_S
    is_forced = False
    while os.path.lexists(place.folder):
        lock = place.try_claim()
        if lock >= 0:
            _remove_leftovers(place, lock)
            break
        if time.monotonic() > end_s - END_S / 2 and not is_forced:
            is_forced = True
            _end_by_force(place)
        if time.monotonic() > end_s:
            raise StorageError(f"{place.folder}: its daemon does not end; its log is {place.log_path}")
        time.sleep(_POLL_S)
    return True


def _end_by_force(place: TreeDirectory) -> None:
    """End a daemon that is stopped or hangs: first its readers get errors, then its processes end."""
    place.clear()
    for pid in place.read_pids():
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            continue  # it has ended
        try:
            if place.has_lock_open(pid):  # checked after the open: it cannot be another process
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(fd)


def _remove_leftovers(place: TreeDirectory, lock: int) -> None:
    """Remove the leftovers of a killed daemon; release the lock, which is held."""
    try:
        place.clear()
        place.remove()
    finally:
        os.close(lock)
