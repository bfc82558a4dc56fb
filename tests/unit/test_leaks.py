"""The leak check finds what it is for: a check that sees nothing would let every test pass."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator

import pytest

from bench import shm
from tests.leaks import LeakCheck
from tests.support import wait_until

DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
open(sys.argv[1], "w").close()
time.sleep(60)
"""


@pytest.fixture
def check() -> Iterator[LeakCheck]:
    made = LeakCheck()
    yield made
    made.close()


def test_nothing_left_is_no_leak(check: LeakCheck) -> None:
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    assert check.leftovers(0) == []


def test_daemon_in_its_own_session_is_found_and_ended(check: LeakCheck, tmp_path) -> None:
    ready = tmp_path / "ready"
    subprocess.run([sys.executable, "-c", DAEMON, os.fspath(ready)], check=True)
    wait_until(ready.exists)
    (found,) = check.leftovers(0)
    assert found.startswith("process ") and os.fspath(ready) in found
    wait_until(lambda: not check.processes(), what="the daemon was killed")


def test_thread_descriptor_and_shared_memory_are_found(check: LeakCheck) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-over")
    thread.start()
    shm = f"/dev/shm/left-by-a-test-{uuid.uuid4().hex}"
    fd = os.open(shm, os.O_CREAT | os.O_RDWR)
    try:
        found = check.leftovers(0)
        assert any("thread left-over" in line for line in found)
        assert any(f"descriptor {fd}" in line for line in found)
        assert not any(shm in line and line.startswith("file") for line in found), "it is in use"
        os.close(fd)
        assert f"file {shm}" in check.leftovers(0)
    finally:
        os.unlink(shm)
        stop.set()
        thread.join()
    assert check.leftovers(0) == []


def test_a_semaphore_that_only_its_maker_has_is_in_use() -> None:
    """Its maker has mapped it under another name."""
    before = shm.files()
    make = "from multiprocessing import get_context\nlock = get_context('spawn').Lock()\n"
    words = [sys.executable, "-c", f"{make}print(lock._semlock.name, flush=True)\ninput()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdin is not None and maker.stdout is not None
        name = f"sem.{maker.stdout.readline().strip().lstrip('/')}"
        assert name in shm.files()
        assert name not in shm.left(before)
        maker.stdin.write("\n")
    assert name not in shm.files()


def test_program_past_its_deadline_fails_and_ends(program, check: LeakCheck) -> None:
    started = program.start(sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)")
    wait_until(lambda: "here" in started.stdout)
    with pytest.raises(AssertionError, match=r"(?s)still running after 0.1 s.*here"):
        started.wait(0.1)
    assert started.process.returncode == -signal.SIGTERM
    assert check.leftovers(0) == []
