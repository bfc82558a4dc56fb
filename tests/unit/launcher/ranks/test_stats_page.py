"""The page: both ends of it in one process, torn reads, and what cannot be opened."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.in_rank import bootstrap as inside
from launcher.monitor.samples.sampler import Sampler
from launcher.monitor.samples.stack_collector import NO_HANDLER, StackCollector
from launcher.ranks import stats_page as pages
from launcher.ranks.stats_page import MAGIC, PAGE_BYTES, StatsPages, parse_page, read_page
from tests.unit.launcher.fake_loop import FakeLoop

IMPORT = "from launcher.in_rank import bootstrap as inside"


@pytest.fixture
def made() -> Iterator[StatsPages]:
    found = StatsPages()
    yield found
    found.close()


def in_a_process(path: str, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code that has `page`, in a process of its own: handlers and descriptors stay there."""
    program = f"import os, sys, time\n{IMPORT}\npage = inside.open_page(sys.argv[1])\n"
    program += "beat = lambda step: page.beat(step, time.monotonic_ns())\n"
    return subprocess.run(
        [sys.executable, "-c", program + textwrap.dedent(code), path], capture_output=True, text=True, timeout=60
    )


def fd_of(path: str) -> int:
    return int(path.rpartition("/")[2])


def test_both_ends_know_the_same_format() -> None:
    assert MAGIC + pages.VERSION.to_bytes(4, "little") == inside.PAGE_HEAD
    assert inside.PAGE_BYTES == PAGE_BYTES == inside.LOST_AT + 8
    assert inside.LOST_AT == pages._LOST_AT == inside.PULSE_AT + 32 + inside.MAX_NOTES
    assert inside.MAX_STEP == pages._NO_STEP
    assert inside.END_AT == pages._END_AT


def test_what_is_counted_is_read(made: StatsPages) -> None:
    (file,) = made.renew(1, False)
    fd = fd_of(file.path)
    assert read_page(fd) is None  # nobody has opened it
    before_ns = time.monotonic_ns()
    run = in_a_process(
        file.given,
        """
        print(os.getpid(), sys.modules["_thread"].get_ident())
        for _ in range(3): page.pulse(1, 2, 3)
        beat(-7)
        beat("no number")
        page.counts()
        found = os.listdir("/proc/self/fd")
        print("faulthandler" in sys.modules, [n for n in found if os.path.exists(f"/proc/self/fd/{n}")])
        """,
    )
    assert (run.returncode, run.stderr) == (0, "")
    pid, ident, *rest = run.stdout.split()
    found = read_page(fd)
    assert found is not None
    assert (found.pid, found.main_thread, found.steps, found.step, found.counts) == (
        int(pid),
        int(ident),
        5,
        -7,
        True,
    )
    assert before_ns < found.step_ns < time.monotonic_ns()
    assert (found.stacks_signal, found.stacks_fd) == (inside.STACKS_SIGNAL, inside.HIGH_FD)
    assert found.main_signal == inside.MAIN_SIGNAL
    assert rest == ["False", "['0',", "'1',", "'2',", f"'{inside.HIGH_FD}']"]


def test_before_the_first_step_it_says_whether_one_is_counted(made: StatsPages) -> None:
    one, two = made.renew(2, False)
    assert in_a_process(one.given, "").returncode == in_a_process(two.given, "page.counts()").returncode == 0
    found = [read_page(fd_of(each.path)) for each in (one, two)]
    assert [(each.counts, each.steps, each.step_ns, each.step) for each in found if each] == [
        (False, 0, 0, None),
        (True, 0, 0, None),
    ]


@pytest.mark.parametrize(
    ("code", "status"),
    [("3", 3), ("True", 1), ("'no such file'", 1), ("259", 3), ("-1", 255), ("None", 0), ("0", 0), ("256", 0)],
)
def test_it_says_with_which_status_the_script_has_ended(made: StatsPages, code: str, status: int) -> None:
    (file,) = made.renew(1, False)
    assert pages.read_exit_status(file.path) == 0
    run = in_a_process(file.given, f"page.pulse(); page.ended(SystemExit({code})); sys.exit({code})")
    assert run.returncode == pages.read_exit_status(file.path) == status
    found = read_page(fd_of(file.path))
    assert found is not None and (found.steps, found.stacks_signal) == (1, inside.STACKS_SIGNAL)


