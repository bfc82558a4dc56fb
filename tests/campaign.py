"""A plugin: of families with many cases CI runs a part, always the same part, and the campaign runs all.

`campaign.toml` lists the families. Cases that CI leaves out have the marker `campaign`, and are deselected unless
BOOTSEER_CAMPAIGN=full, a node id on the command line names tests, or `-m` asks for the marker. A family is a test
function with all its cases. Its rule says which of them CI runs:

    "cover"         as few as it takes to have each value of each parameter, and combinations in turn
    a number        so many, spread over all
    a list of ids   these

Of a file with `campaign` CI runs the tests that are not listed there.

`python -m tests.campaign` writes the tables into docs/internals/testing.md.
"""

from __future__ import annotations

import os
import tomllib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import pytest

from tests.durations import family_of

HERE = os.path.dirname(os.path.abspath(__file__))
TABLE = os.path.join(HERE, "campaign.toml")
PAGE = os.path.join(os.path.dirname(HERE), "docs", "internals", "testing.md")
BEGIN, END = "<!-- tests.campaign -->\n", "<!-- end -->\n"
IS_FULL = os.environ.get("BOOTSEER_CAMPAIGN") == "full"

Rule = str | int | list[str]


class Family(NamedTuple):
    """A row of the table."""

    tests: str  # node id without parameters
    ci: Rule
    cases: int  # all of them
    left_out: int  # those that only the campaign runs
    saved_s: int  # seconds of CPU that CI saves, estimated
    why: str
    varies: bool = False  # with the interpreters of a machine: it has these numbers of cases at most


class PartFile(NamedTuple):
    """A test file of which CI runs a part of the functions."""

    path: str
    campaign: list[str]  # functions with one case that only the campaign runs, with their class
    saved_s: int

    @property
    def families(self) -> list[Family]:
        """A row for each function that CI leaves out."""
        return [Family(f"{self.path}::{name}", 0, 1, 1, 0, "") for name in self.campaign]


class Case(NamedTuple):
    """A test of a family: its id, and which value of each parameter it has."""

    name: str
    values: Mapping[str, int]


class Found(NamedTuple):
    """What the collection has of a family."""

    cases: int
    left_out: int


counts = pytest.StashKey[dict[str, Found]]()
files = pytest.StashKey[set[str]]()


def load(path: str = TABLE) -> list[Family]:
    """The rows of the table."""
    with open(path, "rb") as file:
        return [Family(**row) for row in tomllib.load(file)["family"]]


def load_files(path: str = TABLE) -> list[PartFile]:
    """The files of which CI runs a part."""
    with open(path, "rb") as file:
        return [PartFile(**row) for row in tomllib.load(file).get("file", [])]


