"""Checks whether an environment is in place already, and what a target contains, by markers and samples."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from bootseer.env.capture.subtree import Subtree
from bootseer.env.capture.walk import walk
from bootseer.env.restore.markers import digest_of, open_markers

EMPTY = digest_of({})  # `state_of` a directory that is empty or missing


def is_there(targets: Sequence[str], key: str, tree: str, *, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether all targets have this environment, by markers and content. Raises: StorageError."""
    environ = os.environ if environ is None else environ
    for target in map(os.path.realpath, targets):
        markers = open_markers(environ, target)
        marker = markers.read(target)
        if marker is None or (marker.key, marker.tree) != (key, tree):
            return False
        if not markers.is_there(marker, walk(target)):
            return False
    return True


def state_of(target: str) -> str:
    """Return the digest of a target's content; empty equals missing. Raises: StorageError, ConfigError."""
    found = walk(target)
    return digest_of(found if len(found) > 1 else {})


def paths_of(below: Subtree) -> list[bytes]:
    """Return all names that a tree sets or deletes."""
    paths = [b""] * len(below.tree)
    for entry in range(1, len(below.tree)):
        above = paths[below.tree.parents[entry]]
        name = below.tree.names[entry]
        paths[entry] = above + b"/" + name if above else name
    return [*paths, *below.deleted]
