"""Figures of older code are told from figures of today's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench import stale

MODULE = '"""What it is."""\n\n\ndef double(value):\n    """Twice."""\n    return value * 2  # quick\n'


def git(root: Path, *words: str) -> str:
    given = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(given, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "agent.py").write_text(MODULE)
    (tmp_path / "other.py").write_text(MODULE)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def changed(root: Path) -> tuple[str, ...] | None:
    return stale.changed_since(str(root), git(root, "rev-parse", "HEAD"), ("launcher",))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MODULE, ()),
        (MODULE.replace("# quick", "# quicker"), ()),
        (MODULE.replace("Twice.", "Two times.").replace("What it is", "What it was"), ()),
        (MODULE.replace("value * 2", "(value *\n        2)"), ()),
        (MODULE.replace("value * 2", "value + value"), ("launcher/agent.py",)),
        (MODULE.replace("value", "number"), ("launcher/agent.py",)),
        (MODULE + "\nLIMIT = 3\n", ("launcher/agent.py",)),
    ],
)
def test_only_code_counts(root: Path, text: str, expected: tuple[str, ...]) -> None:
    (root / "launcher" / "agent.py").write_text(text)
    assert changed(root) == expected


def test_a_file_that_is_gone_and_one_that_came(root: Path) -> None:
    (root / "launcher" / "agent.py").unlink()
    assert changed(root) == ("launcher/agent.py",)
    git(root, "checkout", "-q", ".")
    before = git(root, "rev-parse", "HEAD")
    (root / "launcher" / "new.py").write_text(MODULE)
    git(root, "add", ".")
    git(root, "commit", "-qm", "second")
    assert stale.changed_since(str(root), before, ("launcher",)) == ("launcher/new.py",)


def test_what_a_bench_does_not_run_does_not_count(root: Path) -> None:
    (root / "other.py").write_text("pass\n")
    assert changed(root) == ()


@pytest.mark.parametrize("commit", ["0" * 40, "HEAD-dirty"])
def test_of_a_commit_that_is_not_here_nothing_is_known(root: Path, commit: str) -> None:
    assert stale.changed_since(str(root), commit, ("launcher",)) is None


def test_files_of_figures_are_read(root: Path) -> None:
    directory = root / "docs" / "numbers"
    directory.mkdir(parents=True)
    commit = git(root, "rev-parse", "HEAD")
    document = {"bench": "launch", "commit": commit, "figures": {"launch.a": {}, "launch.b": {}}}
    (directory / "launch.json").write_text(json.dumps(document))
    (found,) = stale.find_recorded(str(root))
    assert (found.bench, found.figures, found.is_stale) == ("launch", ("launch.a", "launch.b"), False)
    assert stale.describe(found).startswith("today  docs/numbers/launch.json: launch.a, launch.b")
    (root / "launcher" / "agent.py").write_text("pass\n")
    (found,) = stale.find_recorded(str(root))
    assert found.is_stale
    assert "since then changed: launcher/agent.py" in stale.describe(found)


def test_each_bench_names_paths_that_there_are() -> None:
    for bench, paths in stale.MEASURED.items():
        for path in paths:
            assert (Path(stale.ROOT) / path).exists(), f"{bench}: {path}"
