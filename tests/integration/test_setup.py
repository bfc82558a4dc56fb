"""`bootrun --setup`: environments made once and restored, with real virtual environments, pip and wheels."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from bootseer.blocks.trace import decode as decode_trace
from bootseer.blocks.trace import workload_key
from bootseer.mounts.tree_daemon.mount import unmount_tree
from bootseer.mounts.tree_daemon.traces import PAYLOAD_TYPE as TRACE_TYPE
from bootseer.tree.index import BLOCK_UNITS
from bootseer.tree.index import decode as decode_index
from bootseer.trust import parse
from tests import support
from tests.campaign import IS_FULL
from tests.integration.mounted_trees import need_mounts
from tests.integration.setup_jobs import SCRIPT, Machine, agent_events, services_end, setup_span
from tests.made_wheels import make_wheel
from tests.support import lacking, wait_until

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(180)]

UNPACK = ("--env-way", "there,unpack")
DEADLINE_S = 90.0


KILLS = 20 if IS_FULL else 4


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "node")


@pytest.fixture
def start(machine: Machine, bootrun: support.Programs, tmp_path: Path) -> Iterator[Callable[..., support.Program]]:
    """Starts bootrun with set-up; logs are in a folder of each start's own."""
    count = 0

    def start(*flags: str, store: str | None = None, env: dict[str, str | None] | None = None) -> support.Program:
        nonlocal count
        count += 1
        logs = tmp_path / f"logs{count}"
        argv = machine.flags("--log-dir", os.fspath(logs), *flags, store=store)
        return bootrun.start(*argv, machine.script, env={**machine.environ, **(env or {})})

    yield start
    services_end()


Start = Callable[..., support.Program]


def test_second_start_takes_what_the_first_one_installed(machine: Machine, start: Start, tmp_path: Path) -> None:
    first = start(*UNPACK).wait(DEADLINE_S)
    assert first.status == 0, first.stderr
    assert f"rank 0 has 1.0 of {machine.venv}" in first.stdout
    assert machine.count() == 1
    services_end()
    assert len(machine.snapshots()) == 1, first.stderr
    assert setup_span(tmp_path / "logs1").attrs["how"] == "installed"
    assert "environment is stored" in first.stderr or "continues publishing" in first.stderr

    machine.renew()
    second = start(*UNPACK).wait(DEADLINE_S)
    assert second.status == 0, second.stderr
    assert f"rank 0 has 1.0 of {machine.venv}" in second.stdout
    assert machine.count() == 1, "set-up did not run again"
    span = setup_span(tmp_path / "logs2")
    assert (span.attrs["how"], span.attrs["hit"]) == ("unpack", True)
    assert subprocess.run([machine.venv / "bin" / "small"], capture_output=True, text=True).stdout == "1.0\n"

    third = start(*UNPACK).wait(DEADLINE_S)
    assert third.status == 0, third.stderr
    assert setup_span(tmp_path / "logs3").attrs["how"] == "there"
    assert machine.count() == 1


def test_what_pip_leaves_is_compiled_before_ranks_start(machine: Machine, start: Start, tmp_path: Path) -> None:
    """The same files as pip would have compiled; its own record names none, as it has not made them."""
    files = {f"small/part{number}.py": f"X = {number}\n" for number in range(5)} | {"small/bad.py": "x = = 1\n"}
    files["small/__init__.py"] = "from small import part1\nVERSION, FOUND = '1.0', part1.__cached__\n"
    make_wheel(machine.wheels, "small", "1.0", files=files, scripts={"small": "small:main"})
    machine.script.write_text(SCRIPT + "print('found', os.path.exists(small.FOUND))\n")
    machine.counts = False
    compiled = {}
    for number, variable in enumerate((None, "1"), 1):
        machine.renew()
        store = tmp_path / f"store{number}"
        store.mkdir()
        environ = {"PIP_COMPILE": variable, "PYTHONDONTWRITEBYTECODE": "1"}
        job = start(*UNPACK, store=os.fspath(store), env=environ).wait(DEADLINE_S)
        assert job.status == 0, job.stderr
        assert "found True" in job.stdout
        services_end()
        compiled[number] = sorted(machine.venv.rglob("small*/**/*.pyc"))
        (record,) = machine.venv.rglob("small-*/RECORD")
        assert (".pyc" in record.read_text()) == (variable == "1")
    assert len(compiled[1]) == 6 and compiled[1] == compiled[2]


