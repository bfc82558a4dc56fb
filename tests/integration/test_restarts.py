"""Restarts of real jobs in awkward surroundings."""

from __future__ import annotations

import glob
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests import support
from tests.support import BOOTRUN, Programs

Script = Callable[..., str]

# Leaves a connection in TIME_WAIT on the master port, as torch's store does.
OLD_CONNECTION = """
import os, socket, sys, time
address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    server = socket.create_server(address)
    peer, _ = server.accept()
    peer.close()
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    assert peer.recv(1) == b""
    peer.close()
os.write(1, f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} port {address[1]}\\n".encode())
sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
"""
TAKES_THE_LOG_DIR = """
import os, shutil, sys
run_dir = os.path.dirname(os.path.dirname(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])))
shutil.rmtree(run_dir)
open(run_dir, "w").close()
sys.exit(3)
"""
# Its connections close while its interpreter ends, which takes long beside others: a peer fails before it.
ENDS_SLOWLY = """
import atexit, os, signal, sys
def at_exit():
    os.mkfifo("over")
    open("over", "w").close()
    signal.pause()
if os.environ["RANK"] == "1":
    atexit.register(at_exit)
    sys.exit(3)
while not os.path.exists("over"): pass
open("over").close()
raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:8929")
"""
WAITS = "import os, signal; open('up', 'w').write(str(os.getpid())); signal.pause()"


def test_one_port_is_enough_for_restarts(bootrun: support.Programs, script: Script, free_port: int) -> None:
    run = bootrun(
        *("--standalone", "--nproc-per-node", 2, "--max-restarts", 1),
        *("--rdzv-conf", f"port_range={free_port}-{free_port}", script(OLD_CONNECTION)),
    )
    assert run.status == 0, run.stderr
    assert f"attempt 1 port {free_port}" in run.stdout


def test_attempt_that_cannot_be_prepared_ends_the_job_in_one_line(
    bootrun: support.Programs, script: Script
) -> None:
    run = bootrun("--standalone", "--max-restarts", 3, "--log-dir", "logs", script(TAKES_THE_LOG_DIR))
    assert run.status == 1
    assert run.stderr.count("bootrun: error: cannot make the log directory") == 1
    assert "Traceback" not in run.stderr


def test_signal_that_hits_rank_and_bootrun_alike_is_no_failure(bootrun: support.Programs, script: Script) -> None:
    """As schedulers do that signal all processes of a job."""
    program = bootrun.start("--standalone", "--max-restarts", 3, script(WAITS))
    up = os.path.join(program.dir, "up")
    support.wait_until(lambda: os.path.exists(up) and os.path.getsize(up))
    with open(up, encoding="ascii") as file:
        os.kill(int(file.read()), signal.SIGTERM)
    program.signal(signal.SIGTERM)
    run = program.wait(10)
    assert run.status == 143
    assert "FAILED" not in run.stderr
    assert "restart 1" not in run.stderr


def test_who_is_slow_to_end_is_still_the_first_that_failed(bootrun: support.Programs, script: Script) -> None:
    run = bootrun("--standalone", "--nproc-per-node", 2, "--log-dir", "logs", script(ENDS_SLOWLY))
    assert run.status == 1
    (found,) = glob.glob(os.path.join(run.dir, "logs", "*", "failure-0.json"))
    with open(found, encoding="utf-8") as file:
        page = json.load(file)
    assert (page["rank"], page["status"]) == (1, 3), page


DIES_LATE = """
import os, time
time.sleep(1)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    os._exit(3)
"""


def test_nothing_is_imported_between_a_failure_and_the_next_attempt(program: Programs, tmp_path: Path) -> None:
    """What handles a failure is imported while ranks run, as each import would delay the restart."""
    (tmp_path / "train.py").write_text(DIES_LATE)
    words = [BOOTRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", tmp_path / "train.py"]
    job = program.start(sys.executable, "-X", "importtime", *words)
    out = job.wait()
    assert out.status == 0
    lines = out.stderr.splitlines()
    starts = next(number for number, line in enumerate(lines) if "attempt 1 starts" in line)
    ready = max(
        number for number, line in enumerate(lines[:starts]) if line.endswith(" launcher.rules.node_rules")
    )
    late = [line for line in lines[ready:starts] if line.startswith("import time:") and " launcher." in line]
    assert late[1:] == []  # the first one is that of `ready`
