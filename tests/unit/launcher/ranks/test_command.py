"""Command lines of ranks, and the file that their interpreter runs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from string import Template
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.ranks import program
from launcher.ranks.command import INSIDE, RUN_PATH, rank_command, substitute


class Entry(NamedTuple):
    mode: str
    target: str
    args: tuple[str, ...] = ()


def words(entry: Entry, inside: str = "/x/bootstrap.py") -> list[str]:
    return rank_command(
        entry,
        python="/usr/bin/python3",
        inside=inside,
        local_rank=1,
        events_file="/log/e.jsonl",
        run_id="job",
        node="node-a",
        rank=9,
        attempt=2,
    )


@pytest.mark.parametrize("mode", ["script", "module", "run-path"])
def test_with_hooks_the_rank_side_file_gets_all_it_needs(mode: str) -> None:
    assert words(Entry(mode, "train", ("--lr", "1"))) == (
        "/usr/bin/python3 -u /x/bootstrap.py " + mode + " /log/e.jsonl job node-a 9 2  train --lr 1"
    ).split(" ")


def test_without_hooks_the_interpreter_is_bare() -> None:
    assert words(Entry("script", "a.py", ("-x",)), "") == ["/usr/bin/python3", "-u", "a.py", "-x"]
    assert words(Entry("module", "a.b", ("-x",)), "") == ["/usr/bin/python3", "-u", "-m", "a.b", "-x"]
    assert words(Entry("run-path", "/a.py", ("-x",)), "") == [
        "/usr/bin/python3",
        "-u",
        "-c",
        RUN_PATH,
        "/a.py",
        "-x",
    ]


@pytest.mark.parametrize("inside", ["", "/x/bootstrap.py"])
def test_a_program_is_itself(inside: str) -> None:
    assert words(Entry("program", "./${local_rank}", ("$local_rank",)), inside) == ["./${local_rank}", "1"]


def test_local_rank_is_filled_in() -> None:
    entry = Entry("script", "r${local_rank}.py", ("--out=${local_rank}/x", "$local_rank", "$$", "$other", "100$"))
    assert words(entry)[10:] == ["r1.py", "--out=1/x", "1", "$", "$other", "100$"]


@given(st.text(alphabet="${}local_rank x"))
def test_substitution_is_that_of_string_template(text: str) -> None:
    assert substitute(text, 3) == Template(text).safe_substitute(local_rank="3")


def test_no_template_is_loaded_for_nothing() -> None:
    code = "import sys, launcher.ranks.command as c; c.substitute('a', 1); print('string' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_both_sides_run_a_path_alike() -> None:
    from launcher.in_rank import bootstrap as inside

    assert inside.RUN_PATH == RUN_PATH


# ---- the file ------------------------------------------------------------------------------------------------


def test_the_rank_side_file_parses_in_old_interpreters() -> None:
    source = Path(INSIDE).read_text()
    tree = ast.parse(source, feature_version=(3, 4))
    assert not any(isinstance(node, (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr)) for node in ast.walk(tree))
    for node in ast.walk(tree):
        if isinstance(node, (ast.List, ast.Tuple)) and not isinstance(node.ctx, ast.Store):
            assert not any(isinstance(each, ast.Starred) for each in node.elts), f"line {node.lineno}: needs 3.5"


def test_only_what_is_loaded_anyway_is_imported_at_the_top() -> None:
    tree = ast.parse(Path(INSIDE).read_text())
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    assert sorted(names) == ["os", "sys", "time"]


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source = tmp_path / "bootstrap.py"
    source.write_text("x = 1\n")
    monkeypatch.setattr(program, "INSIDE", os.fspath(source))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    return source


def test_the_file_is_compiled_once(copied: Path) -> None:
    compiled = Path(program.inside_path(sys.executable))
    assert compiled.parent == copied.parent / "__pycache__"
    before = compiled.stat()
    assert program.inside_path(sys.executable) == os.fspath(compiled)
    assert compiled.stat().st_mtime_ns == before.st_mtime_ns
    assert compiled.stat().st_ino == before.st_ino


def test_it_is_compiled_again_when_it_changed(copied: Path) -> None:
    compiled = Path(program.inside_path(sys.executable))
    copied.write_text("x = 22\n")
    data = compiled.read_bytes()
    assert program.inside_path(sys.executable) == os.fspath(compiled)
    assert compiled.read_bytes() != data


@pytest.mark.parametrize("damage", [b"", b"garbage of more than sixteen bytes", b"\x00" * 16])
def test_a_damaged_compiled_file_is_replaced(copied: Path, damage: bytes) -> None:
    compiled = Path(program.inside_path(sys.executable))
    compiled.write_bytes(damage)
    assert program.inside_path(sys.executable) == os.fspath(compiled)
    assert len(compiled.read_bytes()) > 16 and compiled.read_bytes() != damage


def test_other_interpreters_get_the_source(copied: Path) -> None:
    assert program.inside_path("/usr/bin/python3") == os.fspath(copied)
    assert not (copied.parent / "__pycache__").exists()


def test_where_nothing_may_be_written_the_source_runs(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert program.inside_path(sys.executable) == os.fspath(copied)


def test_a_missing_file_is_left_to_the_interpreter_to_name(copied: Path) -> None:
    copied.unlink()
    assert program.inside_path(sys.executable) == os.fspath(copied)
