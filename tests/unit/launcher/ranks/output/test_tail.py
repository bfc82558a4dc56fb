"""The tailer with a real loop, real files and real pipes."""

import fcntl
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.base.loop import Loop
from launcher.ranks.output import tail as tail_module
from launcher.ranks.output.console import Console
from launcher.ranks.output.inotify import Inotify
from launcher.ranks.output.tail import Tailer
from tests.unit.launcher.ranks.looping import read_ready, run_for, run_until


class Desk:
    """A loop, a console on two pipes and a tailer; knows what the console's reader got."""

    def __init__(self, pipe_bytes=65536):
        self.loop = Loop()
        self.fds = [*os.pipe(), *os.pipe()]
        for read_fd, write_fd in ((0, 1), (2, 3)):
            os.set_blocking(self.fds[read_fd], False)
            fcntl.fcntl(self.fds[write_fd], fcntl.F_SETPIPE_SZ, pipe_bytes)
        self.console = Console(self.loop, self.fds[1], self.fds[3])
        self.tailer = Tailer(self.loop, self.console)
        self.out = b""
        self.err = b""
        self.notes = []

    def read(self):
        self.out += read_ready(self.fds[0])
        self.err += read_ready(self.fds[2])

    def finish(self, reading=True):
        """Finishes, reading the console or not; returns the note."""
        self.tailer.finish(self.notes.append)

        def done():
            if reading:
                self.read()
            return bool(self.notes)

        run_until(self.loop, done)
        self.read()
        return self.notes[0]

    def until(self, condition):
        def check():
            self.read()
            return condition()

        run_until(self.loop, check)

    def close(self):
        self.tailer.close()
        self.console.close()
        self.loop.close()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.close()


def lines_of(data, prefix):
    return [line.removeprefix(prefix) for line in data.splitlines() if line.startswith(prefix)]


def test_lines_are_copied_while_the_rank_runs(desk, tmp_path):
    path = tmp_path / "stdout.log"
    desk.tailer.add(str(path), 0, 1, b"[r0]:")
    with open(path, "ab", buffering=0) as log:  # told before the rank has started
        log.write(b"one\ntw")
        desk.until(lambda: desk.out == b"[r0]:one\n")
        log.write(b"o\nrest")
        desk.until(lambda: desk.out == b"[r0]:one\n[r0]:two\n")
    assert desk.finish() == ""
    assert desk.out == b"[r0]:one\n[r0]:two\n[r0]:rest\n"
    assert desk.err == b""


def test_files_that_have_content_are_copied_from_their_start(desk, tmp_path):
    path = tmp_path / "stderr.log"
    path.write_bytes(b"early\n")
    desk.tailer.add(str(path), 3, 2, b"3 ")
    desk.until(lambda: desk.err == b"3 early\n")
    assert desk.finish() == ""


def test_nothing_runs_while_nothing_is_written(desk, tmp_path):
    desk.tailer.add(str(tmp_path / "log"), 0, 1, b"")
    run_for(desk.loop, 0.05)
    start_s = time.monotonic()
    desk.loop.run_once(0.3)
    assert time.monotonic() - start_s > 0.25


def test_finish_with_nothing_to_copy(desk):
    assert desk.finish() == ""


def test_a_file_that_cannot_be_followed_is_said(desk, tmp_path):
    desk.tailer.add(str(tmp_path / "none" / "log"), 0, 1, b"")
    desk.until(lambda: desk.err)
    assert (
        desk.err
        == b"bootrun: warning: cannot copy %s/none/log to the console: No such file or directory\n"
        % os.fsencode(tmp_path)
    )
    assert desk.finish() == ""


