"""PURE: which answers of the services of an environment, an image and compile caches are valid.

In: one answer, a JSON object. It is an error if a field is missing or of another type: then the service counts as
failed. An answer of an unknown kind passes, and is ignored. A service can be of another version of this package,
if it was upgraded while a job runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bootseer.ipc.framing import InvalidMessageError

MAX_MOUNT_PATHS = 2  # ServedMount
_MAX_NUMBER = 1 << 63

_Test = Callable[[object], bool]


class _Optional(NamedTuple):
    """The test of a field that may be missing."""

    test: _Test


_Fields = Mapping[str, _Test | _Optional]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_NUMBER


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _are_figures(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is_mount(value: object) -> bool:
    return isinstance(value, list) and _are_texts(value) and len(value) <= MAX_MOUNT_PATHS


_ANY: _Fields = {"notes": _Optional(_are_texts)}
_ORIGIN: _Fields = {"url": _is_text, "folders": _are_texts}
_SEEDED: _Fields = {
    "line": _is_text,
    "files": _is_count,
    "bytes": _is_count,
    "is_cold": _is_flag,
    "is_lost": _is_flag,
    "notes": _are_texts,
}
# By kind, `did`. bootseer/env/service/main.py:
_ENVIRONMENT: Mapping[str, _Fields] = {
    "said": {"text": _is_text},
    "fell-back": {"why": _is_text},
    "line": {"text": _is_text},
    "origin": _ORIGIN,
    "looked": {"key": _is_text, "tree": _is_text, "why": _is_text},
    "fetched": {"tree": _is_text},
    "unfetched": {"why": _is_text, "damaged": _Optional(_is_text)},
    "ready": {
        "how": _is_text,
        "key": _is_text,
        "tree": _is_text,
        "prefix": _are_texts,
        "mount": _Optional(_is_mount),
        "targets": _are_texts,
        "imports": _are_texts,
        "python": _is_text,
        "setup_s": _is_number,
        "capture_s": _is_number,
        "is_publishing": _is_flag,
    },
    "found": {"tree": _is_text},
    "published": {"tree": _is_text},
    "unpublished": {"why": _is_text},
    "failed": {"why": _is_text, "tail": _are_texts, "could_enter": _Optional(_is_flag)},
}
# bootseer/mounts/sandbox/service.py:
_IMAGE: Mapping[str, _Fields] = {
    "said": {"text": _is_text},
    "fell-back": {"why": _is_text},
    "origin": _ORIGIN,
    "resolved": {"digest": _is_text},
    "ready": {
        "prefix": _are_texts,
        "program": _is_text,
        "set": _is_table,
        "unset": _are_texts,
        "digest": _is_text,
        "lock": _is_text,
        "how": _is_text,
        "mount": _Optional(_is_mount),
        "source_s": _is_number,
        "root_s": _is_number,
        "notes": _are_texts,
    },
    "failed": {"why": _is_text},
    "shown-from": {"address": _is_text, "why": _is_text},
    "hidden": {"why": _is_text},
    "shown": {"number": _is_count, "missing": _are_texts},
    "statistics": {"found": _are_figures},
}
# bootseer/env/compile_cache/service.py:
_CACHES: Mapping[str, _Fields] = {
    "origin": _ORIGIN,
    "opened": {**_SEEDED, "folder": _is_text, "variables": _is_table},
    "seeded": _SEEDED,
    "captured": {
        "line": _is_text,
        "files": _is_count,
        "bytes": _is_count,
        "took_s": _is_number,
        "generation": _is_count,
        "has_failed": _is_flag,
        "notes": _are_texts,
    },
    "failed": {"why": _is_text, "ends_job": _Optional(_is_flag)},
}


def check_environment(answer: Mapping[str, Any]) -> None:
    """Check an answer of the environment service. Raises: InvalidMessageError."""
    _check(_ENVIRONMENT, answer)


def check_image(answer: Mapping[str, Any]) -> None:
    """Check an answer of the image service. Raises: InvalidMessageError."""
    _check(_IMAGE, answer)


def check_caches(answer: Mapping[str, Any]) -> None:
    """Check an answer of the compile-cache service. Raises: InvalidMessageError."""
    _check(_CACHES, answer)


def _check(kinds: Mapping[str, _Fields], answer: Mapping[str, Any]) -> None:
    did = answer.get("did")
    if not isinstance(did, str):
        raise InvalidMessageError("an answer without a kind")
    for name, test in {**_ANY, **kinds.get(did, {})}.items():
        if isinstance(test, _Optional):
            is_valid = name not in answer or test.test(answer[name])
        else:
            is_valid = name in answer and test(answer[name])
        if not is_valid:
            raise InvalidMessageError(f"an answer {did!r} without a valid {name!r}")
