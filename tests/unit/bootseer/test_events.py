"""Events written and read back, also from damaged files."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer import events
from bootseer.events import (
    Event,
    EventWriter,
    Kind,
    Stage,
    agent_events_path,
    parse_event,
    rank_events_path,
    read_events,
    run_events_path,
    safe_name,
    to_json,
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return os.fspath(tmp_path / "events.jsonl")


def test_what_is_written_is_read(path: str) -> None:
    writer = EventWriter(path, "job", "node-a", attempt=2)
    before = time.monotonic_ns()
    span = writer.begin(Stage.RENDEZVOUS, "join", nodes=2)
    inner = writer.begin(Stage.RENDEZVOUS, "hello", parent=span)
    writer.end(Stage.RENDEZVOUS, "hello", inner, error="no answer")
    writer.end(Stage.RENDEZVOUS, "join", span)
    writer.instant(Stage.SPAWN, events.RANK_STARTED, rank=3, pid=77)
    writer.scalar(None, "cpu", 1.5, "s")
    writer.attempt = 3
    writer.instant(None, "restart", mono_ns=before)
    writer.close()
    found = list(read_events(path))
    assert [(event.stage, event.kind, event.name) for event in found] == [
        ("rendezvous", "begin", "join"),
        ("rendezvous", "begin", "hello"),
        ("rendezvous", "end", "hello"),
        ("rendezvous", "end", "join"),
        ("spawn", "instant", "rank_started"),
        (None, "scalar", "cpu"),
        (None, "instant", "restart"),
    ]
    assert all((event.run_id, event.node) == ("job", "node-a") for event in found)
    assert found[0].attrs == {"nodes": 2}
    assert found[1].parent == found[0].span == found[3].span != found[1].span
    assert found[2].error == "no answer"
    assert (found[0].rank, found[4].rank, found[4].attrs) == (None, 3, {"pid": 77})
    assert (found[5].value, found[5].unit) == (1.5, "s")
    assert [event.attempt for event in found] == [2] * 6 + [3]
    assert found[6].mono_ns == before
    assert abs(found[6].wall_ns - (time.time_ns() - (time.monotonic_ns() - before))) < 1e9
    assert writer.dropped == 0


def test_spans_of_attempts_have_different_ids(path: str) -> None:
    spans = [EventWriter(path, "job", "node", attempt=attempt).begin(None, "x") for attempt in (None, 0, 1)]
    writer = EventWriter(path, "job", "node")
    spans += [writer.begin(None, "x"), writer.begin(None, "x")]
    assert len(set(spans)) == 4  # the first and the fourth are of writers that nothing tells apart


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(plain)
def test_json_is_that_of_module_json(value: object) -> None:
    assert json.loads(to_json(value)) == value


def test_odd_values() -> None:
    assert to_json([math.nan, math.inf, (1,), {1: 2}]) == '[null,null,[1],{"1":2}]'
    assert json.loads(to_json("\udcff\x7f\x00")) == "\udcff\x7f\x00"
    assert to_json(object).startswith('"<class')


def test_no_path_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = EventWriter("", "job", "node")
    writer.instant(None, "x")
    writer.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["/nowhere/x", "/dev/full", "/proc/self/mem"])
def test_what_cannot_be_written_is_counted(where: str) -> None:
    writer = EventWriter(where, "job", "node")
    for _ in range(3):
        writer.instant(None, "x")
    writer.close()
    assert writer.dropped == 3


def test_a_value_that_has_no_text_is_counted(path: str) -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError

    writer = EventWriter(path, "job", "node")
    writer.instant(None, "x", odd=Odd())
    writer.instant(None, "y")
    writer.close()
    assert writer.dropped == 1
    assert [event.name for event in read_events(path)] == ["y"]


def test_a_line_cut_off_by_a_full_disk_costs_only_itself(path: str) -> None:
    code = f"""
