"""What a start has touched: lists of ranks, pages of this very process, and the entries that are made of them."""

from __future__ import annotations

import importlib.util
import mmap
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.ranks.start_trace import observe as start_observe
from launcher.ranks.start_trace.files import JobKey
from launcher.ranks.start_trace.observe import (
    AccessListing,
    Mapped,
    bytecode_path,
    collect,
    parse_listing,
    read_mapped,
    run,
)
from launcher.ranks.start_trace.plan import DIRECTORY, FILE, NAME, SMALL, UNIT_BYTES
from launcher.ranks.start_trace.record import read_record

KEY = JobKey("/usr/bin/python3", "script", "/home/me/train.py", "", "")
EXAMPLE = "/a/__pycache__/x.cpython-311.pyc"


# ---- lists ---------------------------------------------------------------------------------------------------


def test_a_list_is_read() -> None:
    lines = [
        "json\t/lib/json/__init__.py",
        "\tfile\t/site/pkg.py",
        "\topen\t/data.json",
        "\tfolder\t/lib",
        f"\tbytecode\t{EXAMPLE}",
        "\ttouched\t/lib/a.so\t0+1,5+2",
        "\ttouched\t/lib/a.so\t9+1",
        "\ttouched\t/lib/b.so\tnonsense",
        "\tunknown\tx",
        "alone",
        "",
    ]
    assert parse_listing(lines) == AccessListing(
        ("/lib/json/__init__.py", "/site/pkg.py"),
        ("/data.json",),
        ("/lib",),
        EXAMPLE,
        {"/lib/a.so": ((0, 1), (5, 2), (9, 1))},
    )


@given(st.lists(st.text(st.sampled_from("\tafilederouch/+,0"), max_size=20)))
def test_any_list_is_read(lines: list[str]) -> None:
    assert collect(parse_listing(lines), ()) is not None


