"""Ranks that fail: statuses, the final report, error files, restarts."""

from __future__ import annotations

from tests.parity.model import Better, Has, Probe
from tests.parity.probes.common import ONE_LINE, STANDALONE, STOPPED, TWO

# Rank 1 fails once rank 0 waits; rank 0 then is stopped.
ONE_FAILS = """from tell import *
if RANK == "0":
    mark("up")
    wait_for("never")
wait_for("up")
"""
COUNTS = (
    'from tell import *\ntell(env=env("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "WORLD_SIZE"))\n'
)
REPORT = ("status", "report")
RECORDED = "bootrun records an uncaught exception without @record"
MEANING = "the report names the usual cause of such a signal"
AGENT_TRACEBACK = Better("traceback.*", False, "no traceback of the launcher's own code precedes the report", "W8")

PROBES = (
    Probe(
        "success",
        "all ranks end with 0: status 0, and only their output",
        (*TWO, "{script}"),
        script="import os\nos.write(1, b'say done %s\\n' % os.environb[b'RANK'])\n",
        facts=("status", "stdout", "report", "traceback"),
        live=True,
    ),
    Probe(
        "success-in-turn",
        "ranks may end at different times",
        (*TWO, "{script}"),
        script="from tell import *\nmark('first') if RANK == '0' else wait_for('first')\ntell(done=True)\n",
    ),
    Probe(
        "failure",
        "a rank ends with 3: status 1; the launcher stops the others, and the report names the rank",
        (*TWO, "{script}"),
        script=ONE_FAILS + "sys.exit(3)\n",
        facts=("status", "report", "traceback"),
        better=(AGENT_TRACEBACK, *STOPPED),
        live=True,
    ),
    Probe(
        "failure-caught",
        "the others get SIGTERM and may handle it",
        (*TWO, "{script}"),
        script="""from tell import *
if RANK == "0":
    catch("SIGTERM", "SIGINT")
    mark("up")
    wait_for("never")
wait_for("up")
sys.exit(3)
""",
        facts=("status", "told", "report"),
    ),
    Probe(
        "failure-signal",
        "a rank dies by a signal: the report has its negative number, and its name",
        (*TWO, "{script}"),
        script=ONE_FAILS + "os.kill(os.getpid(), signal.SIGSEGV)\n",
        facts=REPORT,
        better=(
            *STOPPED,
            Better("report.0.root.traceback", Has(("Signal 11 (SIGSEGV) received by PID 0; ",)), MEANING),
        ),
    ),
    Probe(
        "failure-kill",
        "a rank dies by SIGKILL",
        (*STANDALONE, "{script}"),
        script="import os\nos.kill(os.getpid(), 9)\n",
        facts=REPORT,
        better=(Better("report.0.root.traceback", Has(("Signal 9 (SIGKILL) received by PID 0; ",)), MEANING),),
    ),
    Probe(
        "failure-exception",
        "a rank raises: exit code 1; its traceback is on its own standard error",
        (*STANDALONE, "{script}"),
        script="raise ValueError('say wrong number')\n",
        facts=("status", "said", "report"),
        better=(
            Better(
                "report.0.root.error_file",
                "{dir}/tmp/torchelastic_{random}/{uuid}_{random}/attempt_0/0/error.json",
                RECORDED,
                "W9",
                hooks="auto",
            ),
            Better("report.0.root.traceback", "ValueError: say wrong number", RECORDED, "W9", hooks="auto"),
        ),
    ),
    Probe(
        "failure-text",
        "sys.exit with a text: exit code 1",
        (*STANDALONE, "{script}"),
        script="import sys\nsys.exit('say no data')\n",
        facts=("status", "said", "report"),
    ),
    Probe(
        "failure-wide",
        "sys.exit(300): exit code 44",
        (*STANDALONE, "{script}"),
        script="import sys\nsys.exit(300)\n",
        facts=REPORT,
    ),
    Probe(
        "exit-none",
        "sys.exit(None) is success",
        (*STANDALONE, "{script}"),
        script="import sys\nsys.exit(None)\n",
        facts=REPORT,
    ),
    Probe(
        "script-missing",
        "a missing script: status 1",
        (*STANDALONE, "{dir}/no-such-script.py"),
        facts=("status", "traceback", "lines", "stderr_names"),
        culprit="no-such-script.py",
        better=ONE_LINE,
        live=True,
    ),
    Probe(
        "program-missing",
        "--no-python with a missing program",
        (*STANDALONE, "--no-python", "{dir}/no-such-program"),
        facts=("status", "traceback", "stderr_names"),
        culprit="no-such-program",
        better=(Better("traceback.*", False, "one line names the program", "W7"),),
        flags=("--no-python",),
    ),
    Probe(
        "syntax-error",
        "a script that cannot be compiled",
        (*STANDALONE, "{script}"),
        script="def f(:\n",
        facts=("status", "report", "stderr_names"),
        culprit="SyntaxError",
        better=(
            Better(
                "report.0.root.error_file",
                "{dir}/tmp/torchelastic_{random}/{uuid}_{random}/attempt_0/0/error.json",
                RECORDED,
                "W9",
                hooks="auto",
            ),
            Better("report.0.root.traceback", "SyntaxError: invalid syntax", RECORDED, "W9", hooks="auto"),
        ),
    ),
    Probe(
        "record",
        "@record: error.json has message, traceback and time; the report shows the traceback",
        (*TWO, "--log-dir", "{logs}", "{script}"),
        script="""from tell import *
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if RANK == "0":
        mark("up")
        wait_for("never")
    wait_for("up")
    raise KeyError("step")
main()
""",
        facts=("status", "report", "error_files"),
        better=STOPPED,
        needs_torch=True,
    ),
    Probe(
        "record-exit",
        "@record with sys.exit(5): no error file",
        (*STANDALONE, "--log-dir", "{logs}", "{script}"),
        script="""import sys
from torch.distributed.elastic.multiprocessing.errors import record
record(lambda: sys.exit(5))()
""",
        facts=("status", "report", "error_files"),
        needs_torch=True,
    ),
    Probe(
        "error-file",
        "an error file in torch's form",
        (*STANDALONE, "--log-dir", "{logs}", "{script}"),
        script="""from tell import *
write_error_file(error_data("one\\ntwo"))
sys.exit(7)
""",
        facts=("status", "report", "error_files"),
        live=True,
    ),
    Probe(
        "error-file-plain",
        "an error file in the short form: a text and a time",
        (*STANDALONE, "--log-dir", "{logs}", "{script}"),
        script="""from tell import *
write_error_file({"message": "only a text", "timestamp": 1700000000})
sys.exit(7)
""",
        facts=("status", "report", "error_files"),
    ),
    Probe(
        "error-file-truncated",
        "an error file that is cut off",
        (*STANDALONE, "--log-dir", "{logs}", "{script}"),
        script="""from tell import *
write_error_file('{"message": {"message": "E: te')
sys.exit(7)
""",
        facts=("status", "report.root.exitcode", "traceback"),
        better=(
            Better("report.root.exitcode", 7, "a broken error file does not prevent the report", "W4"),
            AGENT_TRACEBACK,
        ),
    ),
    Probe(
        "error-file-success",
        "an error file of a rank that ends with 0 changes nothing",
        (*STANDALONE, "--log-dir", "{logs}", "{script}"),
        script="from tell import *\nwrite_error_file({'message': 'caught', 'timestamp': 1700000000})\n",
        facts=("status", "report", "error_files"),
    ),
    Probe(
        "error-file-own",
        "a launcher with its own error file copies the first failure's there, with its exit code",
        (*TWO, "--log-dir", "{logs}", "{script}"),
        script=ONE_FAILS
        + """write_error_file(error_data("x"))
sys.exit(7)
""",
        environ={"TORCHELASTIC_ERROR_FILE": "{dir}/own-error.json"},
        facts=("status", "error_files"),
    ),
    Probe(
        "error-file-own-kill",
        "the same for a rank that writes its error file and then dies by a signal",
        (*STANDALONE, "--log-dir", "{logs}", "{script}"),
        script="""from tell import *
write_error_file(error_data("x"))
os.kill(os.getpid(), signal.SIGKILL)
""",
        environ={"TORCHELASTIC_ERROR_FILE": "{dir}/own-error.json"},
        facts=("status", "error_files"),
    ),
    Probe(
        "nested-failure",
        "a failure in a launcher that a rank runs: the outer launcher has its status and its error file",
        (*STANDALONE, "--log-dir", "{logs}", "{script}"),
        script="""from tell import *
if os.environ.get("INNER"):
    write_error_file(error_data("x"))
    sys.exit(5)
os.environ["INNER"] = "1"
sys.exit(subprocess.run([*launcher(), "--standalone", __file__]).returncode)
""",
        facts=("status", "error_files"),
    ),
    Probe(
        "restart",
        "--max-restarts: after a failure all ranks restart; TORCHELASTIC_RESTART_COUNT increases",
        (*TWO, "--max-restarts", "2", "{script}"),
        script=COUNTS + "meet(f'up{RESTART}', 2)\nsys.exit(RESTART < 1 and RANK == '1')\n",
        facts=("status", "told", "report"),
        flags=("--max-restarts",),
        live=True,
    ),
    Probe(
        "restart-spent",
        "a rank that fails each time: status 1 when no restart is left",
        (*STANDALONE, "--max-restarts", "1", "{script}"),
        script=COUNTS + "sys.exit(4)\n",
        facts=("status", "told", "report"),
        flags=("--max-restarts",),
    ),
    Probe(
        "restart-none",
        "without --max-restarts no rank restarts",
        (*STANDALONE, "{script}"),
        script=COUNTS + "sys.exit(4)\n",
        flags=("--max-restarts",),
    ),
    Probe(
        "restart-stops-others",
        "a restart stops the ranks that still run, by SIGTERM",
        (*TWO, "--max-restarts", "1", "{script}"),
        script="""from tell import *
tell(restart=RESTART)
if RESTART == 0 and RANK == "0":
    catch("SIGTERM")
    mark("up")
    wait_for("never")
if RESTART == 0:
    wait_for("up")
    sys.exit(3)
""",
    ),
    Probe(
        "restart-port",
        "MASTER_PORT of a restart, and the run id",
        ("--standalone", "--max-restarts", "1", "{script}"),
        script="""from tell import *
tell(id=env("TORCHELASTIC_RUN_ID"))
name = f"{OUT}/port-and-id"
now = [os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_RUN_ID"]]
if RESTART == 0:
    open(name, "w").write(" ".join(now))
    sys.exit(1)
before = open(name).read().split(" ")
tell(same_port=before[0] == now[0], same_id=before[1] == now[1])
""",
        better=(
            Better("told.*.same_port", False, "each attempt has a fresh port: the old one may be in use", "W18"),
        ),
        flags=("--max-restarts",),
    ),
    Probe(
        "stop-hard",
        "--shutdown-timeout 1, a rank that ignores SIGTERM, another one that fails",
        (*TWO, "--shutdown-timeout", "1", "{script}"),
        script="""from tell import *
if RANK == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark("up")
    wait_for("never", 80)
wait_for("up")
sys.exit(3)
""",
        facts=("status", "quick"),
        better=(Better("quick", True, "--shutdown-timeout applies to every stop, also after a failure", "W1"),),
        flags=("--shutdown-timeout",),
        quick_s=10.0,
    ),
    Probe(
        "stderr-tail",
        "without @record the report has the last lines of a redirected standard error",
        (*STANDALONE, "--log-dir", "{logs}", "-r", "3", "{script}"),
        script="def load():\n    raise ValueError('wrong number')\nload()\n",
        facts=("status", "report.root.traceback_text"),
        better=(
            Better(
                "report.root.traceback_text",
                Has(("ValueError: wrong number",)),
                "the report has the end of the rank's standard error, not a link to documentation",
                "W9",
            ),
        ),
    ),
)
