"""Event files of any kind: found, grouped into jobs, read once, bounded."""

from __future__ import annotations

import json
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.report_job import Plan, make_lines, write_job
from bootseer.errors import UsageError
from bootseer.events import EventWriter, Stage, parse_event
from bootseer.report import reading
from bootseer.report.analysis import analyse_job
from bootseer.report.finding import EventDir, find_jobs, group_jobs
from bootseer.report.reading import EventReader, read_job
from bootseer.report.report import encode, make_report

GIB = 1024**3
LINE = {
    "v": 1, "wall_ns": 5, "mono_ns": 7, "run_id": "r", "node": "n", "rank": 0, "attempt": 0, "stage": "import",
    "kind": "begin", "name": "torch",
}  # fmt: skip


def lines(*more: dict[str, Any]) -> bytes:
    return b"".join(json.dumps({**LINE, **each}).encode() + b"\n" for each in more)


def read(path: Path, data: bytes, **limits: int) -> reading.EventsRead:
    path.write_bytes(data)
    reader = EventReader(**limits)
    reader.read(os.fspath(path))
    return reader.finish()


def test_what_a_writer_writes_is_read(tmp_path: Path) -> None:
    path = os.fspath(tmp_path / "agent-n.jsonl")
    writer = EventWriter(path, "r", "n", attempt=0)
    span = writer.begin(Stage.ENV, "setup", mono_ns=10)
    writer.end(Stage.ENV, "setup", span, mono_ns=20, error="no \x1b[31mstore", how="mount", bytes=3)
    writer.close()
    begin, end = read_job([os.fspath(tmp_path)]).events
    assert (begin.kind, begin.mono_ns, end.kind, end.mono_ns) == ("begin", 10, "end", 20)
    assert end.attrs == {"how": "mount", "bytes": 3}
    assert end.error == "no  [31mstore"  # nothing that a terminal obeys


@given(
    st.dictionaries(
        st.sampled_from([*LINE, "value", "span", "job_ns", "job_error_ns", "error", "attrs", "odd"]),
        st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab", max_size=2) | st.floats(0, 5) | st.just({}),
    )
)
def test_the_same_lines_count_as_for_the_reader_in_plain_python(
    tmp_path_factory: Any, change: dict[str, Any]
) -> None:
    data = lines(change)
    expected = parse_event(data)
    if expected is not None and (
        min(expected.mono_ns, expected.wall_ns, expected.rank or 0, expected.attempt or 0) < 0
    ):
        expected = None  # plain ones are not bounded
    if type(change.get("v", 1)) is not int:
        expected = None  # to Python true and 1.0 are 1
    found = read(tmp_path_factory.mktemp("lines") / "agent-n.jsonl", data).events
    assert len(found) == (expected is not None)
    if expected is not None:
        assert found[0][:6] == expected[:6]
        assert found[0].kind == expected.kind


def test_damaged_lines_are_passed_over_and_counted(tmp_path: Path) -> None:
    data = lines({}) + b'{"v":1,"wall\n' + b"[1]\n" + lines({"v": 2}, {"rank": -1}, {"mono_ns": 2**63})
    data += lines({"mono_ns": 9})[:-20]  # being written
    found = read(tmp_path / "agent-n.jsonl", data)
    assert len(found.events) == 1
    assert found.notes == ["5 lines are not events (cut off, damaged or of another version)"]


