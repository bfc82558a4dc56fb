"""What users, their files and other versions depend on stays: see the collectors of surface.py."""

from __future__ import annotations

import pytest

from tests.guards import surface


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return surface.collect()


@pytest.mark.parametrize("name", sorted(surface.SURFACES))
def test_what_is_frozen_is_there(name: str, found: dict[str, list[str]]) -> None:
    """A renamed flag or key keeps its old name; a changed format or message gets a new number."""
    gone = sorted(set(surface.read_golden(name)) - set(found[name]))
    assert not gone, f"{len(gone)} lines of tests/guards/golden/{name} are not true any more"


@pytest.mark.parametrize("name", sorted(surface.SURFACES))
def test_what_is_new_is_frozen(name: str, found: dict[str, list[str]]) -> None:
    new = sorted(set(found[name]) - set(surface.read_golden(name)))
    assert not new, "python -m tests.guards.surface adds them"


@pytest.mark.parametrize(
    ("removes", "lines", "gone"),
    [(False, ["a", "b", "c"], ["b"]), (True, ["a", "c"], [])],
)
def test_what_is_gone_stays_frozen_until_it_is_removed(removes: bool, lines: list[str], gone: list[str]) -> None:
    assert surface.merge(["a", "b"], ["c", "a"], removes=removes) == (lines, gone)


def test_no_surface_is_empty(found: dict[str, list[str]]) -> None:
    """A collector that finds nothing any more would freeze nothing."""
    assert {name: len(lines) > 5 for name, lines in found.items()} == dict.fromkeys(surface.SURFACES, True)
