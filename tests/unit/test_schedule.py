"""What workers of the test run begin with."""

from __future__ import annotations

import os

from tests.schedule import HDFS, piece_of, places_of

LARGE, SMALL, UNIT = "tests/integration/test_a.py", "tests/integration/test_b.py", "tests/unit/test_c.py"
TESTS = [f"{UNIT}::test_one[{number}]" for number in range(9)] + [f"{SMALL}::test_two", f"{LARGE}::test_three[a]"]


def test_what_takes_longest_comes_first() -> None:
    table = {LARGE: {"test_three": (4, 40.0)}, SMALL: {"test_two": (1, 2.0)}}
    assert places_of(TESTS, table) == {LARGE: 0, SMALL: 1, UNIT: 2}
    assert places_of(TESTS, {SMALL: {"test_two": (1, 30.0)}}) == {SMALL: 0, LARGE: 1, UNIT: 2}
    assert places_of(TESTS, {UNIT: {"test_one": (9, 18.0)}})[UNIT] == 0


def test_without_a_record_real_processes_come_first() -> None:
    assert places_of(TESTS, {}) == {LARGE: 0, SMALL: 1, UNIT: 2}
    assert places_of(reversed(TESTS), {}) == places_of(TESTS, {}), "all workers have to have the same order"


def test_files_that_share_a_server_are_one_piece() -> None:
    assert {piece_of(path) for path in HDFS} == {"hdfs"}
    assert piece_of(LARGE) == LARGE
    assert all(os.path.exists(path) for path in HDFS)
