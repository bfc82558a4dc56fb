"""Names of `typing` for modules on the launch path, which does not import it.

Type checkers see `typing` itself. At run time NamedTuple makes classes like those of typing. typing takes 2 ms to
import, and 0.1 ms a named tuple (it compiles each annotation, and the function that creates instances): a tenth of
a start. Protocol is a plain base here; Any and NoReturn
are placeholders.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # type checkers take it for typing's
if TYPE_CHECKING:
    from collections.abc import Callable as Callable
    from collections.abc import Collection as Collection
    from collections.abc import Iterable as Iterable
    from collections.abc import Iterator as Iterator
    from collections.abc import Mapping as Mapping
    from collections.abc import Sequence as Sequence
    from typing import Any as Any
    from typing import NamedTuple as NamedTuple
    from typing import NoReturn as NoReturn
    from typing import Protocol as Protocol
else:
    # collections.abc has these from here, and its parent imports more.
    from _collections import _tuplegetter  # as collections.namedtuple uses for its fields
    from _collections_abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence  # noqa: F401

    class Any:
        """A placeholder for typing's."""

    class NoReturn:
        """A placeholder for typing's."""

    class Protocol:
        """A plain base class."""

    # By the number of fields. Each class gets a copy with its names: compiling one takes 50 times longer.
    _new = tuple.__new__
    _CREATE = (
        lambda _cls: _new(_cls, ()),
        lambda _cls, a: _new(_cls, (a,)),
        lambda _cls, a, b: _new(_cls, (a, b)),
        lambda _cls, a, b, c: _new(_cls, (a, b, c)),
        lambda _cls, a, b, c, d: _new(_cls, (a, b, c, d)),
        lambda _cls, a, b, c, d, e: _new(_cls, (a, b, c, d, e)),
        lambda _cls, a, b, c, d, e, f: _new(_cls, (a, b, c, d, e, f)),
        lambda _cls, a, b, c, d, e, f, g: _new(_cls, (a, b, c, d, e, f, g)),
        lambda _cls, a, b, c, d, e, f, g, h: _new(_cls, (a, b, c, d, e, f, g, h)),
        lambda _cls, a, b, c, d, e, f, g, h, i: _new(_cls, (a, b, c, d, e, f, g, h, i)),
        lambda _cls, a, b, c, d, e, f, g, h, i, j: _new(_cls, (a, b, c, d, e, f, g, h, i, j)),
        lambda _cls, a, b, c, d, e, f, g, h, i, j, k: _new(_cls, (a, b, c, d, e, f, g, h, i, j, k)),
        lambda _cls, a, b, c, d, e, f, g, h, i, j, k, m: _new(_cls, (a, b, c, d, e, f, g, h, i, j, k, m)),
    )
    _Function = type(lambda: None)

    def _create_of(name, fields, defaults):
        """Return the function that creates instances of a class."""
        if len(fields) >= len(_CREATE):
            return _create_large(fields, defaults)
        code = _CREATE[len(fields)].__code__
        code = code.replace(co_name="__new__", co_qualname=f"{name}.__new__", co_varnames=("_cls", *fields))
        return _Function(code, globals(), "__new__", tuple(defaults.values()))

    def _create_large(fields, defaults):
        def create(cls, *args, **kwargs):
            values = {**defaults, **dict(zip(fields, args))}  # noqa: B905
            twice = kwargs.keys() & fields[: len(args)]
            values.update(kwargs)
            if twice or len(args) > len(fields) or values.keys() != set(fields):
                raise TypeError(f"{cls.__name__}: needs each of {fields} once, got {len(args)} and {list(kwargs)}")
            return tuple.__new__(cls, map(values.__getitem__, fields))

        return create

    def _make(cls, values):
        made = tuple.__new__(cls, values)
        if len(made) != len(cls._fields):
            raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
        return made

    def _replace(self, /, **values):
        made = self._make(map(values.pop, self._fields, self))
        if values:
            kind = TypeError if sys.version_info >= (3, 13) else ValueError  # as collections.namedtuple
            raise kind(f"Got unexpected field names: {list(values)!r}")
        return made

    def _repr(self):
        return f"{self.__class__.__name__}({', '.join(map('{}={!r}'.format, self._fields, self))})"

    def _as_tuple(self):
        return tuple(self)

    _METHODS = {
        "__slots__": (),
        "_make": classmethod(_make),
        "_replace": _replace,
        "_asdict": lambda self: dict(zip(self._fields, self, strict=True)),
        "__repr__": _repr,
        "__getnewargs__": _as_tuple,
    }

    class _Maker(type):
        def __new__(mcs, name, bases, space):
            if not bases:
                return super().__new__(mcs, name, bases, space)
            fields = tuple(space.get("__annotations__", ()))  # kept as text in each module that uses this
            given = [field in space for field in fields]
            if given != sorted(given):
                raise TypeError(f"{name}: a field without a default follows one with a default")
            defaults = {field: space.pop(field) for field in fields if field in space}
            made = {**_METHODS, "_fields": fields, "__match_args__": fields, "_field_defaults": defaults}
            made["__new__"] = _create_of(name, fields, defaults)
            for place, field in enumerate(fields):
                made[field] = _tuplegetter(place, None)
            return type(name, (tuple,), {**space, **made, **{key: space[key] for key in _METHODS if key in space}})

    class NamedTuple(metaclass=_Maker):
        """Base of named tuples, like that of typing."""
