"""Set-up without a key: if the inputs of an environment are unknown, or exclusive access is not possible.

In: the spec, the job's environment variables. Out: the directories that set-up changes. Also decides which errors
only the user can fix, so that they end the job, and which cost only the time of set-up. The result is not stored.
"""

from __future__ import annotations

from collections.abc import Mapping

from bootseer.env.key.targets import resolve_targets
from bootseer.env.service.look import default_targets
from bootseer.env.spec import SetupSpec
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


def is_user_error(error: BaseException) -> bool:
    """PURE: return whether set-up must not run after this error, because only the user can fix it.

    A StorageTimeout here means another process at the targets: two set-ups in one directory would corrupt both.
    """
    if isinstance(error, KeyUnknown):
        return False
    return isinstance(error, ConfigError | SetupFailed | StorageTimeout)


def is_damage(error: BaseException) -> bool:
    """PURE: return whether a tree in the store is damaged or missing, so that building it again helps."""
    if isinstance(error, Untrusted | FormatVersion | SourceChanged):
        return False
    return isinstance(error, IntegrityError | NotFound)


def plain_targets(spec: SetupSpec, environ: Mapping[str, str]) -> list[str]:
    """Return the directories that set-up changes, as far as known without the interpreter. Raises: ConfigError."""
    return resolve_targets(spec.targets or default_targets(spec.python), None, spec.python, environ, spec.store)


def error_line(error: BaseException) -> str:
    """PURE: return an error as one line."""
    if isinstance(error, OSError):
        return f"{error.filename or 'this node'}: {error.strerror}"
    return str(error)
