"""Where event files lie: a path that a user gives -> the folders of one job, or of many.

In: a file, an events folder, a run folder, a log folder, or a folder of such. Out: folders, grouped into jobs.
Nodes with folders of their own leave several for one job; they have the run's id in common. Only names and the
first event of a file are looked at, so that a folder of thousands of jobs is listed quickly.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

from bootseer.errors import UsageError
from bootseer.events import MOST_LINE_BYTES, RUN_EVENTS_NAME, parse_event
from bootseer.formats import one_line

MOST_DEPTH = 5  # of folders below the one that is given
MOST_FOLDERS = 200_000  # that are looked into
MOST_PEEKED_FILES = 3
MOST_PEEKED_LINES = 20
JOIN_WITHIN_NS = 600 * 10**9  # nodes of one job begin within this of another, by their own clocks
_END = ".jsonl"


class EventFolder(NamedTuple):
    """One folder of event files, or a single file."""

    path: str
    run_id: str  # "" when no event was found
    wall_ns: int  # of the first event
    parts: frozenset[str]  # files that another folder of the same job cannot have: of ranks, or else of agents


class JobFolders(NamedTuple):
    """All that was found of one job."""

    run_id: str
    wall_ns: int
    paths: tuple[str, ...]


def find_jobs(top: str) -> list[JobFolders]:
    """The jobs at or below `top`, the newest last.

    Raises: UsageError where there is nothing.
    """
    if not os.path.exists(top):
        raise UsageError(f"{one_line(top)}: there is no such file or folder")
    paths = find_folders(top)
    if not paths:
        raise UsageError(
            f"{one_line(top)}: holds no event files ({RUN_EVENTS_NAME}, agent-NODE.jsonl, rank-...jsonl):"
            " give the log folder of a job (--log-dir), or its --events-dir"
        )
    jobs = group_jobs(peek(path) for path in paths)
    if not jobs:
        raise UsageError(f"{one_line(top)}: its event files hold no event that can be read")
    return jobs


def find_folders(top: str) -> list[str]:
    """Folders with event files at or below `top`, in the order of their names; a file stands for itself."""
    if not os.path.isdir(top):
        return [top]
    found: list[str] = []
    level, looked = [top], 0
    for _ in range(MOST_DEPTH):
        below: list[str] = []
        for folder in level:
            looked += 1
            if looked > MOST_FOLDERS:
                return found
            names, folders = _list(folder)
            if any(map(is_event_file, names)):
                found.append(folder)
            else:
                below += folders
        level = below
    return found


def is_event_file(name: str) -> bool:
    """By its name."""
    return name.endswith(_END) and (name == RUN_EVENTS_NAME or name.startswith(("agent-", "rank-")))


def list_files(path: str) -> list[str]:
    """The event files of a folder: the run's first, then agents, then ranks."""
    if not os.path.isdir(path):
        return [path]
    names = sorted(filter(is_event_file, _list(path)[0]), key=lambda name: (name != RUN_EVENTS_NAME, name))
    return [os.path.join(path, name) for name in names]


def peek(path: str) -> EventFolder:
    """What the names of its files and one event say."""
    files = list_files(path)
    names = [os.path.basename(file) for file in files]
    parts = frozenset(name for name in names if name.startswith("rank-"))
    parts = parts or frozenset(name for name in names if name.startswith("agent-"))
    for file in files[:MOST_PEEKED_FILES]:
        found = _first_event(file)
        if found is not None:
            return EventFolder(path, found[0], found[1], parts)
    return EventFolder(path, "", 0, parts)


def group_jobs(folders: Iterable[EventFolder]) -> list[JobFolders]:
    """Folders of one run that begin at about the same time and have no rank in common are one job."""
    jobs: list[list[EventFolder]] = []
    newest: dict[str, list[EventFolder]] = {}
    for each in sorted(folders, key=lambda folder: (folder.wall_ns, folder.path)):
        if not each.run_id:
            continue
        job = newest.get(each.run_id)
        known = frozenset[str]().union(*(folder.parts for folder in job or ()))
        if job is not None and not known & each.parts and each.wall_ns - job[0].wall_ns <= JOIN_WITHIN_NS:
            job.append(each)
        else:
            newest[each.run_id] = [each]
            jobs.append(newest[each.run_id])
    return [JobFolders(job[0].run_id, job[0].wall_ns, tuple(each.path for each in job)) for job in jobs]


def open_regular(path: str) -> int:
    """A descriptor to read from; only of a regular file, as others may make us wait for ever.

    Raises: OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is no regular file")
    return fd


def _first_event(file: str) -> tuple[str, int] | None:
    try:
        fd = open_regular(file)
    except OSError:
        return None
    with open(fd, "rb") as source:
        for _ in range(MOST_PEEKED_LINES):
            line = source.readline(MOST_LINE_BYTES)
            if not line:
                return None
            event = parse_event(line)
            if event is not None:
                return one_line(event.run_id) or "-", event.wall_ns
    return None


def _list(folder: str) -> tuple[list[str], list[str]]:
    """Names of files, paths of folders; links to folders are not followed, as they may lead round."""
    names, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    names.append(entry.name)
    except OSError:
        return [], []  # not ours to read
    return names, sorted(folders)
