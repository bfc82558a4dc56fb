"""A start is recorded after its first step and read ahead the next time, and no job is the worse for it."""

from __future__ import annotations

import glob
import json
import os
import signal
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootseer.linux.page_cache import cached_share, is_in_memory
from launcher.ranks.start_trace.files import JobKey, make_start_key
from launcher.ranks.start_trace.plan import FILE, SMALL, PrefetchEntry
from launcher.ranks.start_trace.record import read_record, write_record
from tests.support import BOOTRUN, Program, Programs, Run, wait_until

MODULES = 30
TRAIN = """
import os, sys, time
sys.path.insert(0, {site!r})
import bootseer, ctypes, decimal
open({site!r} + "/data.json").close()
os.listdir({site!r} + "/listed")
{imports}
bootseer.heartbeat(1)
while not os.path.exists({go!r}):
    time.sleep(0.01)
"""
WAIT = """
import bootseer, os, time
while not os.path.exists({go!r}):
    time.sleep(0.01)
bootseer.heartbeat(1)
"""


class Job:
    """The same job again and again, with an environment that is a small folder of packages."""

    def __init__(self, program: Programs, folder: Path) -> None:
        self._program, self._directory = program, folder
        self.site, self.cache, self.go = folder / "site", folder / "cache", folder / "go"
        self._script, self._runs = folder / "train.py", 0
        self.site.mkdir()
        for number in range(MODULES):
            package = self.site / f"package{number}"
            package.mkdir()
            (package / "__init__.py").write_text(f"value = {number}\ntext = {'x' * 9000!r}\n")
        (self.site / "data.json").write_text("{}")
        (self.site / "listed").mkdir()
        self.write(TRAIN)

    def write(self, text: str, **more: str) -> None:
        """Another script under the same name."""
        imports = "\n".join(f"import package{number}" for number in range(MODULES))
        names = {"site": os.fspath(self.site), "go": os.fspath(self.go), "imports": imports, **more}
        self._script.write_text(textwrap.dedent(text).format(**names))

    def start(self, *flags: str, env: dict[str, str] | None = None) -> Program:
        """Begins a run."""
        self.go.unlink(missing_ok=True)
        self._runs += 1
        self.logs = self._directory / f"logs{self._runs}"
        words = (BOOTRUN, "--log-dir", os.fspath(self.logs), *flags, os.fspath(self._script))
        return self._program.start(
            *words,
            env={"BOOTSEER_CACHE_DIR": os.fspath(self.cache), **(env or {})},
        )

    def end(self, program: Program) -> Run:
        """Lets the ranks end, and waits."""
        self.go.touch()
        run = program.wait(60)
        assert run.status == 0, run.stderr
        return run

    def run(self, *flags: str, until: str = "start_recorded", env: dict[str, str] | None = None) -> dict[str, Any]:
        """A whole run; what the helper said for which it waits."""
        program = self.start(*flags, env=env)
        facts = wait_until(lambda: self.facts(until), 30, f"{until}: {self.events()}")
        self.end(program)
        return facts

    def events(self) -> list[dict[str, Any]]:
        """bootrun's own, so far."""
        found: list[dict[str, Any]] = []
        for path in glob.glob(f"{self.logs}/*/events/agent-*.jsonl"):
            for line in Path(path).read_text().splitlines():
                found.append(json.loads(line))
        return found

    def facts(self, name: str) -> dict[str, Any]:
        """What a helper has said, {} if nothing yet."""
        ends = [each for each in self.events() if each["name"] == name and each["kind"] == "end"]
        return ends[0]["attrs"] if ends else {}

    def record(self) -> list[PrefetchEntry]:
        """What is recorded."""
        found = read_record(os.fspath(self.cache / "starts"), self.key())
        return [] if found is None else list(found.entries())

    def key(self) -> JobKey:
        """Of the job's record; bootrun is run by this interpreter's environment."""
        (path,) = glob.glob(f"{self.cache}/starts/*.start") or [""]
        python = Path(path).read_text(errors="surrogateescape").split("\n")[1].partition(" ")[2]
        return make_start_key(python, "script", os.fspath(self._script))

    def bytecode(self) -> list[Path]:
        """What the packages need to be read of."""
        return sorted(self.site.glob("*/__pycache__/*.pyc"))


@pytest.fixture
def job(program: Programs, tmp_path: Path) -> Job:
    return Job(program, tmp_path)


