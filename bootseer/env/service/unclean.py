"""Checks whether set-up begins and ends in the state of its key: incomplete targets, changed inputs.

In: targets, their markers, the key document. Out: one line with the reason why the result must not be stored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from bootseer.env.capture.walk import walk
from bootseer.env.key.document import ABSENT, KeyDocument
from bootseer.env.key.keying import WHOLE, Keyed, make_key
from bootseer.env.restore.markers import is_clean, open_markers
from bootseer.env.spec import SetupSpec
from bootseer.errors import BootseerError


def why_unclean(targets: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return why set-up would begin in a state that no key covers; "" if it would not."""
    for target in map(os.path.realpath, targets):
        try:
            unclean = open_markers(environ, target).unclean(target)
            is_unclean = unclean is not None and not is_clean(unclean, walk(target))
        except BootseerError as error:
            return f"{target}: the state before set-up is unknown: {error}"
        if is_unclean:
            return (
                f"{target}: an earlier set-up did not finish there, or its changes are unknown, and no key"
                " covers them; recreate the directory"
            )
    return ""


def begin_setup(targets: Sequence[str], environ: Mapping[str, str]) -> None:
    """Mark the content of targets as unknown from now on. Raises: StorageError, ConfigError."""
    for target in map(os.path.realpath, targets):
        open_markers(environ, target).begin(target, walk(target))


def end_setup(targets: Sequence[str], environ: Mapping[str, str], *, is_clean: bool) -> None:
    """Mark a successful end of set-up. Args: is_clean: it began in the state of its key, which has not changed.

    Raises: StorageError, ConfigError.
    """
    for target in map(os.path.realpath, targets):
        open_markers(environ, target).end(target, is_clean=is_clean)


def why_changed(keyed: Keyed, spec: SetupSpec, environ: Mapping[str, str], *, is_watched: bool = False) -> str:
    """Return why the result of set-up does not match its key, as inputs have changed since; "" if none has.

    Args: is_watched: the reads of set-up are known, so that only declared inputs are compared.
    """
    if keyed.document.base.get("kind") == "none":
        spec = msgspec.structs.replace(spec, python="")  # set-up may have made it meanwhile
    try:
        now = make_key(spec, environ)
    except BootseerError as error:
        return f"the inputs of set-up cannot be read any more: {error}"
    before = keyed.guess if is_watched else keyed.document
    name = changed_input(before, now.guess if is_watched else now.document)
    return f"{name} changed while set-up waited or ran" if name else ""


def why_another(before: KeyDocument, now: KeyDocument) -> str:
    """PURE: return why the key has changed."""
    name = changed_input(before, now)
    name = name or next((each for each, state in before.reads.items() if now.reads.get(each, state) != state), "")
    if name:
        return f"{name} changed before set-up began"
    return f"{', '.join(now.targets)}: changed by another job before set-up began"


def changed_input(before: KeyDocument, now: KeyDocument) -> str:
    """PURE: return the first input that has changed; "" for none. Set-up may create an input that was missing."""
    for name, digest in before.inputs.items():
        if name != WHOLE and digest not in (ABSENT, now.inputs.get(name)):
            return name
    return ""
