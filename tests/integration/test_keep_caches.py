"""`bootrun --keep-caches`: what a first step made is there at the next start, elsewhere, and after a crash."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.events import Event
from tests import support
from tests.integration.setup_jobs import Machine, agent_events, services_end

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(180)]

DEADLINE_S = 90.0
# Compiles, as it were: what is in the folder is taken, else it is made.
COMPILES = """
import os, sys
folder = sys.argv[1]
os.makedirs(folder, exist_ok=True)
path = os.path.join(folder, "kernel.bin")
print("warm" if os.path.exists(path) else "cold", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
print("inductor", os.environ.get("TORCHINDUCTOR_CACHE_DIR"), flush=True)
if not os.path.exists(path):
    with open(path, "w") as file:
        file.write("compiled" * 1000)
if "crash" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
"""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[[str], Machine]]:
    store = tmp_path / "store"
    store.mkdir(mode=0o755)

    def make(name: str) -> Machine:
        machine = Machine(tmp_path / name, wheels=tmp_path / "wheels", store=store)
        machine.script.write_text(COMPILES)
        return machine

    yield make
    services_end()


def run(machine: Machine, bootrun: support.Programs, *words: str, **environ: str | None) -> support.Run:
    kernels = machine.folder / "kernels"
    flags = ["--standalone", "--keep-caches", "--cache-dir", f"mine={kernels}"]
    flags += ["--log-dir", f"{machine.folder}/logs", "--env-store", f"{machine.store}"]
    flags += [word for word in words if word.startswith("--")]
    script = [f"{machine.script}", f"{kernels}", *(word for word in words if not word.startswith("--"))]
    return bootrun(*flags, *script, env={**machine.environ, **environ}, deadline_s=DEADLINE_S)


def caches_events(machine: Machine) -> list[Event]:
    return [event for event in agent_events(machine.folder / "logs") if event.stage == "caches"]


def test_another_node_begins_with_what_the_first_one_made(
    machines: Callable[[str], Machine], bootrun: support.Programs
) -> None:
    first, second = machines("first"), machines("second")
    cold = run(first, bootrun)
    assert cold.status == 0, cold.stderr
    assert "cold 0" in cold.stdout
    services_end()
    warm = run(second, bootrun)
    assert warm.status == 0, warm.stderr
    assert "warm 0" in warm.stdout, warm.stderr
    ends = {event.name: event for event in caches_events(second) if event.kind == "end"}
    assert ends["caches"].attrs["files"] == 1
    assert int(str(ends["caches"].attrs["bytes"])) == 8000
    assert ends["caches"].attrs["hit"] is True
    assert "compile caches: 1 file," in warm.stderr


def test_ranks_are_reported_where_caches_are_unless_the_user_says(
    machines: Callable[[str], Machine], bootrun: support.Programs
) -> None:
    machine = machines("node")
    ours = run(machine, bootrun)
    assert f"inductor {machine.folder}/cache/" in ours.stdout, ours.stderr
    theirs = run(machine, bootrun, TORCHINDUCTOR_CACHE_DIR="/mine")
    assert "inductor /mine" in theirs.stdout


@pytest.mark.parametrize("preload", ["", "none,numba"])
def test_forked_ranks_know_where_caches_are(
    machines: Callable[[str], Machine], bootrun: support.Programs, preload: str
) -> None:
    """Also when it was not known yet when their imports began: what may read it, the user's own, waits for it."""
    machine = machines("node")
    write_numba(machine)
    done = run(machine, bootrun, "--fork-ranks=on", *([f"--preload={preload}"] if preload else []))
    assert done.status == 0 and "same True" in done.stdout, done.stderr
    assert "exec'd" not in done.stderr
    assert has_begun_early(machine)


def write_numba(machine: Machine) -> None:
    """A module that reads the place of its cache when it is imported, and a script that needs it."""
    (site,) = machine.venv.glob("lib/*/site-packages")
    site.joinpath("numba.py").write_text("import os\nFOUND = os.environ.get('NUMBA_CACHE_DIR')\n")
    machine.script.write_text("import numba, os\nprint('same', numba.FOUND == os.environ['NUMBA_CACHE_DIR'])\n")


def has_begun_early(machine: Machine) -> bool:
    """Whether the process that imports was started, at the last start, before it was known where caches are."""
    events = sorted(agent_events(machine.folder / "logs"), key=lambda event: event.mono_ns)
    began = {event.name: event.mono_ns for event in events if event.kind == "begin"}
    ended = {event.name: event.mono_ns for event in events if event.kind == "end"}
    return began["preload"] < ended["caches"]


def test_where_the_last_start_had_caches_is_where_the_next_one_imports(
    machines: Callable[[str], Machine], bootrun: support.Programs
) -> None:
    machine = machines("node")
    write_numba(machine)
    with machine.script.open("a") as script:
        script.write(
            f"""
import glob, sys, time
sys.modules["_bootseer_rank"].heartbeat(1, {{}})
for _ in range(3000):
    if glob.glob("{machine.folder}/cache/**/*.imports", recursive=True):
        sys.exit(0)  # what the next start needs is known
    time.sleep(0.01)  # a look at a time: it ends when the record is there, whenever that is
sys.exit("nothing was recorded")
"""
        )
    for _ in range(2):
        done = run(machine, bootrun, "--fork-ranks=on", BOOTSEER_CACHE_DIR=os.fspath(machine.folder / "cache"))
        assert done.status == 0 and "same True" in done.stdout, done.stderr
        assert "exec'd" not in done.stderr
    assert has_begun_early(machine)


def test_what_the_first_step_made_is_kept_while_ranks_run(
    machines: Callable[[str], Machine], bootrun: support.Programs
) -> None:
    machine = machines("node")
    machine.script.write_text(
        COMPILES
        + f"""
import glob, time
sys.modules["_bootseer_rank"].heartbeat(1, {{}})
for _ in range(3000):
    events = glob.glob("{machine.folder}/logs/*/events/agent-*")
    if any("caches_kept" in open(path).read() for path in events):
        print("kept while it runs", flush=True)
        sys.exit(0)
    time.sleep(0.01)
sys.exit("nothing was kept")
"""
    )
    found = run(machine, bootrun)
    assert found.status == 0, found.stderr
    assert "kept while it runs" in found.stdout
    assert list(machine.store.glob("caches/*/cache-*.json"))
    (kept, *_) = [event for event in caches_events(machine) if event.name == "caches_kept"]
    assert (kept.attrs["files"], kept.attrs["generation"]) == (1, 1)


def test_crash_loses_nothing_that_was_made(machines: Callable[[str], Machine], bootrun: support.Programs) -> None:
    first, second = machines("first"), machines("second")
    crashed = run(first, bootrun, "crash")
    assert crashed.status == 1, crashed.stderr
    services_end()
    warm = run(second, bootrun)
    assert "warm 0" in warm.stdout, warm.stderr


def test_restart_after_a_crash_puts_caches_in_order_first(
    machines: Callable[[str], Machine], bootrun: support.Programs
) -> None:
    machine = machines("node")
    restarted = run(machine, bootrun, "--max-restarts=1", "--restart-backoff=0", "crash")
    assert restarted.status == 0, restarted.stderr
    assert "cold 0" in restarted.stdout and "warm 1" in restarted.stdout
    names = [event.name for event in caches_events(machine) if event.kind == "end"]
    assert names == ["caches", "caches_seeded"]


def test_store_that_can_be_nowhere_is_an_error(
    machines: Callable[[str], Machine], bootrun: support.Programs
) -> None:
    machine = machines("node")
    file = machine.folder / "file"
    file.write_text("")
    machine.store = file / "below"
    found = run(machine, bootrun)
    assert found.status == 1 and "cold" not in found.stdout
    assert f"error: {machine.store}" in found.stderr or f"{machine.store}: " in found.stderr, found.stderr


def write_odd_python(machine: Machine) -> Path:
    """An interpreter that cannot be asked for its version."""
    odd = machine.folder / "odd"
    odd.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 3\nexec {machine.environ["PYTHON_EXEC"]} "$@"\n')
    odd.chmod(0o755)
    return odd


def test_strict_says_once_what_has_failed(machines: Callable[[str], Machine], bootrun: support.Programs) -> None:
    machine = machines("node")
    found = run(machine, bootrun, "--strict", PYTHON_EXEC=os.fspath(write_odd_python(machine)))
    assert found.status == 1 and "cold" not in found.stdout
    (line,) = [line for line in found.stderr.splitlines() if "caches" in line]
    assert "error: --strict: an optimization failed: compile caches are not used" in line


def test_interpreter_without_a_version_is_a_cold_start(
    machines: Callable[[str], Machine], bootrun: support.Programs
) -> None:
    machine = machines("node")
    found = run(machine, bootrun, PYTHON_EXEC=os.fspath(write_odd_python(machine)))
    assert found.status == 0, found.stderr
    assert "compile caches are not used" in found.stderr
    assert "cold 0" in found.stdout


def test_with_set_up(machines: Callable[[str], Machine], bootrun: support.Programs) -> None:
    """Without being asked for. The environment comes first: its interpreter decides which caches fit."""
    machine = machines("node")
    flags = machine.flags("--env-way", "there,unpack", "--log-dir", f"{machine.folder}/logs", keeps_caches=True)
    found = bootrun(*flags, machine.script, machine.folder / "kernels", env=machine.environ, deadline_s=DEADLINE_S)
    assert found.status == 0, found.stderr
    events = [event for event in agent_events(machine.folder / "logs") if event.kind == "end"]
    order = [event.name for event in sorted(events, key=lambda event: event.mono_ns)]
    assert order.index("setup") < order.index("caches")
