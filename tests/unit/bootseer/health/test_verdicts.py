"""Properties of verdicts: worse facts give no better level, every finding is one line, and nothing raises."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.health import accelerators, host, kernel_lines, network
from bootseer.health.finding import (
    FAIL,
    LEVELS,
    OK,
    Finding,
    format_value,
    from_json,
    if_above,
    if_below,
    one_line,
    worst,
)
from bootseer.health.host_interface import ClockState, FileSystemSpace
from bootseer.health.limits import Limits
from bootseer.health.network_facts import Link
from bootseer.health.nvml import Gpu
from bootseer.linux.cgroups import Memory

LIMITS = Limits()
SIZES = st.integers(0, 2**50)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def rank(findings: list[Finding]) -> int:
    for found in findings:
        assert found.level in LEVELS
        assert "\n" not in found.line() and found.line().startswith(found.level)
        assert found.way_out or found.level in (OK, "unknown")
    return LEVELS.index(worst(findings))


@given(st.integers(1, 2**50), SIZES, SIZES)
def test_less_memory_is_no_better(total: int, one: int, other: int) -> None:
    low, high = sorted((min(one, total), min(other, total)))
    found = [rank(host.judge_memory(Memory(total, free, "the machine"), LIMITS)) for free in (low, high)]
    assert found[0] >= found[1]
    assert rank(host.judge_memory(Memory(total, 0, "the machine"), LIMITS)) == LEVELS.index(FAIL)


ROOMS = st.builds(FileSystemSpace, SIZES, SIZES, SIZES, SIZES, st.booleans())


@given(ROOMS, SIZES, SIZES)
def test_less_room_is_no_better(room: FileSystemSpace, free: int, inodes: int) -> None:
    less = room._replace(free_bytes=min(free, room.free_bytes), free_inodes=min(inodes, room.free_inodes))
    assert rank(host.judge_space("/x", less, True, LIMITS)) >= rank(host.judge_space("/x", room, True, LIMITS))
    assert rank(host.judge_space("/x", room, False, LIMITS)) == LEVELS.index(OK)


@given(st.booleans(), FINITE, st.floats(0, 1e3), st.booleans())
def test_clocks(is_synchronised: bool, offset_s: float, error_s: float, has_timesync: bool) -> None:
    level = rank(host.judge_clock(ClockState(is_synchronised, offset_s, error_s), has_timesync, LIMITS))
    if is_synchronised and abs(offset_s) >= LIMITS.clock_fail_s:
        assert level == LEVELS.index(FAIL)
    elif not is_synchronised:
        assert level < LEVELS.index(FAIL)  # nobody knows that it is wrong


COUNTERS = st.dictionaries(
    st.sampled_from(("rx_errors", "rx_dropped", "symbol_error", "carrier_changes", "link_downed")),
    st.floats(0, 1e9),
)
LINKS = st.builds(
    Link,
    st.sampled_from(("eth0", "eth1", "mlx5_0/1", "mlx5_1/1")),
    st.booleans(),
    st.booleans(),
    st.sampled_from(("up", "down", "DOWN, Polling")),
    st.floats(0, 1e12),
    st.booleans(),
    st.booleans(),
    st.just({}),
)


@given(st.lists(LINKS, max_size=4, unique_by=lambda link: link.name), COUNTERS)
def test_links(links: list[Link], rates: dict[str, float]) -> None:
    quiet = network.judge_links(links, {}, [], LIMITS)
    loud = network.judge_links(links, {link.name: rates for link in links}, [], LIMITS)
    assert rank(loud) >= rank(quiet)
    broken = [link.name for link in links if link.has_default_route and not (link.is_up and link.has_carrier)]
    assert broken == [found.where for found in quiet if found.level == FAIL]


NUMBERS = st.one_of(st.none(), st.integers(0, 200))
GPUS = st.builds(
    Gpu,
    st.integers(0, 7),
    st.sampled_from(("", "0000:10:00.0")),
    st.sampled_from(("", "", "GPU is lost (15)")),
    NUMBERS,
    NUMBERS,
    st.one_of(st.none(), st.integers(0, 0x1FF)),
    NUMBERS,
    st.one_of(st.none(), st.booleans()),
    st.one_of(st.none(), st.booleans()),
    *(NUMBERS for _ in range(4)),
    st.lists(st.booleans(), max_size=18).map(tuple),
    st.lists(st.integers(1, 9), max_size=3).map(tuple),
)


@given(st.lists(GPUS, max_size=8), st.one_of(st.none(), st.integers(0, 8)))
def test_gpus(gpus: list[Gpu], expected: int | None) -> None:
    found = accelerators.judge_gpus(gpus, expected, frozenset(), LIMITS)
    level = rank(found)
    working = sum(not gpu.error for gpu in gpus)
    if any(gpu.error or gpu.uncorrected_volatile or gpu.remapped_failed for gpu in gpus) or working < (
        expected or 0
    ):
        assert level == LEVELS.index(FAIL)
    pids = frozenset(range(10))
    assert not any("compute" in each.what for each in accelerators.judge_gpus(gpus, None, pids, LIMITS))


@given(
    st.lists(
        st.one_of(st.text(max_size=200), st.sampled_from(("eth0: link is down", "eth0: link is up"))), max_size=9
    )
)
def test_any_line_of_the_kernel_can_be_judged(lines: list[str]) -> None:
    rank(kernel_lines.judge(lines, 1.0))


# ---- findings ------------------------------------------------------------------------------------------------

TEXTS = st.text(string.ascii_letters + string.digits + "/-_äß", max_size=40)
FINDINGS = st.builds(
    Finding,
    st.just("x"),
    st.sampled_from(LEVELS),
    TEXTS.filter(bool),
    TEXTS,
    st.one_of(st.none(), FINITE),
    st.one_of(st.none(), FINITE),
    TEXTS,
    TEXTS,
)


@given(st.lists(FINDINGS, max_size=5))
def test_findings_survive_json(findings: list[Finding]) -> None:
    told = json.loads(json.dumps([found._asdict() for found in findings]))
    assert from_json("x", told) == findings == from_json("x", {"findings": told})


JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(("level", "what", "measured", "where", "findings", "unit", "x")), inner, max_size=5
        ),
    ),
    max_leaves=12,
)


@given(JUNK)
def test_what_others_write_gives_findings_or_a_value_error(value: object) -> None:
    try:
        findings = from_json("x", value)
    except ValueError as error:
        assert str(error)
    else:
        rank([found for found in findings if found.way_out])
        assert all(found.what.isprintable() for found in findings)


@given(st.text(max_size=5000))
def test_one_line_is_one(text: str) -> None:
    assert one_line(text).isprintable() and len(one_line(text)) <= 500


@given(FINITE, st.tuples(FINITE, FINITE).map(sorted))
def test_levels_by_limits(value: float, limits: list[float]) -> None:
    low, high = limits
    assert (if_below(value, low, high)[0] == OK) == (value >= high)
    assert (if_above(value, low, high)[0] == FAIL) == (value > high)
    assert if_below(value, low, high)[1] in limits and if_above(value, low, high)[1] in limits


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "bytes", "0 B"),
        (1.5e9, "bytes", "1.5 GB"),
        (5e15, "bytes", "5e+03 TB"),
        (3, "s", "3 s"),
        (0.25, "s", "0.25 s"),
        (17, "", "17"),
    ],
)
def test_values_with_units(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text
