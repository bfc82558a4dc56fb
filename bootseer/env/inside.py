"""Where the programs of an environment run: on this node as it is, or in an image (bootseer.mounts.image_root).

The environment itself is a folder of the node in both cases, seen at the same path inside. PURE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class Inside(msgspec.Struct, frozen=True):
    """What brings a program to where it runs."""

    prefix: tuple[str, ...] = ()  # words before the command; () on this node as it is
    set: dict[str, str] = {}
    unset: tuple[str, ...] = ()
    python: str = ""  # the image's interpreter, absolute there; "" for none

    def words(self, words: Sequence[str]) -> list[str]:
        """The command that runs these words there."""
        return [*self.prefix, *words]

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables of a program there, of those that it would have on this node."""
        return {**{name: value for name, value in environ.items() if name not in self.unset}, **self.set}


HERE = Inside()


def inside_of(given: Mapping[str, object] | None) -> Inside:
    """As orders carry it; None: on this node as it is."""
    return HERE if given is None else msgspec.convert(given, Inside)
