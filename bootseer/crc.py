"""CRC32C by the `crc32c` library, without what its package imports beside it.

The package reads its own version and has a command line: importlib.metadata, argparse, email and more, 25 of the
73 ms of processor time that the daemon of a tree took here for its imports. So its extension is loaded by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec

_PACKAGE, _EXTENSION = "crc32c", "crc32c._crc32c"


@cache
def load() -> Callable[..., int]:
    """The library's `crc32c(data, start=0)`. Raises: ImportError when it is not installed."""
    return _load_extension() or _load_package()


def _load_package() -> Callable[..., int]:
    from crc32c import crc32c

    found: Callable[..., int] = crc32c
    return found


def _load_extension() -> Callable[..., int] | None:
    """None when the package is there already, or is laid out otherwise than its versions 2.7 to 2.9."""
    if _PACKAGE in sys.modules:
        return None
    package = find_spec(_PACKAGE)  # does not run it
    places = package.submodule_search_locations if package is not None else None
    spec = PathFinder.find_spec(_EXTENSION, places) if places else None
    if spec is None or spec.loader is None:
        return None
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError:
        return None
    return getattr(module, "crc32c", None)
