"""PURE: bounds and descriptions of the limits of `tuning`, and the parsers of [tuning] and of BOOTSEER_TUNING.

BOOTSEER_TUNING holds `PACKAGE.NAME=NUMBER` pairs, separated by spaces. Helper processes inherit it unchanged.
Apart from `tuning`, as a process without changed limits needs none of it. The reference of [tuning] is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from bootseer.errors import ConfigError
from bootseer.light_typing import NamedTuple

VARIABLE = "BOOTSEER_TUNING"
DAY_S = 86_400.0
YEAR_S = 366 * DAY_S
MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
MAX_VARIABLE_CHARS = 16 << 10


class Limit(NamedTuple):
    """The bounds of a limit, both allowed, its meaning, and the effects of other values."""

    low: float
    high: float
    meaning: str
    larger: str  # "a larger value ..."
    smaller: str


LIMITS: Mapping[str, Mapping[str, Limit]] = {
    "launcher": {
        "max_backoff_s": Limit(
            0.1,
            3600.0,
            "Longest pause before a restart",
            "gives a failed service time to recover",
            "restarts sooner",
        ),
        "attempts_without_progress": Limit(
            1,
            1000,
            "Attempts in a row without a new step, after which the job ends",
            "survives longer outages",
            "ends a hopeless job sooner",
        ),
        "machine_fault_s": Limit(
            1.0,
            30 * DAY_S,
            "Time within which a second network or file system fault excludes a node",
            "excludes nodes with rarer faults",
            "excludes fewer nodes",
        ),
        "calm_s": Limit(
            1.0,
            30 * DAY_S,
            "Run time after which a failure restarts the escalation ladder",
            "escalates rarer failures",
            "restarts in place more often",
        ),
        "hang_first_s": Limit(
            10.0,
            7 * DAY_S,
            "Time without a first step, after which a hang is reported",
            "allows longer imports and compilations",
            "reports a hang sooner",
        ),
        "hang_busy_s": Limit(
            10.0,
            7 * DAY_S,
            "Time without a step, while all ranks compute, after which a hang is reported",
            "allows longer compilations",
            "reports a hang sooner",
        ),
        "hang_working_s": Limit(
            10.0,
            7 * DAY_S,
            "Time without a step, while ranks read or write, after which a hang is reported",
            "allows longer checkpoints",
            "reports a hang sooner",
        ),
        "hang_stacks_s": Limit(
            1.0,
            300.0,
            "Time for all nodes to send the stacks of a hang",
            "includes slow nodes",
            "reports a hang sooner",
        ),
        "py_spy_s": Limit(
            0.1,
            600.0,
            "Time for py-spy to read the stacks of a rank",
            "succeeds on busy nodes",
            "reports a hang sooner",
        ),
        "failure_records": Limit(
            1,
            100_000,
            "Number of failure records that a job writes",
            "records later failures too",
            "needs less space",
        ),
        "event_backlog_bytes": Limit(
            2 * MIB,
            16 * GIB,
            "Size of the unsent events of a file, above which the oldest are dropped",
            "drops fewer events on a slow network",
            "sends recent events sooner",
        ),
        "checkpoint_silence_s": Limit(
            70.0,
            DAY_S,
            "Time without a message, after which bootrun replaces the checkpoint service",
            "tolerates busy nodes",
            "recovers sooner",
        ),
        "image_silence_s": Limit(
            60.0,
            DAY_S,
            "Time without a message of an opening image service, after which the job ends",
            "tolerates slow stores and disks",
            "ends the job sooner",
        ),
        "environment_silence_s": Limit(
            30.0,
            DAY_S,
            "Time without a message, after which bootrun replaces the environment service;"
            " at most a third of `join_timeout`",
            "tolerates slow disks",
            "recovers sooner",
        ),
    },
    "storage": {
        "timeout_s": Limit(
            0.5,
            3600.0,
            "Time without progress, after which a request to a store fails",
            "tolerates slow stores",
            "takes the normal path sooner",
        ),
        "max_requests": Limit(
            1,
            1024,
            "Number of parallel reads that a process sends to one store",
            "reads faster from a fast store",
            "spares a weak store",
        ),
        "io_threads": Limit(
            4,
            1024,
            "Number of threads that read and write files, in each process",
            "reads faster from slow file systems",
            "needs less memory",
        ),
        "hdfs_avoid_s": Limit(
            1.0,
            DAY_S,
            "Time for which a failed DataNode is avoided",
            "avoids unreliable DataNodes longer",
            "uses a recovered DataNode sooner",
        ),
        "upload_part_bytes": Limit(
            5 * MIB,
            GIB,
            "Size of a part of an upload to S3, GCS or Azure",
            "sends fewer requests",
            "needs less memory",
        ),
    },
    "blocks": {
        "unpack_threads": Limit(
            1,
            256,
            "Number of threads that unpack prefetched blocks; at most half of the cores",
            "prefetches faster",
            "leaves the cores to the ranks",
        ),
        "store_rest_s": Limit(
            0.1,
            3600.0,
            "Time for which a failed store is read only after the others",
            "spares the failed store",
            "uses a recovered store sooner",
        ),
    },
    "mounts": {
        "idle_s": Limit(
            1.0,
            30 * DAY_S,
            "Time after its last use, after which the daemon of a tree ends",
            "makes the next start faster",
            "frees memory sooner",
        ),
        "ready_s": Limit(
            1.0,
            250.0,
            "Time for the daemon of a tree to mount it",
            "tolerates slow stores",
            "takes the normal path sooner",
        ),
        "daemon_log_bytes": Limit(
            64 << 10, GIB, "Size at which a daemon empties its log", "keeps older lines", "needs less space"
        ),
        "worker_silence_s": Limit(
            0.5,
            600.0,
            "Time without a message, after which a daemon replaces its prefetch worker",
            "tolerates busy nodes",
            "unblocks readers sooner",
        ),
    },
    "peers": {
        "max_connections": Limit(
            8,
            65_536,
            "Number of connections from other nodes that a node accepts",
            "serves larger jobs",
            "needs fewer descriptors",
        ),
        "begin_s": Limit(
            0.1,
            300.0,
            "Time for a peer to answer, after which the store is read",
            "tolerates busy nodes",
            "reads the store sooner",
        ),
        "stall_s": Limit(
            0.1,
            15.0,
            "Time without bytes from a peer, after which the store is read",
            "tolerates busy links",
            "reads the store sooner",
        ),
        "ranges_at_once": Limit(
            1,
            1024,
            "Number of ranges of 2 MiB that a node fetches for peers in parallel",
            "reads faster from a fast store",
            "needs less memory",
        ),
        "spool_bytes": Limit(
            2 * MIB,
            16 * TIB,
            "Size of the data in TMPDIR that a node keeps for its peers",
            "sends fewer reads to the store",
            "needs less space",
        ),
    },
    "env": {
        "setup_log_bytes": Limit(
            MIB,
            TIB,
            "Size of the output of set-up, above which its commands are ended",
            "allows longer output",
            "saves the disk from endless output",
        ),
        "unpack_processes": Limit(
            1,
            256,
            "Number of processes that unpack an environment; at most one for each core",
            "unpacks faster on many cores",
            "spares the disk",
        ),
        "publish_s": Limit(
            10.0,
            30 * DAY_S,
            "Time after the end of the job to publish its environment",
            "completes uploads to slow stores",
            "frees the node sooner",
        ),
        "cache_bytes": Limit(
            MIB,
            16 * TIB,
            "Size of the compile cache of one key",
            "keeps older entries",
            "needs less space and time to fetch",
        ),
        "cache_seed_s": Limit(
            0.5,
            500.0,  # `bootseer warm` ends a worker after 600 s without progress
            "Time for which ranks wait for their compile cache",
            "compiles less after a slow fetch",
            "starts ranks sooner",
        ),
    },
    "checkpoint": {
        "save_buffer_bytes": Limit(
            MIB,
            TIB,
            "Size of the memory of a save for data in flight; half in each rank of a DCP save",
            "writes more in parallel",
            "leaves memory to the ranks",
        ),
        "resolve_s": Limit(
            1.0,
            540.0,
            "Time for retries to find the version to load",
            "survives longer outages",
            "ends the job sooner",
        ),
        "store_silence_s": Limit(
            1.0,
            DAY_S,
            "Time without bytes from the store, after which ranks read the files themselves",
            "survives longer outages",
            "takes the normal path sooner",
        ),
        "unfinished_s": Limit(
            60.0,
            YEAR_S,
            "Age at which an unfinished save is deleted",
            "is safe with slower saves",
            "frees space sooner",
        ),
    },
    "health": {
        "checks_at_once": Limit(
            1,
            256,
            "Number of health checks that run in parallel",
            "completes the checks sooner",
            "disturbs the measurements less",
        ),
    },
}


def check_value(package: str, name: str, value: object) -> float | int:
    """Return a valid value. Raises: ValueError that names the value and the allowed range."""
    limit = LIMITS[package][name]
    if isinstance(value, int | float) and not isinstance(value, bool) and limit.low <= value <= limit.high:
        if not is_whole(name):
            return float(value)
        if isinstance(value, int):
            return value
    raise ValueError(f"{str(value)[:80]}: {describe_range(package, name)}")


def is_whole(name: str) -> bool:
    """Return whether a limit is a whole number: all but durations."""
    return not name.endswith("_s")


def describe_range(package: str, name: str) -> str:
    """Return the allowed values, as an instruction."""
    limit = LIMITS[package][name]
    unit = " of bytes" if name.endswith("_bytes") else "" if is_whole(name) else " of seconds"
    return f"give a {'whole ' * is_whole(name)}number{unit} from {limit.low:.15g} to {limit.high:.15g}"


def parse_variable(text: str) -> dict[str, float | int]:
    """Return the values of BOOTSEER_TUNING, by `PACKAGE.NAME`. Raises: ConfigError."""
    found: dict[str, float | int] = {}
    if len(text) > MAX_VARIABLE_CHARS:
        raise ConfigError(f"{VARIABLE}: longer than {MAX_VARIABLE_CHARS} characters")
    for word in text.split():
        path, equals, number = word.partition("=")
        package, _, name = path.partition(".")
        if not equals or name not in LIMITS.get(package, {}):
            raise ConfigError(
                f"{VARIABLE}: {word[:80]!r} is no limit; give PACKAGE.NAME=NUMBER, as listed for [tuning] in"
                " docs/reference/bootseer-toml.md"
            )
        try:
            value: object = int(number) if number.lstrip("-").isdecimal() else float(number)
        except ValueError:
            value = number
        try:
            found[path] = check_value(package, name, value)
        except ValueError as error:
            raise ConfigError(f"{VARIABLE}: {path}={error}") from None
    return found


def to_variable(values: Mapping[str, float | int]) -> str:
    """Return the value of BOOTSEER_TUNING for these limits, by `PACKAGE.NAME`."""
    return " ".join(f"{path}={value!r}" for path, value in values.items())


def merge(file: Mapping[str, float | int], text: str) -> dict[str, str]:
    """Return the variables that helper processes need; {} if nothing is set.

    Args: file: values of [tuning]; text: BOOTSEER_TUNING as inherited, which takes precedence.
    Raises: ConfigError.
    """
    values = {**file, **parse_variable(text)}
    return {VARIABLE: to_variable(values)} if values else {}
