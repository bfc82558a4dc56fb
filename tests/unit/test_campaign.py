"""Which cases of a family CI runs, and what becomes of the others."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.campaign import BEGIN, END, Case, Family, cover, kept, with_table
from tests.support import clean_environ, python

TOP = Path(__file__).parents[2]
LETTERS, DIGITS = "abcdef", "123"
CASES = [
    Case(f"{letter}-{digit}", {"letter": place, "digit": number})
    for (place, letter), (number, digit) in itertools.product(enumerate(LETTERS), enumerate(DIGITS))
]
ROW = Family("tests/unit/test_x.py::test_y", "cover", 18, 12, 7, "Like cases.")


def test_a_cover_has_each_value_and_takes_combinations_in_turn() -> None:
    found = cover(CASES)
    assert {name[0] for name in found} == set(LETTERS)
    assert sorted(name[2] for name in found) == sorted(DIGITS * 2), "each digit as often as the others"
    assert found == cover(CASES), "always the same"


def test_one_parameter_has_no_cases_to_leave_out() -> None:
    assert len(cover([Case(str(number), {"number": number}) for number in range(9)])) == 9
    assert cover([Case("", {})]) == set()


@pytest.mark.parametrize("number", range(len(CASES) + 1))
def test_a_number_of_cases_is_spread_over_all(number: int) -> None:
    found = kept(CASES, number)
    assert len(found) == number
    assert number == 0 or CASES[0].name in found
    assert number < 6 or {name[0] for name in found} == set(LETTERS)


def test_cases_by_their_ids() -> None:
    assert kept(CASES, ["a-1", "f-3"]) == {"a-1", "f-3"}
    for wrong in (["a-1", "g-1"], 19, "most"):
        with pytest.raises(ValueError):
            kept(CASES, wrong)  # type: ignore[arg-type]


TESTS = """
import pytest

@pytest.mark.parametrize("digit", [1, 2, 3])
@pytest.mark.parametrize("letter", "abcdef")
def test_y(letter, digit): pass

class TestIt:
    @pytest.mark.parametrize("number", range(4))
    def test_z(self, number): pass

def test_alone(): pass
"""
TABLE = """
[[family]]
tests = "test_x.py::test_y"
ci = "cover"
cases = 18
left_out = 12
saved_s = 0
why = "Like cases."

[[family]]
tests = "test_x.py::TestIt::test_z"
ci = 1
cases = 4
left_out = 3
saved_s = 0
why = "Like cases."
"""

ALL = 18 + 4 + 1


@pytest.fixture
def collected(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Collects tests that have a table of their own, in another process."""
    (tmp_path / "test_x.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = campaign: x\n")
    (tmp_path / "table.toml").write_text(TABLE)

    def run(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
        plugins = ("-p", "tests.campaign", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
        return subprocess.run(
            [*python("-m", "pytest", "--collect-only", "-q"), *plugins, "--campaign-table", "table.toml", *args],
            cwd=tmp_path,
            env={**clean_environ(), "PYTHONPATH": os.fspath(TOP), **environ},
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.parametrize(
    ("args", "environ", "number"),
    [
        ((), {}, 6 + 1 + 1),
        ((), {"BOOTSEER_CAMPAIGN": "full"}, ALL),
        (("-m", "campaign"), {}, 12 + 3),
        (("test_x.py::test_y",), {}, 18),
        (("test_x.py::test_y[a-2]",), {}, 1),
        (("-k", "test_z"), {}, 1),
    ],
    ids=["ci", "campaign", "what is left out", "a family by name", "a case by name", "by a part of the name"],
)
def test_what_is_left_out(
    collected: Callable[..., subprocess.CompletedProcess[str]],
    args: tuple[str, ...],
    environ: dict[str, str],
    number: int,
) -> None:
    run = collected(*args, **environ)
    assert run.stdout.count("test_x.py::") == number, run.stdout + run.stderr


def test_a_table_that_names_no_case_is_an_error(
    collected: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "table.toml").write_text(TABLE.replace('ci = "cover"', 'ci = ["a-9"]'))
    run = collected()
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_x.py::test_y: there is no case ['a-9']" in run.stderr


@pytest.mark.parametrize("ci", ["5", '["a-0"]'])
def test_a_case_by_name_needs_no_other_case(
    collected: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, ci: str
) -> None:
    (tmp_path / "table.toml").write_text(TABLE.replace('ci = "cover"', f"ci = {ci}"))
    run = collected("test_x.py::test_y[a-2]")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("test_x.py::") == 1


def test_the_page_gets_the_table() -> None:
    page = f"# Tests\n{BEGIN}old\n{END}after\n"
    written = with_table(page, [ROW])
    assert "| `unit/test_x.py` `test_y` | 18 | 12 | 7 | Like cases. |\n| all | 18 | 12 | 7 | |\n" in written
    assert with_table(written, [ROW]) == written
    assert written.startswith("# Tests\n") and written.endswith("after\n")
