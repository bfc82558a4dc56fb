"""PURE: rules over the output of ranks: their fields in bootseer.toml, and errors for invalid rules.

A rule is an alarm (each matching line is a finding), a metric (a number in a line, and its bounds), a clock (a
line that ranks must print, and print again), or several of these together. The fields combine those of HyperPod's
log monitoring and Determined's log policies; docs/guide/rules.md explains each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bootseer.errors import ConfigError

OF_HEARTBEATS = "^heartbeat "  # a pattern is for heartbeats only if it begins so
MAX_RULES = 64
MAX_NAME_CHARACTERS = 64
MAX_PATTERN_CHARACTERS = 2000
ACTIONS = ("report", "restart", "give-up", "stop")
RANKS = ("all", "any", "first", "last")
# An alarm that matches all of these matches anything.
_ORDINARY = ("step 10", "INFO  data: 3.5 files/s", "/job/train.py", "epoch=0 loss=2.31", "{'lr': 0.1}", "Ready.")


class Rule(NamedTuple):
    """One rule. Times are in seconds."""

    name: str
    pattern: str  # a regular expression of Python, searched for in each line
    action: str = "report"  # of ACTIONS
    ranks: str | tuple[int, ...] = "all"  # of RANKS, or global ranks
    metric: str = ""  # a named group of the pattern: a number
    must_be_below: float | None = None
    must_be_above: float | None = None
    must_be_finite: bool = False
    must_not_jump: float | None = None  # more than so many times its usual value
    times: int = 1  # consecutive wrong values until they count
    must_start_within_s: float | None = None
    must_recur_within_s: float | None = None
    start: str = ""  # the rule applies from a line on that matches this
    stop: str = ""  # until a line that matches this
    hints: tuple[str, ...] = ()  # for speed: a match contains one of these texts; () if unknown
    kind: str = ""  # the class of failure that it indicates

    @property
    def has_clock(self) -> bool:
        """Whether ranks must print matching lines."""
        return self.must_start_within_s is not None or self.must_recur_within_s is not None

    @property
    def is_of_heartbeats(self) -> bool:
        """Whether it applies to the numbers of heartbeats, not to the output of ranks."""
        return self.pattern.startswith(OF_HEARTBEATS)

    @property
    def is_alarm(self) -> bool:
        """Whether a matching line is a finding by itself."""
        return not self.metric and not self.has_clock

    def is_about(self, rank: int, world_size: int) -> bool:
        """Return whether the rule applies to output of this global rank."""
        if isinstance(self.ranks, tuple):
            return rank in self.ranks
        return self.ranks in ("all", "any") or rank == (0 if self.ranks == "first" else world_size - 1)


_TEXTS = ("name", "pattern", "action", "metric", "start", "stop")
_SECONDS = ("must_start_within_s", "must_recur_within_s")
_BOUNDS = ("must_be_below", "must_be_above", "must_be_finite", "must_not_jump", "times")
KEYS = (*_TEXTS, "ranks", *_BOUNDS, *_SECONDS)


def read_rules(tables: Sequence[Mapping[str, Any]], shown: str) -> tuple[Rule, ...]:
    """Read the rules of a file. Args: tables: its [[rule]]s; shown: its name for errors. Raises: ConfigError."""
    if len(tables) > MAX_RULES:
        raise ConfigError(f"{shown}: {len(tables)} rules: there may be {MAX_RULES}")
    rules: list[Rule] = []
    for number, table in enumerate(tables, 1):
        where = f"{shown}: [[rule]] {number}"
        if isinstance(table.get("name"), str) and table["name"]:
            where += f" ({table['name'][:MAX_NAME_CHARACTERS]})"
        rule = _read(table, where)
        if any(rule.name == other.name for other in rules):
            raise ConfigError(f"{where} name: another rule has this name")
        rules.append(rule)
    return tuple(rules)


def _read(table: Mapping[str, Any], where: str) -> Rule:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key not in KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}; there are {', '.join(KEYS)}")
        found[key] = _check(key, value, f"{where} {key}")
    for key in ("name", "pattern"):
        if not found.get(key):
            raise ConfigError(f"{where}: {key} is missing")
    rule = Rule(**found)
    _check_name(rule.name, where)
    if rule.action not in ACTIONS:
        raise ConfigError(f"{where} action: {rule.action!r}: the values are {', '.join(ACTIONS)}")
    for key in ("pattern", "start", "stop"):
        _check_pattern(getattr(rule, key), f"{where} {key}")
    _check_together(rule, found, where)
    return rule


def _check(key: str, value: Any, where: str) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if key in _TEXTS:
        if not isinstance(value, str):
            raise ConfigError(f"{where}: has to be a text")
    elif key == "ranks":
        return _check_ranks(value, where)
    elif key == "must_be_finite":
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: has to be true or false")
    elif key == "times":
        if not is_number or not isinstance(value, int) or not 1 <= value <= 1000:
            raise ConfigError(f"{where}: has to be a whole number, 1 to 1000")
    elif not is_number:
        raise ConfigError(f"{where}: has to be a number")
    elif key == "must_not_jump" and not 1 < value <= 1e6:
        raise ConfigError(f"{where}: {value:g}: has to be more than 1: so many times the usual value")
    elif key in _SECONDS and not 1 <= value <= 1e7:
        raise ConfigError(f"{where}: {value:g}: give seconds, 1 or more")
    return float(value) if is_number and key != "times" else value


def _check_ranks(value: Any, where: str) -> str | tuple[int, ...]:
    if isinstance(value, str) and value in RANKS:
        return value
    whole = isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value)
    if not whole or not 0 < len(value) <= 4096 or min(value) < 0:
        raise ConfigError(f"{where}: give {', '.join(RANKS)}, or a list of ranks as [0, 7]")
    return tuple(value)


def _check_name(name: str, where: str) -> None:
    if len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise ConfigError(f"{where} name: at most {MAX_NAME_CHARACTERS} characters, and no control characters")


def _check_pattern(pattern: str, where: str) -> None:
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise ConfigError(f"{where}: longer than {MAX_PATTERN_CHARACTERS} characters")
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{where}: is no regular expression: {error}") from None


def _check_together(rule: Rule, given: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if fields contradict each other."""
    if rule.metric and rule.metric not in re.compile(rule.pattern).groupindex:
        raise ConfigError(
            f"{where} metric: the pattern has no group of this name; as in loss[=: ]+(?P<{rule.metric}>\\S+)"
        )
    if not rule.metric:
        for key in _BOUNDS:
            if key in given:
                raise ConfigError(f"{where} {key}: needs a metric, the name of a group of the pattern")
    below, above = rule.must_be_below, rule.must_be_above
    if below is not None and above is not None and below <= above:
        raise ConfigError(f"{where} must_be_below: no number is below {below:g} and above {above:g}")
    if rule.is_alarm and all(re.search(rule.pattern, line) for line in _ORDINARY):
        raise ConfigError(f"{where} pattern: fits every line: make it more specific")
