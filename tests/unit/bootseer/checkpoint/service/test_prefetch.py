"""What is prefetched, and what earlier loads teach; what lies on disk is not believed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.checkpoint.io.source import SourceFile
from bootseer.checkpoint.service import prefetch
from bootseer.checkpoint.service.prefetch import PIECE_BYTES, Position, RecordedFile, Recording
from bootseer.checkpoint.service.release import MAX_FILES, Recordings, cache_folder
from bootseer.storage.engine.extents import Extents

MIB = 1 << 20
HERE = Position(world_size=8, nnodes=4, group_rank=1)
ALONE = Position(world_size=2, nnodes=1, group_rank=0)
LOTS = 1 << 50


def files(**sizes: int) -> dict[str, SourceFile]:
    return {path: SourceFile(path, size) for path, size in sizes.items()}


SHARDS = files(a=100 * MIB, b=100 * MIB, c=100 * MIB) | {".metadata": SourceFile(".metadata", 5000)}


def read(**asked: list[tuple[int, int]]) -> Recording:
    made = prefetch.record(SHARDS, {path: Extents(spans) for path, spans in asked.items()}, HERE)
    assert made is not None
    return made


def covered(plan: prefetch.Plan) -> dict[str, Extents]:
    found: dict[str, Extents] = {}
    for path, start, end in plan.ranges:
        assert not found.setdefault(path, Extents()).within(start, end)  # nothing twice
        found[path].add(start, end)
    return found


def test_a_first_load_fetches_metadata_only() -> None:
    plan = prefetch.plan(SHARDS, None, LOTS, HERE, whole=False)
    assert plan.kind == prefetch.METADATA_ONLY
    assert plan.ranges == [(".metadata", 0, 5000)]


def test_a_load_that_read_a_part_gets_that_part() -> None:
    plan = prefetch.plan(SHARDS, read(b=[(0, 100 * MIB)], a=[(7, 99)]), LOTS, HERE, whole=False)
    assert plan.kind == prefetch.RECORDED
    assert covered(plan) == {"b": Extents([(0, 100 * MIB)]), "a": Extents([(7, 99)])}


def test_a_load_that_read_more_than_half_gets_everything_if_it_fits() -> None:
    recording = read(a=[(0, 100 * MIB)], b=[(0, 60 * MIB)])
    everything = {path: Extents([(0, file.size)]) for path, file in SHARDS.items()}
    plan = prefetch.plan(SHARDS, recording, LOTS, HERE, whole=False)
    assert plan.kind == prefetch.WHOLE and covered(plan) == everything
    first = plan.ranges[: len(prefetch.plan(SHARDS, recording, 200 * MIB, HERE, whole=False).ranges)]
    assert {each.path for each in first} == {"a", "b"}  # what was read comes first
    plan = prefetch.plan(SHARDS, recording, 200 * MIB, HERE, whole=False)
    assert plan.kind == prefetch.RECORDED and plan.bytes == 160 * MIB


def test_all_of_it_or_nothing_for_code_that_opens_files_by_name() -> None:
    assert prefetch.plan(SHARDS, read(a=[(0, 9)]), LOTS, HERE, whole=True).bytes == 300 * MIB + 5000
    plan = prefetch.plan(SHARDS, None, 300 * MIB, HERE, whole=True)
    assert (plan.kind, plan.ranges) == (prefetch.NOTHING, [])


def test_nodes_have_orders_of_their_own_and_one_alone_the_files() -> None:
    orders = [
        prefetch.plan(SHARDS, None, LOTS, HERE._replace(group_rank=rank), whole=True).ranges for rank in range(4)
    ]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert all(one != two for at, one in enumerate(orders) for two in orders[:at])
    assert orders[1] == prefetch.plan(SHARDS, None, LOTS, HERE, whole=True).ranges  # the same each time
    alone = prefetch.plan(SHARDS, None, LOTS, ALONE, whole=True).ranges
    assert alone[0].path == ".metadata" and alone[1:] == sorted(alone[1:])


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 50)), max_size=12),
    st.integers(0, 400) | st.just(LOTS),
    st.booleans(),
)
def test_plans_stay_in_files_and_in_memory(asked: list[tuple[int, int]], room_mib: int, whole: bool) -> None:
    spans = Extents((start * MIB, min(100, start + length) * MIB) for start, length in asked)
    recording = prefetch.record(SHARDS, {"b": spans}, HERE)
    plan = prefetch.plan(SHARDS, recording, room_mib * MIB, HERE, whole)
    assert plan.bytes <= room_mib * MIB
    for path, start, end in plan.ranges:
        assert 0 <= start < end <= SHARDS[path].size and end - start <= PIECE_BYTES
    if plan.kind == prefetch.RECORDED:
        assert all(not each.minus(spans).total_bytes for path, each in covered(plan).items() if path == "b")


def test_the_key_is_the_layout_and_the_place() -> None:
    key = prefetch.key(SHARDS, HERE)
    assert key == prefetch.key(dict(reversed(SHARDS.items())), HERE)
    assert key != prefetch.key(SHARDS, HERE._replace(group_rank=2))
    assert key != prefetch.key(SHARDS, HERE._replace(world_size=16))
    assert key != prefetch.key(SHARDS | files(d=1), HERE)
    bigger = {**SHARDS, "a": SourceFile("a", 100 * MIB + 17)}
    assert key == prefetch.key(bigger, HERE)
    assert key != prefetch.key({**SHARDS, "a": SourceFile("a", 120 * MIB)}, HERE)


def test_a_recording_of_other_sizes_is_clipped() -> None:
    smaller = {**SHARDS, "b": SourceFile("b", 50 * MIB)}
    plan = prefetch.plan(smaller, read(b=[(40 * MIB, 60 * MIB)], c=[(90, 95)]), LOTS, HERE, whole=False)
    assert covered(plan) == {"b": Extents([(40 * MIB, 50 * MIB)]), "c": Extents([(90, 95)])}


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 9)), min_size=1), st.integers(1, 20))
def test_too_many_ranges_are_joined_over_the_smallest_gaps(found: list[tuple[int, int]], limit: int) -> None:
    spans = Extents((start, start + length) for start, length in found)
    joined = prefetch.join(list(spans), limit)
    assert len(joined) == min(limit, len(spans))
    assert not spans.minus(Extents(joined)).total_bytes
    gaps = sorted(b[0] - a[1] for a, b in zip(list(spans), list(spans)[1:], strict=False))
    assert Extents(joined).total_bytes - spans.total_bytes == sum(gaps[: len(spans) - len(joined)])


def test_a_complete_load_replaces_and_a_broken_one_adds() -> None:
    older, newer = read(a=[(0, 10)], b=[(5, 9)]), read(a=[(8, 20)])
    assert prefetch.merge(None, newer, complete=False) == newer
    assert prefetch.merge(older, newer, complete=True) == newer
    both = prefetch.merge(older, newer, complete=False)
    assert {file.path: file.ranges for file in both.files} == {"a": [(0, 20)], "b": [(5, 9)]}


BAD = [
    b"", b"{", b"[" * 100_000, b"\xff", b"null", b"{}",
    b'{"format":"bootseer-load/2","world_size":8,"nnodes":4,"group_rank":1,"files":[]}',
    b'{"format":"bootseer-load/1","world_size":8,"nnodes":4,"group_rank":2,"files":[]}',
    b'{"format":"bootseer-load/1","world_size":8,"nnodes":4,"group_rank":1,"files":[],"more":1}',
]  # fmt: skip


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_what_is_no_recording_is_none(data: bytes) -> None:
    assert prefetch.decode(data, SHARDS, HERE) is None


@pytest.mark.parametrize(
    "file",
    [
        RecordedFile("a", 10, [(0, 11)]), RecordedFile("a", 10, [(5, 5)]), RecordedFile("a", 10, [(-1, 5)]),
        RecordedFile("a", 10, [(0, 5), (4, 6)]), RecordedFile("a", 10, [(5, 6), (0, 1)]),
        RecordedFile("../etc/passwd", 10, [(0, 5)]),
        RecordedFile("a", 1 << 60, [(at * 2, at * 2 + 1) for at in range(50_000)]),
    ],
    ids=str,
)  # fmt: skip
def test_ranges_that_cannot_be_are_refused(file: RecordedFile) -> None:
    whole = msgspec.json.encode(msgspec.structs.replace(read(b=[(0, 5)]), files=[file]))
    assert prefetch.decode(whole, SHARDS, HERE) is None


def test_recordings_are_kept_for_the_next_load(tmp_path: Path) -> None:
    kept = Recordings(str(tmp_path / "cache"))
    assert kept.load(SHARDS, HERE) is None
    assert kept.save(SHARDS, HERE, read(b=[(3, 70)]), complete=True) == ""
    assert kept.load(SHARDS, HERE) == read(b=[(3, 70)])
    assert kept.load(SHARDS, ALONE) is None
    [path] = (tmp_path / "cache" / "loads").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert json.loads(path.read_text())["format"] == prefetch.FORMAT


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    kept = Recordings(str(tmp_path))
    (tmp_path / "loads").mkdir()
    for number in range(MAX_FILES + 5):
        path = tmp_path / "loads" / f"{number}.json"
        path.write_text("{}")
        os.utime(path, (number, number))
    assert kept.save(SHARDS, HERE, read(b=[(3, 70)]), complete=True) == ""
    left = {path.name for path in (tmp_path / "loads").iterdir()}
    assert len(left) == MAX_FILES and "5.json" not in left and f"{MAX_FILES + 4}.json" in left
    assert kept.load(SHARDS, HERE) is not None


def test_links_directories_and_pipes_in_its_place_are_not_read(tmp_path: Path) -> None:
    kept = Recordings(str(tmp_path))
    assert kept.save(SHARDS, HERE, read(b=[(3, 70)]), complete=True) == ""
    [path] = (tmp_path / "loads").iterdir()
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert kept.load(SHARDS, HERE) is None
    path.unlink()
    os.mkfifo(path)
    assert kept.load(SHARDS, HERE) is None
    path.unlink()
    path.mkdir()
    assert kept.load(SHARDS, HERE) is None
    assert "cannot save" in kept.save(SHARDS, HERE, read(b=[(3, 70)]), complete=True)
    assert not list((tmp_path / "loads").glob("*.tmp"))


def test_where_the_cache_is() -> None:
    assert cache_folder({"BOOTSEER_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg"}) == "/own"
    assert cache_folder({"XDG_CACHE_HOME": "/xdg"}) == "/xdg/bootseer"
    assert cache_folder({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}) == "/home/me/.cache/bootseer"
