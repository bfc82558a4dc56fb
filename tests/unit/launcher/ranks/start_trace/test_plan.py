"""What is recorded of a start and how it is read ahead: pages, ranges, order, lines that nobody vouches for."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.ranks.start_trace import plan as start_plan
from launcher.ranks.start_trace.plan import (
    DIRECTORY,
    FEW_THREADS,
    FILE,
    GAP_UNITS,
    LARGE_PROBES,
    MAX_PROBES,
    MAX_RANGES,
    MAX_THREADS,
    NAME,
    PIECE_BYTES,
    SMALL,
    STEP_BYTES,
    UNIT_BYTES,
    PrefetchEntry,
    choose_probes,
    choose_threads,
    clip_to_file,
    find_runs,
    format_entries,
    format_probe,
    make_probe,
    merge,
    merge_order,
    parse_entries,
    parse_probe,
    place_libraries,
    split,
    steps,
    written_first,
)

UNITS = st.integers(0, 300)
RANGES = st.lists(st.tuples(UNITS, st.integers(0, 40)), max_size=20)


def covered(ranges: object) -> set[int]:
    return {unit for first, count in ranges for unit in range(first, first + count)}  # type: ignore[attr-defined]


# ---- ranges --------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 1000), st.sampled_from([1, 4, 16]))
def test_runs_are_the_pages_that_were_touched(touched: list[bool], first: int, scale: int) -> None:
    runs = find_runs(bytes(touched), first, scale)
    pages = {first + place for place, each in enumerate(touched) if each}
    assert covered(runs) == {page * scale + unit for page in pages for unit in range(scale)}
    assert len(runs) == sum(each and not (place and touched[place - 1]) for place, each in enumerate(touched))


@given(RANGES, st.integers(0, 30))
def test_merged_ranges_hold_all_and_no_more_than_the_gaps(ranges: list[tuple[int, int]], gap: int) -> None:
    merged = merge(ranges, gap)
    assert covered(ranges) <= covered(merged)
    for (first, count), (following, _) in itertools.pairwise(merged):
        assert following - (first + count) > gap
    edges = {first for first, count in ranges if count} | {first + count for first, count in ranges if count}
    assert {edge for first, count in merged for edge in (first, first + count)} <= edges


@given(RANGES, st.integers(0, 400 * UNIT_BYTES))
def test_ranges_of_a_file_lie_in_it(ranges: list[tuple[int, int]], size: int) -> None:
    units = -(-size // UNIT_BYTES)
    found = clip_to_file(ranges, size)
    wanted = {unit for unit in covered(ranges) if unit < units}
    if found is None:
        assert not wanted
    elif found == ():
        assert 0.9 * units <= len(covered(merge((unit, 1) for unit in wanted)))
    else:
        assert wanted <= covered(found)
        assert max(covered(found)) < units


def test_too_many_ranges_are_taken_together() -> None:
    scattered = [(unit * (GAP_UNITS + 2), 1) for unit in range(3 * MAX_RANGES)]
    found = clip_to_file(scattered, 1 << 40)
    assert found
    assert len(found) <= MAX_RANGES
    assert covered(scattered) <= covered(found)


@given(st.integers(0, 5 * PIECE_BYTES), RANGES)
def test_pieces_are_what_is_recorded_of_a_file_once(size: int, ranges: list[tuple[int, int]]) -> None:
    entry = PrefetchEntry(FILE, "/lib.so", size, 1, merge(ranges))
    pieces = split(entry)
    read = [span for piece in pieces for span in piece.ranges]
    assert all(sum(length for _, length in piece.ranges) <= PIECE_BYTES for piece in pieces)
    assert [piece.is_first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    spans = [(first * UNIT_BYTES, count * UNIT_BYTES) for first, count in entry.ranges] or [(0, size)]
    expected = sum(max(0, min(size, offset + length) - min(size, offset)) for offset, length in spans)
    assert sum(length for _, length in read) == expected
    assert all(0 <= offset < offset + length <= size for offset, length in read)
    assert read == sorted(read)


@given(st.integers(0, 1 << 40), st.integers(0, 10 * STEP_BYTES))
def test_steps_follow_each_other(offset: int, length: int) -> None:
    at = offset
    for start, part in steps(offset, length):
        assert start == at
        assert 0 < part <= STEP_BYTES
        at += part
    assert at == offset + length


def test_what_is_only_looked_up_is_one_piece_without_bytes() -> None:
    for kind in (DIRECTORY, NAME):
        entry = PrefetchEntry(kind, "/a")
        assert [piece.ranges for piece in split(entry)] == [()]


def test_the_source_of_bytecode() -> None:
    assert start_plan.source_of("/a/__pycache__/b.cpython-311.opt-1.pyc") == "/a/b.py"
    assert start_plan.source_of("/a/b.pyc") == start_plan.source_of("/a/b.so") == ""


# ---- order ---------------------------------------------------------------------------------------------------


def test_a_library_comes_with_the_module_that_needs_it() -> None:
    modules = ["/os.py", "/torch/__init__.py", "/torch/_C.so", "/torch/nn.py", "/numpy/core.so"]
    libraries = ["/python", "/libc", "/torch/_C.so", "/torch/lib/cpu.so", "/numpy/core.so", "/numpy/blas.so"]
    assert merge_order(modules, libraries) == [
        *("/python", "/libc", "/os.py", "/torch/__init__.py", "/torch/_C.so", "/torch/lib/cpu.so"),
        *("/torch/nn.py", "/numpy/core.so", "/numpy/blas.so"),
    ]


@given(st.lists(st.sampled_from("abcdefgh")), st.lists(st.sampled_from("efghijkl")))
def test_merged_order_has_each_once_and_keeps_that_of_modules(modules: list[str], libraries: list[str]) -> None:
    merged = merge_order(modules, libraries)
    assert sorted(merged) == sorted({*modules, *libraries})
    own = list(dict.fromkeys(modules))
    assert [path for path in merged if path in own] == own


def test_a_library_that_was_mapped_into_a_gap_is_that_of_its_package() -> None:
    begin = "/venv/lib/python3.11/site-packages"
    files = ["/os.py", f"{begin}/torch/_C.so", f"{begin}/torch/x.so", f"{begin}/yaml/_y.so", f"{begin}/alone.so"]
    libraries = [
        *("/python", f"{begin}/yaml/_y.so", f"{begin}/torch/lib/cpu.so", "/libm", f"{begin}/torch.libs/gomp.so.1"),
        *(f"{begin}/nvidia/blas.so", f"{begin}/torch/_C.so", "/libc"),
    ]
    assert place_libraries(files, libraries) == [
        *(
            "/python",
            "/os.py",
            f"{begin}/torch/_C.so",
            f"{begin}/torch/lib/cpu.so",
            f"{begin}/torch.libs/gomp.so.1",
        ),
        *("/libc", f"{begin}/torch/x.so", f"{begin}/yaml/_y.so", "/libm", f"{begin}/nvidia/blas.so"),
        f"{begin}/alone.so",
    ]


@given(RANGES, RANGES)
def test_what_is_relocated_comes_first(touched: list[tuple[int, int]], written: list[tuple[int, int]]) -> None:
    ranges, copied = merge(touched), merge(written, 0)
    found = written_first(ranges, copied)
    assert sum(count for _, count in found) == len(covered(ranges)) and covered(found) == covered(ranges)
    kinds = [
        0 if not first and not place else 1 if covered([(first, count)]) <= covered(copied) else 2
        for place, (first, count) in enumerate(found)
    ]
    assert kinds == sorted(kinds)
    assert not covered(each for each, kind in zip(found, kinds, strict=True) if kind == 2) & covered(copied)


# ---- lines ---------------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(blacklist_characters="/\0\n", blacklist_categories=["Cs"]), min_size=1, max_size=8)
PATHS = (
    st.lists(NAMES.filter(lambda name: name not in (".", "..")), min_size=1, max_size=4)
    .map(lambda names: "/" + "/".join(names))
)  # fmt: skip
ENTRIES = st.one_of(
    PATHS.map(lambda path: PrefetchEntry(DIRECTORY, path)),
    PATHS.map(lambda path: PrefetchEntry(NAME, path)),
    PATHS.map(lambda path: PrefetchEntry(SMALL, path)),
    st.builds(
        lambda path, size, mtime, ranges: PrefetchEntry(FILE, path, size, mtime, merge(ranges)),
        PATHS,
        st.integers(0, 1 << 50),
        st.integers(-(1 << 62), 1 << 62),
        RANGES,
    ),
)


@given(st.lists(ENTRIES, max_size=20))
def test_entries_survive_being_written(entries: list[PrefetchEntry]) -> None:
    lines = format_entries(entries)
    assert not [line for line in lines if "\n" in line]
    assert list(parse_entries(lines)) == entries


@pytest.mark.parametrize("path", ["", "a", "relative/a", "/a\nb", "/a\0", "/", "/a/", "/a/..", "/a/."])
def test_what_no_line_can_hold_is_left_out(path: str) -> None:
    assert format_entries([PrefetchEntry(FILE, path, 1, 1), PrefetchEntry(NAME, "/b")]) == ["at /", "n 0 b"]


@pytest.mark.parametrize(
    "lines",
    [
        ["x 0 a"],
        [""],
        ["n 0 a"],  # a folder that was not named
        ["at /a", "n 1 b"],
        ["at /a", "n -1 b"],
        ["at a"],
        ["at /a\0"],
        ["at /a", "n 0 .."],
        ["at /a", "n 0 b/c"],
        ["at /a", "n 0 "],
        ["at /a", "f 0 1 2 *"],
        ["at /a", "f 0 1 2 3 b"],
        ["at /a", "f 0 -1 2 * b"],
        ["at /a", "f 0 1 2 1+1,,2+1 b"],
        ["at /a", "f 0 1 2 0+99999999999999999999 b"],
        ["at /a", "f 0 ١ 2 * b"],
        ["at /a", "f 0 1 2 " + ",".join(["1+1"] * (MAX_RANGES + 1)) + " b"],
    ],
)
def test_lines_that_are_none_are_refused(lines: list[str]) -> None:
    with pytest.raises(ValueError):
        list(parse_entries(lines))


@given(st.lists(st.text(max_size=30), max_size=10))
def test_any_lines_are_entries_or_refused(lines: list[str]) -> None:
    try:
        for entry in parse_entries(lines):
            assert entry.path.startswith("/")
    except ValueError:
        pass


def test_a_record_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_plan, "MAX_ENTRIES", 5)
    assert len(format_entries([PrefetchEntry(NAME, f"/a/{each}") for each in range(9)])) == 1 + 5
    with pytest.raises(ValueError, match="too many"):
        list(parse_entries(["at /a", *["n 0 b"] * 6]))


# ---- probes and threads --------------------------------------------------------------------------------------


@given(st.lists(ENTRIES, max_size=60))
def test_probes_are_places_in_files(entries: list[PrefetchEntry]) -> None:
    chosen = choose_probes(entries)
    assert len(chosen) <= MAX_PROBES
    files = [entry for entry in entries if entry.kind == SMALL or (entry.kind == FILE and entry.size)]
    assert set(chosen) <= set(files)
    assert bool(chosen) == bool(files)
    probes = [make_probe(entry, 7, -5) for entry in chosen]
    assert [parse_probe(format_probe(probe)) for probe in probes] == probes


@given(st.integers(1, 500))
def test_probes_lie_everywhere(count: int) -> None:
    """What the first files and the large ones have is no word on the last ones."""
    entries = [PrefetchEntry(FILE, f"/a/{number:03}", count - number, 0, ()) for number in range(count)]
    found = sorted(int(entry.path[3:]) for entry in choose_probes(entries))
    gaps = [after - before for before, after in zip([-1, *found], [*found, count], strict=True)]
    assert max(gaps) <= 2 + count // (MAX_PROBES - LARGE_PROBES)


@pytest.mark.parametrize("line", ["", "1", "1 2 3", "1 2 3 a", "-1 2 3 /a", "1 2 3 /a\0", "1 2 x /a"])
def test_a_probe_that_is_none_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        parse_probe(line)


def test_more_read_at_once_where_each_takes_longer() -> None:
    assert choose_threads([]) == FEW_THREADS
    assert choose_threads([0.00001] * 9 + [0.1] * 3) == FEW_THREADS
    assert FEW_THREADS < choose_threads([0.001] * 12) < choose_threads([0.004] * 12) == MAX_THREADS
