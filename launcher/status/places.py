"""The status sockets of this user's running jobs on this node, in a private directory.

    RUNTIME/jobs/PID-RANDOM     RUNTIME as in bootseer/mounts/tree_daemon/places.py; other users have no access

A socket has a temporary name until its job listens. So one that refuses connections was left by a job that was
killed together with its supervisor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from bootseer.errors import BootseerError
from bootseer.ipc.client import Client, GoneError, NotAnsweringError
from bootseer.mounts.tree_daemon import places as tree_places
from bootseer.storage.os_errors import map_os_errors

JOBS = "jobs"
UNFINISHED = "."  # begins the name of a socket whose job does not listen yet
ANSWER_S = 5.0
_OLD_S = 60.0


class JobStatus(NamedTuple):
    """A job, and its answer: its status, or why there is none."""

    path: str
    status: dict[str, Any] | None
    why: str


def prepare(environ: Mapping[str, str]) -> str:
    """Return the directory; make it if necessary. Raises: ConfigError, StorageError."""
    try:
        above = tree_places.prepare(tree_places.locate(environ))
    except BootseerError:
        if environ.get(tree_places.VARIABLE):
            raise
        above = tree_places.prepare(
            tree_places.locate({})
        )  # for example if XDG_RUNTIME_DIR belongs to a session that is over
    directory = os.path.join(above, JOBS)
    with map_os_errors(directory):
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            pass
    tree_places.check(directory)
    return directory


def folders(environ: Mapping[str, str]) -> list[str]:
    """Return the directories of this user's jobs: a scheduler may set other variables than this shell.

    Raises: ConfigError if the directory of this shell's variables is not private to this user.
    """
    uid = os.geteuid()
    own = tree_places.locate(environ)
    others = [
        tree_places.locate({}),
        *([] if uid == 0 or tree_places.VARIABLE in environ else [f"/run/user/{uid}/bootseer"]),
    ]
    found = []
    for place in dict.fromkeys([own, *([] if tree_places.VARIABLE in environ else others)]):
        directory = os.path.join(place, JOBS)
        try:
            tree_places.check(directory)
        except OSError:
            continue  # there is none
        except BootseerError:
            if place == own:
                raise
            continue
        found.append(directory)
    return found


def ask_all(environ: Mapping[str, str]) -> list[JobStatus]:
    """Query all running jobs, the oldest first; remove stale sockets. Raises: ConfigError."""
    found = []
    for directory in folders(environ):
        try:
            names = os.listdir(directory)
        except OSError:
            continue  # gone meanwhile
        for name in names:
            path = os.path.join(directory, name)
            one = _ask(path, name.startswith(UNFINISHED))
            if one is not None:
                found.append(one)
    return sorted(found, key=lambda each: -float((each.status or {}).get("runs_s") or 0.0))


def _ask(path: str, is_unfinished: bool) -> JobStatus | None:
    try:
        if is_unfinished:
            if time.time() - os.lstat(path).st_mtime > _OLD_S:
                os.unlink(path)
            return None
        with_control = Client.connect(path, timeout_s=ANSWER_S)
        if with_control is None:
            os.unlink(path)
            return None
        with with_control as control:
            return JobStatus(path, control.ask("status", timeout_s=ANSWER_S), "")
    except GoneError:
        return JobStatus(path, None, "it has closed the connection: too many clients") if _is_there(path) else None
    except NotAnsweringError:
        return JobStatus(path, None, f"its bootrun has not answered within {ANSWER_S:g} s; it may be stopped")
    except BootseerError as error:
        return JobStatus(path, None, str(error)) if _is_there(path) else None
    except OSError:
        return None


def _is_there(path: str) -> bool:
    """Return whether the socket exists; else the job has just ended."""
    return os.path.lexists(path)