def test_filtered_lines_also_go_to_a_file_of_their_own(desk, tmp_path):
    filtered = tmp_path / "filtered_stdout.log"
    for rank in range(2):
        path = tmp_path / f"{rank}.log"
        path.write_bytes(b"loss 1\nnoise\nloss 2\n")
        desk.tailer.add(str(path), rank, 1, b"[%d]:" % rank, (b"loss", b"none"), str(filtered))
    assert filtered.exists()
    assert desk.finish() == ""
    for prefix in (b"[0]:", b"[1]:"):
        assert lines_of(filtered.read_bytes(), prefix) == [b"loss 1", b"loss 2"]
        assert lines_of(desk.out, prefix) == [b"loss 1", b"noise", b"loss 2"]


def test_filtered_lines_are_written_although_the_console_is_stuck(tmp_path):
    desk = Desk(4096)
    path = tmp_path / "log"
    path.write_bytes(b"line\n" * 100_000 + b"needle\n")
    desk.tailer.add(str(path), 0, 1, b"", (b"needle",), str(tmp_path / "filtered"))
    run_until(desk.loop, lambda: (tmp_path / "filtered").read_bytes() == b"needle\n")
    desk.close()


def test_ranks_take_turns(tmp_path):
    desk = Desk(4096)
    for rank in range(3):
        path = tmp_path / f"{rank}"
        path.write_bytes(b"x" * 99 + b"\n" + b"y" * 99 + b"\n" * 20_000)
        desk.tailer.add(str(path), rank, 1, b"[%d]" % rank)
    desk.until(lambda: all(b"[%d]" % rank in desk.out for rank in range(3)))
    assert len(desk.out) < 3_000_000  # not one rank after the other
    desk.close()


def test_a_stuck_console_is_given_up_and_all_is_counted(tmp_path):
    desk = Desk(4096)
    written = 0
    for rank in (3, 7):
        path = tmp_path / f"{rank}.log"
        path.write_bytes(b"%099d\n" % rank * 5000)
        written += path.stat().st_size
        desk.tailer.add(str(path), rank, 1, b"[%d]:" % rank)
    start_s = time.monotonic()
    note = desk.finish(reading=False)
    assert 1.9 < time.monotonic() - start_s < 6
    shown = len(desk.out) - 4 * desk.out.count(b"\n")
    assert note == (
        f"warning: the console accepted nothing for 2 s: {written - shown} bytes of output of ranks 3, 7 "
        f"were not shown; they are in {tmp_path}"
    )
    assert desk.err == f"bootrun: {note}\n".encode()
    assert desk.out.endswith(b"\n")
    desk.close()


def test_a_slow_console_gets_everything(tmp_path):
    """The console takes a little, then nothing for a while, again and again: nothing is lost at the end."""
    desk = Desk(4096)
    path = tmp_path / "log"
    data = b"".join(b"%d\n" % number for number in range(30_000))
    path.write_bytes(data)
    desk.tailer.add(str(path), 0, 1, b"")
    desk.tailer.finish(desk.notes.append)
    for _ in range(3):
        run_for(desk.loop, 0.9)
        desk.out += os.read(desk.fds[0], 100)
    assert not desk.notes
    desk.until(lambda: desk.notes)
    desk.read()
    assert desk.notes == [""]
    assert desk.out == data
    desk.close()


def test_hasten_does_not_wait_for_the_console(tmp_path):
    desk = Desk(4096)
    path = tmp_path / "log"
    path.write_bytes(b"x" * 99 + b"\n" * 10_000)
    desk.tailer.add(str(path), 0, 1, b"")
    desk.tailer.finish(desk.notes.append)
    run_for(desk.loop, 0.05)
    desk.tailer.hasten()
    assert "not shown" in desk.notes[0]
    desk.close()


