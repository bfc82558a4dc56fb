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


class UsageError(ConfigError):
    """The command line itself is wrong; exit status 2 as argparse (and torchrun) has it."""

    exit_status = 2


class LaunchError(BootseerError):
    """A job could not be started or kept running."""
