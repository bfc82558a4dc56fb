"""Whether an environment is in its place already, and what is in a target at all: by markers and looks at it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from bootseer.env.markers import digest_of, open_markers
from bootseer.env.subtree import Subtree
from bootseer.env.walk import walk

EMPTY = digest_of({})  # `state_of` a folder that is empty, or not there


def is_there(targets: Sequence[str], key: str, tree: str, *, environ: Mapping[str, str] | None = None) -> bool:
    """Whether all targets have this environment, as their markers and a look at them say. Raises: StorageError."""
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
    """All that is in a target, as one digest; an empty folder is as none. Raises: StorageError, ConfigError."""
    found = walk(target)
    return digest_of(found if len(found) > 1 else {})


def paths_of(below: Subtree) -> list[bytes]:
    """All names that a tree says something about, those that it takes away too."""
    paths = [b""] * len(below.tree)
    for entry in range(1, len(below.tree)):
        above = paths[below.tree.parents[entry]]
        name = below.tree.names[entry]
        paths[entry] = above + b"/" + name if above else name
    return [*paths, *below.deleted]
