"""Set-up without a key: where it cannot be told what decides an environment, or nobody can be alone at its folder.

In: the spec, the job's environment. Out: the folders that set-up changes; which errors are the user's to mend, so
that they end the job, and which cost only the time that set-up takes. What is set up like this is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping

from bootseer.env.setup_keeper_look import default_targets
from bootseer.env.spec import SetupSpec
from bootseer.env.targets import resolve_targets
from bootseer.errors import (
    ConfigError,
    FormatVersion,
    IntegrityError,
    KeyUnknown,
    NotFound,
    SetupFailed,
    SourceChanged,
    StorageTimeout,
    Untrusted,
)


def ends_job(error: BaseException) -> bool:
    """PURE: whether set-up cannot or must not be run after it: only the user can do something about it.

    Of the timeouts only those of another process at the targets get here: two set-ups in one folder spoil both.
    """
    if isinstance(error, KeyUnknown):
        return False
    return isinstance(error, ConfigError | SetupFailed | StorageTimeout)


def is_damage(error: BaseException) -> bool:
    """PURE: whether what the store has of a tree is not what it should be, or gone: to build it anew mends it."""
    if isinstance(error, Untrusted | FormatVersion | SourceChanged):
        return False
    return isinstance(error, IntegrityError | NotFound)


def plain_targets(spec: SetupSpec, environ: Mapping[str, str]) -> list[str]:
    """The folders that set-up changes, as far as they can be told without the interpreter. Raises: ConfigError."""
    return resolve_targets(spec.targets or default_targets(spec.python), None, spec.python, environ, spec.store)


def described(error: BaseException) -> str:
    """PURE: one line."""
    if isinstance(error, OSError):
        return f"{error.filename or 'this node'}: {error.strerror}"
    return str(error)
