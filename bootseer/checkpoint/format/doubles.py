"""PURE: files of a directory that hold the same weights as others in it, in another layout.

In: names. Out: those that are read only on request: files that Mistral (`consolidated*`) and Meta (`original/`)
publish beside a Hugging Face model, and `pytorch_model*` beside safetensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_MODEL = re.compile(r"(?:.*/)?model(?:-[0-9]+-of-[0-9]+)?\.safetensors")
_OTHERS = (
    re.compile(r"((?:.*/)?)original/[^/]+\.(?:safetensors|pth|pt)"),
    re.compile(r"((?:.*/)?)consolidated(?:[.-][0-9]+(?:-of-[0-9]+)?)?\.(?:safetensors|pth|pt)"),
    re.compile(r"((?:.*/)?)pytorch_model(?:-[0-9]+-of-[0-9]+)?\.bin"),
)


def find_duplicates(names: Collection[str]) -> frozenset[str]:
    """Return duplicates, only if the directory has the model as transformers reads it."""
    directories = {
        name.rpartition("/")[0] + "/" if "/" in name else "" for name in names if _MODEL.fullmatch(name)
    }
    return frozenset(
        name
        for name in names
        if any((found := other.fullmatch(name)) is not None and found[1] in directories for other in _OTHERS)
    )
