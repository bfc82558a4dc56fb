"""Parts of the standard library for modules on the launch path, without the modules that they come from.

Type checkers see those. At run time `signal` and `socket` are their C modules, which have numbers where the public
ones have enums; Enum and suppress are small classes that behave like theirs. This saves the import of collections,
contextlib, enum, functools, json, re, selectors, signal and socket: two thirds of bootrun's own instructions.
"""

from __future__ import annotations

from bootseer.light_typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal as signal
    import socket as socket
    from collections import deque as deque
    from contextlib import suppress as suppress
    from enum import Enum as Enum
    from functools import partial as partial
    from json import loads

    load_json = loads
else:
    import _signal as signal  # noqa: F401
    import _socket as socket  # noqa: F401
    from _collections import deque  # noqa: F401
    from _functools import partial  # noqa: F401

    class _Decoder:
        """What the scanner reads of a json.JSONDecoder."""

        strict, memo = True, {}
        object_hook = object_pairs_hook = None
        parse_float, parse_int, parse_constant = float, int, float

    _scan = None

    def load_json(data):
        """Decode JSON as json.loads does: one value. Raises: ValueError."""
        global _scan
        if _scan is None:
            try:
                from _json import make_scanner

                _scan = make_scanner(_Decoder)
            except (ImportError, AttributeError):  # a Python of another kind
                from json import JSONDecoder

                _scan = JSONDecoder().scan_once
        text = data.decode("utf-8", "surrogatepass") if isinstance(data, bytes) else data
        text = text.strip(" \t\r\n")
        try:
            value, end = _scan(text, 0)
        except StopIteration:
            end = -1
        if end != len(text):
            raise ValueError(f"no JSON: {text[:100]!r}")
        return value

    class suppress:  # noqa: N801  its name there
        """Suppress these exceptions in a `with` block."""

        def __init__(self, *kinds):
            self._kinds = kinds

        def __enter__(self):
            return None

        def __exit__(self, kind, error, trace):
            return kind is not None and issubclass(kind, self._kinds)

    class _Members(type):
        def __new__(mcs, name, bases, space):
            made = super().__new__(mcs, name, bases, space)
            made._members = []
            for key, value in space.items():
                if not key.startswith("_") and not hasattr(value, "__get__"):
                    member = object.__new__(made)
                    member.name, member.value = key, value
                    made._members.append(member)
                    type.__setattr__(made, key, member)
            return made

        def __call__(cls, value):
            for member in cls:
                if value is member or value == member.value:
                    return member
            raise ValueError(f"{value!r} is not a valid {cls.__qualname__}")

        def __iter__(cls):
            return iter(cls._members)

        def __len__(cls):
            return len(cls._members)

        def __getitem__(cls, name):
            for member in cls:
                if member.name == name:
                    return member
            raise KeyError(name)

        def __setattr__(cls, name, value):
            if name != "_members":
                raise AttributeError(f"{cls.__qualname__}.{name} cannot be set")
            type.__setattr__(cls, name, value)

    class Enum(metaclass=_Members):
        """Base of enumerations: each public name of a class is a member, and no two have one value."""

        def __repr__(self):
            return f"<{self}: {self.value!r}>"

        def __str__(self):
            return f"{type(self).__name__}.{self.name}"

        def __reduce_ex__(self, _version):
            return type(self), (self.value,)

        def __copy__(self):
            return self

        def __deepcopy__(self, _memo):
            return self
