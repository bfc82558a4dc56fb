"""Where the running jobs of this user can be asked on this node: a socket for each in a folder of its own.

    RUNTIME/jobs/PID-RANDOM     RUNTIME as in bootseer/mounts/tree_places.py; nobody else may look into it

A socket comes under another name until somebody listens: what refuses a connection here was left by a job that was
killed together with its guard.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from bootseer.errors import BootseerError
from bootseer.mounts import tree_places
from bootseer.mounts.tree_control import Control, GoneError, NotAnsweringError
from bootseer.storage.os_errors import map_os_errors

JOBS = "jobs"
UNFINISHED = "."  # begins the name of one on which nobody listens yet
ANSWER_S = 5.0
_OLD_S = 60.0


class Found(NamedTuple):
    """A job, and what it said: its status, or why there is none."""

    path: str
    status: dict[str, Any] | None
    why: str


def prepare(environ: Mapping[str, str]) -> str:
    """The folder, made if it was not there. Raises: ConfigError, StorageError."""
    try:
        above = tree_places.prepare(tree_places.locate(environ))
    except BootseerError:
        if environ.get(tree_places.VARIABLE):
            raise
        above = tree_places.prepare(
            tree_places.locate({})
        )  # as where XDG_RUNTIME_DIR is of a session that is over
    folder = os.path.join(above, JOBS)
    with map_os_errors(folder):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass
    tree_places.check(folder)
    return folder


def folders(environ: Mapping[str, str]) -> list[str]:
    """Where jobs of this user may be: a scheduler may have given them other variables than this shell has.

    Raises: ConfigError where the one of these variables is not this user's alone.
    """
    uid = os.geteuid()
    own = tree_places.locate(environ)
    others = [
        tree_places.locate({}),
        *([] if uid == 0 or tree_places.VARIABLE in environ else [f"/run/user/{uid}/bootseer"]),
    ]
    found = []
    for place in dict.fromkeys([own, *([] if tree_places.VARIABLE in environ else others)]):
        folder = os.path.join(place, JOBS)
        try:
            tree_places.check(folder)
        except OSError:
            continue  # there is none
        except BootseerError:
            if place == own:
                raise
            continue
        found.append(folder)
    return found


def ask_all(environ: Mapping[str, str]) -> list[Found]:
    """All jobs that run, the oldest first. What is left of others is taken away. Raises: ConfigError."""
    found = []
    for folder in folders(environ):
        try:
            names = os.listdir(folder)
        except OSError:
            continue  # gone meanwhile
        for name in names:
            path = os.path.join(folder, name)
            one = _ask(path, name.startswith(UNFINISHED))
            if one is not None:
                found.append(one)
    return sorted(found, key=lambda each: -float((each.status or {}).get("runs_s") or 0.0))


def _ask(path: str, is_unfinished: bool) -> Found | None:
    try:
        if is_unfinished:
            if time.time() - os.lstat(path).st_mtime > _OLD_S:
                os.unlink(path)
            return None
        with_control = Control.connect(path, timeout_s=ANSWER_S)
        if with_control is None:
            os.unlink(path)
            return None
        with with_control as control:
            return Found(path, control.ask("status", timeout_s=ANSWER_S), "")
    except GoneError:
        return Found(path, None, "it has closed the connection: too many ask at once") if _is_there(path) else None
    except NotAnsweringError:
        return Found(path, None, f"its bootrun does not answer within {ANSWER_S:g} s: is it stopped?")
    except BootseerError as error:
        return Found(path, None, str(error)) if _is_there(path) else None
    except OSError:
        return None


def _is_there(path: str) -> bool:
    """Else the job has ended at this moment."""
    return os.path.lexists(path)
