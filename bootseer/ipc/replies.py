"""Replies to requests, and how errors cross the boundary between processes.

request  {"do": "status", ...}
reply    {"ok": {...}}    or    {"error": "a line for users", "kind": "ConfigError"}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bootseer import errors
from bootseer.errors import BootseerError, StorageError


def read_reply(found: object, where: str) -> dict[str, Any]:
    """Return the content of a reply. Raises: the error that it reports; StorageError if it is invalid."""
    if isinstance(found, Mapping) and isinstance(found.get("ok"), Mapping):
        return dict(found["ok"])
    raise to_error(found, where)


def to_error(found: object, where: str) -> BootseerError:
    """Return the error in a reply, as its class if that is one of Bootseer's."""
    text = found.get("error") if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or not isinstance(text, str):
        return StorageError(f"{where}: the daemon's answer is invalid")
    kind = getattr(errors, str(found.get("kind")), StorageError)
    is_ours = isinstance(kind, type) and issubclass(kind, BootseerError)
    return kind(text) if is_ours else StorageError(text)


def from_error(error: BaseException) -> dict[str, str]:
    """Return the reply that reports an error; its kind is the nearest class of bootseer.errors."""
    if not isinstance(error, BootseerError):
        error = StorageError(f"internal error: {type(error).__name__}: {error}")
    kinds = [each.__name__ for each in type(error).__mro__ if getattr(errors, each.__name__, None) is each]
    return {"error": " ".join(str(error).split()), "kind": kinds[0]}
