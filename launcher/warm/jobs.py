"""Job files of a folder: bootseer.toml with a table [job], each warmed as the user who owns it.

    [job]
    folder = "/home/ann/proj"                   # where the job is started: relative paths are meant from there
    command = ["--nproc-per-node", "8", "train.py"]      # what stands after `bootrun` there
    python = "/home/ann/venv/bin/python"        # PYTHON_EXEC, where the ranks do not run in bootseer's own Python

Who owns a file decides as whom it is worked on, so it counts only if nobody else could have written it.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from bootseer.errors import ConfigError
from bootseer.job_file import JOB_COMMAND, JOB_FOLDER, JOB_PYTHON, MOST_BYTES, parse

SUFFIX = ".toml"
MOST_JOBS = 1000
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class JobFile(NamedTuple):
    """One that may be worked on."""

    name: str
    owner: int  # uid
    stamp: tuple[int, int, int]  # another one: the file has changed
    text: bytes


class Refused(NamedTuple):
    """One that is not."""

    name: str
    why: str


class Job(NamedTuple):
    """What a job file says of how the job is started."""

    folder: str  # absolute; "" if it says nothing
    command: tuple[str, ...]
    python: str  # "": as bootrun has it
    settings: Mapping[str, Any]  # by flag, for launcher.config_file.fill


def read_folder(folder: str, uid: int) -> list[JobFile | Refused]:
    """The job files in it, by name.

    Args: uid: who works on them; root does so for all owners, others for their own.
    Raises: ConfigError when the folder cannot be read.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX) and not name.startswith("."))
        above = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"--jobs {folder}: {(error.strerror or 'cannot be read').lower()}") from error
    try:
        found: list[JobFile | Refused] = [_read(above, name, uid) for name in names[:MOST_JOBS]]
    finally:
        os.close(above)
    found += [Refused(name, f"there are more than {MOST_JOBS} job files") for name in names[MOST_JOBS:]]
    return found


def _read(above: int, name: str, uid: int) -> JobFile | Refused:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above)
    except OSError as error:
        return Refused(name, f"cannot be read: {(error.strerror or '').lower()}")
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        why = why_refused(status.st_mode, status.st_uid, status.st_nlink, uid)
        if why:
            return Refused(name, why)
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        return Refused(name, f"has more than {MOST_BYTES} bytes")
    return JobFile(name, status.st_uid, (status.st_mtime_ns, status.st_size, status.st_ino), text)


def why_refused(mode: int, owner: int, links: int, uid: int) -> str:
    """PURE: why a file with these facts is not worked on by `uid`; "" if it is."""
    if not stat.S_ISREG(mode):
        return "is no file"
    if mode & _OTHERS_WRITE:
        return f"others can write to it (mode {stat.S_IMODE(mode):04o}): chmod go-w"
    if links != 1:
        return "has more than one name: a link to somebody else's file would be worked on as theirs"
    if uid != 0 and owner not in (uid, 0):
        return f"belongs to user {owner}, and only root warms for others"
    return ""


def parse_job(text: bytes, name: str) -> Job:
    """PURE. Raises: ConfigError."""
    settings = parse(text, name)
    folder = settings.get(JOB_FOLDER, "")
    if folder and not os.path.isabs(folder):
        raise ConfigError(f"{name}: [job] folder {folder!r}: has to be an absolute path")
    return Job(folder, tuple(settings.get(JOB_COMMAND, ())), settings.get(JOB_PYTHON, ""), settings)


def environ_of(owner: int, uid: int, environ: Mapping[str, str], python: str) -> dict[str, str]:
    """What the work of `owner` gets from a daemon of `uid`; another user's has nothing of the daemon's own.

    Raises: ConfigError when there is no such user.
    """
    if owner == uid:
        found = dict(environ)
    else:
        import pwd

        try:
            entry = pwd.getpwuid(owner)
        except KeyError as error:
            raise ConfigError(f"there is no user {owner} on this node") from error
        found = {
            "HOME": entry.pw_dir,
            "USER": entry.pw_name,
            "LOGNAME": entry.pw_name,
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": environ.get("LANG", "C.UTF-8"),
        }
    if python:
        found["PYTHON_EXEC"] = python
    return found


def become(owner: int) -> None:
    """Makes this process, which is root's and has one thread, that user's for good: no group, no capability stays.

    Raises: ConfigError.
    """
    import ctypes
    import pwd

    try:
        entry = pwd.getpwuid(owner)
        os.initgroups(entry.pw_name, entry.pw_gid)
        os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
        os.setresuid(owner, owner, owner)  # from 0: the kernel takes all capabilities away
    except (KeyError, OSError) as error:
        raise ConfigError(f"cannot become user {owner}: {error}") from error
    no_new_privileges = 38
    if ctypes.CDLL(None, use_errno=True).prctl(no_new_privileges, 1, 0, 0, 0):
        raise ConfigError(f"cannot become user {owner}: the kernel does not rule out new privileges")
    with suppress(OSError):
        os.setresuid(0, 0, 0)
        raise ConfigError(f"cannot become user {owner}: root can be had again")
    for path in (sys.executable, os.__file__, __file__):
        if not os.access(path, os.R_OK):
            raise ConfigError(
                f"user {entry.pw_name} cannot read {path}: bootseer and its Python have to lie where all users"
                " can read"
            )
