"""Lines at the coordinator: whatever comes in, what goes out is an event of this run and of its sender."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.events import VERSION, Event, parse_event, to_json
from launcher.rendezvous import event_lines
from launcher.rendezvous.clock import UNKNOWN_NS
from launcher.rendezvous.event_batch import MAX_LINE_BYTES
from launcher.rendezvous.event_lines import LineSender, validate_line, write_event

SOURCE = LineSender("job", "node-a", 1000, 501_000, 40)
GOOD: dict[str, Any] = {
    "v": 1, "wall_ns": 5, "mono_ns": 900, "run_id": "job", "node": "someone-else", "rank": 3, "attempt": 0,
    "stage": "spawn", "kind": "instant", "name": "script",
}  # fmt: skip


def line(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def vetted(data: bytes, source: LineSender = SOURCE) -> Event | None:
    found = validate_line(data, source)
    if found is None:
        return None
    assert found.line.endswith(b"\n") and found.line.count(b"\n") == 1
    event = parse_event(found.line)
    assert event is not None, "what is written can be read"
    assert (event.run_id, event.node) == (source.run_id, source.node)
    assert found.is_beat == (event.stage is None and event.kind == "scalar")
    return event


def test_the_node_is_who_sent_it_and_the_clock_is_the_coordinators() -> None:
    event = vetted(line(attrs={"pid": 7}, span="x-1"))
    assert event == Event(
        5, 900, "job", "node-a", 3, 0, "spawn", "instant", "script", "x-1", attrs={"pid": 7}, job_ns=500_900,
        job_error_ns=41,
    )  # fmt: skip


def test_the_error_grows_with_the_distance() -> None:
    event = vetted(line(mono_ns=1000 - 10**9))
    assert event is not None and event.job_error_ns == 40 + 200_000 + 1


def test_at_the_coordinator_there_is_one_clock() -> None:
    event = vetted(line(mono_ns=77), LineSender("job", "n", 1000, 1000, 0))
    assert event is not None and (event.job_ns, event.job_error_ns) == (77, 0)


def test_clocks_that_were_never_compared_say_nothing() -> None:
    event = vetted(line(job_ns=5, job_error_ns=0), LineSender("job", "n", 1000, 1000, UNKNOWN_NS))
    assert event is not None and (event.job_ns, event.job_error_ns) == (None, None)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
text = st.text(max_size=20)
counts = st.integers(-(2**40), 2**62)
optional_text = st.none() | text
events = st.builds(
    Event,
    *(counts, counts, st.just("job"), text, st.none() | counts, st.none() | counts),
    *(optional_text, text, text, optional_text, optional_text),
    st.none() | counts | st.floats(allow_nan=False, allow_infinity=False) | text,
    *(optional_text, optional_text, st.dictionaries(text, plain, max_size=3), st.none(), st.none()),
)


@given(events)
def test_every_event_of_the_run_gets_through_as_it_was(event: Event) -> None:
    written = to_json({"v": VERSION, **event._asdict()}).encode("utf-8", "backslashreplace")
    found = vetted(written)
    assert found is not None
    assert found._replace(job_ns=None, job_error_ns=None) == event._replace(node="node-a")


@given(events)
def test_both_ways_of_vetting_say_the_same(event: Event) -> None:
    written = write_event(event)[:-1]
    fast, slow = validate_line(written, SOURCE), event_lines._vet_slowly(written, SOURCE)
    assert fast is not None and slow is not None
    assert parse_event(fast.line) == parse_event(slow.line)
    assert fast.is_beat == slow.is_beat


changes = st.sampled_from(
    [
        ("v", 2), ("run_id", "other"), ("run_id", None), ("rank", "0"), ("rank", True), ("mono_ns", 2.5),
        ("mono_ns", 2**80), ("wall_ns", -(2**80)), ("name", ["x"]), ("attrs", 3), ("kind", None), ("span", 5),
        ("attempt", 2**70), ("job_ns", "x"),
    ]
)  # fmt: skip


@given(changes)
def test_what_is_no_event_of_this_run_is_nothing(change: tuple[str, Any]) -> None:
    assert validate_line(line(**dict([change])), SOURCE) is None


@pytest.mark.parametrize("name", GOOD)
def test_a_field_that_every_event_has_is_missing(name: str) -> None:
    fields = {key: value for key, value in GOOD.items() if key != name}
    assert validate_line(json.dumps(fields).encode(), SOURCE) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        line()[:-5],
        line() + line(),
        line(name="x" * MAX_LINE_BYTES),
        b"[" * 5000,
        b'{"a":' * 3000,
        line(attrs={"deep": json.loads("[" * 900 + "]" * 900)}),
    ],
    ids=lambda data: f"{data[:20]!r}{len(data)}",
)
def test_junk_is_nothing_or_an_event(data: bytes) -> None:
    vetted(data)
    if not data.startswith(b'{"v"'):
        assert validate_line(data, SOURCE) is None


@given(st.binary(max_size=60))
def test_any_bytes(data: bytes) -> None:
    assert validate_line(data, SOURCE) is None


def test_what_only_module_json_takes_gets_through() -> None:
    event = vetted(line(error="bad \udcff name", attrs={"x": "\ud800"}))
    assert event is not None and event.error == "bad \udcff name"
    event = vetted(line().replace(b'"rank": 3', b'"rank": 3, "value": NaN'))
    assert event is not None and event.value is None


def test_fields_that_nobody_knows_stay_behind() -> None:
    found = validate_line(line(later={"x": 1}), SOURCE)
    assert found is not None and b"later" not in found.line


def test_numbers_of_any_size_in_attrs_do_no_harm() -> None:
    vetted(line(attrs={"n": 10**400}, value=10**30))


def test_the_fields_are_those_of_an_event() -> None:
    assert event_lines._Line.__struct_fields__ == ("v", *Event._fields)
