"""Locations of event files: a path that a user gives -> the directories of one job, or of many.

In: a file, an events, run or log directory, or a parent of such. Out: directories, grouped into jobs.
One job has several directories if each node has its own; they share the run's id. Only names and the first event
of a file are inspected, so a directory of thousands of jobs is listed quickly.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

from bootseer.errors import UsageError
from bootseer.events import MAX_LINE_BYTES, RUN_EVENTS_NAME, parse_event
from bootseer.formats import one_line

MAX_DEPTH = 5  # of directories below the given one
MAX_DIRECTORIES = 200_000  # that are listed
MAX_PEEKED_FILES = 3
MAX_PEEKED_LINES = 20
JOIN_WITHIN_NS = 600 * 10**9  # nodes of one job begin within this time of each other, by their own clocks
_END = ".jsonl"


class EventDir(NamedTuple):
    """One directory of event files, or a single file."""

    path: str
    run_id: str  # "" if no event was found
    wall_ns: int  # of the first event
    parts: frozenset[str]  # files that no other directory of the job can have: of ranks, or else of agents


class JobDirs(NamedTuple):
    """All event directories of one job."""

    run_id: str
    wall_ns: int
    paths: tuple[str, ...]


def find_jobs(top: str) -> list[JobDirs]:
    """Return the jobs at or below `top`, the newest last.

    Raises: UsageError if there are none.
    """
    if not os.path.exists(top):
        raise UsageError(f"{one_line(top)}: no such file or directory")
    paths = find_event_dirs(top)
    if not paths:
        raise UsageError(
            f"{one_line(top)}: holds no event files ({RUN_EVENTS_NAME}, agent-NODE.jsonl, rank-...jsonl);"
            " give the log directory of a job (--log-dir), or its --events-dir"
        )
    jobs = group_jobs(describe_dir(path) for path in paths)
    if not jobs:
        raise UsageError(f"{one_line(top)}: its event files hold no readable event")
    return jobs


def find_event_dirs(top: str) -> list[str]:
    """Return the directories with event files at or below `top`, sorted by name; a file is returned as it is."""
    if not os.path.isdir(top):
        return [top]
    found: list[str] = []
    level, looked = [top], 0
    for _ in range(MAX_DEPTH):
        below: list[str] = []
        for directory in level:
            looked += 1
            if looked > MAX_DIRECTORIES:
                return found
            names, directories = _list(directory)
            if any(map(is_event_file, names)):
                found.append(directory)
            else:
                below += directories
        level = below
    return found


def is_event_file(name: str) -> bool:
    return name.endswith(_END) and (name == RUN_EVENTS_NAME or name.startswith(("agent-", "rank-")))


def list_event_files(path: str) -> list[str]:
    """Return the event files of a directory: the run's first, then agents', then ranks'."""
    if not os.path.isdir(path):
        return [path]
    names = sorted(filter(is_event_file, _list(path)[0]), key=lambda name: (name != RUN_EVENTS_NAME, name))
    return [os.path.join(path, name) for name in names]


def describe_dir(path: str) -> EventDir:
    """Describe a directory by the names of its files and one event."""
    files = list_event_files(path)
    names = [os.path.basename(file) for file in files]
    parts = frozenset(name for name in names if name.startswith("rank-"))
    parts = parts or frozenset(name for name in names if name.startswith("agent-"))
    for file in files[:MAX_PEEKED_FILES]:
        found = _first_event(file)
        if found is not None:
            return EventDir(path, found[0], found[1], parts)
    return EventDir(path, "", 0, parts)


def group_jobs(directories: Iterable[EventDir]) -> list[JobDirs]:
    """Group directories into jobs: those of one run that begin within JOIN_WITHIN_NS and share no rank."""
    jobs: list[list[EventDir]] = []
    newest: dict[str, list[EventDir]] = {}
    for each in sorted(directories, key=lambda directory: (directory.wall_ns, directory.path)):
        if not each.run_id:
            continue
        job = newest.get(each.run_id)
        known = frozenset[str]().union(*(directory.parts for directory in job or ()))
        if job is not None and not known & each.parts and each.wall_ns - job[0].wall_ns <= JOIN_WITHIN_NS:
            job.append(each)
        else:
            newest[each.run_id] = [each]
            jobs.append(newest[each.run_id])
    return [JobDirs(job[0].run_id, job[0].wall_ns, tuple(each.path for each in job)) for job in jobs]


def open_regular(path: str) -> int:
    """Open a regular file for reading; other kinds are refused, as they may block for ever.

    Raises: OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a regular file")
    return fd


def _first_event(file: str) -> tuple[str, int] | None:
    try:
        fd = open_regular(file)
    except OSError:
        return None
    with open(fd, "rb") as source:
        for _ in range(MAX_PEEKED_LINES):
            line = source.readline(MAX_LINE_BYTES)
            if not line:
                return None
            event = parse_event(line)
            if event is not None:
                return one_line(event.run_id) or "-", event.wall_ns
    return None


def _list(directory: str) -> tuple[list[str], list[str]]:
    """Return names of files and paths of directories; links to directories are not followed (cycles)."""
    names, directories = [], []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.path)
                else:
                    names.append(entry.name)
    except OSError:
        return [], []  # not readable by this user
    return names, sorted(directories)
