"""Jobs in trouble under torchrun and under bootrun, side by side: `python -m bench.side_by_side`.

Each case runs one script under both launchers, with real processes, and prints what came of it. In these cases an
acceleration or the launcher itself once ended, slowed or falsified a job. A row ends with `wrong` if
bootrun does worse than the case allows; the exit status is then 1. Needs torch. A mount that fails is in
`python -m bench.mount_fails`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bootseer import aio
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.writing.writer import write_version
from bootseer.storage.local.store import LocalStore

DEADLINE_S = 120.0
STOPPED_S = 20.0  # longer than both launchers wait for a silent node
UNIT_BYTES = 1 << 20
PROGRAMS = {"torchrun": "torch.distributed.run", "bootrun": "launcher"}


class Row(NamedTuple):
    """What came of one job."""

    case: str
    launcher: str
    statuses: tuple[int, ...]
    seen: str
    is_right: bool


def command(launcher: str, *words: object) -> list[str]:
    """The launcher's command."""
    return [sys.executable, "-m", PROGRAMS[launcher], *map(str, words)]


def run(top: Path, words: list[str]) -> tuple[int, str]:
    """Status and output of a job on one node."""
    done = subprocess.run(words, cwd=top, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return done.returncode, done.stdout + done.stderr


def seen_in(said: str) -> str:
    """What the ranks have written in lines that begin with `seen: `."""
    return ", ".join(sorted({line[6:].strip() for line in said.splitlines() if line.startswith("seen: ")}))


# ---- what a library fixes at its import ------------------------------------------------------------------------


def imports(top: Path) -> Iterator[Row]:
    """A module reads a variable at its import, which another module has set from a file; the file changes."""
    (top / "dot.py").write_text("import os\nos.environ['MODE'] = open('env.txt').read()\n")
    (top / "settings.py").write_text("import os\nMODE = os.environ['MODE']\n")
    (top / "train.py").write_text("import os, dot, settings\nos.write(1, f'seen: {settings.MODE}\\n'.encode())\n")
    for launcher in PROGRAMS:
        statuses, found = [], []
        more = ("--fork-ranks", "auto") if launcher == "bootrun" else ()
        for mode in "abc":
            (top / "env.txt").write_text(mode)
            status, said = run(top, command(launcher, "--standalone", "--nproc-per-node", 2, *more, "train.py"))
            statuses.append(status)
            found.append(seen_in(said))
        yield Row("A2 fixed at import", launcher, tuple(statuses), " ".join(found), found == ["a", "b", "c"])


# ---- checkpoints -----------------------------------------------------------------------------------------------


def damaged(top: Path) -> Iterator[Row]:
    """A bit of the newest checkpoint is wrong; the script starts from nothing if there is no file."""
    old, new = (random.Random(seed).randbytes(4 * UNIT_BYTES) for seed in (1, 2))
    (top / "train.py").write_text(
        "import os, sys, zlib\n"
        "path = os.path.join(os.environ.get('BOOTSEER_CHECKPOINT', sys.argv[-1]), 'model.bin')\n"
        "sums = dict(pair.split('=') for pair in open('sums').read().split())\n"
        "found = str(zlib.crc32(open(path, 'rb').read())) if os.path.exists(path) else ''\n"
        "print('seen:', sums.get(found, 'wrong bytes') if found else 'nothing')\n"
    )
    (top / "sums").write_text(f"{zlib.crc32(old)}=old {zlib.crc32(new)}=new")
    (top / "plain").mkdir()
    (top / "plain" / "model.bin").write_bytes(b"x" + new[1:])
    status, said = run(top, command("torchrun", "--standalone", "train.py", "plain"))
    yield Row("A5 damaged checkpoint", "torchrun", (status,), seen_in(said), True)
    store = LocalStore(os.fspath(top))
    versions = [
        aio.run_sync(write_version(store, "ckpt", [("model.bin", MemoryInput([data]))])) for data in (old, new)
    ]
    aio.close()
    with (top / versions[1].files[0].stripes[0]).open("r+b") as file:
        file.seek(17)
        file.write(b"wrong")
    for more, right in (((), (1, "")), (("--checkpoint-fallback", "older"), (0, "old"))):
        words = command("bootrun", "--standalone", "--load-checkpoint", top / "ckpt", *more, "train.py")
        status, said = run(top, words)
        name = " ".join(("bootrun", *more))
        yield Row("A5 damaged checkpoint", name, (status,), seen_in(said), (status, seen_in(said)) == right)


def half_done(top: Path) -> Iterator[Row]:
    """The newest save is cut off; the script takes what it is given, else the newest by name."""
    header = json.dumps({"step": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    whole = [len(header).to_bytes(8, "little") + header + number.to_bytes(4, "little") for number in (1, 2)]
    for number, data in ((1, whole[0]), (2, whole[1][:-3])):
        (top / f"saves/checkpoint-{number}").mkdir(parents=True)
        (top / f"saves/checkpoint-{number}/model.safetensors").write_bytes(data)
    (top / "train.py").write_text(
        "import glob, os\nfrom safetensors.numpy import load_file\n"
        "given = os.environ.get('BOOTSEER_CHECKPOINT') or sorted(glob.glob('saves/checkpoint-*'))[-1]\n"
        "path, = glob.glob(given + '/**/model.safetensors', recursive=True)\n"
        "print('seen: step', load_file(path)['step'][0])\n"
    )
    for launcher in PROGRAMS:
        more = ("--load-checkpoint", "saves") if launcher == "bootrun" else ()
        status, said = run(top, command(launcher, "--standalone", *more, "train.py"))
        is_right = launcher == "torchrun" or (status, seen_in(said)) == (0, "step 1")
        yield Row("A6 half-done save", launcher, (status,), seen_in(said), is_right)


# ---- the launcher ----------------------------------------------------------------------------------------------


def silent_node(top: Path) -> Iterator[Row]:
    """The launcher of one of two nodes stands still while its rank runs, and comes back."""
    (top / "train.py").write_text(
        f"import os, time\ntime.sleep({STOPPED_S + 8})\nprint('seen:', os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
    )
    for launcher in PROGRAMS:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = command(launcher, "--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d")
        words += ["--rdzv-id", "side", "--rdzv-endpoint", f"127.0.0.1:{port}", "train.py"]
        jobs = [
            subprocess.Popen(words, cwd=top, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for _ in range(2)
        ]
        time.sleep(6.0)
        jobs[1].send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        jobs[1].send_signal(signal.SIGCONT)
        said = "\n".join(job.communicate(timeout=DEADLINE_S)[0] for job in jobs)
        statuses = tuple(job.returncode for job in jobs)
        yield Row("B10 silent node", launcher, statuses, f"attempts {seen_in(said)}", statuses == (0, 0))


def stop(top: Path) -> Iterator[Row]:
    """SIGTERM: the rank saves what a process of its own has, as those of a DataLoader do."""
    (top / "train.py").write_text(
        "import signal, subprocess, sys, time\n"
        "code = 'import sys; sys.stdin.readline(); time = __import__(\"time\"); time.sleep(0.3); print(42)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], stdin=-1, stdout=-1, text=True)\n"
        "def save(*_):\n"
        "    print('seen: saved', child.communicate('go\\n')[0].strip(), flush=True)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open('ready', 'w').close()\n"
        "time.sleep(60)\n"
    )
    for launcher in PROGRAMS:
        (top / "ready").unlink(missing_ok=True)
        job = subprocess.Popen(
            command(launcher, "--standalone", "train.py"),
            cwd=top,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        end_s = time.monotonic() + DEADLINE_S
        while not (top / "ready").exists() and time.monotonic() < end_s:
            time.sleep(0.05)
        job.terminate()
        said = job.communicate(timeout=DEADLINE_S)[0]
        yield Row("B12 stop", launcher, (job.returncode,), seen_in(said), seen_in(said) == "saved 42")


def inherited(top: Path) -> Iterator[Row]:
    """The starter of the job has blocked SIGCHLD, and all signals that can be blocked."""
    (top / "train.py").write_text("import os, sys\nos.write(1, b'seen: ran\\n')\nsys.exit(int(sys.argv[-1]))\n")
    code = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals());"
        " os.execv(sys.argv[1], sys.argv[1:])"
    )
    for launcher in PROGRAMS:
        statuses, found = [], []
        for wanted in (0, 3):
            words = command(launcher, "--standalone", "--nproc-per-node", 2, "train.py", wanted)
            status, said = run(top, [sys.executable, "-c", code, *words])
            statuses.append(status)
            found.append(seen_in(said))
        is_right = statuses == [0, 1] and found == ["ran", "ran"]
        yield Row("B13 inherited state", launcher, tuple(statuses), ", ".join(found), is_right)


CASES: tuple[Callable[[Path], Iterator[Row]], ...] = (imports, damaged, half_done, silent_node, stop, inherited)


def main() -> int:
    """Run all cases and print the table."""
    is_right = True
    print(f"{'case':24}{'launcher':38}{'status':14}{'of the ranks':24}")
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="side-by-side-") as directory:
            top = Path(directory)
            os.environ.update(BOOTSEER_CACHE_DIR=f"{top}/records", BOOTSEER_CACHE=f"{top}/cache")
            for row in case(top):
                statuses = " ".join(map(str, row.statuses))
                end = "" if row.is_right or row.launcher == "torchrun" else "wrong"
                print(f"{row.case:24}{row.launcher:38}{statuses:14}{row.seen:24}{end}", flush=True)
                is_right &= not end
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
