"""The place in which the programs of an environment run: this node, or an image
(bootseer.mounts.sandbox.image_root).

The environment itself is a directory of the node in both cases, visible at the same path in the image. PURE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class ExecPlace(msgspec.Struct, frozen=True):
    """The prefix and variables that run a program in its place."""

    prefix: tuple[str, ...] = ()  # words before the command; () on this node
    set: dict[str, str] = {}
    unset: tuple[str, ...] = ()
    python: str = ""  # the image's interpreter, absolute there; "" for none

    def words(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs these words there."""
        return [*self.prefix, *words]

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a program there, from those that it would have on this node."""
        return {**{name: value for name, value in environ.items() if name not in self.unset}, **self.set}


HERE = ExecPlace()


def inside_of(given: Mapping[str, object] | None) -> ExecPlace:
    """Convert the form of wire messages; None: this node."""
    return HERE if given is None else msgspec.convert(given, ExecPlace)
