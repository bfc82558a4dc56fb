"""Signals to the launcher, its sudden death, and what stays behind."""

from __future__ import annotations

from tests.parity.model import Better, End, Make, Probe, Send, Start, Until
from tests.parity.probes.common import STANDALONE, TWO

# Both ranks wait and end by what they catch; they tell which signals came.
WAITING = """from tell import *
catch("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
meet("up", 2)
mark("ready")
wait_for("never", 40)
"""
# A rank whose last save needs what it has started: a process of its session, and one with a session of its own.
SAVING = """from tell import *
def start(own):
    code = "import sys; print('up', flush=True); sys.stdin.readline(); print('saved', flush=True)"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    helper = subprocess.Popen([sys.executable, "-c", code], start_new_session=own, **pipes)
    helper.stdout.readline()
    return helper
def save(*_):
    try:
        worker.wait(0.3)
    except subprocess.TimeoutExpired:
        pass
    tell(worker=ask(worker), writer=ask(writer))
    os._exit(0)
def ask(helper):
    try:
        print("now", file=helper.stdin, flush=True)
        return helper.stdout.readline().strip()
    except OSError:
        return ""
worker, writer = start(False), start(True)
signal.signal(signal.SIGTERM, save)
meet("up-" + str(RESTART), 2)
"""
SAVED = Better("told.*.worker", "saved", "a stop signals only ranks, and their child processes end after them")
STATUS = "a job that a signal stops ends with 128 + its number, as in a shell, so that schedulers recognise it"
NO_TRACE = Better("traceback.*", False, "a signal is not an error of the launcher: one line, no traceback", "W8")
GONE = Better("left", [], "no process of a job outlives its launcher")


def stopped(name: str, signum: int, flags: tuple[str, ...] = (), args: tuple[str, ...] = ()) -> Probe:
    """The launcher gets a signal that ends the job."""
    return Probe(
        "signal-" + name.removeprefix("SIG").lower(),
        f"{name} to the launcher reaches the ranks and ends the job",
        (*TWO, *args, "{script}"),
        script=WAITING,
        steps=(Start(), Until("ready"), Send(name)),
        facts=("status", "told", "report", "traceback", "left"),
        better=(Better("status.0", 128 + signum, STATUS, "W8"), NO_TRACE),
        flags=flags,
        live=name == "SIGTERM",
    )


