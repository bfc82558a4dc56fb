"""Files that are replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.linux.files import replace_file


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(str(path), b"old")
    replace_file(str(path), b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(str(tmp_path / "file"), b"data")
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(FileNotFoundError):
        replace_file(str(tmp_path / "missing" / "file"), b"data")
