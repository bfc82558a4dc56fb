"""The console writer against real pipes, terminals, sockets and files."""

import fcntl
import os
import pty
import socket
import termios
import time

import pytest

from launcher.base.loop import Loop
from launcher.ranks.output import console as console_module
from launcher.ranks.output.console import Console
from tests.unit.launcher.ranks.looping import read_ready, run_until


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def fds():
    opened = []
    yield opened
    for fd in opened:
        try:
            os.close(fd)
        except OSError:
            pass


def make_pipe(fds, size=None):
    read_fd, write_fd = os.pipe()
    fds += [read_fd, write_fd]
    if size:
        fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, size)
    os.set_blocking(read_fd, False)
    return read_fd, write_fd


def make_null(fds):
    fds.append(os.open(os.devnull, os.O_RDWR))
    return fds[-1]


def fill(sink, line=b"x" * 99 + b"\n", most=100_000):
    """Copies lines until there is no room; returns what was given."""
    given = b""
    while sink.has_room():
        sink.copy(line * 10)
        given += line * 10
        assert len(given) < most * 100
    return given


def test_a_full_pipe_does_not_block_and_loses_nothing(loop, fds):
    read_fd, write_fd = make_pipe(fds, 4096)
    console = Console(loop, make_null(fds), write_fd)
    assert os.get_blocking(write_fd)
    given = fill(console.err)
    console.say("own line")
    given += b"bootrun: own line\n"
    rooms = []
    console.err.when_room(lambda: rooms.append(1))
    got = b""

    def read():
        nonlocal got
        got += read_ready(read_fd)
        return got == given

    run_until(loop, read)
    run_until(loop, lambda: rooms)
    assert os.get_blocking(write_fd)  # other users of the pipe still have a blocking one
    console.close()


def test_lines_go_to_a_pipe_in_whole_lines(loop, fds):
    """Each write is at most PIPE_BUF and ends with a line, so another writer's lines cannot land inside one."""
    read_fd, write_fd = make_pipe(fds, 65536)
    console = Console(loop, write_fd, make_null(fds))
    lines = b"".join(b"%d %s\n" % (number, b"y" * (number % 300)) for number in range(3000))
    console.out.copy(lines)
    fcntl.fcntl(write_fd, fcntl.F_SETFL, fcntl.fcntl(write_fd, fcntl.F_GETFL) | os.O_NONBLOCK)
    got = b""
    others = 0

    def read():
        nonlocal got, others
        piece = os.read(read_fd, 4096)
        got += piece
        try:
            os.write(write_fd, b"other\n")
            others += 1
        except BlockingIOError:
            pass
        return not console.out.has_copies()

    run_until(loop, read)
    got += read_ready(read_fd)
    assert others
    assert got.count(b"other\n") == others
    assert got.replace(b"other\n", b"") == lines
    console.close()


def test_streams_to_one_place_share_their_order(loop, fds):
    read_fd, write_fd = make_pipe(fds)
    fds.append(os.dup(write_fd))
    console = Console(loop, fds[-1], write_fd)
    console.out.copy(b"1\n")
    console.err.copy(b"2\n")
    console.say("3")
    console.out.copy(b"4\n")
    assert read_ready(read_fd) == b"1\n2\nbootrun: 3\n4\n"
    console.close()


def test_a_terminal_is_not_set_to_non_blocking(loop, fds):
    leader, follower = pty.openpty()
    fds += [leader, follower]
    modes = termios.tcgetattr(follower)
    modes[1] &= ~termios.OPOST
    termios.tcsetattr(follower, termios.TCSANOW, modes)
    os.set_blocking(leader, False)
    console = Console(loop, make_null(fds), follower)
    given = fill(console.err)  # the terminal's reader takes nothing, as after Ctrl-S
    assert os.get_blocking(follower)
    got = b""

    def read():
        nonlocal got
        got += read_ready(leader)
        return len(got) >= len(given)

    run_until(loop, read)
    assert got == given
    os.close(leader)  # the terminal goes away
    console.err.copy(b"x\n")
    assert console.err.dead
    console.say("nobody hears it")
    console.close()


def test_a_socket_is_written_without_waiting(loop, fds):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        console = Console(loop, ours.fileno(), make_null(fds))
        given = fill(console.out, most=10_000_000)
        assert ours.getblocking()
        got = b""

        def read():
            nonlocal got
            got += read_ready(theirs.fileno())
            return got == given

        run_until(loop, read)
        console.close()


