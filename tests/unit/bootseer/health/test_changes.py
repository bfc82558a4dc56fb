"""What is told of looks at a node: each finding once, when it comes, gets worse, and has gone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.health.changes import CALM_ROUNDS, MAX_KNOWN, MAX_REPORTS, Changes
from bootseer.health.finding import BAD, FAIL, HUNG, LEVELS, OK, UNKNOWN, WARN, Finding

FULL = Finding("space", WARN, "free", "/data", 9.0, 10.0, "bytes", "delete")


def told(
    changes: Changes, *findings: Finding, checks: tuple[str, ...] = ("space", "mounts", "kernel-log")
) -> list:
    return [(change.finding.level, change.is_over) for change in changes.look(checks, findings)]


def test_a_finding_is_reported_when_it_comes_and_when_it_has_gone() -> None:
    changes = Changes()
    assert told(changes, FULL) == [(WARN, False)]
    assert told(changes, FULL._replace(measured=8.0)) == []
    assert told(changes) == [], "once away is not gone"
    assert told(changes, FULL) == []
    assert [told(changes) for _ in range(CALM_ROUNDS)] == [[]] * (CALM_ROUNDS - 1) + [[(WARN, True)]]
    assert told(changes) == []


def test_what_gets_worse_is_reported_and_what_gets_better_is_not() -> None:
    changes = Changes()
    assert told(changes, FULL) == [(WARN, False)]
    assert told(changes, FULL._replace(level=FAIL)) == [(FAIL, False)]
    assert told(changes, FULL) == []
    assert told(changes, FULL._replace(level=FAIL)) == [], "it has been as bad before"


def test_what_is_in_order_or_unknown_is_not_reported() -> None:
    assert told(Changes(), FULL._replace(level=OK), FULL._replace(level=UNKNOWN)) == []


def test_a_mount_that_hangs_is_one_finding_wherever_it_waits() -> None:
    changes = Changes()
    hung = Finding("mounts", HUNG, "no answer in 10 s, it waits in rpc_wait_bit", "/mnt")
    assert told(changes, hung) == [(HUNG, False)]
    assert told(changes, hung._replace(what="it still does not answer")) == []


def test_what_was_not_looked_at_is_not_over() -> None:
    changes = Changes()
    told(changes, FULL)
    assert [told(changes, checks=("memory",)) for _ in range(9)] == [[]] * 9


def test_what_the_kernel_has_said_stays_said() -> None:
    changes = Changes()
    told(changes, Finding("kernel-log", FAIL, "Xid 79", "0000:3b:00"))
    assert [told(changes) for _ in range(9)] == [[]] * 9


def test_what_comes_and_goes_is_reported_a_few_times() -> None:
    changes = Changes()
    times = [told(changes, FULL) + [each for _ in range(CALM_ROUNDS) for each in told(changes)] for _ in range(9)]
    assert times == [[(WARN, False), (WARN, True)]] * MAX_REPORTS + [[]] * (9 - MAX_REPORTS)


FINDINGS = st.lists(
    st.builds(
        Finding,
        st.sampled_from(("space", "mounts", "kernel-log")),
        st.sampled_from(LEVELS),
        st.sampled_from(("a", "b")),
        st.sampled_from(("x", "y")),
        st.none() | st.floats(0, 9),
    ),
    max_size=6,
)


@settings(deadline=None)
@given(st.lists(FINDINGS, max_size=30))
def test_lines_come_and_go_in_turn(looks: list[list[Finding]]) -> None:
    """Of one thing: never twice the same without its end between, never an end of what was not told."""
    changes = Changes()
    open_levels: dict[tuple[str, str, str], str] = {}
    for look in looks:
        for change in changes.look(("space", "mounts", "kernel-log"), look):
            found = change.finding
            assert found.level in BAD or found.level == WARN
            key = found.check, found.where, HUNG if found.level == HUNG else found.what
            before = open_levels.pop(key, None)
            if change.is_over:
                assert before is not None and found.check != "kernel-log"
                continue
            assert before is None or LEVELS.index(before) < LEVELS.index(found.level)
            assert change.finding in look
            open_levels[key] = found.level


def test_what_is_known_has_a_bound() -> None:
    changes = Changes()
    flood = [FULL._replace(where=str(number)) for number in range(3 * MAX_KNOWN)]
    assert len(changes.look(["space"], flood)) == MAX_KNOWN
