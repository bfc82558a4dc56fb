"""How the command line is read: spellings, abbreviations, defaults from variables, and wrong use."""

from __future__ import annotations

from tests.parity.model import Better, Probe
from tests.parity.probes.common import ONE_LINE, STANDALONE, TWO

ARGV = "from tell import *\ntell(argv=sys.argv[1:])\n"
WORLD = 'from tell import *\ntell(env=env("RANK", "WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS", "ROLE_NAME"))\n'
RAN = "from tell import *\ntell(ran=True)\n"
WRONG = ("status", "told", "traceback", "lines", "culprit")
NAMED = Better("culprit.*", True, "the line names the wrong option", "W7", flags=())
UNSUPPORTED = Better("status.*", 2, "an unsupported option is a usage error: status 2")


def wrong(name: str, shows: str, args: tuple[str, ...], culprit: str, *flags: str, **rest: object) -> Probe:
    """Wrong use that torchrun answers with a traceback and status 1."""
    better = rest.pop("better", ONE_LINE)
    return Probe(
        name,
        shows,
        args,
        script=RAN,
        facts=WRONG,
        culprit=culprit,
        flags=flags,
        better=better,
        **rest,  # type: ignore[arg-type]
    )


PROBES = (
    Probe(
        "help",
        "--help shows every flag of torchrun",
        ("--help",),
        facts=("status", "help"),
        better=(Better("help.*", True, "it also lists Bootseer's own flags"),),
    ),
    Probe(
        "underscores",
        "flags in the spelling with underscores",
        ("--standalone", "--nproc_per_node=2", "--max_restarts", "4", "--monitor_interval=0.2", "{script}"),
        script=WORLD,
        flags=("--nproc-per-node", "--max-restarts", "--monitor-interval"),
    ),
    Probe(
        "abbreviations",
        "prefixes that match only one flag: --redirect=3 --standal --rol",
        ("--standal", "--redirect=3", "--rol", "worker", "--nno", "1", "--log-d", "{logs}", "{script}"),
        script=WORLD + "print('say out')\n",
        facts=("status", "told", "tree", "stdout"),
        flags=("--redirects", "--standalone", "--role", "--nnodes"),
        live=True,
    ),
    Probe(
        "ambiguous",
        "a prefix that matches several flags: status 2",
        ("--standalone", "--rdzv", "x", "{script}"),
        script=RAN,
        facts=("status", "told"),
    ),
    Probe(
        "ambiguous-spellings",
        "a prefix of both spellings of one flag: as in argparse of this Python",
        ("--standalone", "--nproc=2", "{script}"),
        script=RAN,
        facts=("status", "told"),
        python_bound=True,
    ),
    Probe(
        "short-flags",
        "-r3 and -t=1 without a space",
        (*TWO, "-r3", "-t=1", "--log-dir", "{logs}", "{script}"),
        script="import sys\nprint('say out')\nprint('say err', file=sys.stderr)\n",
        facts=("status", "tree", "stdout", "said"),
        flags=("--redirects", "--tee"),
    ),
    Probe(
        "last-wins",
        "if a flag is given twice, the last one applies",
        ("--standalone", "--nproc-per-node=3", "--role=a", "--nproc_per_node=1", "--role=b", "{script}"),
        script=WORLD,
    ),
    Probe(
        "remainder",
        "all arguments after the script belong to the script, also flags of the launcher, -- and -h",
        (*STANDALONE, "{script}", "--nproc-per-node", "4", "--", "--standalone", "-h", "-m", "--", "x"),
        script=ARGV,
        live=True,
    ),
    Probe(
        "leading-dashes",
        "a -- before the script is removed",
        (*STANDALONE, "--", "{script}", "--", "--role", "x"),
        script=ARGV,
    ),
    Probe(
        "variables",
        "PET_* variables are the defaults of the flags",
        ("{script}",),
        script=WORLD,
        environ={
            "PET_STANDALONE": "1",
            "PET_NPROC_PER_NODE": "2",
            "PET_MAX_RESTARTS": "3",
            "PET_ROLE": "r",
            "PET_MODULE": "0",
            "PET_NO_PYTHON": "0",
        },
        flags=("--standalone", "--nproc-per-node", "--max-restarts", "--role", "--module", "--no-python"),
        live=True,
    ),
    Probe(
        "variables-logs",
        "PET_LOG_DIR, PET_REDIRECTS, PET_TEE and the lists of filters",
        (*TWO, "{script}"),
        script="import os\nprint('say apple')\nprint('say pear', os.environ['RANK'])\n",
        environ={
            "PET_LOG_DIR": "{logs}",
            "PET_REDIRECTS": "3",
            "PET_TEE": "1",
            "PET_LOCAL_RANKS_FILTER": "0",
            "PET_DUPLICATE_STDOUT_FILTERS": "apple,plum",
        },
        facts=("status", "files", "stdout"),
        flags=("--log-dir", "--redirects", "--tee", "--local-ranks-filter", "--duplicate-stdout-filters"),
    ),
    Probe(
        "variables-lose",
        "the command line overrides PET_* variables",
        ("--nproc-per-node", "1", "--role", "mine", "{script}"),
        script=WORLD,
        environ={"PET_STANDALONE": "1", "PET_NPROC_PER_NODE": "2", "PET_ROLE": "theirs"},
    ),
    Probe(
        "variables-without-effect",
        "PET_LOGS_SPECS and PET_NUMA_BINDING have no effect",
        (*STANDALONE, "{script}"),
        script=RAN,
        environ={"PET_LOGS_SPECS": "none-such", "PET_NUMA_BINDING": "none-such"},
        flags=("--logs-specs", "--numa-binding"),
    ),
    Probe(
        "rdzv-conf-junk",
        "unknown keys and literal quotes in --rdzv-conf are tolerated",
        (*STANDALONE, "--rdzv-conf='join_timeout=5,last_call_timeout=1,timeout=5'", "{script}"),
        script=RAN,
        flags=("--rdzv-conf",),
    ),
    Probe(
        "nproc-cpu",
        "--nproc-per-node=cpu: one rank for each processor",
        ("--standalone", "--nproc-per-node", "cpu", "{script}"),
        script='from tell import *\nif RANK == "0":\n'
        '    tell(all=int(os.environ["WORLD_SIZE"]) == os.cpu_count() or os.environ["WORLD_SIZE"])\n',
        flags=("--nproc-per-node",),
    ),
    Probe(
        "nproc-auto",
        "--nproc-per-node=auto without an accelerator: the same as cpu",
        ("--standalone", "--nproc-per-node", "auto", "{script}"),
        script='from tell import *\nif RANK == "0":\n'
        '    tell(all=int(os.environ["WORLD_SIZE"]) == os.cpu_count() or os.environ["WORLD_SIZE"])\n',
        environ={"CUDA_VISIBLE_DEVICES": ""},
        flags=("--nproc-per-node",),
    ),
    Probe(
        "event-log-handler",
        "--event-log-handler null is accepted",
        (*STANDALONE, "--event-log-handler", "null", "{script}"),
        script=RAN,
        flags=("--event-log-handler",),
    ),
    Probe("no-arguments", "no arguments: status 2", (), facts=("status",)),
    Probe("no-script", "flags without a script: status 2", STANDALONE, facts=("status",)),
    Probe(
        "unknown-flag",
        "an unknown flag: status 2, and the message names it",
        (*STANDALONE, "--no-such-flag", "{script}"),
        script=RAN,
        facts=("status", "told", "traceback", "culprit"),
        culprit="--no-such-flag",
        better=(),
    ),
    Probe(
        "flag-with-value",
        "--standalone=1: status 2",
        ("--standalone=1", "{script}"),
        script=RAN,
        facts=("status", "told"),
    ),
    Probe(
        "not-a-number",
        "--max-restarts=many: status 2",
        (*STANDALONE, "--max-restarts", "many", "{script}"),
        script=RAN,
        facts=("status", "told", "traceback", "culprit"),
        culprit="many",
        flags=("--max-restarts",),
    ),
    Probe(
        "not-a-choice",
        "--start-method=thread: status 2",
        (*STANDALONE, "--start-method", "thread", "{script}"),
        script=RAN,
        facts=("status", "told", "culprit"),
        culprit="thread",
        flags=("--start-method",),
    ),
    wrong("bad-nnodes-three", "--nnodes=1:2:3", ("--nnodes", "1:2:3", "{script}"), "1:2:3", "--nnodes"),
    wrong("bad-nnodes-order", "--nnodes=2:1", ("--nnodes", "2:1", "{script}"), "2", "--nnodes"),
    wrong("bad-nnodes-zero", "--nnodes=0", ("--nnodes", "0", "{script}"), "0", "--nnodes"),
    wrong(
        "bad-nproc", "--nproc-per-node=many", ("--nproc-per-node", "many", "{script}"), "many", "--nproc-per-node"
    ),
    wrong(
        "bad-nproc-zero",
        "--nproc-per-node=0",
        ("--nproc-per-node", "0", "{script}"),
        "nproc",
        "--nproc-per-node",
        better=(*ONE_LINE, NAMED),
    ),
    wrong(
        "bad-nproc-gpu",
        "--nproc-per-node=gpu without a GPU",
        ("--nproc-per-node", "gpu", "{script}"),
        "",
        "--nproc-per-node",
        environ={"CUDA_VISIBLE_DEVICES": ""},
    ),
    wrong(
        "bad-backend",
        "--rdzv-backend=none-such",
        ("--rdzv-backend", "none-such", "{script}"),
        "none-such",
        "--rdzv-backend",
        better=(*ONE_LINE, UNSUPPORTED),
    ),
    wrong(
        "bad-conf",
        "--rdzv-conf with a key without a value",
        (*STANDALONE, "--rdzv-conf", "a=1,rest", "{script}"),
        "rest",
        "--rdzv-conf",
    ),
    wrong(
        "bad-cas-backoff",
        "--rdzv-conf cas_backoff_max_seconds that is not finite",
        (
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:{port}"),
            *("--rdzv-conf", "cas_backoff_max_seconds=inf", "{script}"),
        ),
        "cas_backoff_max_seconds",
        "--rdzv-conf",
    )._replace(since="2.15.0"),
    Probe(
        "print-completion",
        "--print-completion needs no script",
        ("--print-completion", "zsh"),
        facts=("status",),
        flags=("--print-completion",),
        since="2.14.1",
    ),
    wrong("bad-restarts", "--max-restarts=-1", (*STANDALONE, "--max-restarts", "-1", "{script}"), "restarts"),
    wrong(
        "bad-interval",
        "--monitor-interval=0",
        (*STANDALONE, "--monitor-interval", "0", "{script}"),
        "interval",
        "--monitor-interval",
        better=(*ONE_LINE, NAMED),
    ),
    wrong(
        "bad-timeout",
        "--shutdown-timeout=-1",
        (*STANDALONE, "--shutdown-timeout", "-1", "{script}"),
        "timeout",
        "--shutdown-timeout",
    ),
    wrong("bad-mask", "--redirects=4", (*STANDALONE, "-r", "4", "{script}"), "4", "--redirects"),
    wrong(
        "bad-filter",
        "--local-ranks-filter=a",
        (*STANDALONE, "--local-ranks-filter", "a", "{script}"),
        "filter",
        "--local-ranks-filter",
    ),
    wrong(
        "bad-log-dir",
        "--log-dir that is a file",
        (*STANDALONE, "--log-dir", "{work}/tell.py", "{script}"),
        "tell.py",
        "--log-dir",
    ),
    wrong(
        "bad-event-handler",
        "--event-log-handler=none-such",
        (*STANDALONE, "--event-log-handler", "none-such", "{script}"),
        "none-such",
        "--event-log-handler",
    ),
    wrong(
        "bad-logs-specs",
        "--logs-specs=none-such",
        (*STANDALONE, "--logs-specs", "none-such", "{script}"),
        "logs",
        "--logs-specs",
        better=(*ONE_LINE, UNSUPPORTED),
    ),
    wrong(
        "bad-no-python-module",
        "--no-python together with --module",
        (*STANDALONE, "--no-python", "--module", "{script}"),
        "module",
        "--no-python",
        "--module",
    ),
    wrong(
        "bad-variable",
        "PET_STANDALONE=true: only numbers are accepted",
        ("{script}",),
        "true",
        environ={"PET_STANDALONE": "true"},
    ),
    wrong(
        "bad-virtual-local-rank",
        "--virtual-local-rank with fewer visible devices than ranks",
        (*TWO, "--virtual-local-rank", "{script}"),
        "3",
        "--virtual-local-rank",
        environ={"CUDA_VISIBLE_DEVICES": "3"},
    ),
)
