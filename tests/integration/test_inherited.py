"""Whatever state the starter has left to bootrun: ends of ranks are noticed, restarts work, signals stop the job.

What ranks get of that state is compared with torchrun's ranks by the parity probes `inherited-...`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests import support

# Sets a state, then becomes the program.
STARTER = "import ctypes, os, resource, signal, sys; exec(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"
# Rank 1 fails at first, when rank 0 runs; then both wait for SIGTERM.
JOB = """
import os, signal, sys, time
here, rank, attempt = sys.argv[1], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
def mark(name): open(here + "/" + name, "w").close()
signal.pthread_sigmask(signal.SIG_SETMASK, [])
signal.signal(signal.SIGTERM, lambda *_: (mark("heard-" + rank), sys.exit(0)))
mark(f"up-{rank}-{attempt}")
while not all(os.path.exists(f"{here}/up-{each}-{attempt}") for each in (0, 1)): time.sleep(0.005)
if (rank, attempt) == ("1", "0"): sys.exit(3)
while True: time.sleep(100)
"""
ENDLESS = "resource.RLIM_INFINITY"
STATES = {
    "SIGCHLD is blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])",
    "all are blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    "SIGCHLD is ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "all are ignored": "[signal.signal(n, signal.SIG_IGN) for n in signal.valid_signals() if n not in (9, 19)]",
    "soft limits are low": "resource.setrlimit(resource.RLIMIT_NOFILE, (24, 4096)); "
    f"resource.setrlimit(resource.RLIMIT_FSIZE, (4096, {ENDLESS}))",
    # Root without the rights to read what it may not.
    "own files are closed": "os.umask(0o777); [ctypes.CDLL(None).prctl(24, right, 0, 0, 0) for right in (1, 2)]",
    "the folder is gone": "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')",
}


@pytest.mark.parametrize("way", ["off", "on"])
@pytest.mark.parametrize("state", STATES)
def test_ends_are_noticed_restarts_and_stops_work(
    program: support.Programs, script: Callable[..., str], state: str, way: str
) -> None:
    flags = ("--standalone", "--nproc-per-node", 2, "--max-restarts", 1, "--restart-backoff", 0, "--redirects", 3)
    ways = ("--fork-ranks", way, "--preload", "none", "--log-dir", program.dir + "/logs")
    starter = support.python("-c", STARTER, STATES[state], support.BOOTRUN)
    run = program.start(*starter, *flags, *ways, script(JOB), program.dir)
    ups = [f"{program.dir}/up-{rank}-1" for rank in (0, 1)]
    support.wait_until(lambda: run.process.poll() is not None or all(map(os.path.exists, ups)), 10)
    with open(f"/proc/{run.pid}/limits", encoding="ascii") as file:
        [files] = [line.split()[3:5] for line in file if line.startswith("Max open files")]
    assert int(files[0]) >= 1024
    run.signal(signal.SIGTERM)
    ended = run.wait(10)
    assert ended.status == 143, ended.stderr
    assert all(os.path.exists(f"{program.dir}/heard-{rank}") for rank in (0, 1)), ended.stderr
    assert "exec'd" not in ended.stderr
    assert ended.seconds < 10
