"""The limits that an operator may need to change: one record for each package, with the defaults.

In: BOOTSEER_TUNING, which bootrun sets from [tuning] of bootseer.toml, and helper processes inherit. Out:
`current()`. Bounds and descriptions are in `tuning_limits`, which is imported only if something is set. A module
reads its limit when it needs it, never at import. Pure modules get theirs as an argument.
"""

from __future__ import annotations

import os

from bootseer.light_typing import NamedTuple

VARIABLE = "BOOTSEER_TUNING"


class LauncherTuning(NamedTuple):
    """Limits of the agent and of the coordinator."""

    max_backoff_s: float = 30.0
    attempts_without_progress: int = 3
    machine_fault_s: float = 1800.0
    calm_s: float = 1800.0
    hang_first_s: float = 1800.0
    hang_busy_s: float = 900.0
    hang_working_s: float = 3600.0
    hang_stacks_s: float = 6.0
    py_spy_s: float = 10.0
    failure_records: int = 1000
    event_backlog_bytes: int = 64 << 20
    checkpoint_silence_s: float = 90.0
    image_silence_s: float = 900.0
    environment_silence_s: float = 300.0


class StorageTuning(NamedTuple):
    """Limits of stores."""

    timeout_s: float = 30.0
    max_requests: int = 64
    io_threads: int = 64
    hdfs_avoid_s: float = 30.0
    upload_part_bytes: int = 16 << 20


class BlocksTuning(NamedTuple):
    """Limits of block fetching."""

    unpack_threads: int = 8
    store_rest_s: float = 10.0


class MountsTuning(NamedTuple):
    """Limits of mounted trees and their daemons."""

    idle_s: float = 60.0
    ready_s: float = 120.0
    daemon_log_bytes: int = 4 << 20
    worker_silence_s: float = 5.0


class PeersTuning(NamedTuple):
    """Limits of sharing between nodes."""

    max_connections: int = 1024
    begin_s: float = 3.0
    stall_s: float = 5.0
    ranges_at_once: int = 32
    spool_bytes: int = 4 << 30


class EnvTuning(NamedTuple):
    """Limits of environments and compile caches."""

    setup_log_bytes: int = 1 << 30
    unpack_processes: int = 8
    publish_s: float = 3600.0
    cache_bytes: int = 2 << 30
    cache_seed_s: float = 30.0


class CheckpointTuning(NamedTuple):
    """Limits of checkpoints."""

    save_buffer_bytes: int = 512 << 20
    resolve_s: float = 60.0
    store_silence_s: float = 60.0
    unfinished_s: float = 86_400.0


class HealthTuning(NamedTuple):
    """Limits of health checks."""

    checks_at_once: int = 16


class Tuning(NamedTuple):
    """The limits of all packages."""

    launcher: LauncherTuning = LauncherTuning()
    storage: StorageTuning = StorageTuning()
    blocks: BlocksTuning = BlocksTuning()
    mounts: MountsTuning = MountsTuning()
    peers: PeersTuning = PeersTuning()
    env: EnvTuning = EnvTuning()
    checkpoint: CheckpointTuning = CheckpointTuning()
    health: HealthTuning = HealthTuning()


DEFAULTS = Tuning()
_last: tuple[str, Tuning] = ("", DEFAULTS)  # of the variable's value


def current() -> Tuning:
    """Return the limits of this process. Raises: ConfigError for an invalid value of BOOTSEER_TUNING."""
    global _last
    text = os.environ.get(VARIABLE, "")
    if text != _last[0]:
        _last = text, parse(text)
    return _last[1]


def parse(text: str) -> Tuning:
    """Return the limits of a value of BOOTSEER_TUNING; the rest keep their defaults. Raises: ConfigError."""
    from bootseer.tuning_limits import parse_variable

    found = DEFAULTS
    for path, value in parse_variable(text).items():
        package, _, name = path.partition(".")
        found = found._replace(**{package: getattr(found, package)._replace(**{name: value})})
    return found
