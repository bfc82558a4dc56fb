"""The secret of a job: its sources, and the checks of its file.

In: the environment and the file named in --rdzv-conf. Out: the secret as bytes, or None for an open job.
"""

from __future__ import annotations

import os
import stat

from bootseer.errors import ConfigError
from bootseer.light_typing import Mapping

VARIABLE = "BOOTSEER_SECRET"
FILE_VARIABLE = "BOOTSEER_SECRET_FILE"
# The ranks' environment must not contain these.
SECRET_VARIABLES = (VARIABLE, FILE_VARIABLE)
MIN_BYTES = 16
MAX_BYTES = 64 * 1024


def find_secret(environ: Mapping[str, str], conf_file: str | None = None) -> bytes | None:
    """Return the secret from the file of --rdzv-conf, else of BOOTSEER_SECRET_FILE, else from BOOTSEER_SECRET."""
    if conf_file is not None:
        return read_secret_file(conf_file, "--rdzv-conf secret_file")
    if FILE_VARIABLE in environ:
        return read_secret_file(environ[FILE_VARIABLE], FILE_VARIABLE)
    if VARIABLE in environ:
        return _check_length(os.fsencode(environ[VARIABLE]).strip(), VARIABLE)
    return None


def read_secret_file(path: str, what: str) -> bytes:
    """Return the contents of a secret file without surrounding white space; raises ConfigError."""
    try:
        # Non-blocking: a FIFO without a writer would block the job for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what}: cannot open {path!r}: {getattr(error, 'strerror', None) or error}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{what}: {path!r} is not a regular file")
        # As ssh treats keys: own files are for the owner alone; files of root may be shared with a group.
        others = 0o077 if status.st_uid == os.geteuid() else 0o007
        if status.st_mode & others:
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            raise ConfigError(f"{what}: {path!r} can be read by others (mode {mode}): chmod 600 {path}")
        if status.st_size > MAX_BYTES:
            raise ConfigError(f"{what}: {path!r} has more than {MAX_BYTES} bytes: it is not a secret file")
        data = os.read(fd, MAX_BYTES + 1)
    finally:
        os.close(fd)
    return _check_length(data.strip(), f"{what}: {path!r}")


def _check_length(secret: bytes, what: str) -> bytes:
    if not secret:
        raise ConfigError(f"{what} is empty: put at least {MIN_BYTES} random bytes there, or unset it")
    if len(secret) < MIN_BYTES:
        raise ConfigError(f"{what} has {len(secret)} bytes, a secret needs at least {MIN_BYTES}")
    return secret