import resource, signal
from bootseer.events import EventWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = EventWriter({path!r}, "job", "node")
writer.instant(None, "one")
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
writer.instant(None, "two")
writer.instant(None, "three")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
writer.instant(None, "four")
writer.close()
print(writer.dropped)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "2\n"
    assert [event.name for event in read_events(path)] == ["one", "four"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 300


GOOD = (
    b'{"v":1,"wall_ns":1,"mono_ns":2,"run_id":"r","node":"n","rank":0,"attempt":0,'
    b'"stage":null,"kind":"instant","name":"x"}\n'
)


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"null\n",
        b"[1]\n",
        b"{}\n",
        b'"x"\n',
        b"\xff\xfe\n",
        GOOD[:40] + b"\n",
        GOOD.replace(b'"v":1', b'"v":2'),
        GOOD.replace(b'"v":1,', b""),
        GOOD.replace(b'"rank":0', b'"rank":"0"'),
        GOOD.replace(b'"rank":0', b'"rank":true'),
        GOOD.replace(b'"mono_ns":2', b'"mono_ns":2.5'),
        GOOD.replace(b'"name":"x"', b'"name":["x"]'),
        GOOD.replace(b'"name":"x"', b'"name":"x","attrs":3'),
        GOOD.replace(b',"name":"x"', b""),
        b"[" * 100000 + b"\n",
        b'{"a":' * 100000 + b"\n",
        GOOD.replace(b'"x"', b'"' + b"x" * events.MAX_LINE_BYTES + b'"'),
    ],
    ids=lambda line: repr(line[:30]) + str(len(line)),
)
def test_lines_that_are_no_events_are_passed_over(path: str, line: bytes) -> None:
    with open(path, "wb") as file:
        file.write(GOOD + line + GOOD + GOOD[:30])
    assert [event.name for event in read_events(path)] == ["x", "x"]


@given(st.binary())
def test_any_bytes_can_be_parsed(data: bytes) -> None:
    assert parse_event(data) is None


def test_unknown_fields_are_ignored() -> None:
    event = parse_event(GOOD.replace(b'"v":1', b'"v":1,"later":{}'))
    assert event == Event(1, 2, "r", "n", 0, 0, None, "instant", "x")


def test_the_clock_of_the_job_is_read_where_it_is() -> None:
    event = parse_event(GOOD.replace(b'"v":1', b'"v":1,"job_ns":5,"job_error_ns":0'))
    assert event is not None and (event.job_ns, event.job_error_ns) == (5, 0)
    assert parse_event(GOOD.replace(b'"v":1', b'"v":1,"job_ns":true')) is None


def test_lines_can_be_left_out_unread(path: str) -> None:
    writer = EventWriter(path, "job", "node")
    writer.scalar(None, "heartbeat", 1)
    writer.scalar(Stage.IMAGE, "image_requests", 1)
    writer.instant(None, "x")
    writer.close()
    assert [event.name for event in read_events(path, without=events.BEAT_MARK)] == ["image_requests", "x"]


def test_no_file_no_events(tmp_path: Path) -> None:
    assert list(read_events(os.fspath(tmp_path / "missing"))) == []


def test_file_names() -> None:
    assert agent_events_path("/log", "node-1.x") == "/log/agent-node-1.x.jsonl"
    assert rank_events_path("/log", "node", 12, 3) == "/log/rank-12-attempt-3-node.jsonl"
    assert run_events_path("/log") == "/log/run.jsonl"


@given(st.text())
def test_names_are_safe_in_paths(text: str) -> None:
    name = safe_name(text)
    assert 0 < len(name.encode()) <= 100
    assert "/" not in name and "\0" not in name


def test_the_fields_are_documented() -> None:
    text = Path("docs/reference/events.md").read_text()
    for name in ("v", *Event._fields, *(stage.value for stage in Stage), *(kind.value for kind in Kind)):
        assert f"| `{name}` |" in text, name


def test_writing_loads_no_json() -> None:
    code = "import sys, bootseer.events as e; w = e.EventWriter('/dev/null', '', ''); w.instant(None, 'x', a=1.5)"
    code += "; w.close(); print({'json', 'inspect', 'dataclasses'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
