"""The table of all flags of bootrun: torchrun's contract first, then Bootseer's own.

One row per flag. parser.py makes the parser of it; docs/reference/torchrun.md and the guard tests read it. Types,
defaults and environment variables of the contract are those of torch 2.13; the help texts are Bootseer's.
"""

from __future__ import annotations

from bootseer.errors import ConfigError, UsageError
from bootseer.light_typing import Any, Callable, NamedTuple


class NotGiven(int):
    """A default that differs from the same number given by the user."""


class Flag(NamedTuple):
    """One flag; a switch without a value has `kind` None."""

    names: tuple[str, ...]  # with dashes; `spellings` adds the underscore spelling
    help: str
    kind: Callable[[str], Any] | None = str
    default: Any = None
    env: str = ""  # variable that gives the default, "" for none
    choices: tuple[str, ...] | None = None
    ours: bool = False
    metavar: str | None = None
    is_repeated: bool = False  # may be repeated, each time with one value; its variable is a list with commas

    @property
    def dest(self) -> str:
        """Name of its value."""
        return _dest(self.names)

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
    """Split `a,b` into a list; a doubled comma is a comma."""
    return [item.replace("\0", ",") for item in value.replace(",,", "\0").split(",")]


def one_item(value: str) -> list[str]:
    """Return a list of one value, which may contain commas."""
    return [value]


def _torchrun_flag(*names: str, help: str, env: bool = True, **more: Any) -> Flag:  # noqa: A002
    return Flag(names, help, env="PET_" + _dest(names).upper() if env else "", **more)


