"""What went wrong: pure analysis of what is known of a job, and the tools that ask more."""

from bootseer.diagnose.replay import Found, Group, Replay, Verdict
from bootseer.diagnose.replay_run import Result, run_groups

__all__ = ["Found", "Group", "Replay", "Result", "Verdict", "run_groups"]
