"""A search that would take for ever is ended; what is quick is not."""

from __future__ import annotations

import re
import signal
import time

import pytest

from launcher.rules.engine import DisabledRule, RuleEngine
from launcher.rules.node_rules import TimeLimit
from launcher.rules.rule import Rule


@pytest.mark.parametrize("pattern", [r"^(a+)+$", r"^(a|aa)+$", r"(.*a){25}b", r"^(\w+\s?)*$"])
def test_a_pathological_pattern(pattern: str) -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    limit = TimeLimit(0.05)
    try:
        began_s = time.process_time()
        engine = RuleEngine([Rule("slow", pattern)], [0], 1, 0.0)
        (off,) = engine.read(0, ["a" * 60 + "!"], 0.0, limit.run)
        assert isinstance(off, DisabledRule)
        assert time.process_time() - began_s < 2.0
        assert limit.run(lambda: 7) == 7, "the next one has its own time"
    finally:
        limit.close()
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_what_goes_wrong_goes_on() -> None:
    limit = TimeLimit(10.0)
    try:
        with pytest.raises(re.error):
            limit.run(lambda: re.compile("("))
        assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    finally:
        limit.close()


def test_a_late_signal_harms_nobody() -> None:
    limit = TimeLimit(10.0)
    try:
        signal.raise_signal(signal.SIGVTALRM)
    finally:
        limit.close()