def test_run_file_and_files_of_nodes_are_joined_and_nothing_counts_twice(tmp_path: Path) -> None:
    plan = Plan(nodes=3, ranks=2)
    both, run, own = (
        write_job(os.fspath(tmp_path / name), plan, run_file=run_file, own_files=own_files)
        for name, run_file, own_files in (("both", True, True), ("run", True, False), ("own", False, True))
    )
    reports = [encode(make_report(analyse_job(read_job([f"{each}/events"]).events), 0)) for each in (both, run)]
    assert reports[0] == reports[1]
    # The half of the run's file that is lost is in the files of the nodes.
    path = Path(both) / "events" / "run.jsonl"
    text = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(text[: len(text) // 2]))
    assert encode(make_report(analyse_job(read_job([f"{both}/events"]).events), 0)) == reports[1]
    blind = make_report(analyse_job(read_job([f"{own}/events"]).events), 0)
    assert blind.clock.kind == "nodes"
    assert any("not on the coordinator's clock" in note for note in blind.notes)


def test_order_of_lines_in_files_does_not_matter(tmp_path: Path) -> None:
    plan = Plan(nodes=2, ranks=2)
    run = Path(write_job(os.fspath(tmp_path), plan)) / "events"
    expected = encode(make_report(analyse_job(read_job([os.fspath(run)]).events), 0))
    text = (run / "run.jsonl").read_bytes().splitlines(keepends=True)
    random.Random(3).shuffle(text)
    (run / "run.jsonl").write_bytes(b"".join(text))
    assert encode(make_report(analyse_job(read_job([os.fspath(run)]).events), 0)) == expected


def test_of_heartbeats_only_the_last_is_kept(tmp_path: Path) -> None:
    heartbeats = [{"kind": "scalar", "name": "heartbeat", "stage": None, "mono_ns": at} for at in (5, 90, 7)]
    found = read(tmp_path / "rank-0-attempt-0-n.jsonl", lines(*heartbeats, {}))
    assert [(each.name, each.mono_ns) for each in found.events] == [("torch", 7), ("heartbeat", 90)]


@pytest.mark.parametrize(
    "fill",
    [
        lambda file: file.truncate(GIB),
        lambda file: file.write(b"x\n" * 20_000_000),
        lambda file: file.write((b"y" * 1_000_000 + b"\n") * 100),
    ],
    ids=["zeros", "short lines", "long lines"],
)
def test_a_file_of_junk_costs_little_time_and_memory(tmp_path: Path, fill: Callable[[Any], object]) -> None:
    with open(tmp_path / "agent-n.jsonl", "wb") as file:
        file.write(lines({}))
        fill(file)
    before = resource.getrusage(resource.RUSAGE_SELF)
    found = read_job([os.fspath(tmp_path)])
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert len(found.events) == 1
    assert found.notes[0] == "agent-n.jsonl: few lines are events: the rest was not read"
    assert after.ru_utime - before.ru_utime < 2
    assert after.ru_maxrss - before.ru_maxrss < 100 * 1024


def test_what_is_too_much_is_left_out_and_said(tmp_path: Path) -> None:
    data = lines(*({"mono_ns": at} for at in range(50)))
    found = read(tmp_path / "agent-n.jsonl", data, max_events=20)
    assert len(found.events) == 20
    assert found.notes == ["more than 20 events: the rest of agent-n.jsonl and later files were left out"]
    many = lines(*({"mono_ns": at} for at in range(2000)))
    found = read(tmp_path / "rank-0-attempt-0-n.jsonl", many, max_rank_bytes=4000)
    times = [event.mono_ns for event in found.events]
    assert times[0] == 0
    assert times[-1] == 1999  # when it was last seen
    assert 300 < len(times) < 700
    assert found.notes == ["rank-0-attempt-0-n.jsonl: more than 4,000 bytes: only its beginning and end were read"]


def test_large_attributes_are_cut(tmp_path: Path) -> None:
    attrs = {"how": "x" * 10_000, "list": [1] * 10_000, **{f"n{each}": each for each in range(100)}}
    (event,) = read(tmp_path / "agent-n.jsonl", lines({"attrs": attrs})).events
    assert len(event.attrs["how"]) == 300
    assert "list" not in event.attrs
    assert len(event.attrs) == 32


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "agent-n.jsonl")
    found = read_job([os.fspath(tmp_path)])
    assert found.events == []
    assert found.notes[0].startswith("agent-n.jsonl: cannot be read: ")


# ---- where they lie ------------------------------------------------------------------------------------------


def test_any_directory_of_a_job_will_do(tmp_path: Path) -> None:
    run = write_job(os.fspath(tmp_path / "logs"), Plan(nodes=2), own_files=True)
    for top in (tmp_path, tmp_path / "logs", Path(run), Path(run) / "events", Path(run) / "events" / "run.jsonl"):
        (job,) = find_jobs(os.fspath(top))
        assert job.run_id == "job-17"
        assert analyse_job(read_job(job.paths).events).attempts[0].first_step_s is not None


def test_directories_of_nodes_of_one_job_are_joined(tmp_path: Path) -> None:
    for node in range(3):
        own = tmp_path / f"machine{node}"
        run = Path(write_job(os.fspath(own), Plan(nodes=3), run_file=False, own_files=True)) / "events"
        for file in run.iterdir():
            if not file.name.endswith(f"node{node:04d}.jsonl"):
                file.unlink()
    (job,) = find_jobs(os.fspath(tmp_path))
    assert len(job.paths) == 3
    assert len(analyse_job(read_job(job.paths).events).attempts[0].start.nodes) == 3


def test_the_same_node_again_is_another_job() -> None:
    day_ns = 86_400 * 10**9
    directories = [
        EventDir("x", "none", 10, frozenset("a")),
        EventDir("y", "none", 12, frozenset("b")),
        EventDir("z", "none", 30, frozenset("a")),
        EventDir("late", "none", day_ns, frozenset("c")),
        EventDir("other", "else", 11, frozenset("a")),
        EventDir("empty", "", 0, frozenset()),
    ]
    assert [job.paths for job in group_jobs(directories)] == [("x", "y"), ("other",), ("z",), ("late",)]


def test_where_nothing_lies_one_line_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or directory"):
        find_jobs(os.fspath(tmp_path / "gone"))
    (tmp_path / "other.jsonl").write_bytes(lines({}))
    with pytest.raises(UsageError, match="holds no event files"):
        find_jobs(os.fspath(tmp_path))
    (tmp_path / "agent-n.jsonl").write_bytes(b"junk\n")
    with pytest.raises(UsageError, match="hold no readable event"):
        find_jobs(os.fspath(tmp_path))


def test_links_that_lead_round_are_not_followed(tmp_path: Path) -> None:
    write_job(os.fspath(tmp_path), Plan(nodes=1))
    (tmp_path / "round").symlink_to(tmp_path)
    assert len(find_jobs(os.fspath(tmp_path))) == 1


def test_made_lines_are_events() -> None:
    for line in make_lines(Plan(nodes=1)):
        assert parse_event(json.dumps(line).encode() + b"\n") is not None
