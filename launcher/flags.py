"""The table of all flags of bootrun: torchrun's contract first, then Bootseer's own.

One row a flag; cli.py makes the parser of it, docs/torchrun.md and the guard tests read it. Types, defaults and
environment variables of the contract are those of torch 2.13; the help texts are ours.
"""

from __future__ import annotations

from collections.abc import Callable

from bootseer.light_typing import Any, NamedTuple


class NotGiven(int):
    """A default that can be told from the same number given by the user."""


class Flag(NamedTuple):
    """One flag. `kind` None: a switch without a value."""

    names: tuple[str, ...]  # as written with dashes; the underscore spelling is added by `spellings`
    help: str
    kind: Callable[[str], Any] | None = str
    default: Any = None
    env: str = ""  # variable that gives the default, "" for none
    choices: tuple[str, ...] | None = None
    ours: bool = False
    metavar: str | None = None
    is_repeated: bool = False  # may be given many times, each with one value; its variable is a list with commas

    @property
    def dest(self) -> str:
        """Name of its value."""
        return next(name for name in self.names if name.startswith("--"))[2:].replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """All option strings; torchrun's flags have an underscore spelling too."""
        found = list(self.names)
        for name in self.names:
            underscored = "--" + name[2:].replace("-", "_")
            if name.startswith("--") and underscored not in found:
                found.append(underscored)
        return tuple(found)


def comma_list(value: str) -> list[str]:
    """`a,b` as a list; a doubled comma is a comma."""
    return [item.replace("\0", ",") for item in value.replace(",,", "\0").split(",")]


def one_item(value: str) -> list[str]:
    """A list of one: for what may have commas in it."""
    return [value]


def _theirs(*names: str, help: str, env: bool = True, **more: Any) -> Flag:  # noqa: A002
    flag = Flag(names, help, **more)
    return flag._replace(env="PET_" + flag.dest.upper()) if env else flag


def _ours(name: str, help: str, **more: Any) -> Flag:  # noqa: A002
    flag = Flag((name,), help, ours=True, **more)
    return flag._replace(env="BOOTSEER_" + flag.dest.upper())


