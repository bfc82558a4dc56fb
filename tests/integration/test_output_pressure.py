"""Output under pressure: stuck and slow consoles, much output, stopped processes, full disks.

The output side of bootrun runs alone in a process (tailing.py), the writers are real processes that append to log
files as ranks do. In every case: writers never wait, memory is bounded, and what was not shown is counted.
"""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

MIB = 1 << 20
MAX_GROWTH_BYTES = 40 * MIB

# Appends numbered lines until it has written so much, and says how long the slowest write took.
WRITER = """
import os, sys, time
path, name, most, pause = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
written = number = 0
slowest = 0.0
errors = 0
while written < most:
    lines = b"".join(b"%s %d %s\\n" % (name.encode(), n, b"x" * (n % 97)) for n in range(number, number + 40))
    began = time.monotonic()
    try:
        written += os.write(fd, lines)
    except OSError:
        errors += 1
        written += len(lines)
    slowest = max(slowest, time.monotonic() - began)
    number += 40
    if pause:
        time.sleep(pause)
print(number, slowest, errors)
"""


class Tailing:
    """The tailing process, its writers and both ends of its console."""

    def __init__(self, tmp_path, stdout, names=("0",), stream=1, needles=(), filtered="", log_dir=None):
        self.logs = {name: str((log_dir or tmp_path) / f"{name}.log") for name in names}
        self.report_path = str(tmp_path / "report.json")
        specs = [
            [path, int(name), stream, f"[{name}]:", list(needles), filtered] for name, path in self.logs.items()
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.tailing", json.dumps(specs), self.report_path],
            stdin=subprocess.PIPE,
            stdout=stdout if stream == 1 else subprocess.DEVNULL,
            stderr=subprocess.PIPE if stream == 1 else stdout,
        )
        self.writers = {}
        if stream == 1:
            assert self.process.stderr.readline() == b"bootrun: ready\n"
            os.set_blocking(self.process.stderr.fileno(), False)

    def write(self, max_bytes, pause_s=0.0):
        for name, path in self.logs.items():
            self.writers[name] = subprocess.Popen(
                [sys.executable, "-c", WRITER, path, name, str(max_bytes), str(pause_s)], stdout=subprocess.PIPE
            )

    def wait_writers(self):
        """Waits for the writers; returns lines written by name, the slowest write in seconds, failed writes."""
        told = {name: writer.communicate(timeout=60)[0].split() for name, writer in self.writers.items()}
        assert all(writer.returncode == 0 for writer in self.writers.values())
        return (
            {name: int(words[0]) for name, words in told.items()},
            max(float(words[1]) for words in told.values()),
            sum(int(words[2]) for words in told.values()),
        )

    def finish(self):
        self.process.stdin.close()

    def end(self):
        """Waits for the end of the process and returns its report."""
        assert self.process.wait(30) == 0
        with open(self.report_path) as report:
            return json.load(report)

    def close(self):
        for process in (self.process, *self.writers.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def tailing(tmp_path):
    made = []

    def make(stdout, **options):
        made.append(Tailing(tmp_path, stdout, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def pipe():
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    for fd in (read_fd, write_fd):
        try:
            os.close(fd)
        except OSError:
            pass


@pytest.fixture
def reading(pipe, tmp_path):
    """A pipe's end to write to, and the program that reads it into a file."""
    read_fd, write_fd = pipe
    shown_path = tmp_path / "shown"
    with open(shown_path, "wb") as shown:
        reader = subprocess.Popen(["cat"], stdin=read_fd, stdout=shown)
    yield write_fd, shown_path, reader
    reader.kill()
    reader.wait()


def check_lines(shown, lines_by_name):
    """Every line of every writer is there, whole, once and in order."""
    next_number = dict.fromkeys(lines_by_name, 0)
    for line in shown.splitlines():
        match = re.fullmatch(rb"\[(\d+)\]:(\d+) (\d+) (x*)", line)
        assert match, line[:200]
        assert match[1] == match[2]
        name, number = match[1].decode(), int(match[3])
        assert number == next_number[name], line[:200]
        assert len(match[4]) == number % 97
        next_number[name] = number + 1
    assert next_number == lines_by_name


def count_logged(tailing):
    return sum(os.path.getsize(path) for path in tailing.logs.values())


def read_until_end(fd):
    parts = []
    while part := os.read(fd, MIB):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    "max_bytes", [pytest.param(8 * MIB, id="8MiB"), pytest.param(100 * MIB, id="100MiB", marks=pytest.mark.slow)]
)
def test_much_output_with_a_fast_reader(tailing, reading, max_bytes):
    write_fd, shown_path, reader = reading
    one = tailing(write_fd, names=("0", "1"))
    os.close(write_fd)
    one.write(max_bytes)
    lines, _, _ = one.wait_writers()
    one.finish()
    report = one.end()
    assert reader.wait(30) == 0
    assert report["note"] == ""
    assert report["grown_bytes"] < MAX_GROWTH_BYTES
    assert report["longest_round_s"] < 2
    check_lines(shown_path.read_bytes(), lines)


def test_a_console_that_nobody_reads(tailing, pipe):
    read_fd, write_fd = pipe
    one = tailing(write_fd, names=("3", "7"))
    os.close(write_fd)
    one.write(10 * MIB)
    _, slowest_s, _ = one.wait_writers()
    assert slowest_s < 2  # they never wait for the console; the rest is a busy machine
    one.finish()
    report = one.end()
    shown = read_until_end(read_fd)
    left = count_logged(one) - (len(shown) - len(b"[3]:") * shown.count(b"\n"))
    assert f": {left} bytes of output of ranks 3, 7 were not shown; they are in " in report["note"]
    assert report["grown_bytes"] < MAX_GROWTH_BYTES
    assert 1.5 < report["finish_s"] < 10
    assert os.read(one.process.stderr.fileno(), 65536) == f"bootrun: {report['note']}\n".encode()


def test_a_stuck_stderr_that_is_all_there_is(tailing, pipe):
    """bootrun's own lines have the same stuck console: it ends nevertheless."""
    read_fd, write_fd = pipe
    one = tailing(write_fd, stream=2)
    os.close(write_fd)
    one.write(2 * MIB)
    one.wait_writers()
    one.finish()
    report = one.end()
    assert "were not shown" in report["note"]
    assert not report["drained"]
    shown = read_until_end(read_fd)
    assert shown.startswith(b"bootrun: ready\n[0]:0 0 \n")


def test_a_reader_that_stops_and_goes_on(tailing, reading):
    write_fd, shown_path, reader = reading
    fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, 8192)
    one = tailing(write_fd, names=("0", "1"))
    os.close(write_fd)
    reader.send_signal(signal.SIGSTOP)
    one.write(2 * MIB)
    lines, slowest_s, _ = one.wait_writers()
    assert slowest_s < 2
    assert shown_path.stat().st_size < MIB
    reader.send_signal(signal.SIGCONT)
    one.finish()
    assert one.end()["note"] == ""
    assert reader.wait(30) == 0
    check_lines(shown_path.read_bytes(), lines)


def test_bootrun_stopped_and_continued(tailing, tmp_path):
    """Events of the watch overflow while it is stopped: nothing is lost, the writers notice nothing."""
    shown_path = tmp_path / "shown"
    with open(shown_path, "wb") as shown:
        one = tailing(shown, names=("0", "1", "2"))
    one.process.send_signal(signal.SIGSTOP)
    one.write(24 * MIB)  # in writes of about 2 KiB, which alternate: more events than the queue holds
    lines, slowest_s, _ = one.wait_writers()
    assert slowest_s < 2
    one.process.send_signal(signal.SIGCONT)
    one.finish()
    report = one.end()
    assert report["note"] == ""
    assert report["grown_bytes"] < MAX_GROWTH_BYTES
    check_lines(shown_path.read_bytes(), lines)


def test_small_writes_cost_little(tailing, tmp_path):
    """A writer of many small pieces does not wake the tailer for each."""
    shown_path = tmp_path / "shown"
    with open(shown_path, "wb") as shown:
        one = tailing(shown)
    one.write(2 * MIB, pause_s=0.001)
    lines, _, _ = one.wait_writers()
    one.finish()
    report = one.end()
    check_lines(shown_path.read_bytes(), lines)
    assert report["cpu_s"] < 2


def test_filtered_lines_do_not_wait_for_a_stuck_console(tailing, pipe, tmp_path):
    _, write_fd = pipe
    filtered = tmp_path / "filtered_stdout.log"
    one = tailing(write_fd, names=("0", "1"), needles=(" 77 ", " 12345 "), filtered=str(filtered))
    os.close(write_fd)
    one.write(2 * MIB)
    one.wait_writers()
    one.finish()
    assert "were not shown" in one.end()["note"]
    wanted = [f"[{name}]:{name} {number} {'x' * (number % 97)}" for name in "01" for number in (77, 12345)]
    assert sorted(filtered.read_text().splitlines()) == sorted(wanted)


@pytest.fixture
def small_disk(tmp_path):
    directory = tmp_path / "disk"
    directory.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "bootseer", str(directory)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
    yield directory
    deadline_s = time.monotonic() + 10
    while subprocess.run(["umount", str(directory)], capture_output=True).returncode:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.system
@pytest.mark.parametrize("where", ["logs", "filtered", "console"])
def test_a_full_disk(tailing, tmp_path, small_disk, where):
    shown_path = (small_disk if where == "console" else tmp_path) / "shown"
    filtered = (small_disk if where == "filtered" else tmp_path) / "filtered"
    with open(shown_path, "wb") as shown:
        one = tailing(
            shown,
            names=("0", "1"),
            needles=("x",),
            filtered=str(filtered),
            log_dir=small_disk if where == "logs" else tmp_path,
        )
    one.write(2 * MIB)
    lines, slowest_s, errors = one.wait_writers()
    assert slowest_s < 2
    assert bool(errors) == (where == "logs")
    one.finish()
    report = one.end()
    assert report["note"] == ""
    said = one.process.stderr.read() or b""
    if where == "console":
        assert said.count(b"stdout cannot be written any more (No space left on device)") == 1
    else:
        if where == "filtered":
            assert said.count(b"No space left on device") == 1
            check_lines(shown_path.read_bytes(), lines)
        else:
            assert said == b""
            prefixed = len(b"[0]:") * shown_path.read_bytes().count(b"\n")
            assert 0 <= shown_path.stat().st_size - prefixed - count_logged(one) <= 2  # two ends of line added


@pytest.mark.system
@pytest.mark.parametrize("way", ["off", "on"])
def test_what_a_full_log_disk_does_not_take_is_reported_once_and_the_job_goes_on(bootrun, script, small_disk, way):
    """Output of the rank and of a process that it has forked; events lie elsewhere."""
    path = script(
        "import os\nfor _ in range(300): print('x' * 9999)\n"
        "if not os.fork():\n    print('y' * 999)\n    os._exit(0)\nos.wait()\n"
    )
    flags = ("--standalone", "--log-dir", small_disk, "--redirects", 3, "--events-dir", bootrun.dir)
    run = bootrun(*flags, "--fork-ranks", way, "--preload", "none", path)
    assert run.status == 0
    [line] = [line for line in run.stderr.splitlines() if "warning:" in line]
    [written] = small_disk.glob("*/attempt_0/0/stdout.log")
    lost = 300 * 10000 + 1000 - written.stat().st_size
    assert f"warning: {lost} bytes of output of rank 0 were lost" in line
    assert os.path.dirname(written) in line
