"""`make demo`: trains examples/train.py on two ranks, lets rank 1 die once, and checks what came of it.

What is checked is read from what the job left, not from what bootrun says of itself: the error file that rank 1
wrote, the log folders of two attempts, the checkpoint that the second attempt went on from, and the final loss.
Anything missing makes the demo fail. Stdlib only; `--launcher torchrun` runs the same under torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SAVE_EVERY = 50
DIES_AT = 130
RESUMES_AT = DIES_AT // SAVE_EVERY * SAVE_EVERY
TARGET_LOSS = 2.3  # nats a byte; guessing by the frequency of bytes alone gives about 3.1
DEADLINE_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Train, lose a rank, restart, resume.")
    parser.add_argument("--launcher", default="bootrun", choices=("bootrun", "torchrun"))
    launcher = parser.parse_args().launcher
    folder = tempfile.mkdtemp(prefix="bootseer-demo-")
    begin_s = time.monotonic()
    status, output = run(command(launcher, folder), launcher)
    problems = check(status, output, os.path.join(folder, "logs"))
    print(f"\nThe demo took {time.monotonic() - begin_s:.0f} s.", flush=True)
    if problems:
        for problem in problems:
            print(f"demo: FAILED: {problem}")
        print(f"demo: logs and checkpoints are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    print("demo: ok")
    return 0


def command(launcher: str, folder: str) -> list[str]:
    """The job; its checkpoints and logs go below `folder`."""
    return [
        os.path.join(sysconfig.get_path("scripts"), launcher),
        *("--standalone", "--nproc-per-node", "2", "--max-restarts", "1"),
        *("--log-dir", os.path.join(folder, "logs"), "--tee", "3"),
        os.path.join(TOP, "examples", "train.py"),
        *("--checkpoints", os.path.join(folder, "checkpoints"), "--save-every", str(SAVE_EVERY)),
        *("--die-rank", "1", "--die-at-step", str(DIES_AT), "--target-loss", str(TARGET_LOSS)),
    ]


def run(argv: list[str], launcher: str) -> tuple[int, str]:
    """Runs the job; its output is shown as it comes and returned."""
    environ = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if launcher == "torchrun":
        # Without it torchrun cannot restart a gloo job: the new ranks read the addresses of the old ones.
        environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    print("+ " + " ".join(argv), flush=True)
    begin_s = time.monotonic()
    lines = []
    with subprocess.Popen(
        argv, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            print(line, end="", flush=True)
            lines.append(line)
            if time.monotonic() - begin_s > DEADLINE_S:
                job.terminate()
                break
    return job.returncode, "".join(lines)


def check(status: int, output: str, logs: str) -> list[str]:
    """Prints what happened; returns what did not happen and should have."""
    print()
    problems = []

    def expect(happened: object, text: str) -> None:
        print(f"  {'yes' if happened else 'NO '}  {text}")
        if not happened:
            problems.append(f"not so: {text}")

    expect(status == 0, f"the job ended with exit status 0 (it was {status})")
    message = f"rank 1 was told to die before step {DIES_AT}"
    died = [path for path in find(logs, r"attempt_0/1/error\.json") if message in message_of(path)]
    expect(died, f"rank 1 died in attempt 0, before step {DIES_AT}")
    expect(find(logs, r"attempt_1/0/stdout\.log"), "the job was restarted: there is an attempt 1")
    expect(not find(logs, r"attempt_2/.*"), "it was restarted only once")
    expect(output.count("from the beginning") == 1, "attempt 0 began at the beginning")
    resumed = re.findall(r"resumed from step (\d+)", output)
    expect(
        resumed == [str(RESUMES_AT)],
        f"attempt 1 resumed from the checkpoint of step {RESUMES_AT} (it said {', '.join(resumed) or 'nothing'})",
    )
    losses = [float(loss) for loss in re.findall(r"final loss (\d+\.\d+)", output)]
    expect(
        len(losses) == 1 and losses[0] <= TARGET_LOSS,
        f"the final loss is at most {TARGET_LOSS} (it is {', '.join(map(str, losses)) or 'unknown'})",
    )
    return problems


def find(logs: str, pattern: str) -> list[str]:
    """Files below `logs` whose path ends as `pattern` says."""
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(logs) for name in names]
    return [path for path in paths if re.search(f"/{pattern}$", path)]


def message_of(error_file: str) -> str:
    """The message that a rank's @record wrote."""
    try:
        with open(error_file, encoding="utf-8") as file:
            return str(json.load(file)["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
