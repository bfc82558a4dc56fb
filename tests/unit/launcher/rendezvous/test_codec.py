"""Messages as bytes: every type survives the way, bounds hold on both ends, nothing invalid gets through."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.coordinator.escalation import Step
from launcher.rendezvous import codec
from launcher.rendezvous.codec import FROM_COORDINATOR, FROM_MEMBER, CodecError, Kind, Message
from launcher.rendezvous.messages import (
    BadFinding,
    CheckReport,
    ClockReading,
    Distributions,
    EntryDigest,
    Environment,
    EventBatch,
    EventsDropped,
    Examine,
    Examined,
    Failure,
    FailureRecordMessage,
    Finish,
    FromCoordinator,
    FromMember,
    Identity,
    Join,
    Leave,
    MountFault,
    PairMeasured,
    PairNode,
    PairOrder,
    PairPort,
    PairResult,
    Ping,
    Pinned,
    RankFailed,
    RecoveryResult,
    RecoveryStep,
    StepTaken,
    Stopped,
    World,
)

JOIN = Join("run", "node1", "10.0.0.1", 7, -1, "default", 2, 1, 2, 0, 40000, False)
FAILURE = Failure("node1", 0, 3, 1, 99, -9, 10**15, 5, 1.5e9, False, "/log/error.json", "m", "t", ("a", "b"))


def kind_of(message: Message) -> Kind:
    return next(k for kinds in (FROM_MEMBER, FROM_COORDINATOR) for k in kinds.values() if k.type is type(message))


def there_and_back(message: Message) -> Any:
    tag, payload = codec.encode(message)
    kind = kind_of(message)
    assert kind.tag == tag and len(payload) <= kind.max_bytes
    return codec.decode(kind, payload)


def test_every_message_has_a_tag_of_its_own() -> None:
    assert {kind.type for kind in FROM_MEMBER.values()} == set(get_args(FromMember))
    assert {kind.type for kind in FROM_COORDINATOR.values()} == set(get_args(FromCoordinator))
    assert not set(FROM_MEMBER) & set(FROM_COORDINATOR)


text = st.text(max_size=40)
STEPS = st.sampled_from([step.value for step in Step])
numbers = st.integers(0, 4000)
joins = st.builds(
    Join,
    text,
    text,
    text,
    numbers,
    st.integers(-1, 100),
    text,
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 64),
    numbers,
    st.integers(0, 65535),
    st.booleans(),
    st.builds(EntryDigest, text, *[st.text("0123456789abcdef", max_size=64)] * 3),
)
failures = st.builds(
    Failure,
    text,
    numbers,
    numbers,
    numbers,
    numbers,
    st.integers(-64, 255),
    st.integers(0, 2**60),
    st.integers(0, 2**60),
    st.floats(0, 1e10),
    st.booleans(),
    text,
    text,
    text,
    st.lists(text, max_size=5).map(tuple),
    st.sampled_from(("", "yes", "maybe", "no")),
    st.lists(text, max_size=4).map(tuple),
    st.lists(text, max_size=4).map(tuple),
    st.lists(st.builds(MountFault, st.sampled_from(("env", "image")), text, st.booleans()), max_size=4).map(tuple),
    st.lists(numbers, max_size=4).map(tuple),
)
floats = st.floats(0, 1e12)
pair_nodes = st.builds(PairNode, text, st.integers(0, 65535))
pairs_measured = st.builds(PairMeasured, numbers, text, *[st.none() | floats] * 3)
worlds = st.builds(
    World,
    *[numbers] * 3,
    st.integers(1, 64),
    *[numbers] * 4,
    text,
    st.integers(0, 65535),
    st.none() | st.builds(Pinned, text, st.text("0123456789abcdef", max_size=64)),
)


@given(
    st.one_of(
        joins,
        st.builds(Ping, st.integers(0, 2**60), st.integers(0, 2**60)),
        st.builds(RankFailed, numbers, failures),
        st.builds(
            Stopped,
            numbers,
            st.lists(failures, max_size=3).map(tuple),
            numbers,
            st.booleans(),
            st.integers(-1, 2**60),
            st.none() | st.integers(-(2**60), 2**60),
            st.binary(max_size=20),
            st.lists(numbers, max_size=4).map(tuple),
        ),
        st.builds(PairPort, numbers, text, st.integers(0, 65535)),
        st.builds(PairOrder, numbers, numbers, st.lists(pair_nodes, max_size=64).map(tuple)),
        st.builds(PairResult, numbers, st.lists(pairs_measured, max_size=15).map(tuple)),
        st.builds(ClockReading, st.integers(-(2**61), 2**61), st.integers(0, 2**61), st.integers(0, 2**61)),
        st.builds(CheckReport, st.booleans(), st.booleans(), *[text] * 4, *[st.none() | floats] * 2, text, text),
        st.builds(FailureRecordMessage, numbers, st.binary(max_size=9000)),
        st.builds(Examine, numbers, st.floats(0, 86400), st.booleans()),
        st.builds(Examined, numbers, st.floats(0, 86400), text),
        st.builds(
            RecoveryStep,
            numbers,
            STEPS,
            st.floats(0, 86400),
            text,
            numbers,
            st.binary(max_size=9000),
            st.lists(text, max_size=9).map(tuple),
        ),
        st.builds(
            RecoveryResult,
            numbers,
            STEPS,
            st.booleans(),
            st.floats(0, 86400),
            text,
            st.lists(st.builds(BadFinding, text, text), max_size=9).map(tuple),
            st.lists(text, max_size=9).map(tuple),
        ),
        st.builds(StepTaken, numbers, STEPS, text, text),
        st.builds(
            Finish,
            numbers,
            text,
            st.lists(failures, max_size=3).map(tuple),
            st.just((1, 2)),
            st.lists(text, max_size=3).map(tuple),
        ),
        worlds,
        st.builds(Environment, st.builds(Distributions, text, st.lists(text, max_size=9).map(tuple))),
        st.builds(
            EventBatch,
            st.binary(max_size=9000),
            st.integers(0, codec.MAX_RAW_EVENTS_BYTES),
            st.integers(0, codec.MAX_EVENT_LINES),
            *[st.integers(0, 2**61)] * 3,
            st.builds(EventsDropped, *[st.integers(0, 2**60)] * 4),
        ),
    )
)
def test_messages_survive(message: Message) -> None:
    assert there_and_back(message) == message


def test_what_is_no_utf8_survives_in_some_form() -> None:
    back = there_and_back(Leave("bad \udcff name"))
    assert back.reason.startswith("bad ") and back.reason.endswith(" name")


@pytest.mark.parametrize("size", [20_000, 400_000])
def test_long_texts_lose_their_tail(size: int) -> None:
    back = there_and_back(RankFailed(0, FAILURE._replace(message="m" * size, traceback="ö" * size)))
    assert back.failure.message.startswith("mmm") and back.failure.message.endswith("...")
    assert back.failure[:5] == FAILURE[:5]


def test_a_report_of_the_whole_job_fits() -> None:
    long = FAILURE._replace(message="m" * 16000, traceback="t" * 16000, stderr_tail=("e" * 2000,) * 64)
    back = there_and_back(Finish(1, "ranks failed", tuple(long._replace(rank=n) for n in range(64)), ()))
    assert [failure.rank for failure in back.failures] == list(range(64))


def test_many_failures_and_many_names_are_cut_to_what_fits() -> None:
    stopped = there_and_back(Stopped(0, (FAILURE._replace(traceback="ü" * 9000),) * 9000, 1, False))
    assert 0 < len(stopped.failures) <= 4096
    names = tuple(f"package-with-a-rather-long-name-{n}==1.2.3.4.5.6.7" for n in range(50_000))
    assert 1000 < len(there_and_back(Environment(Distributions("3.11", names))).distributions.names) <= 20_000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", "x" * 257),
        ("host", "x" * 257),
        ("local_world_size", 0),
        ("local_world_size", 2**40),
        ("local_world_size", "2"),
        ("master_port", 65536),
        ("master_port", -1),
        ("min_nodes", 0),
        ("node_rank", -2),
        ("pid", 1.5),
        ("has_identity", 1),
        ("host", None),
        ("host", b"bytes"),
    ],
)
def test_fields_out_of_bounds_are_refused(field: str, value: Any) -> None:
    payload = msgspec.msgpack.encode(JOIN._replace(**{field: value}))
    with pytest.raises(CodecError, match="invalid Join"):
        codec.decode(FROM_MEMBER[1], payload)


def test_bounds_hold_inside_of_lists() -> None:
    bad = RankFailed(0, FAILURE._replace(stderr_tail=("x" * 3000,)))
    with pytest.raises(CodecError, match="out of bounds"):
        codec.decode(kind_of(bad), msgspec.msgpack.encode(bad))
    many = RankFailed(0, FAILURE._replace(stderr_tail=("x",) * 65))
    with pytest.raises(CodecError, match="out of bounds"):
        codec.decode(kind_of(many), msgspec.msgpack.encode(many))


def test_numbers_that_are_none_are_refused() -> None:
    bad = RankFailed(0, FAILURE._replace(wall_s=float("nan")))
    with pytest.raises(CodecError, match="out of bounds"):
        codec.decode(kind_of(bad), msgspec.msgpack.encode(bad))


EVENTS = EventBatch(bytes(codec.MAX_EVENTS_BYTES), 2**20, 8192, *[2**61] * 3, EventsDropped(*[2**60] * 4))


def test_the_largest_batch_of_events_fits() -> None:
    assert there_and_back(EVENTS) == EVENTS


@pytest.mark.parametrize(
    "change",
    [
        {"data": bytes(codec.MAX_EVENTS_BYTES + 1)},
        {"raw_bytes": 2**20 + 1},
        {"raw_bytes": -1},
        {"lines": 8193},
        {"error_ns": -1},
        {"data": "text"},
        {"dropped": EventsDropped(-2, 0, 0, 0)},
    ],
)
def test_batches_of_events_out_of_bounds_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CodecError, match="invalid EventBatch"):
        codec.decode(kind_of(EVENTS), msgspec.msgpack.encode(EVENTS._replace(**change)))


@pytest.mark.parametrize("cut", [1, 2])
def test_fewer_or_more_fields_are_refused(cut: int) -> None:
    required = [name for name in JOIN._fields if name not in JOIN._field_defaults]
    for fields in (tuple(JOIN)[: len(required) - cut], (*JOIN, 1)):
        with pytest.raises(CodecError):
            codec.decode(FROM_MEMBER[1], msgspec.msgpack.encode(fields))


@given(st.binary(max_size=100), st.sampled_from([*FROM_MEMBER.values(), *FROM_COORDINATOR.values()]))
def test_any_bytes_give_a_message_or_a_reason(data: bytes, kind: Kind) -> None:
    try:
        message = codec.decode(kind, data)
    except CodecError as error:
        assert kind.type.__name__ in str(error)
    else:
        assert type(message) is kind.type


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(CodecError):
        codec.decode(FROM_MEMBER[2], b"\x91" * 5000)
    with pytest.raises(CodecError):
        codec.decode(kind_of(Identity("", "")), b"\xdd\xff\xff\xff\xff")
