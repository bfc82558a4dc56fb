"""Compares what two launchers showed of the same probe: every fact is same, better (as declared) or unexplained.

Pure. A declared difference that is not there any more, or that is not what was promised, is unexplained too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from tests.parity.model import Absent, AtMost, Better, Has, Lacks

ABSENT = Absent()


class Verdict(NamedTuple):
    """The facts of a probe, sorted."""

    same: tuple[str, ...]
    better: tuple[str, ...]
    unexplained: tuple[str, ...]  # one line each


def compare(torchrun: Mapping[str, Any], bootrun: Mapping[str, Any], better: Sequence[Better]) -> Verdict:
    """Sorts every fact of both observations."""
    theirs, ours = flatten(torchrun), flatten(bootrun)
    same, meant, unexplained = [], [], []
    differs: set[int] = set()
    for path in sorted(theirs.keys() | ours.keys()):
        their, our = theirs.get(path, ABSENT), ours.get(path, ABSENT)
        rules = [number for number, rule in enumerate(better) if fnmatchcase(path, rule.fact)]
        if their == our and (not rules or not any(fits(better[rule].expected, our) for rule in rules)):
            same.append(path)
        elif their == our:
            same.append(path)  # the difference must show somewhere, not at every rank
        elif rules and fits(better[rules[0]].expected, our):
            meant.append(path)
            differs.update(rules[:1])
        else:
            promised = f"; promised was {better[rules[0]].expected!r}" if rules else ""
            unexplained.append(f"{path}: torchrun {_show(their)}, bootrun {_show(our)}{promised}")
    for number, rule in enumerate(better):
        if number not in differs:
            unexplained.append(f"{rule.fact}: declared better ({rule.because}), but does not differ any more")
    return Verdict(tuple(same), tuple(meant), tuple(unexplained))


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Paths to values; lists are values."""
    found: dict[str, Any] = {}
    for key, one in value.items():
        path = f"{prefix}{key}"
        if isinstance(one, Mapping):
            found.update(flatten(one, path + "."))
        else:
            found[path] = one
    return found


def fits(expected: Any, value: Any) -> bool:
    """Whether the value is what a `Better` promised."""
    match expected:
        case Absent():
            return isinstance(value, Absent)
        case AtMost(most):
            return isinstance(value, int | float) and value <= most
        case Has(texts):
            return all(text in _as_text(value) for text in texts)
        case Lacks(texts):
            return not isinstance(value, Absent) and not any(text in _as_text(value) for text in texts)
    return type(value) is type(expected) and bool(value == expected)


def _as_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _show(value: Any) -> str:
    if isinstance(value, Absent):
        return "nothing"
    text = repr(value)
    return text if len(text) <= 300 else text[:300] + "..."
