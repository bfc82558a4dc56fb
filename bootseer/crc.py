"""CRC32C by the `crc32c` library, without the other imports of its package.

The package imports importlib.metadata, argparse, email and more for its version and command line. They took 25 of
the 73 ms of CPU time of a tree daemon's imports. So only the extension is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec

from bootseer.errors import ConfigError

_PACKAGE, _EXTENSION = "crc32c", "crc32c._crc32c"


@cache
def load() -> Callable[..., int]:
    """Return the library's `crc32c(data, start=0)`. Raises: ConfigError if it is not installed."""
    try:
        return _load_extension() or _load_package()
    except ImportError as error:
        raise ConfigError(
            "checksums need the library crc32c: pip install 'bootseer[image]' or 'bootseer[checkpoint]'"
        ) from error


def crc32c(data: memoryview | bytes | bytearray, start: int = 0) -> int:
    """Return the checksum of `data`, continued from the checksum `start` of the preceding bytes."""
    checksum: int = load()(data, start)
    return checksum


def _load_package() -> Callable[..., int]:
    from crc32c import crc32c

    found: Callable[..., int] = crc32c
    return found


def _load_extension() -> Callable[..., int] | None:
    """Load the extension; None if the package is loaded already, or laid out unlike its versions 2.7 to 2.9."""
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
