"""Job files of a directory: bootseer.toml with a table [job], each warmed as the user who owns it.

    [job]
    folder = "/home/ann/proj"                   # working directory of the job, for relative paths
    command = ["--nproc-per-node", "8", "train.py"]      # arguments of `bootrun`
    python = "/home/ann/venv/bin/python"        # PYTHON_EXEC, if ranks do not run in bootseer's Python

The daemon handles a file as the user who owns it, so it refuses a file that another user could have written.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from bootseer.errors import ConfigError
from bootseer.job_file import JOB_COMMAND, JOB_DIRECTORY, JOB_PYTHON, MAX_BYTES, parse

SUFFIX = ".toml"
MAX_JOBS = 1000
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class JobFile(NamedTuple):
    """A job file that the daemon accepts."""

    name: str
    owner: int  # uid
    stamp: tuple[int, int, int]  # differs if the file has changed
    text: bytes


class RefusedFile(NamedTuple):
    """A job file that the daemon refuses."""

    name: str
    why: str


class Job(NamedTuple):
    """How the job of a job file is started."""

    folder: str  # absolute; "" if not given
    command: tuple[str, ...]
    python: str  # "": the default of bootrun
    settings: Mapping[str, Any]  # by flag, for launcher.cli.config_file.fill


def read_directory(directory: str, uid: int) -> list[JobFile | RefusedFile]:
    """Return the job files of a directory, by name.

    Args: uid: the daemon's user; root handles the files of all owners, other users their own.
    Raises: ConfigError if the directory cannot be read.
    """
    try:
        names = sorted(
            name for name in os.listdir(directory) if name.endswith(SUFFIX) and not name.startswith(".")
        )
        above = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"--jobs {directory}: {(error.strerror or 'cannot be read').lower()}") from error
    try:
        found: list[JobFile | RefusedFile] = [_read(above, name, uid) for name in names[:MAX_JOBS]]
    finally:
        os.close(above)
    found += [RefusedFile(name, f"there are more than {MAX_JOBS} job files") for name in names[MAX_JOBS:]]
    return found


def _read(above: int, name: str, uid: int) -> JobFile | RefusedFile:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above)
    except OSError as error:
        return RefusedFile(name, f"cannot be read: {(error.strerror or '').lower()}")
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        why = why_refused(status.st_mode, status.st_uid, status.st_nlink, uid)
        if why:
            return RefusedFile(name, why)
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        return RefusedFile(name, f"has more than {MAX_BYTES} bytes")
    return JobFile(name, status.st_uid, (status.st_mtime_ns, status.st_size, status.st_ino), text)


def why_refused(mode: int, owner: int, links: int, uid: int) -> str:
    """PURE: return why the daemon of `uid` refuses a file with these facts; "" if it accepts it."""
    if not stat.S_ISREG(mode):
        return "is no file"
    if mode & _OTHERS_WRITE:
        return f"others can write to it (mode {stat.S_IMODE(mode):04o}): chmod go-w"
    if links != 1:
        return "has more than one name: a link to another user's file would be handled as that user"
    if uid != 0 and owner not in (uid, 0):
        return f"belongs to user {owner}, and only root warms for others"
    return ""


def parse_job(text: bytes, name: str) -> Job:
    """PURE: parse a job file. Raises: ConfigError."""
    settings = parse(text, name)
    directory = settings.get(JOB_DIRECTORY, "")
    if directory and not os.path.isabs(directory):
        raise ConfigError(f"{name}: [job] folder {directory!r}: must be an absolute path")
    return Job(directory, tuple(settings.get(JOB_COMMAND, ())), settings.get(JOB_PYTHON, ""), settings)


def environ_of(owner: int, uid: int, environ: Mapping[str, str], python: str) -> dict[str, str]:
    """Return the variables of a worker for `owner`; another user's worker gets none of the daemon's values.

    Raises: ConfigError if there is no such user.
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
    """Change this single-threaded process of root to that user for good, without old groups and capabilities.

    Raises: ConfigError.
    """
    import pwd

    from bootseer.linux.processes import forbid_new_privileges

    try:
        entry = pwd.getpwuid(owner)
        os.initgroups(entry.pw_name, entry.pw_gid)
        os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
        os.setresuid(owner, owner, owner)  # from 0: the kernel drops all capabilities
    except (KeyError, OSError) as error:
        raise ConfigError(f"cannot become user {owner}: {error}") from error
    if not forbid_new_privileges():
        raise ConfigError(f"cannot become user {owner}: the kernel does not rule out new privileges")
    with suppress(OSError):
        os.setresuid(0, 0, 0)
        raise ConfigError(f"cannot become user {owner}: the process can become root again")
    for path in (sys.executable, os.__file__, __file__):
        if not os.access(path, os.R_OK):
            raise ConfigError(
                f"user {entry.pw_name} cannot read {path}: install bootseer and its Python where all users"
                " can read"
            )
