"""Parts of the standard library for the launch path against those parts themselves."""

from __future__ import annotations

import copy
import enum
import json
import math
import pickle
import signal
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer import light_stdlib


class Light(light_stdlib.Enum):
    """Two members and a method."""

    RED = "red"
    BLUE = "blue"

    @property
    def initial(self) -> str:
        return self.value[0]


class Full(enum.Enum):
    """Two members and a method."""

    RED = "red"
    BLUE = "blue"

    @property
    def initial(self) -> str:
        return self.value[0]


@pytest.mark.parametrize(
    "use",
    [
        lambda made: [(member.name, member.value) for member in made],
        len,
        lambda made: made("red") is made.RED,
        lambda made: made(made.BLUE) is made.BLUE,
        lambda made: made["BLUE"] is made.BLUE,
        lambda made: made.RED.initial,
        lambda made: made.RED == "red",
        lambda made: made.RED == made.BLUE,
        lambda made: made.RED in made,
        lambda made: {made.RED: 1}[made("red")],
        lambda made: isinstance(made.RED, made),
        lambda made: str(made.RED).partition(".")[2],
        lambda made: repr(made.RED).partition(".")[2],
        lambda made: f"{made.RED}".partition(".")[2],
        lambda made: copy.copy(made.RED) is made.RED,
        lambda made: copy.deepcopy([made.RED])[0] is made.RED,
        lambda made: pickle.loads(pickle.dumps(made.RED)) is made.RED,
        lambda made: made.__doc__,
    ],
)
def test_enums_behave_alike(use: Callable[[type], object]) -> None:
    assert use(Light) == use(Full)


@pytest.mark.parametrize("use", [lambda made: made("green"), lambda made: made["GREEN"], lambda made: made.GREEN])
def test_enums_refuse_alike(use: Callable[[type], object]) -> None:
    with pytest.raises((ValueError, KeyError, AttributeError)) as full:
        use(Full)
    with pytest.raises(full.type):
        use(Light)


def test_a_member_cannot_be_set() -> None:
    with pytest.raises(AttributeError):
        Light.RED = "green"  # type: ignore[assignment]


@pytest.mark.parametrize("kinds", [(OSError,), (OSError, ValueError), ()])
@pytest.mark.parametrize("error", [FileNotFoundError(), ValueError(), KeyError(), KeyboardInterrupt()])
def test_errors_are_suppressed_alike(kinds: tuple[type[Exception], ...], error: BaseException) -> None:
    def ends_as(made: type[suppress]) -> BaseException | None:
        try:
            with made(*kinds):
                raise error
        except BaseException as caught:
            return caught
        return None

    assert ends_as(light_stdlib.suppress) is ends_as(suppress)


def test_signals_are_numbers_of_the_same_names() -> None:
    light = vars(light_stdlib.signal).items()
    numbers = {name: number for name, number in light if name.startswith("SIG") and not name.startswith("SIG_")}
    assert numbers == {name: int(number) for name, number in signal.Signals.__members__.items()}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_json_is_decoded_alike(value: object) -> None:
    text = json.dumps(value)
    for data in (text, text.encode(), f" {text}\n"):
        assert repr(light_stdlib.load_json(data)) == repr(json.loads(text))


@given(st.text() | st.binary())
def test_what_is_no_json_is_refused_alike(data: str | bytes) -> None:
    try:
        found = json.loads(data if isinstance(data, str) else data.decode("utf-8", "surrogatepass"))
    except ValueError:
        with pytest.raises(ValueError):
            light_stdlib.load_json(data)
    else:
        again = light_stdlib.load_json(data)
        assert again == found or (isinstance(found, float) and math.isnan(found))
