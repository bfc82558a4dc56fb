"""The error hierarchy of Bootseer: every error that a user may see.

Each class has the exit status of the command that ends with it, and whether a retry can help. A message names the
culprit and the fix in one line. Exit statuses are listed in docs/reference/errors.md and never used twice.
"""

from __future__ import annotations


def first_line(error: BaseException, max_chars: int = 200) -> str:
    """Return the first line of a foreign error's message, else its kind."""
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:max_chars]


class BootseerError(Exception):
    """Base of all errors that are reported as one line without a traceback."""

    exit_status = 1
    retryable = False


class ConfigError(BootseerError):
    """The request is impossible: a value, a file or a combination of flags."""


class NoSuchLocation(ConfigError):
    """A URL or path in the configuration cannot exist: it lacks its scheme, bucket or parent directory."""


class UsageError(ConfigError):
    """The command line itself is wrong; exit status 2 as in argparse (and torchrun)."""

    exit_status = 2


class LaunchError(BootseerError):
    """A job could not be started or kept running."""


class StorageError(BootseerError):
    """Bytes could not be read from or written to a store.

    `read_bytes`: bytes of a range that arrived, from its start, before the failure; a retry continues there.
    `retry_after_s`: the store's requested wait before the next try (HTTP's Retry-After), 0 for none.
    """

    def __init__(self, message: str, *, read_bytes: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.read_bytes = read_bytes
        self.retry_after_s = retry_after_s


class NotFound(StorageError):
    """The file or directory does not exist."""


class AlreadyExists(StorageError):
    """The name exists already, but was to be created."""


class PermissionDenied(StorageError):
    """The store refuses access to this file."""


class Unavailable(StorageError):
    """The store or the network fails; a retry may succeed."""

    retryable = True


class StorageTimeout(Unavailable):
    """No progress within the deadline."""


class IntegrityError(BootseerError):
    """Data is invalid; none of it is returned."""


class DigestMismatch(IntegrityError):
    """The checksum of some bytes differs from the recorded one."""


class Truncated(IntegrityError):
    """A file is too short, or a range lies past its end."""


class SourceChanged(IntegrityError):
    """A file was replaced while it was being read."""


class FormatVersion(IntegrityError):
    """The format, or its version, is unknown to this Bootseer."""


class Untrusted(IntegrityError):
    """No trusted key has signed the data, and other users can write to its store."""


class CheckpointError(BootseerError):
    """A checkpoint cannot be found, read or written."""


class EnvError(BootseerError):
    """An environment cannot be set up, captured or restored."""


class KeyUnknown(ConfigError):
    """The key of an environment cannot be computed: set-up runs, and its result is not kept."""


class SetupFailed(EnvError):
    """A set-up command failed, or took too long.

    `tail`: the last lines of its output. `status`: exit status, or minus the signal number; None if Bootseer ended
    it.
    """

    def __init__(self, message: str, *, tail: tuple[str, ...] = (), status: int | None = None) -> None:
        super().__init__(message)
        self.tail = tail
        self.status = status


class CaptureRefused(EnvError):
    """The result of set-up commands cannot be restored on another node: it is not published; the job continues."""


class EditableRefused(CaptureRefused):
    """A package is installed in place, and its source directory is neither in a target nor an input."""