def test_a_file_keeps_its_offset_for_all_who_write_it(loop, fds, tmp_path):
    fd = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    fds.append(fd)
    os.write(fd, b"before\n")
    console = Console(loop, fd, make_null(fds))
    console.out.copy(b"copied\n")
    os.write(fd, b"after\n")
    assert (tmp_path / "out").read_bytes() == b"before\ncopied\nafter\n"
    console.close()


@pytest.mark.parametrize("early", [True, False])
def test_a_reader_that_is_gone_is_reported_once(loop, fds, early):
    out_read, out_write = make_pipe(fds)
    err_read, err_write = make_pipe(fds)
    if early:
        os.close(out_read)
    console = Console(loop, out_write, err_write)
    if not early:
        os.close(out_read)
    for _ in range(3):
        console.out.copy(b"x\n")
    assert console.out.dead == "Broken pipe"
    assert read_ready(err_read) == (
        b"bootrun: warning: stdout cannot be written any more (Broken pipe): "
        b"ranks' output still goes to the log files\n"
    )
    console.close()


def test_a_full_disk_and_closed_descriptors_do_no_harm(loop, fds):
    full = os.open("/dev/full", os.O_WRONLY)
    fds.append(full)
    closed = os.dup(full)
    os.close(closed)
    console = Console(loop, full, closed)
    console.say("nobody hears it")
    console.out.copy(b"x\n")
    assert console.out.dead == "No space left on device"
    assert console.err.dead == "Bad file descriptor"
    assert console.drain(0.1)
    console.close()


def test_own_lines_beyond_the_bound_are_counted(loop, fds):
    read_fd, write_fd = make_pipe(fds, 4096)
    console = Console(loop, make_null(fds), write_fd)
    line = "z" * 990
    count = 2 * console_module.MAX_OWN_LINE_BYTES // 1000
    for _ in range(count):
        console.say(line)
    got = b""

    def read():
        nonlocal got
        got += read_ready(read_fd)
        return b"dropped" in got and got.endswith(b"\n")

    run_until(loop, read)
    shown = got.count(line.encode() + b"\n")
    assert 0 < shown < count
    lost = f"{count - shown:,} lines of bootrun"
    assert got.endswith(f"bootrun: warning: {lost}: dropped here, as the console accepted nothing\n".encode())
    console.close()


def test_drain_is_bounded(loop, fds):
    _, write_fd = make_pipe(fds, 4096)
    console = Console(loop, make_null(fds), write_fd)
    fill(console.err)
    start_s = time.monotonic()
    assert not console.drain(0.2)
    assert 0.15 < time.monotonic() - start_s < 2
    console.close()


def test_giving_up_ends_at_the_end_of_a_line(loop, fds):
    read_fd, write_fd = make_pipe(fds, 8192)
    console = Console(loop, make_null(fds), write_fd)
    lines = [b"%d" % number * size + b"\n" for number, size in enumerate((3000, 9000, 3000, 3000))]
    console.err.copy(b"".join(lines))
    back = console.err.give_up()
    assert back == b"".join(lines[2:])  # the second line had begun
    console.say("end")
    got = b""

    def read():
        nonlocal got
        got += read_ready(read_fd)
        return got.endswith(b"end\n")

    run_until(loop, read)
    assert got == b"".join(lines[:2]) + b"bootrun: end\n"
    console.close()


@pytest.mark.system
@pytest.mark.skipif(os.getuid() != 0, reason="gives up root to have a pipe of another user")
def test_another_users_pipe_is_asked_first(loop, fds):
    """Where the pipe cannot be opened anew, room is asked for before each small write."""
    read_fd, write_fd = make_pipe(fds, 8192)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setuid(65534)
            console = Console(loop, make_null(fds), write_fd)
            with pytest.raises(PermissionError):
                os.open(f"/proc/self/fd/{write_fd}", os.O_WRONLY)
            given = fill(console.err)
            status = 0 if given and console.err.has_copies() and not console.err.dead else 2
            run_until(loop, lambda: not console.err.has_copies())
        finally:
            os._exit(status)
    os.close(write_fd)
    os.set_blocking(read_fd, True)
    got = b""
    while piece := os.read(read_fd, 65536):
        got += piece
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert got
    assert set(got.splitlines()) == {b"x" * 99}
