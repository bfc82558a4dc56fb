"""What ranks of a probe use to tell about themselves; lies beside the probe's script. Standard library only.

`tell` writes a file for each start of a rank: r<RANK>.<n>.json, n counting that rank's starts. Marks are empty
files: ranks and the runner wait for them, so nothing is a matter of luck or of time.
"""

import json
import os
import signal
import subprocess
import sys
import time

OUT = os.environ["PROBE_OUT"]
RANK = os.environ.get("RANK", "x")
RESTART = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
_path = None
_facts = {}


def tell(**facts):
    """Adds facts to what this start of the rank has told."""
    global _path
    _facts.update(facts)
    temp = f"{OUT}/.{os.getpid()}.tmp"
    with open(temp, "w") as file:
        json.dump(_facts, file)
    if _path is not None:
        os.replace(temp, _path)
        return
    start = 0
    while True:
        path = f"{OUT}/r{RANK}.{start}.json"
        try:
            os.link(temp, path)
        except FileExistsError:
            start += 1
            continue
        os.unlink(temp)
        _path = path
        return


def env(*names):
    """These variables, None where there is none."""
    return {name: os.environ.get(name) for name in names}


def added_env():
    """Variables that the launcher's own environment does not have, or has with another value."""
    with open(f"{OUT}/../environ.{os.environ['PROBE_AGENT']}.json") as file:
        before = json.load(file)
    now = {os.fsdecode(name): os.fsdecode(value) for name, value in os.environb.items()}
    added = {name: value for name, value in now.items() if before.get(name) != value}
    added.update({name: "<removed>" for name in before if name not in now})
    return added


def mark(name):
    """Makes a mark."""
    with open(f"{OUT}/{name}.mark", "w"):
        pass


def wait_for(name, deadline_s=25.0):
    """Waits for a mark; ends the rank when it does not come."""
    if not comes(name, deadline_s):
        sys.exit(f"no mark {name}")


def comes(name, deadline_s):
    """Whether a mark comes within this time."""
    end = time.monotonic() + deadline_s
    while not os.path.exists(f"{OUT}/{name}.mark"):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def meet(name, ranks):
    """Waits until that many ranks are here."""
    mark(f"{name}-{RANK}")
    for rank in range(ranks):
        wait_for(f"{name}-{rank}")


def catch(*names, status=0):
    """On one of these signals: tells it and ends with this status (None: goes on)."""
    seen = []

    def handle(number, _frame):
        seen.append(signal.Signals(number).name)
        tell(signals=seen)
        mark(f"caught-{RANK}-{signal.Signals(number).name}")
        if status is not None:
            os._exit(status)

    for name in names:
        signal.signal(signal.Signals[name], handle)


def child(name, session=False, deaf=False):
    """A process of this rank that lives on for long; `name` is what the runner calls it."""
    program = "import time; print('child up', flush=True); time.sleep(100)"
    if deaf:
        program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + program
    process = subprocess.Popen(
        [sys.executable, "-c", program, "child-" + name], start_new_session=session, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    return process


def write_error_file(data):
    """As torch's @record does, for ranks that do not import torch."""
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        file.write(data if isinstance(data, str) else json.dumps(data))


def error_data(trace):
    """What @record writes."""
    extra = {"py_callstack": trace, "timestamp": "1700000000"}
    return {"message": {"message": "E: text", "extraInfo": extra}}


def launcher():
    """The command of the launcher that runs this, for ranks that run a launcher themselves."""
    return json.loads(os.environ["PROBE_LAUNCHER"])
