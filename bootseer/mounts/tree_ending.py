"""Trees that are mounted here: which there are, and their end, whatever state their daemons are in.

A daemon that can answer ends itself. One that is stopped or hangs is ended from outside: first its connection, so
that nobody waits for it any more, then its processes, then what they had mounted.
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
from bootseer.mounts.tree_control import Control, GoneError, NotAnsweringError
from bootseer.mounts.tree_places import Place, check, locate, places

ANSWER_S = 5.0  # a daemon that says nothing for so long is ended by force
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
    """Ends the daemon of a tree and its mounts; False when there are none.

    Args:
        tree: its digest, or the folder where it is mounted.
        force: also while somebody holds it: what is read there then fails. A daemon that says nothing is always
            ended by force.
    Raises: ConfigError while it is held; StorageError.
    """
    place = find_place(tree, environ=environ)
    return place is not None and unmount(place, force=force)


def find_place(tree: str, *, environ: Mapping[str, str] | None = None) -> Place | None:
    """Where a tree is mounted, or would be; None when this user has mounted nothing on this node.

    Args: tree: as for `unmount_tree`.
    Raises: ConfigError for a folder that is none of a tree; StorageError.
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
        return Place(runtime, tree)
    except ValueError as error:
        raise ConfigError(f"{tree[:80]!r}: give the tree's digest, or the folder where it is mounted") from error


class Servers:
    """The processes that serve a tree now; they outlive its mounts for as long as they save what they have.

    Held by descriptors, so that no other process with the same number is taken for one of them.
    """

    def __init__(self, place: Place) -> None:
        self._fds: list[int] = []
        for pid in place.read_pids():
            try:
                fd = os.pidfd_open(pid)
            except OSError:
                continue  # it has ended
            self._fds.append(fd)
            if not place.has_lock_open(pid):  # looked at after the descriptor: no other process can be meant
                os.close(self._fds.pop())

    def wait_end(self, timeout_s: float) -> bool:
        """Whether all have ended, within this time."""
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
    """Those that this user has mounted here. What killed daemons left is taken away. Raises: StorageError."""
    runtime = locate(os.environ if environ is None else environ)
    try:
        check(runtime)
    except FileNotFoundError:
        return []
    states = []
    for place in places(runtime):
        state, status = _look(place)
        if state:
            states.append(TreeState(place.digest, place.root, state, status))
    return states


# ---- inner parts -----------------------------------------------------------------------------------------------


def _look(place: Place) -> tuple[str, dict[str, Any]]:
    """The state of its daemon, "" if there is none, and what it says."""
    try:
        control = Control.connect(place.control_path, timeout_s=LOOK_S)
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
    _take_away(place, lock)
    return "", {}


def unmount(place: Place, *, force: bool) -> bool:
    if not os.path.isdir(place.folder):
        return False
    try:
        control = Control.connect(place.control_path, timeout_s=ANSWER_S)
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
            _take_away(place, lock)
            break
        if time.monotonic() > end_s - END_S / 2 and not is_forced:
            is_forced = True
            _end_by_force(place)
        if time.monotonic() > end_s:
            raise StorageError(f"{place.folder}: its daemon does not end; its log is {place.log_path}")
        time.sleep(_POLL_S)
    return True


def _end_by_force(place: Place) -> None:
    """Of a daemon that is stopped or hangs: first readers get errors, then its processes end."""
    place.clear()
    for pid in place.read_pids():
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            continue  # it has ended
        try:
            if place.has_lock_open(pid):  # looked at after the descriptor: no other process can be meant
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(fd)


def _take_away(place: Place, lock: int) -> None:
    """What a killed daemon has left; the lock is held, and given back."""
    try:
        place.clear()
        place.remove()
    finally:
        os.close(lock)
