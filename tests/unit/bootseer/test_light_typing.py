"""Named tuples of the launch path against those of typing."""

from __future__ import annotations

import copy
import pickle
import typing
from collections.abc import Callable

import msgspec
import pytest

from bootseer import light_typing


class Light(light_typing.NamedTuple):
    """Two fields and a method."""

    name: str
    count: int = 3

    @property
    def twice(self) -> int:
        return self.count * 2

    def renamed(self, name: str) -> Light:
        return self._replace(name=name)


class Full(typing.NamedTuple):
    """Two fields and a method."""

    name: str
    count: int = 3

    @property
    def twice(self) -> int:
        return self.count * 2

    def renamed(self, name: str) -> Full:
        return self._replace(name=name)


class Empty(light_typing.NamedTuple):
    """No field."""


class Single(light_typing.NamedTuple):
    only: tuple[str, ...]


Made = Callable[[type], object]


@pytest.mark.parametrize(
    "use",
    [
        lambda made: made("a")[:],
        lambda made: made(count=1, name="a")[:],
        lambda made: made("a").twice,
        lambda made: made("a").renamed("b")[:],
        lambda made: made("a")._asdict(),
        lambda made: repr(made("a")).partition("(")[2],
        lambda made: made._make(["a", 2])[:],
        lambda made: made._fields,
        lambda made: made._field_defaults,
        lambda made: made.__match_args__,
        lambda made: made.__doc__,
        lambda made: made.__mro__[1:],
        lambda made: made.__annotations__.keys(),
        lambda made: made("a") == ("a", 3),
        lambda made: hash(made("a")),
        lambda made: type(pickle.loads(pickle.dumps(made("a")))) is made,
        lambda made: copy.copy(made("a"))[:],
        lambda made: msgspec.json.decode(b'["a", 4]', type=made)[:],
        lambda made: msgspec.json.decode(b'["a"]', type=made)[:],
    ],
)
def test_they_behave_alike(use: Made) -> None:
    assert use(Light) == use(Full)


@pytest.mark.parametrize(
    "use",
    [
        lambda made: made(),
        lambda made: made("a", 1, 2),
        lambda made: made("a", size=1),
        lambda made: made._make(["a"]),
        lambda made: made("a")._replace(size=1),
        lambda made: setattr(made("a"), "count", 1),
        lambda made: msgspec.json.decode(b'["a", "b"]', type=made),
        lambda made: msgspec.json.decode(b"[1]", type=made),
    ],
)
def test_they_refuse_alike(use: Made) -> None:
    with pytest.raises(Exception) as full:
        use(Full)
    with pytest.raises(full.type):
        use(Light)


def test_with_no_field_and_with_one() -> None:
    assert Empty() == ()
    assert Single(("a",)).only == ("a",)
    assert repr(Single(())) == "Single(only=())"


def test_a_default_is_followed_by_defaults_only() -> None:
    space = {"__annotations__": {"first": "int", "second": "int"}, "first": 1}
    with pytest.raises(TypeError, match="a field without a default"):
        type(light_typing.NamedTuple)("Bad", (light_typing.NamedTuple,), space)


def test_one_with_many_fields_behaves_alike() -> None:
    names = [f"field{number}" for number in range(40)]
    space = {"__annotations__": dict.fromkeys(names, "int"), "field39": 7, "__module__": __name__}
    light = type(light_typing.NamedTuple)("Many", (light_typing.NamedTuple,), dict(space))
    full = typing.NamedTuple("Many", [(name, int) for name in names])
    full.__new__.__defaults__ = (7,)
    kept = {name: number for number, name in enumerate(names)}
    assert light(*range(39)) == full(*range(39)) == (*range(39), 7)
    assert light(**kept) == full(**kept)
    assert light(0, **{name: kept[name] for name in names[1:]}) == tuple(range(40))
    assert light(*range(39))._replace(field0=5)[0] == 5
    for given, named in ((range(38), {}), (range(41), {}), (range(39), {"field0": 1}), (range(39), {"other": 1})):
        for made in (light, full):
            with pytest.raises(TypeError):
                made(*given, **named)