def test_no_end_is_read_where_there_is_no_page(made: StatsPages, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x" * 512)
    (tmp_path / "short").write_bytes(inside.PAGE_HEAD)
    for path in ("", "/nowhere", str(tmp_path), str(tmp_path / "other"), str(tmp_path / "short")):
        assert pages.read_exit_status(path) == 0
    (file,) = made.renew(1, False)
    assert in_a_process(file.given, "os.close(page.fd); page.ended(SystemExit(3))").returncode == 0
    assert pages.read_exit_status(file.path) == 0


def test_forked_children_do_not_count(made: StatsPages) -> None:
    (file,) = made.renew(1, False)
    run = in_a_process(
        file.given,
        """
        page.pulse()
        if os.fork() == 0:
            for _ in range(10): page.pulse(); beat(99)
            page.ended(SystemExit(3))
            os._exit(0)
        os.wait()
        beat(1)
        """,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert pages.read_exit_status(file.path) == 0
    found = read_page(fd_of(file.path))
    assert found is not None and (found.steps, found.step) == (2, 1)


def write_pulse(made: StatsPages, place: int, steps: int, number: int) -> None:
    """Writes what a rank would that has made so many steps."""
    data = b"".join(words(steps, time.monotonic_ns(), number + pages._NO_STEP))
    os.pwrite(made._fds[place], os.getpid().to_bytes(4, "little"), 12)
    os.pwrite(made._fds[place], data, 32)


def test_all_pages_of_an_attempt_are_read_after_it(made: StatsPages) -> None:
    made.renew(3, False)
    write_pulse(made, 0, 5, 104)
    write_pulse(made, 2, 4, -3)
    found = made.read()
    assert [None if page is None else (page.steps, page.step) for page in found] == [(5, 104), None, (4, -3)]


class Watched:
    """A rank that has a page and no process."""

    rank, pid, started_ns, logs = 0, 0, 0, None

    def __init__(self, page_file: str) -> None:
        self.page_file = page_file


def test_numbers_of_heartbeats_that_fall_are_noticed(made: StatsPages) -> None:
    files = made.renew(2, False)
    sampler = Sampler([Watched(each.path) for each in files])  # type: ignore[misc]
    for number in (3, 3, 9):
        write_pulse(made, 0, number, number)
        write_pulse(made, 1, 1, 0)
        sampler.look(0.0)
        assert not sampler.numbers_fall
    write_pulse(made, 1, 2, -1)
    sampler.look(0.0)
    assert sampler.numbers_fall
    sampler.close()


def test_a_file_of_the_scripts_that_has_its_number_is_left_alone(made: StatsPages, tmp_path: Path) -> None:
    """Before the first step nothing is counted then; from there on the page is mapped, and may be closed."""
    early, late = made.renew(2, False)
    own = tmp_path / "own"
    own.write_bytes(b"x" * 1000)
    taken = f"""
        os.closerange(3, 2000)
        own = os.open({os.fspath(own)!r}, os.O_RDWR)
        os.dup2(own, page.fd)
        for _ in range(3): page.pulse(); beat(4)
        """
    for file, before in ((early, ""), (late, "page.pulse()\n")):
        run = in_a_process(file.given, before + textwrap.dedent(taken))
        assert (run.returncode, run.stderr) == (0, "")
    assert own.read_bytes() == b"x" * 1000
    found = [read_page(fd_of(file.path)) for file in (early, late)]
    assert [(page.steps, page.step) for page in found if page] == [(0, None), (7, 4)]


def test_closed_before_the_first_step_it_counts_nothing_and_nothing_fails(made: StatsPages) -> None:
    (file,) = made.renew(1, False)
    run = in_a_process(file.given, "os.closerange(3, 2000); page.pulse(); page.counts(); beat(1)")
    assert (run.returncode, run.stderr) == (0, "")
    found = read_page(fd_of(file.path))
    assert found is not None and (found.steps, found.counts) == (0, False)


@pytest.mark.parametrize("step", [0, 1, -1, 2**54, 2**55 - 1, -(2**55) + 1])
def test_numbers_of_steps(made: StatsPages, step: int) -> None:
    (file,) = made.renew(1, False)
    assert in_a_process(file.given, f"beat({step})").returncode == 0
    found = read_page(fd_of(file.path))
    assert found is not None and found.step == step


def test_other_numbers_are_not_taken_but_count(made: StatsPages) -> None:
    (file,) = made.renew(1, False)
    code = "for step in (5, 2**55, -2**55, 10**30, True, 1.5, None, 'x'): beat(step)"
    assert in_a_process(file.given, code).returncode == 0
    found = read_page(fd_of(file.path))
    assert found is not None and (found.steps, found.step) == (8, 5)


COUNTS = st.integers(0, 2**40 - 2)
TIMES = st.integers(0, 2**59)
STEPS = st.integers(0, 2**56 - 1)


def words(count: int, time_ns: int, step: int) -> list[bytes]:
    numbers = (count, time_ns, step, count + 5 * time_ns + 7 * step)
    return [number.to_bytes(8, "little") for number in numbers]


HEAD = (MAGIC + pages.VERSION.to_bytes(4, "little") + (77).to_bytes(4, "little")).ljust(32, b"\0")


@given(COUNTS, TIMES, st.integers(100, 10**12), STEPS, st.integers(0, 1000), st.sets(st.integers(0, 3)))
def test_a_torn_read_shows(count: int, time_ns: int, later_ns: int, step: int, more: int, stale: set[int]) -> None:
    """Any mixture of the words of two pulses, one after the other, is not taken for a page."""
    old, new = words(count, time_ns, step), words(count + 1, time_ns + later_ns, step + more)
    mixed = b"".join(old[place] if place in stale else new[place] for place in range(4))
    found = parse_page(HEAD + mixed)
    if mixed in (b"".join(old), b"".join(new)):
        assert found is not None and found.steps in (count, count + 1)
    else:
        assert found is None


NAMES = st.lists(st.text(max_size=5), max_size=3, unique=True)
METRICS = NAMES.flatmap(lambda names: st.fixed_dictionaries({name: st.floats(width=32) for name in names}))
ANY_METRICS = st.dictionaries(
    st.text(max_size=5), st.floats(allow_infinity=False, allow_nan=False) | st.integers() | st.text(max_size=9)
)
ANY_STEP = st.integers(-(2**54), 2**54) | st.text(max_size=5)


class FakePage:
    """Has notes as a page that is in memory; `is_lost`: the script has closed it."""

    def __init__(self) -> None:
        self.notes, self.heartbeats, self.is_lost = b"", 0, False

    def beat(self, _step: object, _now_ns: int, notes: bytes = b"") -> bool:
        self.heartbeats += 1
        if not self.is_lost and notes:
            self.notes = notes
        return not self.is_lost


class FakeEvents:
    """Keeps what would be written into the file."""

    path = "events.jsonl"

    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, _stage: object, _kind: str, _name: str, more: str) -> None:
        self.written.append(more)


class FakeFirstStep:
    """Is told of the first heartbeats."""

    def done(self, _how: str) -> None:
        pass


def make_beat(monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[..., None], FakePage, FakeEvents]:
    """A rank after its first heartbeats, each of which leaves an event."""
    monkeypatch.setattr(inside, "FIRST_BEATS", 0)
    monkeypatch.setattr(inside, "HEARTBEAT_EVERY_NS", 0)
    page, events = FakePage(), FakeEvents()
    return inside.make_heartbeat(events, FakeFirstStep(), page), page, events  # type: ignore[arg-type]


@given(st.lists(st.tuples(ANY_STEP, METRICS | ANY_METRICS), min_size=1, max_size=20))
def test_notes_of_heartbeats_are_read(heartbeats: list[tuple[int | str, dict[str, float | int | str]]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        beat, page, events = make_beat(patch)
        for step, metrics in heartbeats:
            beat(step, metrics)
    assert page.heartbeats == len(heartbeats)
    found = {note.number: note for note in pages.parse_heartbeats(page.notes)}
    for number, (step, metrics) in enumerate(heartbeats, 1):
        if number in found:
            expected = (step, {name: metric(value) for name, value in metrics.items()})
            assert pages.heartbeat_event(found[number]) == expected
    assert len(heartbeats) in found or events.written, "the last one is in one of the two"


def metric(value: object) -> object:
    """As events have it."""
    return repr(value) if isinstance(value, float) and value - value != 0 else value


def test_the_last_notes_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    beat, page, events = make_beat(monkeypatch)
    for step in range(100):
        beat(step, {"loss": step / 2, "lr": 0.1})
        numbers = [note.number for note in pages.parse_heartbeats(page.notes)]
        assert len(numbers) == min(step + 1, 6)
        assert numbers == list(range(step + 2 - len(numbers), step + 2))
    assert not events.written


def test_one_a_second_leaves_a_note_and_metrics_do_not_wait_for_those_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns = 10**9
    monkeypatch.setattr(inside, "FIRST_BEATS", 0)
    page, events = FakePage(), FakeEvents()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic_ns", lambda: now_ns)
        beat = inside.make_heartbeat(events, FakeFirstStep(), page)  # type: ignore[arg-type]
    for step in range(100):  # tenths of a second; each fifth has metrics
        beat(step, {} if step % 5 != 4 else {"loss": 0.5})
        now_ns += 10**8
    found = [pages.heartbeat_event(note) for note in pages.parse_heartbeats(page.notes)]
    assert page.heartbeats == 100 and not events.written
    # 4 does not wait for 0, nor 10 for anything but 4.
    assert found[-4:] == [(64, {"loss": 0.5}), (74, {"loss": 0.5}), (84, {"loss": 0.5}), (94, {"loss": 0.5})]


def test_a_heartbeat_without_room_for_its_metrics_is_an_event_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    beat, page, events = make_beat(monkeypatch)
    beat(1, {"text": "x" * 500})
    beat(2, {"loss": 1.0})
    assert events.written == [',"value":1,"attrs":{"text":"' + "x" * 500 + '"}']
    assert [note.number for note in pages.parse_heartbeats(page.notes)] == [2]
    assert page.heartbeats == 2


def test_once_the_page_is_lost_heartbeats_are_events_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    beat, page, events = make_beat(monkeypatch)
    page.is_lost = True
    beat(1, {"loss": 1.0})
    beat(2, {})
    assert events.written == [',"value":1,"attrs":{"loss":1.0}', ',"value":2'] and not page.notes


@given(st.binary(max_size=500), st.integers(0, 440))
def test_any_notes_can_be_read(data: bytes, cut: int) -> None:
    """Also where only a part is the ranks' own."""
    whole = inside.pack_text(7, 5, ',"value":3')
    for each in (data, data[:cut] + whole, data + whole):
        for note in pages.parse_heartbeats(each):
            pages.heartbeat_event(note)
    assert pages.parse_heartbeats(data[:cut] + whole)[-1][:2] == (7, 5)


@given(st.data())
def test_torn_notes_show(data: st.DataObject) -> None:
    """Of notes that are written while they are read some bytes are new and the rest is old."""
    with pytest.MonkeyPatch.context() as patch:
        beat, page, _ = make_beat(patch)
        written = {}
        for step in range(data.draw(st.integers(2, 15))):
            old = page.notes
            written[step + 1] = (step, {"loss": step / 4})
            beat(step, {"loss": step / 4})
    cut = data.draw(st.integers(0, len(page.notes)))
    for mixed in (page.notes[:cut] + old[cut:], old[:cut] + page.notes[cut:]):
        for note in pages.parse_heartbeats(mixed):
            assert pages.heartbeat_event(note) == written[note.number]


@given(st.binary(max_size=80))
def test_anything_can_be_read(data: bytes) -> None:
    parse_page(data)
    parse_page(HEAD[:16] + data)


def test_it_is_read_while_it_is_written(made: StatsPages) -> None:
    (file,) = made.renew(1, False)
    program = f"import sys\n{IMPORT}\npage = inside.open_page(sys.argv[1])\nwhile True: page.pulse()"
    writer = subprocess.Popen([sys.executable, "-c", program, file.given])
    try:
        fd = fd_of(file.path)
        end_s = time.monotonic() + 30
        while read_page(fd) is None:
            assert time.monotonic() < end_s and writer.poll() is None
        last = (0, 0)
        for _ in range(20000):
            found = read_page(fd)
            assert found is not None
            assert (found.steps, found.step_ns) >= last
            last = (found.steps, found.step_ns)
        assert last[0] > 0
    finally:
        writer.kill()
        writer.wait()
    found = read_page(fd)
    assert found is not None and found.pid == writer.pid  # of a dead one, too


class SeenRank(NamedTuple):
    """A rank whose stacks are collected."""

    rank: int
    pid: int
    stacks_file: str


def test_a_number_that_is_no_pid_ends_nothing(made: StatsPages) -> None:
    (file,) = made.renew(1, False)
    os.pwrite(fd_of(file.path), (1 << 31).to_bytes(4, "little"), 12)
    assert read_page(fd_of(file.path)) is None
    loop, found = FakeLoop(), []
    collector = StackCollector(loop, [SeenRank(0, os.getpid(), file.path)], py_spy="")
    collector.collect(found.append)
    loop.advance(1.0)
    assert [ranks[0].note for ranks in found] == [NO_HANDLER]


def test_named_ones_lose_their_name_when_they_are_opened(made: StatsPages) -> None:
    one, two = made.renew(2, True)
    assert one.given.startswith("/dev/shm/") and one.path.startswith("/proc/")
    assert stat.S_IMODE(os.stat(one.given).st_mode) == 0o600
    assert in_a_process(one.given, "page.pulse()").returncode == 0
    assert not os.path.exists(one.given) and os.path.exists(two.given)
    found = read_page(fd_of(one.path))
    assert found is not None and found.steps == 1
    made.renew(0, True)
    assert not os.path.exists(two.given) and not os.path.exists(one.path)


def test_names_that_a_killed_job_has_left_go_with_the_next(
    monkeypatch: pytest.MonkeyPatch, made: StatsPages, tmp_path: Path
) -> None:
    monkeypatch.setattr(pages, "NAMED_DIRECTORY", os.fspath(tmp_path))
    left, young, other = (tmp_path / name for name in ("bootseer-page-1", "bootseer-page-2", "somebody-elses"))
    for path in (left, young, other):
        path.touch()
    for path in (left, other):
        os.utime(path, (1.0, 1.0))
    (file,) = made.renew(1, True)
    assert sorted(tmp_path.iterdir()) == sorted([young, other, Path(file.given)])
    assert made.names == [file.given]


def test_names_are_reported_before_there_are_such_files(
    monkeypatch: pytest.MonkeyPatch, made: StatsPages, tmp_path: Path
) -> None:
    """Else a job that is killed between the two would leave them."""
    monkeypatch.setattr(pages, "NAMED_DIRECTORY", os.fspath(tmp_path))
    told: list[tuple[list[str], list[Path]]] = []
    files = made.renew(2, True, on_named=lambda: told.append((made.names, list(tmp_path.iterdir()))))
    assert told == [([file.given for file in files], [])]
    assert sorted(tmp_path.iterdir()) == sorted(Path(file.given) for file in files)


@pytest.mark.parametrize("what", ["nothing", "folder", "empty", "other", "fifo", "device", "memory"])
def test_what_is_no_page_is_left_alone(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    content = b"x" * 100
    if what == "folder":
        path.mkdir()
    elif what == "empty":
        path.touch()
    elif what == "other":
        path.write_bytes(content)
    elif what == "fifo":
        os.mkfifo(path)
    given = {"device": "/dev/full", "memory": "/proc/self/mem"}.get(what, os.fspath(path))
    run = in_a_process(given, "print(page, sorted(os.listdir('/proc/self/fd'))[:-1])")
    assert (run.returncode, run.stderr, run.stdout) == (0, "", "None ['0', '1', '2']\n")
    assert what != "other" or path.read_bytes() == content


def test_where_there_is_no_room_there_is_no_page(monkeypatch: pytest.MonkeyPatch, made: StatsPages) -> None:
    monkeypatch.setattr(pages, "NAMED_DIRECTORY", "/nowhere")
    assert made.renew(2, True) == [pages.NO_STATS_PAGE] * 2


def test_a_small_limit_of_descriptors(made: StatsPages) -> None:
    (file,) = made.renew(1, False)
    program = (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "from launcher.in_rank import bootstrap as inside\npage = inside.open_page(sys.argv[1])\npage.pulse()"
    )
    subprocess.run([sys.executable, "-c", program, file.given], check=True)
    found = read_page(fd_of(file.path))
    assert found is not None and (found.steps, found.stacks_fd) == (1, 40)


def test_closed_standard_streams_stay_closed(made: StatsPages) -> None:
    (file,) = made.renew(1, False)
    run = in_a_process(
        file.given,
        """
        os.close(0), os.close(2)
        first, page = page, inside.open_page(sys.argv[1])
        print(page is not None, {"0", "2"} & set(os.listdir("/proc/self/fd")))
        """,
    )
    assert run.stdout in ("True {'0'}\n", "True set()\n")  # 0: the folder that is listed


def test_a_module_of_the_scripts_is_not_taken_for_the_librarys(made: StatsPages, tmp_path: Path) -> None:
    (file,) = made.renew(1, False)
    (tmp_path / "faulthandler.py").write_text("raise SystemExit('this one is the script\\'s')")
    program = f"import sys\n{IMPORT}\nsys.path.insert(0, sys.argv[2])\nbefore = sys.path[:]\n"
    program += "page = inside.open_page(sys.argv[1])\npage.pulse()\nassert sys.path == before"
    subprocess.run([sys.executable, "-c", program, file.given, os.fspath(tmp_path)], check=True)
    found = read_page(fd_of(file.path))
    assert found is not None and found.stacks_signal == inside.STACKS_SIGNAL


def times_of(gaps_s: Iterable[float], before_s: Iterable[float] = ()) -> list[tuple[float, float]]:
    """What a page says after each heartbeat: how long steps take, and at the least; optimizers step before."""
    now_ns = 10**9
    fd = os.memfd_create("page")
    found: list[tuple[float, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic_ns", lambda: now_ns)
        pulse, beat, _ = inside._make_pulse(fd)
    os.pwrite(fd, HEAD.ljust(PAGE_BYTES, b"\0"), 0)
    for gap_s in before_s:
        now_ns += int(gap_s * 1e9)
        pulse()
    for gap_s in gaps_s:
        now_ns += int(gap_s * 1e9)
        assert beat(1, now_ns)
        page = read_page(fd)
        assert page is not None
        found.append((page.takes_s, page.min_s))
    os.close(fd)
    return found


@given(st.floats(1e-5, 30.0), st.floats(1.3, 100.0), st.integers(20, 40))
def test_how_long_steps_take_is_followed_up_and_down(step_s: float, factor: float, count: int) -> None:
    per_rest = max(1, int(1.1 / step_s)) if step_s < 1 else 1
    found = times_of([step_s] * count + [factor * step_s] * min(per_rest + 30, 3000) + [step_s] * 30)
    assert found[0] == (0.0, 0.0)  # since when the first step ran is not known
    assert found[1][0] <= step_s * 1.000001 < found[1][0] * 2 ** (1 / 8) * 1.001
    assert found[1][1] == 0.0 and found[count - 1] == (found[1][0], found[1][0])
    if per_rest < 2000:
        slow_s = found[-31][0]
        assert slow_s <= factor * step_s * 1.000001 < slow_s * 2 ** (1 / 8) * 1.001
    assert found[-1][1] <= found[1][0]


@pytest.mark.parametrize("step_s", [0.05, 2.0])
def test_some_long_steps_change_nothing_for_long(step_s: float) -> None:
    random = Random(3)
    often = times_of([step_s * (10 if random.random() < 0.1 else random.uniform(0.9, 1.1)) for _ in range(4000)])
    assert 0.85 * step_s < median(takes for takes, _ in often) < 1.1 * step_s
    assert sum(takes > 1.8 * step_s for takes, _ in often) < 100
    assert often[-1][1] > 0.75 * step_s


def test_heartbeats_are_steps_where_there_are_some() -> None:
    """Each optimizer's step may be only a part of one."""
    found = times_of([1.0] * 20, before_s=[0.5] * 100)
    assert found[0] == (0.0, 0.0) and found[-1][0] == found[-1][1] and 0.91 < found[-1][0] <= 1.0
