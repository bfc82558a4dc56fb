"""A real mount that does not answer: named by hand and while ranks run, and nothing else waits for it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.health.finding import FAIL, HUNG
from tests.support import Programs, lacking, python

pytestmark = [pytest.mark.system, pytest.mark.slow]

# In a mount namespace of its own: a FUSE file system whose server says nothing, not even at the beginning.
DRIVER = """
import ctypes, json, os, subprocess, sys
point, python = sys.argv[1], sys.executable
fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
libc = ctypes.CDLL(None, use_errno=True)
options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
assert not libc.mount(b"silent", point.encode(), b"fuse", 0, options), os.strerror(ctypes.get_errno())
from bootseer.cli import check
status = check.main(["--only", "mounts", "--only", "memory", "--timeout", "1", "--interval", "0", "--json"])
print(status, flush=True)
argv = [python, "-P", "-m", "bootseer.health.while_running", "--every", "0.2", "--timeout", "1"]
with subprocess.Popen(argv, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as watching:
    def until(level, is_over):
        for line in watching.stdout:
            found = json.loads(line)
            if (found["where"], found["level"], found["is_over"]) == (point, level, is_over):
                print(line.decode(), end="", flush=True)
                return
    until("hung", False)
    os.close(fd)  # its server is gone: now it answers, by an error
    until("fail", False)
    until("hung", True)
    watching.stdin.close()
sys.exit(watching.wait())
"""


def test_a_silent_file_system(program: Programs, script: Callable[..., str], tmp_path: Path) -> None:
    if os.geteuid() or not os.path.exists("/dev/fuse") or shutil.which("unshare") is None:
        lacking("needs root, /dev/fuse and unshare")
    point = tmp_path / "mount"
    point.mkdir()
    run = program("unshare", "--mount", *python(script(DRIVER)), point, deadline_s=60)
    assert run.status == 0, run.stderr
    record, status, *lines = run.stdout.splitlines()
    assert status == "3"
    found = {(each["check"], each["where"]): each for each in json.loads(record)["findings"]}
    hung = found["mounts", os.fspath(point)]
    assert hung["level"] == HUNG and hung["what"].startswith("no answer in 1 s")
    assert found["memory", ""]["level"] != HUNG
    assert json.loads(record)["wall_s"] < 10
    assert [(json.loads(line)["level"], json.loads(line)["is_over"]) for line in lines] == [
        (HUNG, False),
        (FAIL, False),
        (HUNG, True),
    ]
