"""The rules by which set-up's watch records names, as an order gives them (setup_watch.py). Stdlib only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple


class Rules(NamedTuple):
    """The rules for recording. Directories are resolved, without `/` at the end."""

    roots: tuple[bytes, ...]  # everything below is recorded
    literal: tuple[tuple[bytes, bytes], ...] = ()  # another name of a root, and the root
    never: tuple[bytes, ...] = ()  # nothing below is recorded: targets, the store, caches
    files: frozenset[bytes] = frozenset()  # files that are not recorded: the log
    home: bytes = b""  # of its directories that begin with a dot, only settings are recorded
    temporary: tuple[bytes, ...] = ()  # directories in which missing names are ignored
    targets: tuple[bytes, ...] = ()
    programs: frozenset[bytes] = frozenset()  # directories of PATH: part of the machine, except below the roots
    makes: bool = True  # False: creation is not reported, and only temporary files of the commands are read again
    began_ns: int = 0  # by the clock of file timestamps
    # the commands run in an image: outside the roots, only bind mounts of the node's own paths are recorded
    only_roots: bool = False


def make_rules(given: Mapping[str, Any]) -> Rules:
    def many(name: str) -> tuple[bytes, ...]:
        return tuple(map(os.fsencode, given.get(name, ())))

    return Rules(
        roots=many("roots"),
        literal=tuple((os.fsencode(one), os.fsencode(other)) for one, other in given.get("literal", ())),
        never=many("never"),
        files=frozenset(many("files")),
        home=os.fsencode(given.get("home", "")),
        temporary=many("temporary"),
        targets=many("targets"),
        programs=frozenset(many("programs")),
        makes=bool(given.get("makes", True)),
        began_ns=int(given.get("began_ns", 0)),
        only_roots=bool(given.get("only_roots")),
    )