def test_a_console_that_is_gone_does_not_keep_the_end(desk, tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x\n" * 100)
    os.dup2(desk.fds[3], desk.fds[0])  # closes the reader of stdout
    desk.tailer.add(str(path), 0, 1, b"")
    with open(path, "ab") as log:
        log.write(b"more\n")
    desk.tailer.finish(desk.notes.append)
    run_until(desk.loop, lambda: desk.notes)
    assert desk.notes == [""]
    assert b"stdout cannot be written any more" in read_ready(desk.fds[2])


def test_attempts_follow_each_other(desk, tmp_path):
    for attempt in range(3):
        path = tmp_path / f"attempt_{attempt}"
        desk.tailer.add(str(path), 0, 1, b"")
        path.write_bytes(b"attempt %d, no newline" % attempt)
        desk.tailer.end_all()
    assert desk.finish() == ""
    assert sorted(desk.out.splitlines()) == [b"attempt %d, no newline" % attempt for attempt in range(3)]


def test_many_attempts_behind_a_stuck_console_hold_few_descriptors(tmp_path, monkeypatch):
    desk = Desk(4096)
    monkeypatch.setattr(tail_module, "MAX_OPEN", 8)
    (tmp_path / "first").write_bytes(b"x" * 99 + b"\n" * 100_000)
    desk.tailer.add(str(tmp_path / "first"), 0, 1, b"")
    run_for(desk.loop, 0.02)
    before = len(os.listdir("/proc/self/fd"))
    for attempt in range(50):
        path = tmp_path / f"{attempt}"
        path.write_bytes(b"attempt %d\n" % attempt)
        desk.tailer.add(str(path), 0, 1, b"")
        desk.tailer.end_all()
        run_for(desk.loop, 0.001)
    assert len(os.listdir("/proc/self/fd")) < before + 16
    assert desk.finish() == ""
    assert [line for line in desk.out.splitlines() if line.startswith(b"attempt")] == [
        b"attempt %d" % attempt for attempt in range(50)
    ]
    desk.close()


def test_a_cut_or_removed_log_does_no_harm(desk, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    desk.tailer.add(str(one), 0, 1, b"")
    desk.tailer.add(str(other), 1, 1, b"")
    one.write_bytes(b"first\n")
    other.write_bytes(b"gone soon\n")
    desk.until(lambda: desk.out.count(b"\n") == 2)
    os.unlink(other)
    os.truncate(one, 0)
    with open(one, "ab") as log:
        log.write(b"new\n")
    desk.until(lambda: b"new\n" in desk.out)
    assert desk.finish() == ""


def test_without_inotify_files_are_polled_and_it_is_said_once(tmp_path):
    held = []
    try:
        while True:  # takes all that this user may have
            held.append(Inotify())
    except OSError:
        pass
    try:
        desk = Desk()
    finally:
        for inotify in held:
            inotify.close()
    path = tmp_path / "log"
    desk.tailer.add(str(path), 0, 1, b"")
    desk.until(lambda: desk.err)
    path.write_bytes(b"seen\n")
    desk.until(lambda: desk.out == b"seen\n")
    assert desk.err.count(b"no inotify for log files (Too many open files)") == 1
    assert desk.finish() == ""
    desk.close()


writes = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.sampled_from([b"a", b"bb\n", b"\n", b"c" * 300, b"d" * 5000 + b"\n"]), max_size=3).map(
            b"".join
        ),
        st.booleans(),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(writes)
def test_any_chunks_of_several_ranks_arrive_in_whole_lines(tmp_path_factory, written):
    base = tmp_path_factory.mktemp("tail")
    desk = Desk(8192)
    expected = [b"", b"", b""]
    files = []
    for rank in range(3):
        desk.tailer.add(str(base / str(rank)), rank, 1, b"[%d]:" % rank)
        files.append(open(base / str(rank), "ab", buffering=0))  # noqa: SIM115
    for rank, data, turn in written:
        files[rank].write(data)
        expected[rank] += data
        if turn:
            desk.loop.run_once(0.0)
            desk.read()
    for file in files:
        file.close()
    assert desk.finish() == ""
    assert all(line[:4] in (b"[0]:", b"[1]:", b"[2]:") for line in desk.out.splitlines())
    for rank in range(3):
        assert lines_of(desk.out, b"[%d]:" % rank) == expected[rank].splitlines()
    desk.close()
