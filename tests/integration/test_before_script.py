"""Errors before a script's first statement would come again: the job ends at once, and the report shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import support

BROKEN = {
    "syntax": (b"import os\ndef f(:\n    pass\n", "SyntaxError", True),
    "indentation": (b"if 1:\npass\n", "IndentationError", True),
    "encoding": (b"x = '\xff\xfe'\n", "SyntaxError", True),
    "null": (b"x = 1\n\0\n", "null bytes", True),
    "in a module": (b"import broken\n", "SyntaxError", True),
    "on purpose": (b"raise ValueError('may pass')\n", "ValueError: may pass", False),
}


@pytest.mark.parametrize("way", ["off", "on"])
@pytest.mark.parametrize("what", BROKEN)
def test_a_script_that_cannot_be_read(bootrun: support.Programs, tmp_path: Path, what: str, way: str) -> None:
    text, said, ends = BROKEN[what]
    (tmp_path / "train.py").write_bytes(text)
    (tmp_path / "broken.py").write_text("def f(:\n")
    flags = ("--standalone", "--nproc-per-node", 2, "--max-restarts", 1, "--log-dir", tmp_path / "logs")
    ways = ("--restart-backoff", 0, "--fork-ranks", way, "--preload", "none", "--same-error", "give-up")
    run = bootrun(*flags, *ways, tmp_path / "train.py")
    assert run.status == 1
    _, _, report = run.stderr.partition("Root Cause")
    assert said in report.partition("traceback :")[2]
    attempts = [name for name in os.listdir(next((tmp_path / "logs").iterdir())) if name.startswith("attempt_")]
    assert len(attempts) == (1 if ends else 2)
    assert ("--same-error restart" in run.stderr) == ends or not ends


def test_a_module_that_is_not_there(bootrun: support.Programs, tmp_path: Path) -> None:
    run = bootrun("--standalone", "--max-restarts", 2, "--log-dir", tmp_path / "logs", "-m", "no_such_module")
    assert run.status == 1
    assert "No module named no_such_module" in run.stderr.partition("traceback :")[2]
    assert "restart 1 of" not in run.stderr
