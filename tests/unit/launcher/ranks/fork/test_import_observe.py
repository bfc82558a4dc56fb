"""What is read of modules for a plan."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.linux.files import read_regular
from launcher.ranks.fork import import_observe
from launcher.ranks.fork.import_plan import MAIN

LIB = "/lib/python3.11/site-packages"


@pytest.fixture
def noted(tmp_path: Path) -> str:
    """A start whose modules are in another root folder: one looks at what the script changes."""
    lib = tmp_path / "root" / LIB[1:]
    lib.mkdir(parents=True)
    (lib / "plain.py").write_text("value = 1\n")
    (lib / "looks.py").write_text("import sys\nhook = sys.excepthook\n")
    lines = [f"begun\t0\t\t0\t{MAIN}\t/train.py", "uses\t1\t1\t0\t1\thooks"]
    for tick, name in enumerate(("plain", "looks", "gone"), 2):
        lines.append(f"begun\t{tick}\t{MAIN}\t9\t{name}\t{LIB}/{name}.py")
    place = tmp_path / "rank-0"
    place.with_suffix(".uses").write_text("\n".join([*lines, "end", ""]))
    place.with_suffix(".imports").write_text(
        "".join(f"{name}\t{LIB}/{name}.py\n" for name in ("plain", "looks", "gone"))
    )
    return os.fspath(place)


def test_texts_are_those_that_ranks_see(noted: str, tmp_path: Path) -> None:
    plan = import_observe.observe(noted, os.fspath(tmp_path / "root"))
    assert plan is not None
    assert plan.modules == ("plain",) and set(plan.left_out) == {"looks", "gone"}
    assert import_observe.read_plan(noted + import_observe.PLAN) == plan


def test_what_cannot_be_read_may_look_at_anything(noted: str) -> None:
    plan = import_observe.observe(noted)
    assert plan is not None and not plan.modules


def test_only_files_are_read(tmp_path: Path) -> None:
    """Not what a rank has put in their place, which would hold up who opens it."""
    os.mkfifo(tmp_path / "fifo")
    assert read_regular(os.fspath(tmp_path / "fifo"), 10) is None
    assert read_regular(os.fspath(tmp_path), 10) is None
    (tmp_path / "file").write_bytes(b"0123456789")
    assert read_regular(os.fspath(tmp_path / "file"), 10) == b"0123456789"
    assert read_regular(os.fspath(tmp_path / "file"), 9) is None
