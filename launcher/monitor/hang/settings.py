"""PURE: the limits of hang detection, which flags and bootseer.toml set."""

from __future__ import annotations

from typing import NamedTuple

from bootseer.tuning import DEFAULTS

_LIMITS = DEFAULTS.launcher
STACKS_S = _LIMITS.hang_stacks_s  # for all nodes to send the stacks of their ranks


class HangSettings(NamedTuple):
    """Limits of the detection, in seconds."""

    min_s: float = 15.0  # a hang is reported within this,
    factor: float = 3.0  # or within this multiple of the longest healthy gap so far, if that is longer
    first_s: float = _LIMITS.hang_first_s  # before the first steps of an attempt: imports, downloads, compilation
    busy_s: float = _LIMITS.hang_busy_s  # while all compute or spin: compilation, autotuning
    working_s: float = _LIMITS.hang_working_s  # while some read or write
    ending_s: float = 120.0  # once ranks have ended: the rest cleans up
    frozen_s: float = 5.0  # how long a process is stopped before it is reported
    late_s: float = 6.0  # facts older than the newest by more than this are late
    gone_s: float = 60.0  # a rank without facts for longer is not waited for
    look_s: float = 10.0  # time between samples beyond this was unobserved and does not count
    asks_busy: bool = False  # if all ranks only work, query them at the usual limit: ALL_SPIN
    steps_needed: int = 3  # gaps between steps before they are a cadence
    outputs_needed: int = 10  # gaps between outputs before they are one: the output may be a server's
    output_busy_part: float = 0.8  # and ranks must work in this part of the time
    stacks_s: float = STACKS_S
