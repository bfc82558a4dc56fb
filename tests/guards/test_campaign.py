"""What CI leaves out is listed: each family with its number of cases, and each test that does less by itself."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import campaign
from tests.campaign import Family, PartFile, load, load_files

TOP = Path(__file__).parents[2]
FAMILIES = load()
FILES = load_files()
SWITCH = re.compile(r"\bIS_FULL\b")
MACHINERY = {
    "tests/campaign.py",
    "tests/examples.py",
    "tests/unit/test_examples.py",
    "tests/guards/test_campaign.py",
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.tests.removeprefix("tests/"))
def test_the_table_has_what_ci_leaves_out(family: Family, request: pytest.FixtureRequest) -> None:
    path = family.tests.partition("::")[0]
    assert os.path.exists(TOP / path)
    if path not in request.config.stash[campaign.files]:
        pytest.skip("this run has collected another part of the tests")
    found = request.config.stash[campaign.counts].get(family.tests)
    assert found is not None, "there is no such test any more"
    if family.varies:
        assert found.cases <= family.cases and found.left_out <= family.left_out
        return
    assert (found.cases, found.left_out) == (family.cases, family.left_out)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.path.removeprefix("tests/"))
def test_of_each_file_ci_runs_two_functions_at_least(file: PartFile, request: pytest.FixtureRequest) -> None:
    text = (TOP / file.path).read_text(encoding="utf-8")
    functions = re.findall(r"^ *(?:async )?def (test_\w+)", text, re.MULTILINE)
    names = [name.rpartition("::")[2] for name in file.campaign]
    assert set(names) <= set(functions), "there is no such test any more"
    assert len(set(names)) == len(names) <= len(functions) - 2
    if file.path in request.config.stash[campaign.files]:
        found = [request.config.stash[campaign.counts].get(family.tests) for family in file.families]
        assert found == [(1, 1)] * len(names), "a function with several cases is a family"


def test_nothing_else_is_left_out() -> None:
    assert all(0 < family.left_out <= family.cases for family in FAMILIES)
    assert len({family.tests for family in FAMILIES}) == len(FAMILIES)
    own = [path for path in (TOP / "tests").rglob("*.py") if "mark.campaign" in path.read_text(encoding="utf-8")]
    assert [path.relative_to(TOP).as_posix() for path in own if path != Path(__file__)] == ["tests/campaign.py"]


def test_the_page_is_up_to_date() -> None:
    text = Path(campaign.PAGE).read_text(encoding="utf-8")
    assert campaign.with_table(text, FAMILIES, FILES) == text, "run `python -m tests.campaign`"


def test_tests_that_do_less_in_ci_are_on_the_page() -> None:
    text = Path(campaign.PAGE).read_text(encoding="utf-8")
    places = {path.relative_to(TOP).as_posix(): path for path in (TOP / "tests").rglob("*.py")}
    doing = {name for name, path in places.items() if SWITCH.search(path.read_text(encoding="utf-8"))} - MACHINERY
    listed = set(re.findall(r"^\| `(tests/[\w/]+\.py)` \|", text, re.MULTILINE))
    assert listed == doing
