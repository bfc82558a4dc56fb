"""What the watch of set-up commands records of a program, depending on which one has started it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from bootseer.env.service import supervisor
from tests import support

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def watched(directory: Path, command: str) -> dict[str, Any]:
    """Runs a command as set-up does, and gives the record."""
    watch = {"package": TOP, "looks": True, "roots": [os.fspath(directory)]}
    order = {"prefix": [], "commands": [command], "cwd": os.fspath(directory), "environ": {}, "watch": watch}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = [sys.executable, "-I", "-S", "-X", "utf8", supervisor.__file__]
        process = subprocess.Popen(argv, stdin=theirs, cwd="/")
        theirs.close()
        ours.sendall(json.dumps(order).encode() + b"\n")
        with ours.makefile() as answers:
            found = [json.loads(line) for line in answers]
        process.wait(20)
    assert {"done": 0, "status": 0} in found
    record: dict[str, Any] = next(each["watched"] for each in found if "watched" in each)
    if record["why"]:
        support.lacking(f"set-up cannot be watched: {record['why']}")
    return record


def test_a_program_that_make_starts_is_no_compiler(tmp_path: Path) -> None:
    project, outside = tmp_path / "project", tmp_path / "outside"
    project.mkdir()
    outside.mkdir()
    make, step, data = outside / "make", outside / "step", outside / "data"
    shutil.copy(os.path.realpath("/bin/sh"), make)
    data.write_text("input")
    step.write_text(f"#!/bin/sh\nread -r text < {data}\n")
    step.chmod(0o755)
    touched = watched(project, f"{make} -c '{step}; true'")["touched"]
    assert "r" in touched[os.fspath(data)]["ops"]


def test_what_a_compiler_reads_is_not_recorded(tmp_path: Path) -> None:
    project, outside = tmp_path / "project", tmp_path / "outside"
    project.mkdir()
    outside.mkdir()
    make, data = outside / "make", outside / "data"
    shutil.copy(os.path.realpath("/bin/sh"), make)
    data.write_text("input")
    touched = watched(project, f"{make} -c 'read -r text < {data} || true'")["touched"]
    assert os.fspath(data) not in touched