FLAGS: tuple[Flag, ...] = (
    _theirs("--nnodes", default="1:1", metavar="N|MIN:MAX", help="nodes of the job, or the least and the most"),
    _theirs(
        "--nproc-per-node",
        default="1",
        metavar="N|cpu|gpu|xpu|auto",
        help="ranks on this node; devices are counted without torch",
    ),
    _theirs(
        "--rdzv-backend",
        default="static",
        metavar="static|c10d",
        help="how nodes find each other; both names stand for Bootseer's own rendezvous",
    ),
    _theirs("--rdzv-endpoint", default="", metavar="HOST[:PORT]", help="where nodes meet (c10d: port 29400)"),
    _theirs("--rdzv-id", default="none", metavar="ID", help="name of the job"),
    _theirs(
        "--rdzv-conf",
        default="",
        metavar="K=V,...",
        help="join_timeout, last_call_timeout, keep_alive_interval, keep_alive_max_attempt, is_host; ours: "
        "port_range=LOW-HIGH, secret_file=PATH, max_membership_changes=N, mixed_arguments=1",
    ),
    _theirs("--standalone", kind=None, help="a job on this node alone, with an id and a port of its own"),
    _theirs("--max-restarts", kind=int, default=0, metavar="N", help="restarts after failures, for the whole job"),
    _theirs("--monitor-interval", kind=float, default=0.1, metavar="S", help="accepted; exits are seen at once"),
    _theirs(
        "--start-method",
        default="spawn",
        choices=("spawn", "fork", "forkserver"),
        help="accepted; ranks are separate processes in any case",
    ),
    _theirs("--event-log-handler", default="null", metavar="null|console", help="where state events of ranks go"),
    _theirs("--role", default="default", metavar="NAME", help="role of the ranks, part of the line prefix"),
    _theirs("-m", "--module", kind=None, help="run a module, as python -m does"),
    _theirs("--no-python", kind=None, help="run a program that is not a Python script"),
    _theirs("--run-path", kind=None, help="run an absolute path by runpy.run_path; wins over --no-python"),
    _theirs("--log-dir", metavar="DIR", help="folder for logs; /dev/null for none (default: a new one in TMPDIR)"),
    _theirs(
        "-r",
        "--redirects",
        default="0",
        metavar="MASK",
        help="to files: 0 none, 1 stdout, 2 stderr, 3 both, or 0:3,12:1",
    ),
    _theirs("-t", "--tee", default="0", metavar="MASK", help="to files and the console, masks as above"),
    _theirs("--local-ranks-filter", default="", metavar="R,...", help="only these local ranks on the console"),
    _theirs(
        "--duplicate-stdout-filters",
        kind=comma_list,
        default=[],
        metavar="TEXT,...",
        help="tee'd stdout lines with one of these texts also go to filtered_stdout.log (,, is a comma)",
    ),
    _theirs(
        "--duplicate-stderr-filters",
        kind=comma_list,
        default=[],
        metavar="TEXT,...",
        help="the same for stderr and filtered_stderr.log",
    ),
    _theirs(
        "--log-line-prefix-template",
        default="",
        metavar="TEXT",
        help="what stands before lines that --tee copies: ${role_name}, ${local_rank}, ${rank}, ${hostname} and "
        "text (TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE; default [${role_name}${local_rank}]:)",
    ),
    _theirs(
        "--print-completion",
        env=False,
        choices=("bash", "zsh", "tcsh", "fish", "powershell"),
        help="print what this shell needs to complete the words of bootrun, and end",
    ),
    _theirs(
        "--node-rank", kind=int, default=NotGiven(0), metavar="N", help="place of this node; honoured for c10d too"
    ),
    _theirs("--master-addr", default="127.0.0.1", metavar="HOST", help="static: host of node 0"),
    _theirs("--master-port", kind=int, metavar="PORT", help="static: port of rank 0 (29500)"),
    _theirs("--local-addr", metavar="HOST", help="address under which other nodes reach this one"),
    _theirs("--logs-specs", env=False, metavar="NAME", help="only `default`: use --redirects, --tee, --log-dir"),
    _theirs(
        "--numa-binding",
        env=False,
        choices=("node", "socket", "exclusive", "core-complex"),
        help="bind each rank to the CPUs near its GPU, by numactl",
    ),
    _theirs(
        "--signals-to-handle",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="SIG,...",
        help="signals that stop the job",
    ),
    _theirs(
        "--shutdown-timeout",
        kind=int,
        metavar="S",
        help="what ranks get to end before SIGKILL, on every path (TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30)",
    ),
    _theirs(
        "--virtual-local-rank", kind=None, help="LOCAL_RANK 0 for all, CUDA_VISIBLE_DEVICES cut to the one device"
    ),
    _ours(
        "--rank-hooks",
        "auto: our file runs in each rank before the script (first step, heartbeat); off: the bare script",
        default="auto",
        choices=("auto", "off"),
    ),
    _ours(
        "--fork-ranks",
        "fork ranks from one process per node that has the framework imported, instead of starting an interpreter "
        "each: auto (docs/fork.md), only for restarts, on, off (default auto)",
        choices=("auto", "restarts", "on", "off"),
    ),
    _ours(
        "--preload",
        "imported there beside torch, torch.distributed and what the last start of the job needed; none,a,b: only "
        "a and b",
        kind=comma_list,
        default=[],
        metavar="MODULE,...",
    ),
    _ours(
        "--preload-timeout",
        "ranks are started the ordinary way when these imports take longer (default 120)",
        kind=float,
        metavar="S",
    ),
    _ours(
        "--record-start",
        "record which files, and which parts of libraries, a start reads up to its first step, and read them "
        "ahead at the next start of the job: on, off (default on)",
        choices=("on", "off"),
    ),
    _ours(
        "--image",
        "run the ranks inside an image: a tree of `bootseer image build`, or rootfs:/PATH, a folder with a root "
        "file system; Python is the image's",
        metavar="URL",
    ),
    _ours("--image-name", "the tree's name, if it was published under another one than URL", metavar="NAME"),
    _ours(
        "--image-writable",
        "where goes what ranks write to the image's own folders: tmpfs (gone with the job), none (nothing can be "
        "written), or a folder of your own on a local disk (default tmpfs)",
        metavar="tmpfs|none|DIR",
    ),
    _ours(
        "--image-bind",
        "a file or folder of this node that is seen inside, beside the working directory, the script's folder, "
        "HOME, the logs, /tmp, /dev, /proc and /sys; no:DST leaves one of these out; can be repeated",
        kind=comma_list,
        default=[],
        metavar="SRC:DST[:ro]",
        is_repeated=True,
    ),
    _ours(
        "--image-python", "the image's interpreter (default: python3, else python, on its PATH)", metavar="PROGRAM"
    ),
    _ours(
        "--image-env",
        "a variable inside, above the image's own and the caller's; can be repeated",
        kind=comma_list,
        default=[],
        metavar="NAME=VALUE",
        is_repeated=True,
    ),
    _ours(
        "--load-checkpoint",
        "a checkpoint, or a folder whose newest complete one each attempt takes; ranks find it as a path in "
        "BOOTSEER_CHECKPOINT",
        metavar="URL",
    ),
    _ours(
        "--checkpoint-memory",
        "memory that a node may keep it in, as 200GiB; 0 for none (default: a quarter of what there is)",
        metavar="SIZE",
    ),
    _ours(
        "--checkpoint-disk",
        "what loaded checkpoints may take of this node's disk, as 500GiB; the next start reads it (default 0)",
        metavar="SIZE",
    ),
    _ours(
        "--checkpoint-fallback",
        "what to load where the newest version is damaged: none, which ends the job, or older (default none)",
        choices=("none", "older"),
    ),
    _ours("--require-checkpoint", "no start from nothing: an error where there is no checkpoint", kind=None),
    _ours(
        "--checkpoint-files",
        "off: ranks read it by Bootseer's loaders alone; where nothing can be mounted BOOTSEER_CHECKPOINT is the "
        "URL (default on)",
        choices=("on", "off"),
    ),
    _ours("--keep-arena", "keep it there after the ranks have loaded it", kind=None),
    _ours(
        "--arena-bytes",
        "memory in which a save may leave its bytes for the next attempt, as 50GiB (default 0)",
        metavar="SIZE",
    ),
    _ours(
        "--peers",
        "the nodes of a job bring each byte of image, environment, caches and checkpoint out of the store about "
        "once and hand it on to each other: on, off (default on, where the job has a secret)",
        choices=("on", "off"),
    ),
    _ours(
        "--peers-upload",
        "bytes a second that this node may send to others, as 500MB (default: no limit)",
        metavar="SIZE",
    ),
    _ours(
        "--setup",
        "a command that makes the environment of the ranks, run by /bin/sh before they start; can be repeated, in "
        "order. What it did is kept, and restored at the next start",
        kind=one_item,
        default=[],
        metavar="COMMAND",
        is_repeated=True,
    ),
    _ours(
        "--setup-input",
        "a file or folder whose content decides what set-up makes, as requirements.txt; can be repeated",
        kind=comma_list,
        default=[],
        metavar="PATH",
        is_repeated=True,
    ),
    _ours(
        "--setup-target",
        "a folder that set-up changes (default: the environment of the ranks' interpreter); can be repeated",
        kind=comma_list,
        default=[],
        metavar="DIR",
        is_repeated=True,
    ),
    _ours(
        "--setup-variable",
        "a variable whose value decides what set-up makes, beside PIP_*, UV_*, CC and the like; can be repeated",
        kind=comma_list,
        default=[],
        metavar="NAME",
        is_repeated=True,
    ),
    _ours("--setup-timeout", "for all set-up commands together (default 3600)", kind=float, metavar="S"),
    _ours(
        "--setup-wait",
        "for another node, or job, that makes the same environment (default 600)",
        kind=float,
        metavar="S",
    ),
    _ours("--env-store", "where environments and first-step caches are kept: a folder or a URL", metavar="URL"),
    _ours("--env-key", "a text that is part of the environment's key: another text, another one", metavar="TEXT"),
    _ours(
        "--env-max-age",
        "set-up is run anew when the kept environment is older (default: 7 days if something is not pinned, else "
        "never)",
        kind=float,
        metavar="S",
    ),
    _ours(
        "--env-way",
        "how a kept environment may come to its place, in this order (default: there,mount,unpack)",
        kind=comma_list,
        metavar="WAY,...",
    ),
    _ours(
        "--keep-caches",
        "keep what the first step compiles (torch.compile, triton, extensions) and restore it at the next start "
        "(default with --env-store, but for --no-python)",
        kind=None,
    ),
    _ours("--no-keep-caches", "do not, whatever else is said", kind=None),
    _ours(
        "--cache-dir",
        "a folder of your own that is kept with them; can be repeated",
        kind=comma_list,
        default=[],
        metavar="NAME=DIR",
        is_repeated=True,
    )._replace(env="BOOTSEER_KEEP_CACHE_DIR"),  # BOOTSEER_CACHE_DIR is where hot imports are remembered
    _ours(
        "--config", "file with such settings (default: bootseer.toml beside the script, else here)", metavar="FILE"
    ),
    _ours("--allow-mixed-environments", "start although nodes have different Python environments", kind=None),
    _ours("--restart-refill", "a failure after so many seconds gives the restarts back", kind=float, metavar="S"),
    _ours(
        "--restart-backoff",
        "first wait between restarts that fail within 30 s; it doubles; 0 for none (default 1)",
        kind=float,
        default=1.0,
        metavar="S",
    ),
    _ours(
        "--on-hang",
        "when no rank makes progress for longer than is usual: report what each rank does, restart after that, or "
        "off (default report)",
        choices=("report", "restart", "off"),
    ),
    _ours(
        "--hang-least",
        "seconds (default 15): a standstill is told within so many seconds, or within 3 times the longest gap "
        "between steps so far, where that is more; nothing shorter than 0.8 of that is taken for one",
        kind=float,
        metavar="S",
    ),
    _ours(
        "--log-rules",
        "rules over what ranks print into their log files: all (those of bootseer.toml and the known errors that "
        "come with Bootseer), own (without these), or off (default all; docs/rules.md)",
        choices=("all", "own", "off"),
    ),
    _ours(
        "--check",
        "look beside the start of each attempt, and while ranks run, whether this node is fit, by its disks, "
        "network, accelerators and memory: report what is not, fail (a node that is not fit for a start leaves "
        "the job), or off (default off)",
        choices=("off", "report", "fail"),
    ),
    _ours(
        "--check-pairs",
        "the network between nodes is measured, each with each, before another attempt: auto (after a failure of "
        "the network, with --check after any), always (after any), or off (default auto)",
        choices=("auto", "always", "off"),
    ),
    _ours(
        "--check-own",
        "a check of your own: JSON on stdout (docs/checks.md); with --check or --stop-checks; can be repeated",
        kind=comma_list,
        default=[],
        metavar="EXECUTABLE",
        is_repeated=True,
    ),
    _ours(
        "--check-path",
        "PATH or PATH:ro; beside a start a small file is written there and read, or one is read; with --check or "
        "--stop-checks; can be repeated",
        kind=comma_list,
        default=[],
        metavar="PATH",
        is_repeated=True,
    ),
    _ours(
        "--check-nic",
        "that has to have a link, as ib0 or mlx5_0/1; with --check or --stop-checks; can be repeated",
        kind=comma_list,
        default=[],
        metavar="NAME",
        is_repeated=True,
    ),
    _ours(
        "--check-expect-gpus",
        "GPUs that have to work on each node; with --check or --stop-checks",
        kind=int,
        metavar="N",
    ),
    _ours(
        "--check-every",
        "seconds between two looks while ranks run, 0 for none (default 30); with --check",
        kind=float,
        metavar="S",
    ),
    _ours(
        "--check-timeout",
        "seconds for each check (default 60, 10 while ranks run); between two attempts each has 0.8 of "
        "--stop-checks-timeout instead",
        kind=float,
        metavar="S",
    ),
    _ours(
        "--check-limit",
        "another limit, by its name in docs/checks.md; with --check or --stop-checks; can be repeated",
        kind=comma_list,
        default=[],
        metavar="NAME=NUMBER",
        is_repeated=True,
    ),
    _ours(
        "--trace-collectives",
        "record what ranks call of torch.distributed: when the job stands still, the report names the first stuck "
        "rank and its victims",
        kind=None,
    ),
    _ours(
        "--same-error",
        "the same error of the code at the same line in two attempts in a row: give-up ends the job, as it would "
        "fail there again; restart uses up --max-restarts (default give-up)",
        choices=("give-up", "restart"),
    ),
    _ours(
        "--exclude-nodes",
        "a node whose accelerator certainly failed, or whose network or file system failed twice within half an "
        "hour, or that --stop-checks, --check-pairs or --replay-command has found to be bad, waits as a spare "
        "from then on while others suffice: auto or off (default auto)",
        choices=("auto", "off"),
    ),
    _ours(
        "--no-progress",
        "three attempts in a row that got no further than the job had been, by the numbers of heartbeats, or made "
        "no step after one that made some: give-up ends the job; restart uses up --max-restarts (default give-up)",
        choices=("give-up", "restart"),
    ),
    _ours(
        "--give-up-status",
        "exit status when starting again cannot help, for schedulers that look at it; 93 is common for "
        "`do not requeue` (default 1)",
        kind=int,
        metavar="N",
    ),
    _ours(
        "--post-mortem",
        "a command for /bin/sh that is run when an attempt has failed, on each node with a failed rank (on all "
        "where the job stood still), before the other ranks are ended: they are held as they are meanwhile",
        metavar="COMMAND",
    ),
    _ours("--post-mortem-timeout", "it is ended after so long (default 60)", kind=float, metavar="S"),
    _ours(
        "--stop-checks",
        "health checks of all nodes between two attempts, which the restart waits for; a node that is not fit is "
        "left out: auto (where failures come again, or may be a machine's that does not say so), always (before "
        "each restart), off (default off)",
        choices=("off", "auto", "always"),
    ),
    _ours(
        "--stop-checks-timeout",
        "seconds for all checks of a node (default 60); a check that has not ended after 0.8 of that has failed",
        kind=float,
        metavar="S",
    ),
    _ours(
        "--rollback-command",
        "a command for /bin/sh that takes back what was changed last (code, settings, checkpoint): run once on "
        "the node of rank 0, before the restart, when failures come again after cheaper steps",
        metavar="COMMAND",
    ),
    _ours("--rollback-timeout", "it is ended after so long (default 300)", kind=float, metavar="S"),
    _ours(
        "--replay-command",
        "a command for /bin/sh that finds the machine at fault, as `bootseer replay --json --hosts "
        "$BOOTSEER_HOSTS --group-size $BOOTSEER_GROUP_SIZE --run ...`: run once there, when they still come again",
        metavar="COMMAND",
    ),
    _ours("--replay-timeout", "it is ended after so long (default 7200)", kind=float, metavar="S"),
    _ours(
        "--forward-signals",
        "signals that only pass to the ranks; empty for none (default SIGUSR1,SIGUSR2)",
        default="SIGUSR1,SIGUSR2",
        metavar="SIG,...",
    ),
    _ours(
        "--signal-scope",
        "job: a signal to one node stops all; node: an elastic job goes on without this node",
        default="job",
        choices=("job", "node"),
    ),
    _ours("--events-dir", "folder for event files; /dev/null for none (default: below the logs)", metavar="DIR"),
    _ours(
        "--strict",
        "end the job when something that makes starts fast fails before its ranks run; without it the ordinary "
        "way is taken, and a line says so",
        kind=None,
    ),
    _ours("--quiet", "leave out bootrun's informational lines", kind=None),
)
