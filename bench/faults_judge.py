"""PURE: was the right thing said of a fault, and done? In: what faults.toml wants and what came. Out: Verdicts.

The first word that has a class counts for the class, the first with a class that names somebody for the culprit;
where no class is named the first word that names anybody. Later corrections do not help: somebody has acted then.
"""

from __future__ import annotations

from typing import NamedTuple

from bench.faults_plan import NODES, RANKS_OF_NODE, Injection
from bench.faults_said import Word

HANG_LEAST_S, HANG_GAPS = 15.0, 3.0  # what issue and docs promise of hangs
EXIT_S = 40.0  # so long is waited for a word about an end
SLOW_STEPS = 30  # and for one about slow ranks and odd numbers
ACTION_S = 60.0  # from the first word until it is known what is done
QUIET_S = 8.0  # in which nothing is done after a report
HARMLESS_S, HARMLESS_STEPS = 30.0, 45  # are watched after the fault is over
GOES_ON_STEPS = 3


class Outcome(NamedTuple):
    """What came of an injection so far. Times are seconds after it."""

    words: tuple[Word, ...] = ()  # at_s: after the injection; before it: negative
    goes_on_s: float | None = None  # a later attempt has made a few steps
    nodes_after: int = NODES  # that take part in it
    steps_after: int = 0  # that any rank made after the injection in the attempt that was hit
    ended_s: float | None = None  # all launchers have ended
    longest_gap_s: float = 0.0  # between two steps, before
    left: int = 0  # processes that were there after everything was ended


class Verdict(NamedTuple):
    """Of one injection."""

    is_right: bool  # harmful: seen; harmless: nothing was said and the job went on
    seen_s: float | None
    class_: str
    is_class_right: bool
    culprit: str
    is_culprit_right: bool
    action: str  # what was done
    is_action_right: bool
    is_in_time: bool
    goes_on_s: float | None
    note: str


def hang_limit_s(longest_gap_s: float) -> float:
    """Within this a hang must be told."""
    return max(HANG_LEAST_S, HANG_GAPS * longest_gap_s)


def is_exit(injection: Injection) -> bool:
    """Whether the fault ends a process, which is seen at once."""
    fault = injection.fault
    return fault.class_ not in ("", "hang", "slow", "numeric", "node") and fault.do != "link"


def wait_s(injection: Injection, longest_gap_s: float) -> float:
    """How long a word is waited for."""
    fault = injection.fault
    if fault.is_harmless:
        lasts_s = float(fault.arguments.get("seconds", 0.0)) if fault.do in ("autotune", "link") else 0.0
        return lasts_s + max(HARMLESS_S, HARMLESS_STEPS * injection.step_s)
    if fault.class_ == "hang":
        return hang_limit_s(longest_gap_s) + EXIT_S
    if fault.class_ in ("slow", "numeric"):
        return max(EXIT_S, SLOW_STEPS * injection.step_s)
    return EXIT_S


def is_settled(injection: Injection, outcome: Outcome, now_s: float, silent_s: float | None = None) -> bool:
    """Whether nothing more is waited for, `now_s` seconds after the injection; a word at most `silent_s`."""
    fault, words = injection.fault, _after(outcome)
    if outcome.ended_s is not None:
        return True
    if not words and not fault.is_harmless and silent_s is not None:
        return now_s >= silent_s
    if fault.is_harmless or not words:
        return now_s >= wait_s(injection, outcome.longest_gap_s)
    quiet_s = words[0].at_s + QUIET_S
    if fault.action == "report":
        return now_s >= quiet_s
    if fault.action in ("restart", "exclude") and outcome.goes_on_s is not None:
        return True
    return now_s >= words[0].at_s + ACTION_S


def judge(injection: Injection, outcome: Outcome) -> Verdict:
    """What was right."""
    fault, words = injection.fault, _after(outcome)
    early = outcome.words[: len(outcome.words) - len(words)]
    seen_s = words[0].at_s if words else None
    with_class = [word for word in words if word.class_]
    class_ = with_class[0].class_ if with_class else ""
    named = next((word for word in with_class or words if word.ranks or word.nodes), None)
    action = _action(outcome, bool(words))
    notes = [f"said before: {early[0].text}"] if early else []
    if outcome.left:
        notes.append(f"{outcome.left} processes were left")
    if fault.is_harmless:
        is_right = not outcome.words and outcome.ended_s is None and outcome.goes_on_s is None
        is_right = is_right and outcome.steps_after > 0
        if not is_right and words:
            notes.append(words[0].text)
        elif not is_right and not early:
            notes.append("the training did not go on")
        culprit = _name(named)
        is_quiet = action in ("", "none")
        return Verdict(
            is_right,
            seen_s,
            class_,
            not class_,
            culprit,
            not culprit,
            action,
            is_quiet,
            is_right,
            None,
            _join(notes),
        )
    return Verdict(
        is_right=seen_s is not None,
        seen_s=seen_s,
        class_=class_,
        is_class_right=class_ == fault.class_,
        culprit=_name(named),
        is_culprit_right=seen_s is not None and _is_culprit(injection, named),
        action=action,
        is_action_right=_is_action_right(fault.action, action, outcome),
        is_in_time=seen_s is not None and seen_s <= hang_limit_s(outcome.longest_gap_s),
        goes_on_s=outcome.goes_on_s,
        note=_join(notes),
    )


def _after(outcome: Outcome) -> tuple[Word, ...]:
    return tuple(word for word in outcome.words if word.at_s >= 0)


def _join(notes: list[str]) -> str:
    return "; ".join(notes)


def _name(word: Word | None) -> str:
    if word is None:
        return ""
    if word.ranks:
        return ("rank " if len(word.ranks) == 1 else "ranks ") + ", ".join(map(str, word.ranks))
    return ", ".join(word.nodes)


def node_name(number: int) -> str:
    """As the bench's hosts are called."""
    return f"node{number + 1}"


def _is_culprit(injection: Injection, named: Word | None) -> bool:
    fault = injection.fault
    every = tuple(range(NODES * RANKS_OF_NODE))
    if fault.culprit == "job":
        return named is None or (not named.nodes and named.ranks == every)
    if named is None:
        return False
    if fault.culprit == "rank":
        return named.ranks == (injection.rank,)
    own = every[injection.node * RANKS_OF_NODE : (injection.node + 1) * RANKS_OF_NODE]
    return named.nodes == (node_name(injection.node),) or (not named.nodes and named.ranks == own)


def _action(outcome: Outcome, is_seen: bool) -> str:
    if outcome.ended_s is not None:
        return "ended"  # after a restart, perhaps
    if outcome.goes_on_s is not None:
        return "restart" if outcome.nodes_after == NODES else f"restart on {outcome.nodes_after}"
    return "none" if is_seen else ""


def _is_action_right(wanted: str, action: str, outcome: Outcome) -> bool:
    if wanted == "restart":
        return action.startswith("restart")
    if wanted == "exclude":
        return action.startswith("restart") and outcome.nodes_after < NODES
    if wanted == "give-up":
        return action == "ended"
    return action == "none"  # report
