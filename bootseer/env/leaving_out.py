"""Looks into the suspects of a difference, and decides by contents.py: what is left out, what refuses a capture.

In: what a walk found in a target, and what of it changed. Out: paths, or CaptureRefused.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence

from bootseer.env import contents
from bootseer.env.difference import Difference
from bootseer.env.source import open_files
from bootseer.env.walk import Walk
from bootseer.errors import CaptureRefused


def find_left_out(target: str, after: Walk, difference: Difference) -> frozenset[bytes]:
    """Paths of the difference that are not to be in the tree."""
    special = {
        path
        for path in difference.changed
        if contents.is_special(after[path]) or contents.is_lock(path, after[path])
    }
    suspects = [path for path in difference.changed if contents.may_hold_secret(path, after[path])]
    secret = {
        path: data
        for path, data in open_files(target, after, suspects, contents.MOST_SECRET_BYTES)
        if contents.holds_secret(path, data)
    }
    if secret:
        records = [path for path in after if path.endswith(b".dist-info/RECORD")]
        for path, data in open_files(target, after, records, contents.MOST_METADATA_BYTES):
            site = path.removesuffix(b"/RECORD").rpartition(b"/")[0]
            record = contents.read_record(data)
            for brought in [each for each in secret if contents.is_of_record(each, secret[each], site, record)]:
                del secret[brought]
    left_out = special | secret.keys()
    left_out |= {
        path
        for path in difference.changed
        if path.endswith(b".pyc") and any(contents.is_bytecode_of(path, source) for source in secret)
    }
    return frozenset(left_out)


def check_links(
    target: str, after: Walk, difference: Difference, caches: Sequence[str], targets: Sequence[str]
) -> None:
    """Raises: CaptureRefused for links into a cache, as uv makes them when told to."""
    for path in difference.changed:
        link = after[path].target
        if not link:
            continue
        place = posixpath.join(target, os.fsdecode(path.rpartition(b"/")[0]), os.fsdecode(link))
        place = posixpath.normpath(place)
        if any(contents.is_within(place, each) for each in targets):
            continue
        if any(contents.is_within(place, cache) for cache in caches):
            shown = show(os.path.join(target, os.fsdecode(path)))
            raise CaptureRefused(
                f"{shown}: is a link into a cache ({show(place)}), which other nodes do not have: install copies "
                "(UV_LINK_MODE=copy)"
            )


def show(path: str) -> str:
    """For messages and documents, which are UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