def kept(cases: Sequence[Case], rule: Rule) -> set[str]:
    """The ids of the cases that CI runs.

    Raises:
        ValueError: the rule names a case that is not there, or more cases than there are.
    """
    names = [case.name for case in cases]
    if isinstance(rule, list):
        if missing := set(rule) - set(names):
            raise ValueError(f"there is no case {sorted(missing)}")
        return set(rule)
    if isinstance(rule, int):
        if rule > len(names):
            raise ValueError(f"there are only {len(names)} cases")
        return {names[place * len(names) // rule] for place in range(rule)}
    if rule != "cover":
        raise ValueError(f"unknown rule {rule!r}")
    return cover(cases)


def cover(cases: Sequence[Case]) -> set[str]:
    """Cases that have each value of each parameter between them; those used least come first.

    The parameter with the most values comes first. For each value that no case has yet, that case is taken whose
    other values are in the fewest cases so far.
    """
    having: dict[tuple[str, int], list[Case]] = {}
    for case in cases:
        for value in case.values.items():
            having.setdefault(value, []).append(case)
    sizes = Counter(name for name, _value in having)
    used: Counter[tuple[str, int]] = Counter()
    found: set[str] = set()
    for value in sorted(having, key=lambda each: (-sizes[each[0]], each)):
        if not used[value]:
            best = min(having[value], key=lambda case: sum(used[each] for each in case.values.items()))
            found.add(best.name)
            used.update(best.values.items())
    return found


def mark(items: Sequence[pytest.Item], families: Sequence[Family]) -> dict[str, Found]:
    """Give the marker to the tests that CI leaves out.

    Returns: what is collected of each family; nothing for one without any test here.
    """
    rules = {family.tests: family.ci for family in families}
    members: dict[str, list[pytest.Item]] = {}
    for item in items:
        if (family := family_of(item.nodeid)) in rules:
            members.setdefault(family, []).append(item)
    found = {}
    for family, own in members.items():
        cases = numbered(own)
        try:
            chosen = kept(cases, rules[family])
        except ValueError as error:
            raise pytest.UsageError(f"tests/campaign.toml: {family}: {error}") from None
        for item, case in zip(own, cases, strict=True):
            if case.name not in chosen:
                item.add_marker(pytest.mark.campaign)
        found[family] = Found(len(own), len(own) - len(chosen))
    return found


def case_of(nodeid: str) -> str:
    """The id of its parameters; "" without any."""
    return nodeid.partition("[")[2].removesuffix("]")


def numbered(items: Sequence[pytest.Item]) -> list[Case]:
    """Cases of a family; values are numbered as they come, so that each process has the same numbers."""
    numbers: dict[str, dict[Hashable, int]] = {}
    found = []
    for item in items:
        callspec = getattr(item, "callspec", None)
        params: Mapping[str, object] = {} if callspec is None else callspec.params
        values = {}
        for name, value in params.items():
            known = numbers.setdefault(name, {})
            values[name] = known.setdefault(key_of(value), len(known))
        found.append(Case(case_of(item.nodeid), values))
    return found


def key_of(value: object) -> Hashable:
    """What tells values apart; those that cannot be compared by a hash are the same object or different."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


# ---- the page -------------------------------------------------------------------------------------------------


def rows(families: Sequence[Family]) -> str:
    """The table of the page, by file."""
    lines = ["| tests | cases | CI leaves out | CPU s saved | why |", "|---|---|---|---|---|"]
    for family in families:
        path, _, name = family.tests.partition("::")
        where = path.removeprefix("tests/")
        numbers = f"{family.cases} | {family.left_out} | {family.saved_s}"
        lines.append(f"| `{where}` `{name}` | {numbers} | {family.why} |")
    cases, left_out, saved_s = (sum(family[place] for family in families) for place in (2, 3, 4))
    lines.append(f"| all | {cases} | {left_out} | {saved_s} | |")
    return "\n".join(lines) + "\n"


def file_rows(files: Sequence[PartFile]) -> str:
    """The table of files."""
    lines = ["| file | tests only in the campaign | CPU s saved |", "|---|---|---|"]
    for file in files:
        lines.append(f"| `{file.path.removeprefix('tests/')}` | {len(file.campaign)} | {file.saved_s} |")
    count, saved_s = sum(len(file.campaign) for file in files), sum(file.saved_s for file in files)
    lines.append(f"| all | {count} | {saved_s} |")
    return "\n".join(lines) + "\n"


def with_table(text: str, families: Sequence[Family], files: Sequence[PartFile] = ()) -> str:
    """The page with the tables of these families and files."""
    before, _, rest = text.partition(BEGIN)
    tables = rows(families) + ("\n" + file_rows(files) if files else "")
    return before + BEGIN + "\n" + tables + "\n" + END + rest.partition(END)[2]


# ---- in pytest ------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--campaign-table", metavar="FILE", default=TABLE, help="Families of which CI runs a part")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = config.getoption("campaign_table")
    own = [family for file in load_files(path) for family in file.families]
    has_cases = any("[" in argument for argument in config.args)  # then families are not complete
    config.stash[counts] = {} if has_cases else mark(items, [*load(path), *own])
    config.stash[files] = {item.nodeid.partition("::")[0] for item in items}
    is_named = any("::" in argument for argument in config.args)
    if IS_FULL or is_named or "campaign" in (config.getoption("markexpr") or ""):
        return
    left_out = [item for item in items if item.get_closest_marker("campaign")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("campaign")]


if __name__ == "__main__":
    with open(PAGE, encoding="utf-8") as page:
        now = with_table(page.read(), load(), load_files())
    with open(PAGE, "w", encoding="utf-8") as page:
        page.write(now)
