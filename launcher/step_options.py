"""PURE: the flags of the restart ladder's steps: which commands there are, and how long they may take."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from bootseer.errors import UsageError
from launcher.policy import StepLimits

POST_MORTEM_S = CHECKS_S = 60.0
ROLLBACK_S = 300.0
REPLAY_S = 7200.0  # two rounds, each of them a start of the job


class StepOptions(NamedTuple):
    """What is done beside starting again."""

    limits: StepLimits
    post_mortem: str  # commands for a shell, "" for none
    rollback: str
    replay: str


def read_steps(args: argparse.Namespace, warnings: list[str]) -> StepOptions:
    """Raises: UsageError."""
    limits = StepLimits(
        post_mortem_s=_limit_s(args.post_mortem, args.post_mortem_timeout, POST_MORTEM_S, "--post-mortem"),
        checks_s=_limit_s(
            "" if args.stop_checks in (None, "off") else "checks",
            args.stop_checks_timeout,
            CHECKS_S,
            "--stop-checks",
        ),
        checks_always=args.stop_checks == "always",
        rollback_s=_limit_s(args.rollback_command, args.rollback_timeout, ROLLBACK_S, "--rollback-command"),
        replay_s=_limit_s(args.replay_command, args.replay_timeout, REPLAY_S, "--replay-command"),
    )
    if not args.max_restarts and (limits.checks_s or limits.rollback_s or limits.replay_s):
        warnings.append("--stop-checks, --rollback-command and --replay-command do nothing without --max-restarts")
    return StepOptions(limits, args.post_mortem or "", args.rollback_command or "", args.replay_command or "")


def _limit_s(command: str | None, given_s: float | None, default_s: float, flag: str) -> float:
    """0 where it is not asked for."""
    timeout = f"{flag.removesuffix('-command')}-timeout"
    if command is not None and (not command.strip() or "\0" in command) and flag != "--stop-checks":
        raise UsageError(f"{flag} {command!r}: give a command for /bin/sh")
    if given_s is not None and not command:
        raise UsageError(f"{timeout} {given_s:g} is without effect: give {flag} as well")
    if given_s is not None and not 0.1 <= given_s <= 86400:
        raise UsageError(f"{timeout} {given_s:g}: give 0.1 to 86400 seconds")
    return (default_s if given_s is None else given_s) if command else 0.0
