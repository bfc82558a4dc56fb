"""What a rank is as a process and as a program: argv, sys.path, flags, sessions, descriptors, standard input."""

from __future__ import annotations

from tests.parity.model import Agent, Better, Has, Probe
from tests.parity.probes.common import OWN_STORE, STANDALONE, TWO

# The last flag, int_max_str_digits, is -1 by default, and 4300 from Python 3.13 on.
PROGRAM = """from tell import *
tell(argv=sys.argv, path0=sys.path[0], file=__file__, name=__name__, package=__package__,
    spec=getattr(__spec__, "name", None), flags=[*sys.flags[:-1], sys.get_int_max_str_digits()],
    executable=sys.executable, doc=__doc__,
    orig_argv=sys.orig_argv[-len(sys.argv):], main=sys.modules["__main__"].__dict__ is globals(),
    unbuffered=sys.stdout.write_through, cached=sorted(name for name in globals() if name.startswith("__")))
"""
PROCESS = """import os
fds = sorted(int(name) for name in os.listdir("/proc/self/fd"))
from tell import *
import resource, threading
def is_open(fd):
    try:
        os.fstat(fd)
        return True
    except OSError:
        return False
names = [signal.Signals(n).name for n in range(1, 32) if n not in (9, 19)]
tell(leader=os.getpid() == os.getsid(0) == os.getpgid(0), cwd=os.getcwd(), umask=oct(os.umask(0)),
    fds=[fd for fd in fds if is_open(fd)], threads=threading.active_count(), nice=os.nice(0),
    ignored=[n for n in names if signal.getsignal(signal.Signals[n]) == signal.SIG_IGN],
    handled=[n for n in names if callable(signal.getsignal(signal.Signals[n]))
             and not isinstance(signal.getsignal(signal.Signals[n]), signal.Handlers)],
    blocked=[int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    nofile=resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 64, tty=os.isatty(0))
"""
BARE = "this setting turns the rank bootstrap off, so bootrun does not record the exception"

