"""The error tree of Bootseer: every error that a user may see.

Each class carries the exit status of the command that ends by it and whether trying again can help. A message
names the culprit and the way out in one line. Numbers are listed in docs/errors.md and never used twice.
"""

from __future__ import annotations


class BootseerError(Exception):
    """Base of all errors that are reported as one line without a traceback."""

    exit_status = 1
    retryable = False


class ConfigError(BootseerError):
    """What the user asked for cannot be: a value, a file or a combination of flags."""


class NoSuchPlace(ConfigError):
    """A URL or path that somebody has typed can be nowhere: its scheme, bucket or parent folder does not exist."""


class UsageError(ConfigError):
    """The command line itself is wrong; exit status 2 as argparse (and torchrun) has it."""

    exit_status = 2


class LaunchError(BootseerError):
    """A job could not be started or kept running."""


class StorageError(BootseerError):
    """Bytes could not be read from or written to a store.

    `read_bytes`: how much of a range had arrived, in order from its start, when it failed. A retry goes on there.
    `retry_after_s`: how long the store asks us to wait before the next try (HTTP's Retry-After), 0 if it does not.
    """

    def __init__(self, message: str, *, read_bytes: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.read_bytes = read_bytes
        self.retry_after_s = retry_after_s


class NotFound(StorageError):
    """There is no such file or folder."""


class AlreadyExists(StorageError):
    """Something has that name already and was to be created."""


class PermissionDenied(StorageError):
    """The store refuses us this file."""


class Unavailable(StorageError):
    """The store or the network fails; another try may succeed."""

    retryable = True


class StorageTimeout(Unavailable):
    """No progress within the deadline."""


class IntegrityError(BootseerError):
    """Data is not what it should be; none of it is handed out."""


class DigestMismatch(IntegrityError):
    """The sum of some bytes differs from the recorded one."""


class Truncated(IntegrityError):
    """A file is shorter than it should be, or a range lies past its end."""


class SourceChanged(IntegrityError):
    """A file was replaced while it was being read."""


class FormatVersion(IntegrityError):
    """Written in a format, or by a newer version of it, that this Bootseer does not know."""


class Untrusted(IntegrityError):
    """Nobody who is believed answers for it: no trusted key signed it, and its store is not this user's alone."""


class CheckpointError(BootseerError):
    """A checkpoint cannot be found, read or written."""


class EnvError(BootseerError):
    """An environment cannot be set up, captured or restored."""


class KeyUnknown(ConfigError):
    """What decides an environment cannot be told: set-up is run, and what it does is not kept."""


class SetupFailed(EnvError):
    """A set-up command failed, or took too long.

    `tail`: the last lines of what it wrote. `status`: exit status, or minus the number of the signal; None when it
    was ended by us.
    """

    def __init__(self, message: str, *, tail: tuple[str, ...] = (), status: int | None = None) -> None:
        super().__init__(message)
        self.tail = tail
        self.status = status


class CaptureRefused(EnvError):
    """What set-up commands did cannot be had on another node: nothing is published, and the job goes on."""


class EditableRefused(CaptureRefused):
    """A package is installed in place, and its source folder lies neither in a target nor among the inputs."""
