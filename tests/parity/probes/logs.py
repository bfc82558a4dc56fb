"""Log directory, redirects, tee, filters and prefixes."""

from __future__ import annotations

from tests.parity.model import Better, Probe
from tests.parity.probes.common import STANDALONE, TWO

# Each line in one piece: both ranks may write to the same console.
BOTH = """import os
os.write(1, b"say out %s\\n" % os.environb[b"RANK"])
os.write(2, b"say err %s\\n" % os.environb[b"RANK"])
"""
FACTS = ("status", "files", "stdout", "said")

PROBES = (
    Probe(
        "logs-none",
        "without redirects all ranks share the console, without prefix; the logs have a directory for each rank",
        (*TWO, "--log-dir", "{logs}", "{script}"),
        script=BOTH,
        facts=("status", "tree", "stdout", "said"),
        flags=("--log-dir",),
    ),
    Probe(
        "logs-default",
        "without --log-dir the launcher creates a temporary directory",
        (*TWO, "--redirects", "1", "{script}"),
        script=BOTH,
        facts=FACTS,
        flags=("--log-dir",),
    ),
    Probe(
        "logs-redirects",
        "--redirects 3: files, and a quiet console",
        (*TWO, "--log-dir", "{logs}", "--redirects", "3", "{script}"),
        script=BOTH,
        facts=FACTS,
        flags=("--redirects",),
    ),
    Probe(
        "logs-mask",
        "masks by local rank: 0:1,1:2",
        (*TWO, "--log-dir", "{logs}", "--redirects", "0:1,1:2", "{script}"),
        script=BOTH,
        facts=FACTS,
        flags=("--redirects",),
    ),
    Probe(
        "logs-mask-beyond",
        "a mask for a rank that does not exist is ignored",
        (*TWO, "--log-dir", "{logs}", "--redirects", "1:3,5:3", "{script}"),
        script=BOTH,
        facts=FACTS,
        flags=("--redirects",),
    ),
    Probe(
        "logs-mask-many",
        "a mask for local rank 10",
        (*TWO, "--log-dir", "{logs}", "--redirects", "0:1,10:3", "{script}"),
        script=BOTH,
        facts=("status", "stdout"),
        better=(
            Better("status.0", 0, "masks apply to local ranks with any number of digits", "W7"),
            Better("stdout.0", ["say out 1"], "masks apply to local ranks with any number of digits", "W7"),
        ),
        flags=("--redirects",),
    ),
    Probe(
        "logs-tee",
        "--tee 3: files and the console, with the prefix [role + rank]:",
        (*TWO, "--log-dir", "{logs}", "--tee", "3", "{script}"),
        script=BOTH,
        facts=FACTS,
        flags=("--tee",),
        live=True,
    ),
    Probe(
        "logs-tee-mask",
        "tee and redirects with different masks",
        (*TWO, "--log-dir", "{logs}", "--tee", "0:1", "--redirects", "1:3", "{script}"),
        script=BOTH,
        facts=FACTS,
        flags=("--tee", "--redirects"),
    ),
    Probe(
        "logs-role",
        "the prefix has the role's name",
        (*STANDALONE, "--log-dir", "{logs}", "--role", "trainer", "-t", "1", "{script}"),
        script=BOTH,
        facts=("status", "stdout"),
        flags=("--role", "--tee"),
    ),
    Probe(
        "logs-template",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE; unknown names stay as they are",
        (*TWO, "--log-dir", "{logs}", "-t", "1", "{script}"),
        script=BOTH,
        environ={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name}|$rank|${local_rank}|${other}> "},
        facts=("status", "stdout"),
    ),
    Probe(
        "logs-template-flag",
        "--log-line-prefix-template overrides the variable; ${hostname} is the node",
        (
            *TWO,
            "--log-dir",
            "{logs}",
            "-t",
            "1",
            "--log-line-prefix-template",
            "<${hostname}|${rank}> ",
            "{script}",
        ),
        script=BOTH,
        environ={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "variable"},
        facts=("status", "stdout"),
        flags=("--log-line-prefix-template",),
        since="2.14.1",
    ),
    Probe(
        "logs-template-pet",
        "PET_LOG_LINE_PREFIX_TEMPLATE",
        (*TWO, "--log-dir", "{logs}", "-t", "1", "{script}"),
        script=BOTH,
        environ={"PET_LOG_LINE_PREFIX_TEMPLATE": "$role_name.$local_rank>"},
        facts=("status", "stdout"),
        flags=("--log-line-prefix-template",),
        since="2.14.1",
    ),
    Probe(
        "logs-template-empty",
        "an empty --log-line-prefix-template counts as unset",
        (*TWO, "--log-dir", "{logs}", "-t", "1", "--log-line-prefix-template=", "{script}"),
        script=BOTH,
        facts=("status", "stdout"),
        flags=("--log-line-prefix-template",),
        since="2.14.1",
    ),
    Probe(
        "logs-filter",
        "--local-ranks-filter: the console shows no other ranks",
        (*TWO, "--log-dir", "{logs}", "--local-ranks-filter", "1", "{script}"),
        script=BOTH,
        facts=FACTS,
        flags=("--local-ranks-filter",),
    ),
    Probe(
        "logs-filter-tee",
        "--local-ranks-filter with tee: all ranks still have their files",
        (*TWO, "--log-dir", "{logs}", "--local-ranks-filter=1", "--tee=3", "{script}"),
        script=BOTH,
        facts=FACTS,
        flags=("--local-ranks-filter", "--tee"),
    ),
    Probe(
        "logs-duplicates",
        "filters copy lines of tee'd ranks into files; two commas count as one",
        (
            *TWO,
            "--log-dir",
            "{logs}",
            "--tee",
            "0:3,1:1",
            "--duplicate-stdout-filters",
            "apple,a,,b",
            "--duplicate-stderr-filters",
            "pear",
            "{script}",
        ),
        script="""import os, sys
for word in ("apple", "pear", "a,b", "ab"):
    print("say", word, os.environ["RANK"])
    print("say", word, os.environ["RANK"], file=sys.stderr)
""",
        facts=("status", "filtered", "tree"),
        flags=("--duplicate-stdout-filters", "--duplicate-stderr-filters"),
    ),
    Probe(
        "logs-off",
        "--log-dir /dev/null: no files, an empty TORCHELASTIC_ERROR_FILE, and the console",
        (*TWO, "--log-dir", "/dev/null", "--redirects", "3", "{script}"),
        script='from tell import *\ntell(env=env("TORCHELASTIC_ERROR_FILE"))\n' + BOTH,
        facts=("status", "told", "tree", "stdout", "said"),
        flags=("--log-dir",),
    ),
    Probe(
        "logs-off-failure",
        "--log-dir /dev/null with a rank that fails",
        (*STANDALONE, "--log-dir", "/dev/null", "--redirects", "3", "{script}"),
        script="raise SystemExit(3)\n",
        facts=("status", "tree", "report"),
        flags=("--log-dir",),
    ),
    Probe(
        "logs-new-dir",
        "the launcher creates a missing log directory, with its parents",
        (*STANDALONE, "--log-dir", "{logs}/a/b", "-r", "1", "{script}"),
        script=BOTH,
        facts=("status", "files"),
        flags=("--log-dir",),
    ),
    Probe(
        "logs-partial-line",
        "tee of a last line without a line end",
        (*STANDALONE, "--log-dir", "{logs}", "--tee", "1", "{script}"),
        script="import sys\nsys.stdout.write('say first\\nsay last')\n",
        facts=("status", "files", "stdout"),
        flags=("--tee",),
    ),
    Probe(
        "logs-bytes",
        "tee of bytes that are not UTF-8: the file has them unchanged",
        (*STANDALONE, "--log-dir", "{logs}", "--tee", "1", "{script}"),
        script="import os\nos.write(1, b'say \\xff\\xfe \\xe2\\x98\\x83\\n')\n",
        facts=("status", "files", "stdout"),
        better=(Better("stdout.0", ["[default0]:say \udcff\udcfe ☃"], "the console gets the rank's own bytes"),),
        flags=("--tee",),
    ),
    Probe(
        "logs-large",
        "none of 40,000 tee'd lines is lost or torn",
        (*TWO, "--log-dir", "{logs}", "--tee", "1", "{script}"),
        script="""import os
for number in range(20000):
    print("say line", os.environ["RANK"], number, "x" * 50)
""",
        facts=("status", "stdout_whole"),
        better=(Better("stdout_whole", True, "bootrun copies a line in one piece, with one prefix"),),
        flags=("--tee",),
    ),
    Probe(
        "logs-restart",
        "each start has its own attempt directory",
        (*TWO, "--log-dir", "{logs}", "-r", "3", "--max-restarts", "1", "{script}"),
        script=BOTH + "from tell import *\nmeet(f'up{RESTART}', 2)\nsys.exit(RESTART == 0 and RANK == '0')\n",
        facts=("status", "files"),
        flags=("--max-restarts", "--redirects"),
    ),
    Probe(
        "logs-events",
        "files of events",
        (*STANDALONE, "--log-dir", "{logs}", "{script}"),
        script=BOTH,
        facts=("status", "events"),
        better=(Better("events", True, "the stages of the start are in <run>/events, beside the attempts"),),
        flags=("--log-dir",),
    ),
    Probe(
        "logs-failure",
        "failure records",
        (*STANDALONE, "--log-dir", "{logs}", "--max-restarts", "1", "{script}"),
        script="import sys; sys.exit(3)\n",
        facts=("status", "pages"),
        better=(
            Better(
                "pages",
                ["failure-0.json", "failure-0.txt", "failure-1.json", "failure-1.txt"],
                "each failure has a record in <run>, beside the attempts",
            ),
        ),
        flags=("--log-dir",),
    ),
    Probe(
        "logs-again",
        "a second job in the same log directory keeps the first one's logs",
        (*STANDALONE, "--log-dir", "{logs}", "-r", "1", "{script}"),
        script=BOTH,
        facts=("status", "runs"),
        files={"../logs/none_earlier/attempt_0/0/stdout.log": "say earlier\n"},
        flags=("--log-dir",),
    ),
)
