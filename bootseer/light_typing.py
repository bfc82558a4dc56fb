"""Names of `typing` for modules on the launch path, which does not import it.

Type checkers see `typing` itself. At run time NamedTuple makes classes like those of typing. The function that
creates their instances is compiled for the first one. typing takes 2 ms to import, and 0.1 ms a named tuple (it
compiles each annotation and that function): a tenth of a start. Protocol is a plain base here; Any and NoReturn
are placeholders.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it for typing's
if TYPE_CHECKING:
    from typing import Any as Any
    from typing import NamedTuple as NamedTuple
    from typing import NoReturn as NoReturn
    from typing import Protocol as Protocol

    def compile_named_tuples() -> None:
        """Compile in idle time, so that the first instance of a class costs no more than the others."""

else:
    from _collections import _tuplegetter  # as collections.namedtuple uses for its fields

    class Any:
        """A placeholder for typing's."""

    class NoReturn:
        """A placeholder for typing's."""

    class Protocol:
        """A plain base class."""

    _classes = []  # that may have no instance yet

    def _compile(owner):
        """Compile the function that creates instances of a class."""
        names = "".join([f"{field}, " for field in owner._fields])
        scope = {"_new": tuple.__new__, "__builtins__": {}, "__name__": f"namedtuple_{owner.__name__}"}
        made = eval(f"lambda _cls, {names}: _new(_cls, ({names}))", scope)  # noqa: S307  identifiers of a class
        made.__name__, made.__defaults__ = "__new__", tuple(owner._field_defaults.values())
        owner.__new__ = staticmethod(made)
        return made

    def _new(cls, *args, **kwargs):
        """Create the first instance of a class."""
        owner = next(base for base in cls.__mro__ if base.__dict__.get("_fields") is not None)
        return _compile(owner)(cls, *args, **kwargs)

    def compile_named_tuples():
        while _classes:
            owner = _classes.pop()
            if owner.__new__ is _new:
                _compile(owner)

    def _make(cls, values):
        made = tuple.__new__(cls, values)
        if len(made) != len(cls._fields):
            raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
        return made

    def _replace(self, /, **values):
        made = self._make(map(values.pop, self._fields, self))
        if values:
            raise ValueError(f"Got unexpected field names: {list(values)!r}")
        return made

    def _repr(self):
        return f"{self.__class__.__name__}({', '.join(map('{}={!r}'.format, self._fields, self))})"

    def _as_tuple(self):
        return tuple(self)

    _METHODS = {
        "__slots__": (),
        "__new__": _new,
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
            made = {**_METHODS, "_fields": fields, "__match_args__": fields}
            made["_field_defaults"] = {field: space.pop(field) for field in fields if field in space}
            for place, field in enumerate(fields):
                made[field] = _tuplegetter(place, None)
            made = type(name, (tuple,), {**space, **made, **{key: space[key] for key in _METHODS if key in space}})
            _classes.append(made)
            return made

    class NamedTuple(metaclass=_Maker):
        """Base of named tuples, like that of typing."""
