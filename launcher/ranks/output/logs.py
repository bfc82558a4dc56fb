"""Where the output of each rank goes: the masks of --redirects and --tee, the log tree, line prefixes.

In: the masks as typed, the run's directory and the number of ranks. Out: the paths for each rank. The plan is
pure; only `make_run_dir` and `make_attempt_dirs` touch the disk. The layout is torchrun's:
`<log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}`. Directories are only
ever added: attempt numbers never repeat, so no attempt can take the place of an earlier one's logs.
"""

from __future__ import annotations

import os

from bootseer.errors import ConfigError, LaunchError
from bootseer.light_typing import Collection, NamedTuple

NO_LOG_DIR = os.devnull  # as --log-dir: write no files at all
OUT = 1
ERR = 2
_RANDOM_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789_"
_RANDOM_LENGTH = 8
_LONGEST_RUN_ID_BYTES = 200  # a file name has at most 255 bytes, the random part included


class Masks(NamedTuple):
    """Which streams of which local rank: bit 1 is stdout, bit 2 stderr."""

    every: int  # for ranks without an entry of their own
    by_rank: dict[int, int]

    def of(self, local_rank: int) -> int:
        return self.by_rank.get(local_rank, self.every)


class RankLogs(NamedTuple):
    """Where the output of one rank goes. A path of None means that the rank inherits the console."""

    stdout_path: str | None
    stderr_path: str | None
    tee_stdout: bool
    tee_stderr: bool
    error_file: str  # "" when there is no log directory


def parse_masks(text: str, flag: str = "--redirects") -> Masks:
    """Parse `3` or `0:3,10:1`; name `flag` in the error if the value is wrong."""
    value = text.removesuffix("\n")
    if value in ("0", "1", "2", "3"):
        return Masks(int(value), {})
    by_rank: dict[int, int] = {}
    for entry in value.split(","):
        rank, colon, mask = entry.partition(":")
        if not (colon and rank.isdecimal() and mask in ("0", "1", "2", "3")):
            raise ConfigError(
                f"{flag} {text!r}: give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), "
                "or local ranks with such values, as in 0:3,12:1"
            )
        by_rank[int(rank)] = int(mask)
    return Masks(0, by_rank)


def parse_local_ranks(text: str) -> frozenset[int]:
    """Parse `0,1,12`; an empty text means no filter."""
    try:
        return frozenset(int(part) for part in text.split(",")) if text else frozenset()
    except ValueError:
        raise ConfigError(
            f"--local-ranks-filter {text!r}: give local ranks separated by commas, as in 0,1"
        ) from None


def attempt_dir(run_dir: str, attempt: int) -> str:
    """Return the directory of one attempt of the job."""
    return f"{run_dir}/attempt_{attempt}"


def filtered_path(run_dir: str, attempt: int, stream: int) -> str:
    """Return the file for matches of --duplicate-stdout-filters (stream 1) or -stderr- (2); "" without logs."""
    if run_dir == NO_LOG_DIR:
        return ""
    return f"{attempt_dir(run_dir, attempt)}/filtered_{'stdout' if stream == OUT else 'stderr'}.log"


def plan_logs(
    run_dir: str,
    attempt: int,
    nproc: int,
    redirects: Masks,
    tee: Masks,
    local_ranks_filter: Collection[int] = (),
) -> tuple[RankLogs, ...]:
    """Plan the outputs of all local ranks. Without a log directory all ranks use the console, as in torchrun."""
    if run_dir == NO_LOG_DIR:
        return (RankLogs(None, None, False, False, ""),) * nproc
    return tuple(
        _plan_rank(
            f"{attempt_dir(run_dir, attempt)}/{rank}",
            redirects.of(rank),
            tee.of(rank),
            not local_ranks_filter or rank in local_ranks_filter,
        )
        for rank in range(nproc)
    )


def _plan_rank(directory: str, redirect: int, tee: int, shown: bool) -> RankLogs:
    to_file = redirect | tee  # a copy to the console is made from the file
    elsewhere = None if shown else os.devnull
    return RankLogs(
        f"{directory}/stdout.log" if to_file & OUT else elsewhere,
        f"{directory}/stderr.log" if to_file & ERR else elsewhere,
        shown and bool(tee & OUT),
        shown and bool(tee & ERR),
        f"{directory}/error.json",
    )


def line_prefix(template: str | None, role: str, rank: int, local_rank: int, node: str = "") -> bytes:
    """Return the prefix of each copied line; `template` is --log-line-prefix-template, with ${node} added."""
    if not template:
        text = f"[{role}{local_rank}]:"
    else:
        import string  # rarely needed, so not imported at every start

        text = string.Template(template).safe_substitute(
            role_name=role, rank=rank, local_rank=local_rank, hostname=os.uname().nodename, node=node
        )
    return text.encode(errors="surrogateescape")


# ---- disk ----------------------------------------------------------------------------------------------------


def make_run_dir(log_dir: str | None, run_id: str) -> str:
    """Make the run's own directory and return its absolute path; /dev/null if no files are wanted."""
    if log_dir == NO_LOG_DIR:
        return NO_LOG_DIR
    base = os.path.abspath(log_dir) if log_dir else _make_unique(_temporary_dir(), "torchelastic_")
    try:
        os.makedirs(base, exist_ok=True)
    except OSError as error:
        if os.path.exists(base) and not os.path.isdir(base):
            raise ConfigError(f"log dir {log_dir} is a file: give a directory with --log-dir") from None
        raise _cannot_make(base, error) from None
    return _make_unique(base, f"{_one_name(run_id)}_")


def make_attempt_dirs(run_dir: str, attempt: int, nproc: int) -> None:
    """Make the directories of an attempt; they must not exist yet."""
    if run_dir == NO_LOG_DIR:
        return
    base = attempt_dir(run_dir, attempt)
    try:
        os.makedirs(base)
        for rank in range(nproc):
            os.mkdir(f"{base}/{rank}")
    except OSError as error:
        raise LaunchError(f"cannot make the log directory {error.filename or base}: {error.strerror}") from None


def _cannot_make(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"cannot make the log directory {path} ({error.strerror}): give another with --log-dir")


def _make_unique(base: str, prefix: str) -> str:
    while True:
        letters = "".join(_RANDOM_LETTERS[byte % len(_RANDOM_LETTERS)] for byte in os.urandom(_RANDOM_LENGTH))
        path = f"{base.rstrip('/')}/{prefix}{letters}"
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise _cannot_make(path, error) from None
        return path


def _temporary_dir() -> str:
    for path in (os.environ.get("TMPDIR"), os.environ.get("TEMP"), os.environ.get("TMP"), "/tmp", "/var/tmp"):  # noqa: S108
        if path and os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK):
            return os.path.abspath(path)
    return os.getcwd()


def _one_name(run_id: str) -> str:
    """Return the run id as part of one file name that cannot lead out of the log directory."""
    name = "".join("_" if letter == "/" or not letter.isprintable() else letter for letter in run_id)
    return name.encode()[:_LONGEST_RUN_ID_BYTES].decode(errors="ignore")
