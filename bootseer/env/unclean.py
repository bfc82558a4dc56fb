"""Whether set-up begins and ends with what its key says: targets that are half done, inputs that change.

In: targets, what markers know of them, the key document. Out: why the result must not be kept, in one line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from bootseer.env.document import ABSENT, KeyDocument
from bootseer.env.keying import WHOLE, Keyed, make_key
from bootseer.env.markers import is_clean, open_markers
from bootseer.env.spec import SetupSpec
from bootseer.env.walk import walk
from bootseer.errors import BootseerError


def why_unclean(targets: Sequence[str], environ: Mapping[str, str]) -> str:
    """Why set-up there would begin with something that no key speaks of; "" if it would not."""
    for target in map(os.path.realpath, targets):
        try:
            unclean = open_markers(environ, target).unclean(target)
            is_unclean = unclean is not None and not is_clean(unclean, walk(target))
        except BootseerError as error:
            return f"{target}: it cannot be told what set-up would begin with: {error}"
        if is_unclean:
            return (
                f"{target}: an earlier set-up did not end there, or nobody could tell what it did, and what it has"
                " left is in no key: make the folder anew"
            )
    return ""


def begin_setup(targets: Sequence[str], environ: Mapping[str, str]) -> None:
    """Notes that nobody knows from now on what is there. Raises: StorageError, ConfigError."""
    for target in map(os.path.realpath, targets):
        open_markers(environ, target).begin(target, walk(target))


def end_setup(targets: Sequence[str], environ: Mapping[str, str], *, is_clean: bool) -> None:
    """Set-up has ended well. Args: is_clean: it began with what its key says, and nothing of that has changed.

    Raises: StorageError, ConfigError.
    """
    for target in map(os.path.realpath, targets):
        open_markers(environ, target).end(target, is_clean=is_clean)


def why_changed(keyed: Keyed, spec: SetupSpec, environ: Mapping[str, str], *, is_watched: bool = False) -> str:
    """Why what set-up made is not what its key says: inputs have changed since that was made. "" if none has.

    Args: is_watched: what set-up has read is known, so that only what was declared is looked at.
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
    """PURE: why it is another key than the one that was made before."""
    name = changed_input(before, now)
    name = name or next((each for each, state in before.reads.items() if now.reads.get(each, state) != state), "")
    if name:
        return f"{name} changed before set-up began"
    return f"{', '.join(now.targets)}: was changed by another job before set-up began"


def changed_input(before: KeyDocument, now: KeyDocument) -> str:
    """PURE: the first input that is another one now; "" for none. One that was absent may be made by set-up."""
    for name, digest in before.inputs.items():
        if name != WHOLE and digest not in (ABSENT, now.inputs.get(name)):
            return name
    return ""
