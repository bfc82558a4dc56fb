"""Names of a package that are loaded at first use: importing the package costs nothing (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def loader(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package.

    Args: homes: for each name, the module that has it: one below the package, or a full name.
    """

    def load(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(home if "." in home else f"{package}.{home}"), name)

    return load
