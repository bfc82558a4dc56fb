"""Nodes that are left out: at once, the second time, and never for what others have too."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.coordinator.exclusion import AGAIN_S, Exclusion, MachineFault

ECC, NET = "an uncorrectable memory error of the accelerator", "the network is unreachable"
HOSTS_ALL = ["a", "b", "c"]
HOSTS = st.sampled_from(HOSTS_ALL)
FAULTS = st.builds(MachineFault, HOSTS, st.sampled_from([ECC, NET]), st.booleans())
ATTEMPTS = st.lists(st.tuples(st.floats(0.0, 4000.0), st.lists(FAULTS, max_size=3)), max_size=20)


def grave(host: str) -> MachineFault:
    return MachineFault(host, ECC, True)


def light(host: str) -> MachineFault:
    return MachineFault(host, NET, False)


def test_a_grave_fault_counts_at_once() -> None:
    exclusion = Exclusion()
    assert exclusion.after_failure([grave("a")], 0.0) == [grave("a")]
    assert exclusion.why == {"a": ECC}
    assert exclusion.after_failure([grave("a")], 1.0) == []  # known


def test_of_others_the_second_within_half_an_hour() -> None:
    exclusion = Exclusion()
    assert exclusion.after_failure([light("a")], 0.0) == []
    assert exclusion.after_failure([light("a")], AGAIN_S + 1) == []
    assert exclusion.after_failure([light("a")], AGAIN_S + 2) == [light("a")]


def test_what_several_hosts_have_is_no_machines_fault() -> None:
    exclusion = Exclusion()
    assert exclusion.after_failure([grave("a"), grave("b")], 0.0) == []  # which was first?
    assert exclusion.after_failure([grave("a")], 1.0) == []
    other = Exclusion()
    other.after_failure([grave("a")], 0.0)
    assert other.after_failure([grave("b")], 1.0) == []
    assert other.why == {}  # a comes back


def test_a_failed_check_leaves_its_host_out_until_it_is_in_order() -> None:
    exclusion = Exclusion()
    failed = {"a": {"disks": "worn"}, "b": {"clock": "slow"}}
    assert [each.host for each in exclusion.after_checks(failed, {"a", "b", "c"})] == ["a", "b"]
    assert exclusion.why == {"a": "worn", "b": "slow"}
    assert exclusion.after_checks({"a": {"disks": "worn"}}, {"a", "b", "c"}) == []  # known
    assert exclusion.why == {"a": "worn"}  # b is in order
    assert exclusion.after_checks({}, {"b", "c"}) == []  # a was not looked at
    assert exclusion.why == {"a": "worn"}


def test_a_check_does_not_take_back_what_failures_have_shown() -> None:
    exclusion = Exclusion()
    exclusion.after_failure([grave("a")], 0.0)
    assert exclusion.exclude_tested("b", "a group replay has found it") and not exclusion.exclude_tested(
        "b", "again"
    )
    assert exclusion.after_checks({"a": {"disks": "worn"}}, {"a", "b"}) == []
    assert exclusion.after_checks({}, {"a", "b"}) == []
    assert exclusion.why == {"a": ECC, "b": "a group replay has found it"}


CHECKS = st.dictionaries(HOSTS, st.dictionaries(st.sampled_from(["disks", "clock"]), st.just("bad"), min_size=1))


@given(st.lists(st.tuples(CHECKS, st.sets(HOSTS))))
def test_what_all_hosts_fail_is_no_machines_matter(
    looks: list[tuple[dict[str, dict[str, str]], set[str]]],
) -> None:
    exclusion = Exclusion()
    for failed, looked_at in looks:
        before = set(exclusion.why)
        news = {each.host for each in exclusion.after_checks(failed, looked_at)}
        common = set.intersection(*(set(failed.get(host, ())) for host in looked_at)) if looked_at else set()
        for host in HOSTS_ALL:
            own = set(failed.get(host, ())) - (common if len(looked_at) > 1 else set())
            is_out = bool(own) if host in looked_at else host in before
            assert (host in exclusion.why) == is_out
            assert (host in news) == (is_out and host not in before)


@given(ATTEMPTS)
def test_never_two_hosts_for_one_fault_and_never_without_one(
    attempts: list[tuple[float, list[MachineFault]]],
) -> None:
    exclusion = Exclusion()
    now_s, seen = 0.0, set()
    for past_s, faults in attempts:
        now_s += past_s
        news = exclusion.after_failure(faults, now_s)
        seen |= {(fault.host, fault.what) for fault in faults}
        assert set(news) <= set(faults)
        assert set(exclusion.why.items()) <= seen
        recent = [what for host, what in exclusion.why.items() if any(f.what == what for f in faults)]
        assert len(recent) == len(set(recent))
