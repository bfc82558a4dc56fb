"""What ranks have of the state that the launcher's starter had set: signals, limits, descriptors, scheduling.

Here a starter sets it and then becomes the launcher. Apart from processes.py, which shows ranks of a plain start.
"""

from __future__ import annotations

from tests.parity.model import Better, Probe, Send, Start, Until
from tests.parity.probes.common import STANDALONE, TWO

# Absolute values only: what the starter has not set depends on the machine.
STATE = """import os
fds = [int(name) for name in os.listdir("/proc/self/fd")]
from tell import *
import ctypes, resource
fds = sorted(fd for fd in fds if os.path.exists("/proc/self/fd/" + str(fd)))
libc, parent = ctypes.CDLL(None), ctypes.c_int()
libc.prctl(2, ctypes.byref(parent))
with open("/proc/self/oom_score_adj") as file:
    oom = int(file.read())
limits = {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in ("CORE", "CPU", "FSIZE",
    "NOFILE", "STACK")}
tell(blocked=sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))), fds=fds, umask=os.umask(0),
    limits=limits, oom=oom, nice=os.getpriority(os.PRIO_PROCESS, 0), policy=os.sched_getscheduler(0),
    processors=len(os.sched_getaffinity(0)), new_privileges=libc.prctl(39, 0, 0, 0, 0),
    slack=libc.prctl(30, 0, 0, 0, 0), no_huge_pages=libc.prctl(42, 0, 0, 0, 0),
    timers=[signal.getitimer(which) for which in (0, 1, 2)], dies_with_parent=parent.value)
"""
SET_STATE = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, signal.SIGUSR2, signal.SIGALRM, 40])
[os.dup2(0, fd, inheritable=True) for fd in (3, 7, 9, 50)]
[resource.setrlimit(getattr(resource, "RLIMIT_" + name), (soft, hard)) for name, soft, hard in (("CORE", 0, 4096),
    ("CPU", 500, 900), ("FSIZE", 1 << 20, 1 << 30), ("NOFILE", 60, 90), ("STACK", 1 << 21, 1 << 22))]
libc = ctypes.CDLL(None)
os.umask(0o027)
os.setpriority(os.PRIO_PROCESS, 0, 19)
open("/proc/self/oom_score_adj", "w").write("900")
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
libc.prctl(38, 1, 0, 0, 0)
libc.prctl(29, 123456, 0, 0, 0)
libc.prctl(41, 1, 0, 0, 0)
signal.setitimer(signal.ITIMER_REAL, 300)
signal.setitimer(signal.ITIMER_PROF, 300)
"""
IGNORED = """from tell import *
with open("/proc/self/status") as file:
    mask = next(int(line.split()[1], 16) for line in file if line.startswith("SigIgn"))
tell(ignored=[n for n in range(1, 65) if mask >> (n - 1) & 1 and n not in (32, 33)])
"""
BLOCK_ALL = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
IGNORE_ENDS = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
KNOWN = "bootrun notices the ends of ranks, regardless of signals that its starter blocks or ignores"

PROBES = (
    Probe(
        "inherited-state",
        "blocked signals, limits, umask, priority and the like arrive unchanged; open files and "
        "timers do not arrive",
        (*STANDALONE, "{script}"),
        script=STATE,
        starter=SET_STATE,
        facts=("status", "told"),
        better=(
            Better("told.*.dies_with_parent", 9, "no process of a job outlives its launcher", "W3"),
            Better(
                "told.*.fds",
                [0, 1, 2, 36],
                "descriptor 36 is extra: the rank counts its steps there, for hang detection",
                hooks="auto",
            ),
        ),
    ),
    Probe(
        "inherited-ignored",
        "signals that the starter ignores stay ignored, except those that the launcher handles",
        (*STANDALONE, "{script}"),
        script=IGNORED,
        # Not SIGHUP, which nohup ignores on purpose (W17), nor the two for stacks of ranks.
        starter="[signal.signal(n, signal.SIG_IGN) for n in signal.valid_signals() - {1, 9, 17, 19, 58, 59}]",
        facts=("status", "told"),
    ),
    Probe(
        "inherited-deaf",
        "the starter ignores SIGCHLD, and so does a rank that fails; torchrun reports a success",
        (*STANDALONE, "{script}"),
        script=IGNORED + "sys.exit(3)\n",
        starter=IGNORE_ENDS,
        facts=("status", "told"),
        better=(Better("status.0", 1, KNOWN),),
    ),
    Probe(
        "inherited-closed",
        "a closed standard input stays closed",
        (*STANDALONE, "{script}"),
        script="from tell import *\ntell(is_open=os.path.exists('/proc/self/fd/0'))\n",
        starter="os.close(0)",
        facts=("status", "told"),
    ),
    Probe(
        "inherited-mask-failure",
        "a rank fails after the starter has blocked all signals except SIGTERM",
        (*TWO, "{script}"),
        script='from tell import *\nmeet("up", 2)\nif RANK == "1":\n    sys.exit(3)\nwait_for("never", 40)\n',
        starter=BLOCK_ALL + "; signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])",
        facts=("status", "quick", "left"),
    ),
    Probe(
        "inherited-mask-stop",
        "SIGTERM to a launcher after its starter has blocked it and its ranks have unblocked it",
        (*STANDALONE, "{script}"),
        script="from tell import *\nsignal.pthread_sigmask(signal.SIG_SETMASK, [])\n"
        "catch('SIGTERM')\nmark('ready')\nwait_for('never', 40)\n",
        starter=BLOCK_ALL,
        steps=(Start(), Until("ready"), Send("SIGTERM")),
        facts=("status", "told"),
        deadline_s=8.0,
        better=(
            Better("status.0", 143, KNOWN + ", and signals end the job", "W8"),
            Better("told.r0.0.signals", ["SIGTERM"], "signals end the job"),
        ),
    ),
)