def make_cold(paths: list[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def cached(paths: list[Path]) -> int:
    """How many of them are in memory. A read that must not wait would tell too, but fetches what is not there."""
    count = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            count += cached_share(fd, 0, path.stat().st_size) > 0
        finally:
            os.close(fd)
    return count


EXEC, FORK = ("--fork-ranks", "off"), ("--fork-ranks", "on", "--preload", "none,json,ctypes,sqlite3")


# ---- what it is for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [EXEC, FORK], ids=["exec", "fork"])
def test_what_a_start_touched_is_in_memory_before_the_next_one_asks(job: Job, how: tuple[str, ...]) -> None:
    if is_in_memory(os.fspath(job.site)):
        pytest.skip("tmpfs keeps all of its files in memory: there is nothing to be read ahead")
    facts = job.run(*how)
    assert (facts["why"], facts["files"] > MODULES) == ("", True)
    entries = job.record()
    paths = {entry.path: entry for entry in entries}
    assert len(job.bytecode()) == MODULES
    assert all(os.fspath(path) in paths for path in job.bytecode())
    assert os.fspath(job.site / "data.json") in paths
    assert os.fspath(job.site / "listed") in paths
    libraries = [entry for entry in entries if entry.kind == FILE and ".so" in entry.path and entry.ranges]
    assert any("/libc.so" in entry.path or "/libc." in entry.path for entry in libraries), "parts of libraries"

    everything = [Path(entry.path) for entry in entries if entry.kind in (SMALL, FILE)]
    make_cold(everything)  # as far as they are not mapped by somebody
    end_s = time.monotonic() + 5
    while cached(job.bytecode()):  # what was written just now takes a moment
        make_cold(job.bytecode())
        assert time.monotonic() < end_s, "it stays in memory"
    job.write(WAIT)  # imports none of it
    program = job.start(*how)
    wait_until(lambda: job.facts("prefetch"), 30)
    found = job.facts("prefetch")
    assert found.get("files", 0) >= MODULES, found
    assert cached(job.bytecode()) == MODULES
    job.end(program)


def test_what_is_in_memory_is_not_read_and_not_recorded_again(job: Job) -> None:
    job.run(*EXEC)
    before = job.record()
    assert job.run(*EXEC)["why"] == "nothing new"
    assert job.facts("prefetch")["why"] == "all files are in memory"
    assert job.record() == before


def test_forked_ranks_settle_on_one_record(job: Job) -> None:
    """The second start preloads what the first one had to import; that is nothing new."""
    job.run(*FORK)
    modules = {entry.path for entry in job.record()}
    assert any("/json/__pycache__/__init__" in path for path in modules), "what the preloaded process imported"
    assert any("_ctypes" in path for path in modules)
    assert job.run(*FORK)["why"] == "nothing new"
    assert job.run(*EXEC)["cpu_s"] < 5


def test_a_changed_environment_is_recorded_again(job: Job) -> None:
    job.run(*EXEC)
    for number in range(MODULES):
        (job.site / f"package{number}/__init__.py").write_text(f"value = 'another one than {number}'\n")
    facts = job.run(*EXEC)  # some of the recorded files are looked at, whatever is in memory
    assert "next start" in facts["why"]
    assert job.run(*EXEC)["why"] == ""
    record = read_record(os.fspath(job.cache / "starts"), job.key())
    assert record is not None
    looked_at = {probe.path: probe.mtime_ns for probe in record.probes}
    own = [path for path in job.bytecode() if os.fspath(path) in looked_at]
    assert own
    assert all(looked_at[os.fspath(path)] == path.stat().st_mtime_ns for path in own)


# ---- off -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [("--record-start", "off"), ("--rank-hooks", "off"), ("--events-dir", "/dev/null")],
    ids=lambda f: f[0],
)
def test_nothing_is_kept_when_it_is_off(job: Job, flags: tuple[str, ...]) -> None:
    job.end(job.start(*EXEC, *flags))
    assert not (job.cache / "starts").exists()
    assert not job.facts("prefetch")
    assert not job.facts("start_recorded")


def test_the_variable_turns_it_off(job: Job) -> None:
    job.run(*EXEC)
    program = job.start(*EXEC, env={"BOOTSEER_RECORD_START": "off"})
    wait_until(lambda: [each for each in job.events() if each["name"] == "rank_started"])
    job.end(program)
    assert not job.facts("prefetch")


# ---- trouble -------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def garble(path: Path) -> None:
    path.write_bytes(os.urandom(5000))


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("spoil", [cut, garble, make_pipe])
def test_a_damaged_record_is_replaced(job: Job, spoil: Callable[[Path], None]) -> None:
    job.run(*EXEC)
    good = job.record()
    (path,) = (job.cache / "starts").iterdir()
    spoil(path)
    why = job.run(*EXEC)["why"]
    if why:  # it was taken for a record when the start began
        assert "next start" in why
        assert job.run(*EXEC)["why"] == ""
    assert {entry.path for entry in job.record()} == {entry.path for entry in good}


def test_a_cache_that_cannot_be_written_is_said_in_the_events(job: Job) -> None:
    job.cache.write_text("no folder")
    facts = job.run(*EXEC)
    assert facts["why"] != ""


def long_record(job: Job) -> None:
    """What takes a while to be read ahead: nothing of it is in a file that could be in memory."""
    job.run(*EXEC)
    empty = job.site / "empty"
    empty.touch()
    entry = PrefetchEntry(FILE, os.fspath(empty), 0, empty.stat().st_mtime_ns)
    assert write_record(os.fspath(job.cache / "starts"), job.key(), [entry] * 60_000, []) == ""


def helpers() -> list[int]:
    found = []
    for path in glob.glob("/proc/[0-9]*/comm"):
        try:
            if Path(path).read_text() == "bootrun-prefetc\n":
                found.append(int(path.split("/")[2]))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL])
def test_a_job_does_not_wait_for_a_prefetch_that_hangs_or_dies(job: Job, signum: int) -> None:
    long_record(job)
    others = set(helpers())
    program = job.start(*EXEC)
    (pid,) = wait_until(lambda: set(helpers()) - others, 10)
    os.kill(pid, signum)
    wait_until(lambda: job.facts("start_recorded"), 30)  # the first step was made
    run = job.end(program)
    assert run.seconds < 20
    if signum == signal.SIGSTOP:
        assert not job.facts("prefetch"), "it hung to the end"
    assert not os.path.exists(f"/proc/{pid}")


def test_a_job_that_ends_at_once_leaves_no_helper(job: Job) -> None:
    long_record(job)
    job.write("raise SystemExit(3)")
    program = job.start(*EXEC)
    assert program.wait(30).status == 1