PROBES = (
    stopped("SIGTERM", 15),
    stopped("SIGINT", 2),
    stopped("SIGHUP", 1),
    stopped("SIGQUIT", 3),
    stopped("SIGUSR2", 12, ("--signals-to-handle",), ("--signals-to-handle", "SIGUSR2,SIGTERM")),
    Probe(
        "signals-to-handle",
        "--signals-to-handle is TORCHELASTIC_SIGNALS_TO_HANDLE; an unknown name only warns",
        (*STANDALONE, "--signals-to-handle", "SIGTERM,SIGNONE", "{script}"),
        script='from tell import *\ntell(env=env("TORCHELASTIC_SIGNALS_TO_HANDLE"))\n',
        facts=("status", "told", "stderr_names"),
        culprit="SIGNONE",
        flags=("--signals-to-handle",),
    ),
    Probe(
        "signal-no-restart",
        "a signal is not a failure: no rank restarts although restarts are left",
        (*TWO, "--max-restarts", "3", "{script}"),
        script=WAITING,
        steps=(Start(), Until("ready"), Send("SIGTERM")),
        facts=("status", "told", "left"),
        better=(Better("status.0", 143, STATUS, "W8"),),
    ),
    Probe(
        "signal-hard",
        "after --shutdown-timeout, the launcher kills ranks that ignore the signal",
        (*TWO, "--shutdown-timeout", "1", "{script}"),
        script="""from tell import *
signal.signal(signal.SIGTERM, signal.SIG_IGN)
meet("up", 2)
mark("ready")
wait_for("never", 40)
""",
        steps=(Start(), Until("ready"), Send("SIGTERM")),
        facts=("status", "quick", "left"),
        better=(Better("status.0", 143, STATUS, "W8"),),
        flags=("--shutdown-timeout",),
    ),
    Probe(
        "signal-grace",
        "ranks have time to end normally after the signal",
        (*TWO, "{script}"),
        script="""from tell import *
catch("SIGTERM", status=None)
meet("up", 2)
mark("ready")
wait_for("caught-" + RANK + "-SIGTERM", 40)
wait_for("go-on", 20)
tell(saved=True)
""",
        steps=(Start(), Until("ready"), Send("SIGTERM"), Until("caught-0-SIGTERM"), Make("go-on")),
        facts=("status", "told", "left"),
        better=(Better("status.0", 143, STATUS, "W8"),),
    ),
    Probe(
        "signal-workers",
        "a rank that saves at SIGTERM still has its workers, and its helpers in other sessions",
        (*TWO, "{script}"),
        script=SAVING + 'mark("ready")\nwait_for("never", 40)\n',
        steps=(Start(), Until("ready"), Send("SIGTERM")),
        facts=("status", "told", "left"),
        better=(Better("status.0", 143, STATUS, "W8"), SAVED),
        live=True,
    ),
    Probe(
        "restart-workers",
        "the same for ranks that a restart stops",
        (*TWO, "--max-restarts", "1", "{script}"),
        script=SAVING + 'if RESTART == 0:\n    if RANK == "1":\n        sys.exit(3)\n    wait_for("never", 40)\n',
        facts=("status", "told", "left"),
        better=(SAVED,),
    ),
    Probe(
        "signal-rendezvous",
        "SIGTERM while the launcher waits for other nodes",
        ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:{port}", "{script}"),
        script="from tell import *\ntell(ran=True)\n",
        steps=(Start(), Until("listens"), Send("SIGTERM")),
        facts=("status", "told", "traceback", "left"),
        better=(Better("status.0", 143, STATUS + "; torchrun has no handler yet and dies by the signal", "W8"),),
    ),
    Probe(
        "signal-forward",
        "SIGUSR1 goes to the ranks and the job continues (torchrun dies of it and leaves its ranks running)",
        (*TWO, "{script}"),
        script="""from tell import *
catch("SIGUSR1", status=None)
meet("up", 2)
mark("ready")
wait_for("caught-" + RANK + "-SIGUSR1", 5)
tell(saved=True)
""",
        steps=(Start(), Until("ready"), Send("SIGUSR1"), End()),
        facts=("status", "told", "left"),
        better=(
            Better("status.0", 0, "bootrun passes on preemption notices of Slurm, and the job continues", "W16"),
            Better("told.*.signals", ["SIGUSR1"], "each rank gets the signal once", "W16"),
            Better("told.*.saved", True, "the job continues", "W16"),
            GONE,
        ),
    ),
    Probe(
        "launcher-killed",
        "SIGKILL of the launcher: its ranks and their children",
        (*TWO, "{script}"),
        script="""from tell import *
child("of-rank-" + RANK, session=True)
meet("up", 2)
mark("ready")
wait_for("never", 30)
""",
        steps=(Start(), Until("ready"), Send("SIGKILL")),
        facts=("status", "left"),
        better=(Better("left", [], "the supervisor ends the whole process tree, also in other sessions", "W3"),),
    ),
    Probe(
        "crash-children",
        "children of a rank that crashes, in its session and in another one",
        (*TWO, "{script}"),
        script="""from tell import *
if RANK == "1":
    wait_for("up")
    child("same")
    child("own", session=True)
    os.kill(os.getpid(), signal.SIGKILL)
mark("up")
wait_for("never", 30)
""",
        facts=("status", "left"),
        better=(Better("left", [], "bootrun ends the whole process tree of a crashed rank", "W2"),),
    ),
    Probe(
        "success-children",
        "children that a rank leaves behind when it succeeds",
        (*STANDALONE, "--shutdown-timeout", "1", "{script}"),
        script='from tell import *\nchild("left", session=True)\n',
        facts=("status", "left"),
        better=(
            Better(
                "left", [], "they have --shutdown-timeout to finish; bootrun names them, then stops them", "W2"
            ),
        ),
    ),
    Probe(
        "stopped-children",
        "children of ranks when a signal stops the launcher",
        (*TWO, "--shutdown-timeout", "1", "{script}"),
        script="""from tell import *
child("of-" + RANK, session=True, deaf=True)
meet("up", 2)
mark("ready")
wait_for("never", 30)
""",
        steps=(Start(), Until("ready"), Send("SIGTERM")),
        facts=("status", "left"),
        better=(
            Better("status.0", 143, STATUS, "W8"),
            Better("left", [], "bootrun ends the whole process tree of each rank", "W2"),
        ),
    ),
)
