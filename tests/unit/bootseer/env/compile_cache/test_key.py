"""The probe of the key asks the ranks' interpreter, and runs nothing of the working folder."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from bootseer.env.compile_cache.key import probe


@pytest.mark.parametrize("name", ["platform", "json", "re", "importlib", "os"])
def test_the_probe_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / f"{name}.py").write_text(f"open({os.fspath(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    found = probe(sys.executable, {name: os.environ[name] for name in ("PATH",)})
    assert platform.python_version() in found["python"]
    assert not (tmp_path / "ran").exists()