def test_compilation_counts_as_set_up(machine: Machine, start: Start, tmp_path: Path) -> None:
    """Bootseer compiles what pip would have compiled, so the duration of set-up includes it."""
    make_wheel(machine.wheels, "small", "1.0", files={f"small/part{n}.py": f"X = {n}\n" for n in range(5)})
    machine.counts = False
    python, took = machine.venv / "bin" / "python", tmp_path / "took"
    real = python.with_name("python-real")
    python.rename(real)
    python.write_text(
        f"""#!{sys.executable} -IS
import os, subprocess, sys, time
words = ["{real}", *sys.argv[1:]]
names = " ".join(map(os.path.basename, words))
kind = "compile" if "compile_list.py" in names else "pip" if "pip" in names else ""
if not kind:
    os.execv(words[0], words)
began_s = time.monotonic()
if kind == "compile":
    time.sleep(1)  # a slow compiler, as with gigabytes of packages
status = subprocess.call(words)
with open("{took}", "a") as file:
    file.write(f"{{kind}} {{time.monotonic() - began_s}}\\n")
sys.exit(status)
"""
    )
    python.chmod(0o755)
    job = start(*UNPACK).wait(DEADLINE_S)
    assert job.status == 0, job.stderr
    services_end()
    took_s = dict(line.split() for line in took.read_text().splitlines())
    assert took_s.keys() == {"compile", "pip"} and float(took_s["compile"]) >= 1
    span = setup_span(tmp_path / "logs1")
    assert float(str(span.attrs["setup_s"])) >= sum(map(float, took_s.values())), took_s


def test_breakdown_names_set_up(machine: Machine, start: Start, tmp_path: Path) -> None:
    assert start(*UNPACK).wait(DEADLINE_S).status == 0
    spans = {event.name: event.stage for event in agent_events(tmp_path / "logs1") if event.kind == "begin"}
    assert spans["setup"] == "env"
    assert {"rendezvous", "spawn"} <= set(spans)
    span = setup_span(tmp_path / "logs1")
    assert re.fullmatch("[0-9a-f]{64}", str(span.attrs["key"]))
    assert 0 < float(str(span.attrs["setup_s"])) < 60
    assert 0 <= float(str(span.attrs["capture_s"])) < 30
    met = {event.kind: event for event in agent_events(tmp_path / "logs1") if event.name == "rendezvous"}
    took_s = (met["end"].mono_ns - met["begin"].mono_ns) / 1e9
    assert 0 < float(str(met["end"].attrs["launch_s"])) < took_s