PROBES = (
    Probe(
        "program",
        "a script sees the same as with `python -u script`: argv, __main__, __spec__, sys.path[0], flags",
        (*STANDALONE, "{script}", "a", "b c", "", "größe ☃", "--x=1"),
        script=PROGRAM,
        live=True,
    ),
    Probe(
        "program-module",
        "-m: the same as with `python -u -m name`",
        (*STANDALONE, "-m", "inner.job", "a", "--b"),
        script="",
        files={"inner/__init__.py": "# a package\n", "inner/job.py": PROGRAM},
        flags=("--module",),
    ),
    Probe(
        "program-package",
        "-m with a package runs its __main__",
        (*STANDALONE, "--module", "inner", "a"),
        files={"inner/__init__.py": "# a package\n", "inner/__main__.py": PROGRAM},
        flags=("--module",),
    ),
    Probe(
        "program-module-missing",
        "-m with a missing module: the rank fails with status 1",
        (*STANDALONE, "-m", "no_such_module"),
        facts=("status", "report"),
        better=(
            Better(
                "report.0.root.error_file",
                "{dir}/tmp/torchelastic_{random}/{uuid}_{random}/attempt_0/0/error.json",
                "bootrun records the reason why the module did not run, without @record",
                "W9",
                hooks="auto",
            ),
            Better(
                "report.0.root.traceback",
                "ImportError: No module named no_such_module",
                "bootrun records the reason why the module did not run, without @record",
                "W9",
                hooks="auto",
            ),
        ),
        flags=("--module",),
    ),
    Probe(
        "program-relative",
        "a script given by a relative path",
        (*STANDALONE, "sub/script.py"),
        files={"sub/script.py": PROGRAM.replace("from tell", "import sys; sys.path.append('.')\nfrom tell")},
    ),
    Probe(
        "program-directory",
        "a directory with __main__.py as the script",
        (*STANDALONE, "folder"),
        files={"folder/__main__.py": PROGRAM.replace("from tell", "import sys; sys.path.append('.')\nfrom tell")},
    ),
    Probe(
        "no-python",
        "--no-python runs the program itself, with its arguments unchanged",
        (*TWO, "--no-python", "{work}/run.sh", "a", "b c"),
        files={
            "run.sh": '#!/bin/sh\nprintf \'{"arguments": "%s|%s|%s", "rank": "%s", "store": "%s"}\' '
            '"$#" "$1" "$2" "$RANK" "$WORLD_SIZE" > "$PROBE_OUT/r$RANK.0.json"\n'
        },
        flags=("--no-python",),
        live=True,
    ),
    Probe(
        "run-path",
        "--run-path: argv, __name__ and the environment of a script that runs inside the launcher's process",
        (*TWO, "--run-path", "{script}", "a", "b"),
        script="""import os, sys
sys.path.insert(0, os.path.dirname(__file__))
from tell import *
tell(argv=sys.argv, file=__file__, name=__name__, env=added_env())
sys.exit(0)
""",
        better=(OWN_STORE,),
        flags=("--run-path",),
    ),
    Probe(
        "run-path-failure",
        "--run-path with a script that raises: status 1 and a report",
        (*STANDALONE, "--run-path", "{script}"),
        script="raise ValueError('wrong number')\n",
        facts=("status", "report"),
        better=(
            Better(
                "report.0.title", "{dir}/job/script.py", "the report names the script, not a function of torchrun"
            ),
            Better("report.0.root.error_file", "<N/A>", BARE, hooks="off"),
            Better("report.0.root.traceback", Has(("To enable traceback see",)), BARE, hooks="off"),
        ),
        flags=("--run-path",),
    ),
    Probe(
        "start-method",
        "--start-method is accepted with --run-path",
        (*STANDALONE, "--start-method", "fork", "--run-path", "{script}"),
        script="print('say ran')\n",
        facts=("status", "stdout"),
        flags=("--start-method",),
    ),
    Probe(
        "local-rank-macro",
        "${local_rank} in arguments of the script is replaced, as by string.Template",
        (*TWO, "{script}", "${local_rank}", "$local_rank", "a${local_rank}b", "$$x", "${other}", "$", "100%"),
        script="from tell import *\ntell(argv=sys.argv[1:])\n",
    ),
    Probe(
        "python-exec",
        "PYTHON_EXEC names another interpreter",
        (*STANDALONE, "{script}", "a"),
        files={"python.sh": '#!/bin/sh\necho "say wrapper $1"\nexec "$REAL_PYTHON" "$@"\n'},
        script="from tell import *\ntell(argv=sys.argv)\n",
        environ={"PYTHON_EXEC": "{work}/python.sh", "REAL_PYTHON": "{python}"},
        facts=("status", "stdout"),
    ),
    Probe(
        "process",
        "each rank leads its own session, inherits cwd and umask, and no descriptor or signal of the launcher",
        (*TWO, "{script}"),
        script=PROCESS,
        live=True,
        better=(
            Better(
                "told.*.fds",
                [0, 1, 2, 1000],
                "descriptor 1000 is extra: the rank counts its steps there, for hang detection",
                hooks="auto",
            ),
        ),
    ),
    Probe(
        "stdin",
        "a rank reads the launcher's standard input",
        (*STANDALONE, "{script}"),
        (Agent((), stdin="first line\nsecond line\n"),),
        script="from tell import *\ntell(lines=sys.stdin.read().splitlines())\n",
    ),
    Probe(
        "unbuffered",
        "output without a line end and without a flush arrives even if the rank ends abruptly",
        (*STANDALONE, "{script}"),
        script="import os, sys\nsys.stdout.write('say no newline')\nos._exit(0)\n",
        facts=("status", "stdout"),
    ),
    Probe(
        "nested",
        "a rank that runs a launcher: the inner ranks have their own world",
        (*STANDALONE, "{script}"),
        script="""from tell import *
if os.environ.get("INNER"):
    tell(inner=env("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "ROLE_NAME"))
else:
    tell(outer=env("RANK", "WORLD_SIZE"))
    os.environ["INNER"] = "1"
    done = subprocess.run([*launcher(), "--standalone", "--nproc-per-node", "2", "--role", "in", __file__])
    sys.exit(done.returncode)
""",
        flags=(),
    ),
    Probe(
        "gloo",
        "a real torch.distributed job on gloo: init_process_group from the environment, all_reduce",
        (*TWO, "{script}"),
        script="""from tell import *
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(value)
tell(sum=int(value), elastic=dist.is_torchelastic_launched(), rank=dist.get_rank())
dist.destroy_process_group()
""",
        needs_torch=True,
    ),
    Probe(
        "numa-binding-without-gpu",
        "--numa-binding needs a GPU for each local rank",
        (*STANDALONE, "--numa-binding", "node", "{script}"),
        script="from tell import *\ntell(ran=True)\n",
        facts=("status", "traceback"),
        flags=("--numa-binding",),
        better=(Better("traceback.*", False, "one line names the missing resource", "W7"),),
    ),
)