@pytest.mark.parametrize("prefix", [None, "/tmp/prefix"])
def test_bytecode_lies_where_the_interpreter_puts_it(prefix: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", prefix)
    example = importlib.util.cache_from_source("/a/x.py")
    for source in ("/lib/python3/os.py", "/a/x.py", "/deep/er/a.b.py"):
        assert bytecode_path(source, example) == importlib.util.cache_from_source(source)
    assert bytecode_path("/a.py", "") == ""


# ---- /proc ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="this kernel has no pagemap")
def test_pages_that_were_touched_are_found(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(bytes(64 << 20))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as area:
        assert area[32 << 20] == area[(50 << 20) + 5] == 0
        mapped = {each.path: each for each in read_mapped("/proc/self")}
        found = mapped[os.fspath(path)]
    units = {unit for first, count in found.ranges for unit in range(first, first + count)}
    assert {(32 << 20) // UNIT_BYTES, (50 << 20) // UNIT_BYTES} <= units
    assert len(units) * UNIT_BYTES < 8 << 20  # not the rest, though all of it is in memory
    assert not found.is_library
    assert any(each.is_library and each.ranges for each in mapped.values())
    assert not [name for name in mapped if name.startswith(("/dev/", "/proc/"))]


def test_a_process_that_is_gone_has_mapped_nothing(tmp_path: Path) -> None:
    assert read_mapped(os.fspath(tmp_path / "gone")) == []
    (tmp_path / "maps").write_text("00400000-00401000 r-xp 00000000 08:01 5 /bin/true\n")
    assert read_mapped(os.fspath(tmp_path)) == []  # without pagemap


def test_maps_of_another_shape_are_left_out(tmp_path: Path) -> None:
    lines = [
        "00400000-00401000 r-xp 00000000 08:01 5 /bin/with a blank",
        "00500000-00501000 r-xp 00000000 08:01 6 /bin/gone (deleted)",
        "00600000-00601000 rw-s 00000000 00:01 7 /dev/zero",
        "00700000-00701000 rw-p 00000000 00:00 0 [heap]",
        "00800000-00801000 rw-p 00000000 00:00 0",
        "",
    ]
    (tmp_path / "maps").write_text("\n".join(lines))
    (tmp_path / "pagemap").write_bytes(b"")
    assert read_mapped(os.fspath(tmp_path)) == [Mapped("/bin/with a blank", True, ())]


# ---- entries -------------------------------------------------------------------------------------------------


def make(path: Path, size: int = 10) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    return os.fspath(path)


def test_entries_follow_the_imports(tmp_path: Path) -> None:
    first, second = make(tmp_path / "one/a.py"), make(tmp_path / "one/b.py", 20)
    bytecode = make(tmp_path / "one/__pycache__/a.cpython-311.pyc", 30)
    extension, library = (
        make(tmp_path / "two/_C.so", 8 * UNIT_BYTES),
        make(tmp_path / "two/cpu.so", 4000 * UNIT_BYTES),
    )
    directories = (os.fspath(tmp_path / "one"), os.fspath(tmp_path / "empty"))
    data = make(tmp_path / "data.json", 5)
    modules = (first, extension, second, "frozen", "/gone.so")
    listing = AccessListing(modules, (bytecode, data, second), directories, EXAMPLE, {library: ((1000, 2),)})
    mapped = [Mapped(extension, True, ((0, 1),)), Mapped(library, True, ((100, 1),))]
    found = [(entry.kind, entry.path, entry.size, entry.ranges) for entry in collect(listing, mapped)]
    assert found == [
        (DIRECTORY, directories[1], 0, ()),
        (DIRECTORY, directories[0], 0, ()),
        (SMALL, bytecode, 0, ()),  # in place of its source
        (FILE, extension, 8 * UNIT_BYTES, ((0, 1),)),
        (FILE, library, 4000 * UNIT_BYTES, ((100, 1), (1000, 2))),
        (FILE, data, 5, ()),
        (SMALL, second, 0, ()),
    ]


def test_a_source_whose_bytecode_lies_elsewhere_is_asked_for(tmp_path: Path) -> None:
    source, prefix = make(tmp_path / "a.py"), tmp_path / "prefix"
    bytecode = make(Path(f"{prefix}{tmp_path}/a.cpython-311.pyc"))
    listing = AccessListing((source,), (), (), f"{prefix}/a/x.cpython-311.pyc", {})
    assert [(entry.kind, entry.path) for entry in collect(listing, ())] == [(NAME, source), (SMALL, bytecode)]


def test_large_data_that_is_mapped_is_not_recorded(tmp_path: Path) -> None:
    large = 2 * start_observe.MAX_DATA_BYTES
    path = make(tmp_path / "model.safetensors", 0)
    os.truncate(path, large)
    everything = ((0, large // UNIT_BYTES),)
    for is_library in (True, False):
        entries = collect(AccessListing((), (), (), "", {}), [Mapped(path, is_library, everything)])
        assert bool(entries) is is_library


# ---- the whole -----------------------------------------------------------------------------------------------


class Start:
    """A start of this very process."""

    def __init__(self, folder: Path) -> None:
        self.records = os.fspath(folder / "records")
        self.modules = [make(folder / f"site/m{number}.py") for number in range(5)]
        self._listing, self._preload = folder / "rank.imports", folder / "preload.imports"

    def observe(self, modules: list[str], *, fork_server: list[str] | None = None, stale: bool = False) -> str:
        """Records it; why it did not, or ""."""
        self._listing.write_text("".join(f"\tfile\t{path}\n" for path in modules))
        self._preload.write_text("".join(f"\tfile\t{path}\n" for path in fork_server or ()))
        preload = os.fspath(self._preload) if fork_server is not None else ""
        is_whole = "" if read_record(self.records, KEY) else "1"
        texts = (str(os.getpid()), os.fspath(self._listing), preload, is_whole, "1" if stale else "")
        return str(run(self.records, *texts, *KEY)["why"])

    @property
    def recorded(self) -> set[str]:
        """Modules of the record."""
        record = read_record(self.records, KEY)
        return set() if record is None else {entry.path for entry in record.entries()} & set(self.modules)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setattr(os, "nice", lambda _: 0)
    return Start(tmp_path)


def test_the_same_start_is_recorded_once(start: Start) -> None:
    assert start.observe(start.modules[:3]) == ""
    assert start.recorded == set(start.modules[:3])
    assert start.observe(start.modules[:3]) == "nothing new"
    assert start.observe(start.modules[2:4]) == ""  # a module more
    assert start.recorded == set(start.modules[:4])


def test_a_rank_that_lists_nothing_is_not_recorded(start: Start) -> None:
    assert start.observe([]) != ""
    assert start.observe(start.modules, fork_server=[]) != ""
    assert start.recorded == set()


def test_forked_ranks_are_recorded_with_what_was_fork_server(start: Start) -> None:
    assert start.observe(start.modules[3:], fork_server=start.modules[:3]) == ""
    assert start.recorded == set(start.modules)
    # The next time the preloaded process has imported more, and is not asked.
    assert start.observe(start.modules[4:], fork_server=[]) == "nothing new"
    assert start.recorded == set(start.modules)


def test_what_has_changed_is_forgotten_and_recorded_from_nothing(start: Start, tmp_path: Path) -> None:
    start.modules += [make(tmp_path / f"site/more{number}.py") for number in range(300)]
    assert start.observe(start.modules) == ""
    looked_at = {probe.path for probe in read_record(start.records, KEY).probes}  # type: ignore[union-attr]
    assert looked_at & set(start.modules)
    start.modules.sort(key=lambda path: path not in looked_at)
    Path(start.modules[0]).write_text("changed")
    assert "next start" in start.observe(start.modules)
    assert read_record(start.records, KEY) is None
    assert start.observe(start.modules) == ""
    record = read_record(start.records, KEY)
    assert record is not None
    assert not any(map(start_observe._has_changed, record.probes))
    assert "next start" in start.observe(start.modules, stale=True)
    assert start.recorded == set()