def test_mounted_where_that_can_be(
    machine: Machine, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_mounts()
    monkeypatch.setenv("BOOTSEER_RUNTIME", f"{tmp_path}/run")
    machine.environ["BOOTSEER_RUNTIME"] = f"{tmp_path}/run"
    assert start(*UNPACK).wait(DEADLINE_S).status == 0
    services_end()
    machine.renew()
    before = sorted(machine.venv.rglob("*"))
    second = start("--env-way", "mount").wait(DEADLINE_S)
    assert second.status == 0, second.stderr
    assert "has 1.0" in second.stdout
    span = setup_span(tmp_path / "logs2")
    assert unmount_tree(str(span.attrs["tree"]), force=True)
    assert span.attrs["how"] == "mount", second.stderr
    stamp = machine.store / "trees" / str(span.attrs["key"]) / "used" / str(span.attrs["tree"])
    assert stamp.exists(), "no collection deletes it meanwhile"
    assert sorted(machine.venv.rglob("*")) == before, "only ranks see it"


HAD = "import sys\nprint('had', 'small' in sys.modules, flush=True)\n"
READS_AND_WAITS = """
import glob, time
sys.modules["_bootseer_rank"].heartbeat(1, {})
for _ in range(6000):
    if glob.glob("STORE/trees/*/imports/*/*.json"):  # the last that is written
        sys.exit(0)
    time.sleep(0.01)  # a look at a time: it ends when the recording is there, whenever that is
sys.exit("nothing was recorded")
"""


def test_what_its_builder_reads_first_other_nodes_prefetch(machine: Machine, start: Start) -> None:
    """The builder has the files themselves, and no mount that could record what is read of them."""
    machine.script.write_text(HAD + SCRIPT + READS_AND_WAITS.replace("STORE", os.fspath(machine.store)))
    first = start("--fork-ranks", "on", *UNPACK).wait(DEADLINE_S)
    assert first.status == 0, first.stdout + first.stderr
    assert "had False" in first.stdout
    workload = workload_key("python3", os.fspath(machine.script))
    (path,) = machine.store.glob(f"trees/*/traces/*/{workload}.json")
    digest, tree = path.parent.name, path.parent.parent.parent
    index = decode_index((tree / "index" / digest).read_bytes(), digest, "the tree")
    payload = parse(path.read_bytes(), TRACE_TYPE, "the trace").payload
    trace = decode_trace(payload, digest, index.block_count, "the trace")
    small = {
        address // BLOCK_UNITS
        for entry in range(len(index))
        if b"/small/" in index.path(entry) and index.names[entry].endswith(b".pyc")
        for _, address, _ in index.pieces(entry)
    }
    assert small and small <= set(trace.hot())
    assert trace.runs == 1
    services_end()
    machine.renew()
    second = start("--fork-ranks", "on", *UNPACK).wait(DEADLINE_S)
    assert second.status == 0, second.stderr
    assert "had True" in second.stdout, "what ranks import is known where none has run, and imported before"


def test_changed_requirements_are_installed(machine: Machine, start: Start) -> None:
    assert start(*UNPACK).wait(DEADLINE_S).status == 0
    services_end()
    make_wheel(machine.wheels, "small", "2.0")
    machine.requirements.write_text("small==2.0\n")
    machine.renew()
    run = start(*UNPACK).wait(DEADLINE_S)
    assert run.status == 0, run.stderr
    assert "has 2.0" in run.stdout
    assert machine.count() == 2


def test_what_is_too_old_is_set_up_again(machine: Machine, start: Start, tmp_path: Path) -> None:
    """Also what was restored here later: it is as old as its snapshot."""
    day = ("--env-max-age", "86400", *UNPACK)
    assert start(*day).wait(DEADLINE_S).status == 0
    services_end()
    machine.renew()
    assert start(*day).wait(DEADLINE_S).status == 0
    assert setup_span(tmp_path / "logs2").attrs["how"] == "unpack"
    wait_until(lambda: not [p for p in support.processes() if "bootseer.env.restore.sync" in p.command], 30)
    (marker,) = (machine.folder / "cache").glob("**/env/there/*.json")
    (snapshot,) = machine.snapshots()
    assert marker.stat().st_mtime < snapshot.stat().st_mtime + 1
    old_s = time.time() - 90000
    os.utime(marker, (old_s, old_s))
    assert start(*day).wait(DEADLINE_S).status == 0
    assert setup_span(tmp_path / "logs3").attrs["how"] == "installed"
    assert machine.count() == 2


def test_restarts_need_nothing_of_it(machine: Machine, start: Start, tmp_path: Path) -> None:
    machine.script.write_text(
        "import os, small, sys\nprint(small.VERSION, flush=True)\n"
        "sys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)\n"
    )
    run = start("--max-restarts", "1", "--restart-backoff", "0", *UNPACK).wait(DEADLINE_S)
    assert run.status == 0, run.stderr
    assert run.stdout == "1.0\n1.0\n"
    assert machine.count() == 1
    assert setup_span(tmp_path / "logs1").attempt == 0


def test_shell_script_for_ranks_that_are_no_python(
    machine: Machine, bootrun: support.Programs, tmp_path: Path
) -> None:
    """A folder that is not there before, made by something that nobody knows."""
    target = machine.place / "tools"
    flags = ["--standalone", "--no-python", "--env-store", f"{machine.store}", "--env-way", "there,unpack"]
    flags += ["--setup-target", f"{target}", "--setup-input", f"{machine.requirements}"]
    flags += [
        "--setup",
        f"mkdir -p {target}/bin; echo ran >> {machine.runs}",
        "--setup",
        f"echo hi >{target}/file",
    ]
    for _ in range(2):
        run = bootrun(*flags, "/bin/cat", target / "file", env=machine.environ, deadline_s=DEADLINE_S)
        assert run.status == 0, run.stderr
        assert run.stdout == "hi\n"
        services_end()
        shutil.rmtree(target)
    assert machine.count() == 1


def test_settings_of_a_file(machine: Machine, bootrun: support.Programs) -> None:
    directory = Path(bootrun.dir)
    (directory / "bootseer.toml").write_text(
        f'[setup]\ncommands = ["{machine.pip}"]\ninputs = ["{machine.requirements}"]\n[env]\n'
        f'store = "{machine.store}"\n'
    )
    run = bootrun("--standalone", machine.script, env=machine.environ, deadline_s=DEADLINE_S)
    assert run.status == 0, run.stderr
    assert "settings of bootseer.toml" in run.stderr
    assert "has 1.0" in run.stdout
    services_end()
    assert len(machine.snapshots()) == 1


def test_ranks_are_forked_in_the_environment(machine: Machine, start: Start) -> None:
    """The preloaded process starts when the environment is there."""
    machine.script.write_text("import os, small\nprint('forked' if os.getppid() else '', small.VERSION)\n")
    run = start("--fork-ranks", "on", "--preload", "none,small", *UNPACK).wait(DEADLINE_S)
    assert run.status == 0, run.stderr
    assert "1.0" in run.stdout
    assert "ranks are exec'd" not in run.stderr, run.stderr


def test_what_became_of_the_environment_is_in_the_log_when_the_job_is_over(
    machine: Machine, start: Start, tmp_path: Path
) -> None:
    run = start(*UNPACK).wait(DEADLINE_S)
    services_end()
    (log,) = (tmp_path / "logs1").glob("*/setup.log")
    assert "the environment is stored" in log.read_text() + run.stderr


def test_without_a_store_set_up_runs_once_a_node(machine: Machine, start: Start, tmp_path: Path) -> None:
    for _ in range(2):
        run = start(store="").wait(DEADLINE_S)
        assert run.status == 0, run.stderr
        assert "has 1.0" in run.stdout
    assert machine.count() == 1
    assert setup_span(tmp_path / "logs2").attrs["how"] == "there"


def test_eight_at_once_run_it_once(machine: Machine, start: Start) -> None:
    jobs = [start(*UNPACK) for _ in range(8)]
    for job in jobs:
        run = job.wait(DEADLINE_S * 1.5)
        assert run.status == 0, run.stderr
        assert "has 1.0" in run.stdout
    assert machine.count() == 1
    services_end()
    assert len(machine.snapshots()) == 1


def test_eight_nodes_at_once_with_one_key_run_it_once(
    machine: Machine, program: support.Programs, tmp_path: Path
) -> None:
    """Eight jobs of one node each, that share nothing but the store: the lease decides who builds."""
    if os.geteuid() != 0:
        lacking("mount namespaces need root")
    jobs = []
    for number in range(8):
        flags = machine.flags("--log-dir", f"{tmp_path}/logs{number}", "--env-way", "unpack")
        words = [*machine.as_node(tmp_path / f"node{number}"), support.BOOTRUN, *flags, machine.script]
        jobs.append(program.start(*words, env=machine.environ))
    for job in jobs:
        run = job.wait(DEADLINE_S * 1.5)
        assert run.status == 0, run.stderr
        assert "has 1.0" in run.stdout
    assert machine.count() == 1, "\n".join(job.stderr for job in jobs)
    services_end()
    assert len(machine.snapshots()) == 1


def test_the_first_process_of_a_container_stays_until_all_is_published(
    machine: Machine, program: support.Programs, tmp_path: Path
) -> None:
    """With it everything in the container ends."""
    if os.geteuid() != 0:
        lacking("PID namespaces need root")
    container = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    flags = machine.flags("--log-dir", f"{tmp_path}/logs", *UNPACK)
    run = program.start(*container, support.BOOTRUN, *flags, machine.script, env=machine.environ).wait(DEADLINE_S)
    assert run.status == 0, run.stderr
    assert len(machine.snapshots()) == 1, run.stderr


# ---- trouble of set-up -----------------------------------------------------------------------------------------


def test_set_up_that_fails_is_the_jobs_error(machine: Machine, start: Start, tmp_path: Path) -> None:
    machine.requirements.write_text("missing==1.0\n")
    run = start(*UNPACK).wait(DEADLINE_S)
    assert run.status == 1
    errors = [line for line in run.stderr.splitlines() if "error: " in line and line.startswith("bootrun")]
    assert len(errors) == 1, run.stderr
    assert "set-up failed" in errors[0] and "setup.log" in errors[0]
    assert "No matching distribution found for missing==1.0" in run.stderr
    assert "rank 0" not in run.stdout
    assert machine.snapshots() == []
    (log,) = (tmp_path / "logs1").glob("*/setup.log")
    assert "No matching distribution" in log.read_text()


def test_quiet_shows_the_last_lines_of_set_up_that_failed(machine: Machine, start: Start) -> None:
    machine.requirements.write_text("missing==1.0\n")
    run = start("--quiet").wait(DEADLINE_S)
    assert run.status == 1
    assert "No matching distribution found for missing==1.0" in run.stderr


def test_set_up_that_hangs_is_ended(machine: Machine, start: Start) -> None:
    began_s = time.monotonic()
    run = start("--setup", "sleep 1000", "--setup-timeout", "4", *UNPACK).wait(DEADLINE_S)
    assert run.status == 1
    assert "--setup-timeout" in run.stderr
    assert time.monotonic() - began_s < 60


def test_set_up_that_asks_fails_with_a_hint(start: Start) -> None:
    run = start("--setup", "python3 -c 'input(\"Proceed? [y/n] \")'").wait(DEADLINE_S)
    assert run.status == 1
    assert "it asked for input" in run.stderr


def test_set_up_that_writes_elsewhere_is_warned_of(machine: Machine, start: Start) -> None:
    local = machine.folder / "home" / ".local" / "bin"
    run = start("--setup", f"mkdir -p {local} && echo x > {local}/tool").wait(DEADLINE_S)
    assert run.status == 0, run.stderr
    assert "outside its targets" in run.stderr
    assert ".local" in run.stderr


def test_signal_while_set_up_runs_ends_it_at_once(machine: Machine, start: Start) -> None:
    mark, sleep = machine.folder / "begun", "sleep 1000.5"  # no other test's
    job = start("--setup", f"touch {mark}; {sleep}")
    wait_until(mark.exists, 60, "set-up")
    job.signal(signal.SIGTERM)
    run = job.wait(20)
    assert run.status == 128 + signal.SIGTERM
    wait_until(lambda: not [p for p in support.processes() if p.command == sleep], 15, "the command's end")


# ---- trouble of the store --------------------------------------------------------------------------------------


def test_store_that_can_be_nowhere_is_an_error(machine: Machine, start: Start) -> None:
    file = machine.folder / "file"
    file.write_text("")
    run = start(*UNPACK, store=os.fspath(file / "below")).wait(DEADLINE_S)
    assert run.status == 1 and "has 1.0" not in run.stdout
    assert f"{file / 'below'}: " in run.stderr, run.stderr
    assert machine.count() == 0, "set-up has not run"


def test_hostile_snapshot_is_refused_and_set_up_runs(machine: Machine, start: Start) -> None:
    assert start(*UNPACK).wait(DEADLINE_S).status == 0
    services_end()
    (snapshot,) = machine.snapshots()
    snapshot.write_bytes(snapshot.read_bytes()[:-20] + b"x" * 20)
    for pack in machine.store.glob("trees/*/packs/*"):
        pack.write_bytes(b"\xff" * pack.stat().st_size)
    machine.renew()
    run = start(*UNPACK).wait(DEADLINE_S)
    assert run.status == 0, run.stderr
    assert "has 1.0" in run.stdout
    assert machine.count() == 2


def test_damaged_blocks_are_never_shown(machine: Machine, start: Start) -> None:
    assert start(*UNPACK).wait(DEADLINE_S).status == 0
    services_end()
    for pack in machine.store.glob("trees/*/packs/*"):
        pack.write_bytes(b"\xff" * pack.stat().st_size)
    machine.renew()
    run = start("--env-way", "unpack").wait(DEADLINE_S)
    assert run.status == 0, run.stderr
    assert "the kept environment cannot be used" in run.stderr
    assert "has 1.0" in run.stdout
    assert machine.count() == 2


UNSTORED = "bootrun: warning: the environment cannot be stored, so other nodes run set-up again: "
UNSTORED_THERE = "bootrun: warning: the environment is in place here, but cannot be stored: "


@contextmanager
def read_only(path: Path) -> Iterator[str]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,mode=755", "tmpfs", path], check=True)
    try:
        yield "is read-only: name a store that you can write, or mount it for writing"
    finally:
        subprocess.run(["umount", path], check=True)


@contextmanager
def full(path: Path) -> Iterator[str]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k,mode=755", "tmpfs", path], check=True)
    with suppress(OSError), open(path / "data", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    try:
        yield "is full: delete environments (`bootseer env gc`), or name another store"
    finally:
        subprocess.run(["umount", path], check=True)


@contextmanager
def file(path: Path) -> Iterator[str]:
    path.rmdir()
    path.write_text("")
    yield "is a file: name a directory"


@pytest.mark.parametrize("kind", [read_only, full, file])
def test_store_that_cannot_be_written(
    machine: Machine, start: Start, tmp_path: Path, kind: Callable[[Path], AbstractContextManager[str]]
) -> None:
    """One warning with the store and the fix; where the environment is in place, the store is to blame as well."""
    if os.geteuid() != 0 and kind is not file:
        lacking("mounts need root")
    place = tmp_path / "place"
    place.mkdir()
    with kind(place) as reason:
        strict = start("--strict", *UNPACK, store=os.fspath(place)).wait(DEADLINE_S)
        assert strict.status == 1 and "--strict: an optimization failed" in strict.stderr
        assert f"--env-store {place} {reason}" in strict.stderr and "has 1.0" not in strict.stdout
        services_end()
        machine.renew()
        run = start(*UNPACK, store=os.fspath(place)).wait(DEADLINE_S)
        assert run.status == 0 and "has 1.0" in run.stdout, run.stderr
        warnings = [
            line for line in run.stderr.splitlines() if "stored" in line and "outside its targets" not in line
        ]
        assert warnings == [f"{UNSTORED}--env-store {place} {reason}"]
        services_end()
        again = start("--strict", *UNPACK, store=os.fspath(place)).wait(DEADLINE_S)
        assert again.status == 0, "set-up is not run"
        assert f"{UNSTORED_THERE}--env-store {place} {reason}" in again.stderr.splitlines()
        assert "recreate" not in again.stderr
        services_end()


def test_store_that_can_only_be_read(machine: Machine, start: Start, tmp_path: Path) -> None:
    """It is used for what is there; what is not is installed, and not kept."""
    if os.geteuid() != 0:
        lacking("mounts need root")
    assert start(*UNPACK).wait(DEADLINE_S).status == 0
    services_end()
    subprocess.run(["mount", "--bind", machine.store, machine.store], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", machine.store], check=True)
    try:
        machine.renew()
        run = start(*UNPACK).wait(DEADLINE_S)
        assert run.status == 0, run.stderr
        assert setup_span(tmp_path / "logs2").attrs["how"] == "unpack"
        make_wheel(machine.wheels, "small", "2.0")
        machine.requirements.write_text("small==2.0\n")
        machine.renew()
        run = start(*UNPACK).wait(DEADLINE_S)
        assert run.status == 0, run.stderr
        assert "has 2.0" in run.stdout
        assert f"{UNSTORED}--env-store {machine.store} is read-only: name a store" in run.stderr
    finally:
        services_end()
        subprocess.run(["umount", machine.store], check=True)


def test_full_disk_of_the_store(machine: Machine, start: Start, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        lacking("mounts need root")
    make_wheel(machine.wheels, "small", "1.0", files={"small/data.bin": random.Random(1).randbytes(3 << 20)})
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs", full], check=True)
    try:
        run = start(*UNPACK, store=os.fspath(full)).wait(DEADLINE_S)
        assert run.status == 0, run.stderr
        assert "has 1.0" in run.stdout
        services_end()
        log = re.search(r"\(log: (.*)\)", run.stderr)
        assert log is not None
        lines = run.stderr + Path(log[1]).read_text()
        assert f"--env-store {full} is full: delete environments (`bootseer env gc`)" in lines
        assert list(full.glob("keys/*/env-*.json")) == []
    finally:
        services_end()
        subprocess.run(["umount", full], check=True)


@pytest.mark.timeout(600)
def test_builders_that_are_killed_fail_no_job(machine: Machine, start: Start) -> None:
    """At random moments; each has the environment as a new node would. The last ones leave a lease to be taken."""
    chance = random.Random(7)
    for round_ in range(KILLS):
        if round_ < KILLS - 2 or machine.snapshots():
            shutil.rmtree(machine.store / "keys", ignore_errors=True)
        machine.renew()
        job = start("--setup-wait", "60", *UNPACK)
        time.sleep(chance.uniform(0.2, 3.0))  # not for something to happen: the moment is what is tested
        for process in support.descendants(job.pid):
            if process.command.endswith("bootseer.env.service.main"):
                try:
                    os.kill(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        run = job.wait(DEADLINE_S)
        assert run.status == 0, run.stderr
        assert "has 1.0" in run.stdout
        services_end()
    machine.renew()
    run = start("--setup-wait", "60", *UNPACK).wait(DEADLINE_S)
    assert run.status == 0, run.stderr
    services_end()
    assert len(machine.snapshots()) == 1, run.stderr
    machine.renew()
    count = machine.count()
    run = start(*UNPACK).wait(DEADLINE_S)
    assert run.status == 0, run.stderr
    assert machine.count() == count, run.stderr


def test_commands_are_in_no_argument_list(machine: Machine, start: Start) -> None:
    """Of the keeper: bootrun's own is what the user wrote."""
    mark = machine.folder / "begun"
    job = start("--setup", f"touch {mark}; sleep 2; : {sys.executable} token-of-mine")
    wait_until(mark.exists, 60, "set-up")
    services = [p for p in support.descendants(job.pid) if "bootseer.env.service.main" in p.command]
    assert services
    assert not [service for service in services if "token-of-mine" in service.command]
    assert job.wait(DEADLINE_S).status == 0
