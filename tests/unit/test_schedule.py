"""What workers of the test run begin with."""

from __future__ import annotations

import os

from tests.schedule import HDFS, piece_of, places_of

LARGE, SMALL, UNIT = "tests/integration/test_a.py", "tests/integration/test_b.py", "tests/unit/test_c.py"


def test_real_processes_come_first_then_what_has_many_tests() -> None:
    assert places_of([UNIT] * 9 + [SMALL] + [LARGE] * 2) == {LARGE: 0, SMALL: 1, UNIT: 2}
    assert places_of([LARGE, SMALL]) == places_of([SMALL, LARGE]), "all workers have to have the same order"


def test_files_that_share_a_server_are_one_piece() -> None:
    assert {piece_of(path) for path in HDFS} == {"hdfs"}
    assert piece_of(LARGE) == LARGE
    assert all(os.path.exists(path) for path in HDFS)
