"""Dumps of torch's flight recorder: what they say, who is named by them, and what is no dump."""

from __future__ import annotations

import json
import os
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.hangs.calls import Group
from bootseer.hangs.flight import fill_members, load_dump, read_dump
from bootseer.hangs.stuck import CauseKind, find_causes


def entry(
    number: int, op: str, group: tuple[str, str] = ("0", "default_pg"), seq: int = 0, **more: Any
) -> dict[str, Any]:
    return {
        "record_id": number,
        "process_group": group,
        "profiling_name": op,
        "is_p2p": "->" in op or "<-" in op,
        "collective_seq_id": seq or number + 1,
        "input_sizes": [[3, 2]],
        "input_dtypes": ["Float"],
        "output_sizes": [[12]],
        "output_dtypes": ["Half"],
        "state": "completed",
        "time_created_ns": 100 + number,
        "time_discovered_completed_ns": 200 + number,
        "retired": True,
        "frames": [{"name": "step", "filename": "train.py", "line": 3}],
        **more,
    }


OPEN = {"state": "started", "retired": False, "time_discovered_completed_ns": None}


def dump(*entries: dict[str, Any], ranks: str = "[0, 1]") -> bytes:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    return pickle.dumps({"version": "2.10", "pg_config": config, "entries": list(entries)}, 2)


def test_a_dump_of_nccl_is_read() -> None:
    found = read_dump(
        dump(
            entry(0, "nccl:all_reduce"),
            entry(1, "nccl:_reduce_scatter_base"),
            entry(2, "nccl:send 0->1", **OPEN),
            entry(3, "nccl:barrier", seq=3, state="scheduled", retired=False, time_discovered_completed_ns=0),
        ),
        0,
        shift_ns=1000,
    )
    assert found is not None
    group = Group("0", "default_pg", 1, (0, 1))
    first, second, third, fourth = found.calls
    assert (first.group, first.op, first.seq, first.size_bytes, first.dtype) == (
        group,
        "all_reduce",
        1,
        24,
        "float32",
    )
    assert (first.shape, first.entered_ns, first.left_ns, first.is_open()) == ((3, 2), 1100, 1200, False)
    assert (second.op, second.size_bytes, second.dtype) == ("reduce_scatter_tensor", 24, "float16")
    assert (third.op, third.peer, third.seq, third.is_open(), third.waited_for) == ("send", 1, 1, True, True)
    assert (fourth.op, fourth.tensors, fourth.is_open(), fourth.waited_for) == ("barrier", 0, True, False)


def test_the_rank_that_did_not_come_is_named() -> None:
    behind = dump(*(entry(number, "gloo:all_reduce") for number in range(3)), ranks="[]")
    waits = dump(
        *(entry(number, "gloo:all_reduce") for number in range(3)), entry(3, "gloo:all_reduce", **OPEN), ranks="[]"
    )
    traces = [read_dump(behind if rank == 1 else waits, rank) for rank in range(3)]
    (cause,) = find_causes(fill_members([each for each in traces if each is not None]))
    assert (cause.kind, cause.ranks, cause.victims) == (CauseKind.ABSENT, (1,), (0, 2))


def test_messages_count_only_from_the_first_on() -> None:
    sends = [entry(number, "nccl:send 0->1") for number in range(5)]
    whole, cut = read_dump(dump(*sends), 0), read_dump(dump(*sends[2:], entry(5, "nccl:all_reduce")), 0)
    assert whole is not None and cut is not None
    assert [each.seq for each in whole.calls] == [1, 2, 3, 4, 5]
    assert [each.op for each in cut.calls] == ["all_reduce"]


def test_json_says_the_same() -> None:
    entries = [entry(0, "nccl:all_reduce"), entry(1, "nccl:broadcast", **OPEN)]
    config = {"0": {"ranks": "[0, 1]"}}
    text = json.dumps({"pg_config": config, "entries": entries}).encode()
    assert read_dump(text, 0) == read_dump(dump(*entries), 0)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/evil",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"entries": [Evil()]}),
        pickle.dumps({"entries": {1, 2}, "x": print}),
        pickle.dumps([1]),
        pickle.dumps({"entries": 3}),
        b"{}",
        b"",
        b"\x80\x02]r\xff\xff\xff",
        b'{"entries":' + b"[" * 100_000,
    ],
)
def test_what_is_no_dump_is_none(data: bytes) -> None:
    assert load_dump(data) is None
    assert read_dump(data, 0) is None


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=9)
    | st.sampled_from(["[0]", "started", "nccl:x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(st.sampled_from([*entry(0, "x")]), JUNK) | JUNK, max_size=4), JUNK)
def test_whatever_entries_hold_is_read(entries: list[Any], config: Any) -> None:
    made = [{**entry(0, "nccl:all_reduce"), **each} if isinstance(each, dict) else each for each in entries]
    found = read_dump(pickle.dumps({"entries": made, "pg_config": config}), 0)
    assert found is not None
    assert len(fill_members([found])[0].calls) <= len(made)
