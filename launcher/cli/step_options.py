"""PURE: the flags of the escalation ladder's steps: their commands and time limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bootseer.errors import UsageError
from launcher.coordinator.restart_policy import StepLimits

if TYPE_CHECKING:
    from launcher.cli.quick_parse import Arguments

POST_MORTEM_S = CHECKS_S = 60.0
ROLLBACK_S = 300.0
REPLAY_S = 7200.0  # two rounds, each with a start of the job


class StepOptions(NamedTuple):
    """The steps of the escalation ladder."""

    limits: StepLimits
    post_mortem: str  # commands for a shell, "" for none
    rollback: str
    replay: str


def read_steps(args: Arguments, warnings: list[str]) -> StepOptions:
    """Read the flags of the steps. Raises: UsageError."""
    for flag, command in (
        ("--post-mortem", args.post_mortem),
        ("--rollback-command", args.rollback_command),
        ("--replay-command", args.replay_command),
    ):
        if command is not None and (not command.strip() or "\0" in command):
            raise UsageError(f"{flag} {command!r}: give a command for /bin/sh")
    limits = StepLimits(
        post_mortem_s=_limit_s("--post-mortem", args.post_mortem, args.post_mortem_timeout, POST_MORTEM_S),
        checks_s=_limit_s("--stop-checks", args.stop_checks, args.stop_checks_timeout, CHECKS_S),
        checks_always=args.stop_checks == "always",
        rollback_s=_limit_s("--rollback-command", args.rollback_command, args.rollback_timeout, ROLLBACK_S),
        replay_s=_limit_s("--replay-command", args.replay_command, args.replay_timeout, REPLAY_S),
    )
    if args.stop_checks == "off":
        limits = limits._replace(checks_s=0.0)
    if not args.max_restarts and (limits.checks_s or limits.rollback_s or limits.replay_s):
        warnings.append("--stop-checks, --rollback-command and --replay-command do nothing without --max-restarts")
    return StepOptions(limits, args.post_mortem or "", args.rollback_command or "", args.replay_command or "")


def _limit_s(flag: str, asked: str | None, given_s: float | None, default_s: float) -> float:
    """Return the time limit of a step, 0 if it is not requested."""
    timeout = f"{flag.removesuffix('-command')}-timeout"
    if given_s is not None and asked is None:
        raise UsageError(f"{timeout} {given_s:g} is without effect: give {flag} as well")
    if given_s is not None and not 0.1 <= given_s <= 86400:
        raise UsageError(f"{timeout} {given_s:g}: give 0.1 to 86400 seconds")
    return 0.0 if asked is None else default_s if given_s is None else given_s