def _bootseer_flag(name: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return Flag((name,), help, ours=True, env="BOOTSEER_" + _dest((name,)).upper(), **more)


def _dest(names: tuple[str, ...]) -> str:
    for name in names:
        if name.startswith("--"):
            return name[2:].replace("-", "_")
    raise AssertionError(f"{names}: a flag has a long name")


FLAGS: tuple[Flag, ...] = (
    _torchrun_flag(
        "--nnodes", default="1:1", metavar="N|MIN:MAX", help="Number of nodes, or the minimum and the maximum"
    ),
    _torchrun_flag(
        "--nproc-per-node",
        default="1",
        metavar="N|cpu|gpu|xpu|auto",
        help="Ranks on this node; accelerators are counted without torch",
    ),
    _torchrun_flag(
        "--rdzv-backend",
        default="static",
        metavar="static|c10d",
        help="Rendezvous backend; both names select Bootseer's own rendezvous",
    ),
    _torchrun_flag(
        "--rdzv-endpoint",
        default="",
        metavar="HOST[:PORT]",
        help="Address at which the nodes meet (c10d: port 29400)",
    ),
    _torchrun_flag("--rdzv-id", default="none", metavar="ID", help="Name of the job"),
    _torchrun_flag(
        "--rdzv-conf",
        default="",
        metavar="K=V,...",
        help="Rendezvous settings: join_timeout, last_call_timeout, keep_alive_interval, "
        "keep_alive_max_attempt, is_host; Bootseer's own: port_range=LOW-HIGH, secret_file=PATH, "
        "max_membership_changes=N, mixed_arguments=1",
    ),
    _torchrun_flag("--standalone", kind=None, help="Run a single-node job with its own id and a free port"),
    _torchrun_flag(
        "--max-restarts", kind=int, default=0, metavar="N", help="Restarts after failures, for the whole job"
    ),
    _torchrun_flag(
        "--monitor-interval",
        kind=float,
        default=0.1,
        metavar="S",
        help="Accepted for compatibility; bootrun sees exits at once",
    ),
    _torchrun_flag(
        "--start-method",
        default="spawn",
        choices=("spawn", "fork", "forkserver"),
        help="Accepted for compatibility; ranks are separate processes",
    ),
    _torchrun_flag(
        "--event-log-handler",
        default="null",
        metavar="null|console",
        help="Destination of the state events of ranks",
    ),
    _torchrun_flag("--role", default="default", metavar="NAME", help="Role of the ranks, part of the line prefix"),
    _torchrun_flag("-m", "--module", kind=None, help="Run a module, as python -m does"),
    _torchrun_flag("--no-python", kind=None, help="Run a program that is not a Python script"),
    _torchrun_flag(
        "--run-path", kind=None, help="Run an absolute path by runpy.run_path; takes precedence over --no-python"
    ),
    _torchrun_flag(
        "--log-dir", metavar="DIR", help="Directory for logs; /dev/null for none (default: a new one in TMPDIR)"
    ),
    _torchrun_flag(
        "-r",
        "--redirects",
        default="0",
        metavar="MASK",
        help="Streams to write to files: 0 none, 1 stdout, 2 stderr, 3 both, or 0:3,12:1",
    ),
    _torchrun_flag(
        "-t",
        "--tee",
        default="0",
        metavar="MASK",
        help="Streams to write to files and the console; masks as above",
    ),
    _torchrun_flag("--local-ranks-filter", default="", metavar="R,...", help="Local ranks to show on the console"),
    _torchrun_flag(
        "--duplicate-stdout-filters",
        kind=comma_list,
        default=[],
        metavar="TEXT,...",
        help="Copy tee'd stdout lines that contain one of these texts to filtered_stdout.log (,, is a comma)",
    ),
    _torchrun_flag(
        "--duplicate-stderr-filters",
        kind=comma_list,
        default=[],
        metavar="TEXT,...",
        help="Copy tee'd stderr lines that contain one of these texts to filtered_stderr.log",
    ),
    _torchrun_flag(
        "--log-line-prefix-template",
        default="",
        metavar="TEXT",
        help="Prefix of the lines that --tee copies: text, ${role_name}, ${local_rank}, ${rank} and "
        "${hostname} (TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE; default [${role_name}${local_rank}]:)",
    ),
    _torchrun_flag(
        "--print-completion",
        env=False,
        choices=("bash", "zsh", "tcsh", "fish", "powershell"),
        help="Print the completion script of a shell, then exit",
    ),
    _torchrun_flag(
        "--node-rank", kind=int, default=NotGiven(0), metavar="N", help="Rank of this node; also used with c10d"
    ),
    _torchrun_flag(
        "--master-addr", default="127.0.0.1", metavar="HOST", help="Host of node 0 (static rendezvous)"
    ),
    _torchrun_flag("--master-port", kind=int, metavar="PORT", help="Port of rank 0 (static rendezvous, 29500)"),
    _torchrun_flag("--local-addr", metavar="HOST", help="Address at which other nodes reach this one"),
    _torchrun_flag(
        "--logs-specs", env=False, metavar="NAME", help="Only `default`; use --redirects, --tee and --log-dir"
    ),
    _torchrun_flag(
        "--numa-binding",
        env=False,
        choices=("node", "socket", "exclusive", "core-complex"),
        help="Bind each rank to the CPUs near its GPU, by numactl",
    ),
    _torchrun_flag(
        "--signals-to-handle",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="SIG,...",
        help="Signals that stop the job",
    ),
    _torchrun_flag(
        "--shutdown-timeout",
        kind=int,
        metavar="S",
        help="Seconds that ranks have to end before SIGKILL (TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30)",
    ),
    _torchrun_flag(
        "--virtual-local-rank",
        kind=None,
        help="Set LOCAL_RANK to 0 in all ranks, and CUDA_VISIBLE_DEVICES to the one device of each",
    ),
    _bootseer_flag(
        "--rank-hooks",
        "Rank bootstrap: auto runs Bootseer's bootstrap file in each rank before the script (first "
        "step, heartbeat); off runs the bare script",
        default="auto",
        choices=("auto", "off"),
    ),
    _bootseer_flag(
        "--fork-ranks",
        "Fork ranks from one process per node that has imported the framework, instead of starting an "
        "interpreter each: auto (docs/guide/fork.md), restarts, on, off (default: auto)",
        choices=("auto", "restarts", "on", "off"),
    ),
    _bootseer_flag(
        "--preload",
        "Modules that the fork server imports, beside torch, torch.distributed and what the last start "
        "needed; none,a,b: only a and b",
        kind=comma_list,
        default=[],
        metavar="MODULE,...",
    ),
    _bootseer_flag(
        "--preload-timeout",
        "Seconds for the imports of the fork server; then bootrun starts each rank on its own (default: 120)",
        kind=float,
        metavar="S",
    ),
    _bootseer_flag(
        "--record-start",
        "Record the files that a start reads up to its first step, and read them ahead at the next "
        "start: on, off (default: on)",
        choices=("on", "off"),
    ),
    _bootseer_flag(
        "--image",
        "Image to run the ranks in: a tree of `bootseer image build`, or rootfs:/PATH, a directory "
        "with a root file system; Python is the image's",
        metavar="URL",
    ),
    _bootseer_flag(
        "--image-name", "Name of the tree, if it was published under another one than URL", metavar="NAME"
    ),
    _bootseer_flag(
        "--image-writable",
        "Destination of writes to the image's file system: tmpfs (lost at the end of the job), none "
        "(read-only), or a directory on a local disk (default: tmpfs)",
        metavar="tmpfs|none|DIR",
    ),
    _bootseer_flag(
        "--image-bind",
        "File or directory of this node to show in the image, beside the working directory, the "
        "script's directory, HOME, the logs, /tmp, /dev, /proc and /sys; no:DST omits one of these; "
        "repeatable",
        kind=comma_list,
        default=[],
        metavar="SRC:DST[:ro]",
        is_repeated=True,
    ),
    _bootseer_flag(
        "--image-python",
        "Interpreter in the image (default: python3, else python, on its PATH)",
        metavar="PROGRAM",
    ),
    _bootseer_flag(
        "--image-env",
        "Variable to set in the image, over the image's own and the caller's; repeatable",
        kind=comma_list,
        default=[],
        metavar="NAME=VALUE",
        is_repeated=True,
    ),
    _bootseer_flag(
        "--load-checkpoint",
        "Checkpoint to load, or a directory of checkpoints: each attempt takes the newest complete "
        "one. Ranks find its path in BOOTSEER_CHECKPOINT",
        metavar="URL",
    ),
    _bootseer_flag(
        "--checkpoint-memory",
        "Maximum memory of a node for the checkpoint, as 200GiB; 0 for none (default: a quarter)",
        metavar="SIZE",
    ),
    _bootseer_flag(
        "--checkpoint-disk",
        "Maximum disk space of a node for loaded checkpoints, as 500GiB; the next start reads them (default: 0)",
        metavar="SIZE",
    ),
    _bootseer_flag(
        "--checkpoint-fallback",
        "Checkpoint to load if the newest version is damaged: none, which ends the job, or older (default: none)",
        choices=("none", "older"),
    ),
    _bootseer_flag(
        "--require-checkpoint", "Fail if there is no checkpoint, instead of training from scratch", kind=None
    ),
    _bootseer_flag(
        "--checkpoint-files",
        "Show the checkpoint as files. off: only Bootseer's loaders read it, and BOOTSEER_CHECKPOINT "
        "may be a URL (default: on)",
        choices=("on", "off"),
    ),
    _bootseer_flag("--keep-arena", "Keep the checkpoint in memory after the ranks have loaded it", kind=None),
    _bootseer_flag(
        "--arena-bytes",
        "Memory in which a save may leave its bytes for the next attempt, as 50GiB (default: 0)",
        metavar="SIZE",
    ),
    _bootseer_flag(
        "--peers",
        "Share image, environment, caches and checkpoint between the nodes of a job, so that each byte "
        "leaves the store about once: on, off (default: on if the job has a secret)",
        choices=("on", "off"),
    ),
    _bootseer_flag(
        "--peers-upload",
        "Maximum bytes per second that this node sends to other nodes, as 500MB (default: unlimited)",
        metavar="SIZE",
    ),
    _bootseer_flag(
        "--setup",
        "Command that makes the environment of the ranks, run by /bin/sh before they start; "
        "repeatable, in order. The result is cached and restored at the next start",
        kind=one_item,
        default=[],
        metavar="COMMAND",
        is_repeated=True,
    ),
    _bootseer_flag(
        "--setup-input",
        "File or directory whose content determines the environment, as requirements.txt; repeatable",
        kind=comma_list,
        default=[],
        metavar="PATH",
        is_repeated=True,
    ),
    _bootseer_flag(
        "--setup-target",
        "Directory that set-up changes (default: the environment of the ranks' interpreter); repeatable",
        kind=comma_list,
        default=[],
        metavar="DIR",
        is_repeated=True,
    ),
    _bootseer_flag(
        "--setup-variable",
        "Variable whose value determines the environment, beside PIP_*, UV_*, CC and the like; repeatable",
        kind=comma_list,
        default=[],
        metavar="NAME",
        is_repeated=True,
    ),
    _bootseer_flag(
        "--setup-timeout", "Seconds for all set-up commands together (default: 3600)", kind=float, metavar="S"
    ),
    _bootseer_flag(
        "--setup-wait",
        "Seconds to wait for another node or job that makes the same environment (default: 600)",
        kind=float,
        metavar="S",
    ),
    _bootseer_flag("--env-store", "Store of environments and compile caches: a directory or a URL", metavar="URL"),
    _bootseer_flag(
        "--env-key",
        "Text that is part of the environment's key; another text makes another environment",
        metavar="TEXT",
    ),
    _bootseer_flag(
        "--env-max-age",
        "Seconds after which set-up runs again (default: 7 days if a requirement is not pinned, else never)",
        kind=float,
        metavar="S",
    ),
    _bootseer_flag(
        "--env-way",
        "Methods to restore an environment, in this order (default: there,mount,unpack)",
        kind=comma_list,
        metavar="WAY,...",
    ),
    _bootseer_flag(
        "--keep-caches",
        "Keep what the first step compiles (torch.compile, triton, extensions), and restore it at the "
        "next start (default: on with --env-store, except with --no-python)",
        kind=None,
    ),
    _bootseer_flag("--no-keep-caches", "Disable the compile cache, overriding other settings", kind=None),
    _bootseer_flag(
        "--cache-dir",
        "Directory to keep with the compile cache; repeatable",
        kind=comma_list,
        default=[],
        metavar="NAME=DIR",
        is_repeated=True,
    )._replace(env="BOOTSEER_KEEP_CACHE_DIR"),  # BOOTSEER_CACHE_DIR is the directory of the import traces
    _bootseer_flag(
        "--config",
        "File with settings of the job (default: bootseer.toml beside the script, else in the working directory)",
        metavar="FILE",
    ),
    _bootseer_flag(
        "--allow-mixed-environments", "Start although the nodes have different Python environments", kind=None
    ),
    _bootseer_flag(
        "--restart-refill",
        "Seconds without a failure after which the restart budget is full again",
        kind=float,
        metavar="S",
    ),
    _bootseer_flag(
        "--restart-backoff",
        "Seconds before a restart if attempts fail within 30 s; each further one doubles it; 0 for "
        "none (default: 1)",
        kind=float,
        default=1.0,
        metavar="S",
    ),
    _bootseer_flag(
        "--on-hang",
        "Action when no rank makes progress for longer than usual: report the stacks of all ranks, "
        "restart after the report, or off (default: report)",
        choices=("report", "restart", "off"),
    ),
    _bootseer_flag(
        "--hang-least",
        "Minimum hang timeout in seconds (default: 15). The timeout is this, or 3 times the longest "
        "gap between steps so far, whichever is larger; a gap below 0.8 of it never counts as a hang",
        kind=float,
        metavar="S",
    ),
    _bootseer_flag(
        "--log-rules",
        "Rules over the log files of ranks: all (those of bootseer.toml, and the built-in ones for "
        "known errors), own (without the built-in ones), or off (default: all; docs/guide/rules.md)",
        choices=("all", "own", "off"),
    ),
    _bootseer_flag(
        "--check",
        "Check disks, network, accelerators and memory of this node beside the start of each attempt "
        "and while ranks run: report problems, fail (an unfit node leaves the job), or off (default: "
        "off)",
        choices=("off", "report", "fail"),
    ),
    _bootseer_flag(
        "--check-pairs",
        "Measure the network between all pairs of nodes before the next attempt: auto (after a network "
        "failure; with --check after any failure), always (after any failure), or off (default: auto)",
        choices=("auto", "always", "off"),
    ),
    _bootseer_flag(
        "--check-own",
        "Program of a custom check, which prints JSON (docs/guide/checks.md); with --check or --stop-checks; "
        "repeatable",
        kind=comma_list,
        default=[],
        metavar="EXECUTABLE",
        is_repeated=True,
    ),
    _bootseer_flag(
        "--check-path",
        "Path to check, PATH or PATH:ro: write and read a small file there at each start, or read one; "
        "with --check or --stop-checks; repeatable",
        kind=comma_list,
        default=[],
        metavar="PATH",
        is_repeated=True,
    ),
    _bootseer_flag(
        "--check-nic",
        "Network interface that must have a link, as ib0 or mlx5_0/1; with --check or --stop-checks; repeatable",
        kind=comma_list,
        default=[],
        metavar="NAME",
        is_repeated=True,
    ),
    _bootseer_flag(
        "--check-expect-gpus",
        "Number of GPUs that must work on each node; with --check or --stop-checks",
        kind=int,
        metavar="N",
    ),
    _bootseer_flag(
        "--check-every",
        "Seconds between checks while ranks run, 0 for none (default: 30); with --check",
        kind=float,
        metavar="S",
    ),
    _bootseer_flag(
        "--check-timeout",
        "Seconds for each check (default: 60, or 10 while ranks run); between two attempts it is 0.8 "
        "of --stop-checks-timeout",
        kind=float,
        metavar="S",
    ),
    _bootseer_flag(
        "--check-limit",
        "Limit to change, by its name in docs/guide/checks.md; with --check or --stop-checks; repeatable",
        kind=comma_list,
        default=[],
        metavar="NAME=NUMBER",
        is_repeated=True,
    ),
    _bootseer_flag(
        "--trace-collectives",
        "Record the calls of torch.distributed in each rank: the report of a hang then names the first "
        "stuck rank and its victims",
        kind=None,
    ),
    _bootseer_flag(
        "--same-error",
        "Action when two attempts in a row fail with the same error at the same line: give-up ends the "
        "job, restart uses up --max-restarts (default: give-up)",
        choices=("give-up", "restart"),
    ),
    _bootseer_flag(
        "--exclude-nodes",
        "Exclude faulty nodes while others suffice: a node whose accelerator has failed, whose network "
        "or file system has failed twice within half an hour, or that --stop-checks, --check-pairs or "
        "--replay-command has found to be faulty: auto or off (default: auto)",
        choices=("auto", "off"),
    ),
    _bootseer_flag(
        "--no-progress",
        "Action when three attempts in a row get no further than the job has been, or make no step "
        "after one that made some: give-up ends the job, restart uses up --max-restarts (default: "
        "give-up)",
        choices=("give-up", "restart"),
    ),
    _bootseer_flag(
        "--give-up-status",
        "Exit status when a restart cannot help, for schedulers; 93 is common for `do not requeue` (default: 1)",
        kind=int,
        metavar="N",
    ),
    _bootseer_flag(
        "--post-mortem",
        "Command for /bin/sh to run after a failed attempt, on each node with a failed rank (on all "
        "after a hang), while the other ranks are held as they are",
        metavar="COMMAND",
    ),
    _bootseer_flag(
        "--post-mortem-timeout", "Seconds until that command is ended (default: 60)", kind=float, metavar="S"
    ),
    _bootseer_flag(
        "--stop-checks",
        "Check all nodes between two attempts, and exclude unfit ones: auto (after repeated failures, "
        "or one that a machine may have caused), always (before each restart), off (default: off)",
        choices=("off", "auto", "always"),
    ),
    _bootseer_flag(
        "--stop-checks-timeout",
        "Seconds for all checks of a node (default: 60); a check fails after 0.8 of that",
        kind=float,
        metavar="S",
    ),
    _bootseer_flag(
        "--rollback-command",
        "Command for /bin/sh that reverts the last change of code, settings or checkpoint: runs once "
        "on the node of rank 0, before a restart, when cheaper steps have not helped",
        metavar="COMMAND",
    ),
    _bootseer_flag(
        "--rollback-timeout", "Seconds until that command is ended (default: 300)", kind=float, metavar="S"
    ),
    _bootseer_flag(
        "--replay-command",
        "Command for /bin/sh that finds the faulty machine, as `bootseer replay --json --hosts "
        "$BOOTSEER_HOSTS --group-size $BOOTSEER_GROUP_SIZE --run ...`: runs once on that node, when "
        "failures still repeat",
        metavar="COMMAND",
    ),
    _bootseer_flag(
        "--replay-timeout", "Seconds until that command is ended (default: 7200)", kind=float, metavar="S"
    ),
    _bootseer_flag(
        "--forward-signals",
        "Signals that are only passed to the ranks; empty for none (default: SIGUSR1,SIGUSR2)",
        default="SIGUSR1,SIGUSR2",
        metavar="SIG,...",
    ),
    _bootseer_flag(
        "--signal-scope",
        "Scope of a stop signal. job: a signal to one node stops all nodes; node: an elastic job "
        "continues without this node",
        default="job",
        choices=("job", "node"),
    ),
    _bootseer_flag(
        "--events-dir", "Directory for event files; /dev/null for none (default: below the logs)", metavar="DIR"
    ),
    _bootseer_flag(
        "--dashboard",
        "Serve a page, an API and metrics about running jobs once the ranks run: on (127.0.0.1:8484), or an "
        "address for `bootseer serve`; jobs share it",
        metavar="on|ADDR",
    ),
    _bootseer_flag(
        "--dashboard-token-file",
        "File with the token for --dashboard, required for an address that other machines reach",
        metavar="FILE",
    ),
    _bootseer_flag(
        "--strict",
        "End the job if an optimization of the start fails before the ranks run; without this, bootrun "
        "logs a warning and takes the normal path",
        kind=None,
    ),
    _bootseer_flag("--quiet", "Omit the informational lines of bootrun", kind=None),
)


def is_on(flag: Flag, given: str) -> bool:
    """Return the value of a switch that a variable sets: torchrun reads a number. Raises: ConfigError."""
    try:
        return bool(int(given))
    except ValueError:
        wrong = UsageError if flag.ours else ConfigError  # torchrun: a ValueError, so status 1
        raise wrong(f"{flag.env}={given!r}: give 1 or 0") from None
