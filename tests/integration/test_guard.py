"""The guard alone: what it starts ends, whatever happens to bootrun or to itself."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import pytest

from tests import support

# A tiny agent: the snippet acts on `guard`, events are collected, the last line printed is a JSON document.
DRIVER = """
import json, os, sys, time
from launcher.supervisor.supervisor import start_supervisor
pipes = start_supervisor()
from launcher.supervisor.client import SupervisorClient, SupervisorEvents, SpawnRequest
from launcher.base.loop import Loop
loop, seen = Loop(), []
def note(name):
    def on(*values):
        seen.append([name, *[list(v) if isinstance(v, tuple) else v for v in values]])
        hooks.get(name, lambda *a: None)(*values)
    return on
hooks = {"stopped": lambda *a: loop.stop(), "gone": lambda *a: loop.stop()}
guard = SupervisorClient(loop, pipes)
guard.listen(SupervisorEvents(*[note(name) for name in SupervisorEvents._fields]))
guard.set_grace(1.0)
def python(code): return [sys.executable, "-c", code]
def spawn(key, argv, out=None): guard.spawn(SpawnRequest(key, argv, {"RANK": str(key)}, [], out, None))
def finish():
    guard.close()
    print(json.dumps(seen))
"""
SLEEPER = "import subprocess; subprocess.Popen(['sleep', '100'], start_new_session=True)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"


Drive = Callable[..., list[list[object]]]


@pytest.fixture
def drive(program: support.Programs) -> Drive:
    """Runs a snippet after DRIVER and gives the events that it saw."""

    def run(snippet: str, before: str = "") -> list[list[object]]:
        done = program(*support.python("-c", f"{before}\n{DRIVER}{snippet}\nfinish()\n"), deadline_s=20)
        assert done.status == 0, done.stderr
        events: list[list[object]] = json.loads(done.stdout.splitlines()[-1])
        return events

    return run


def named(events: list[list[object]], name: str) -> list[list[object]]:
    return [event[1:] for event in events if event[0] == name]


def test_exit_status_signal_and_failed_exec_are_reported(drive: Drive) -> None:
    events = drive("""
left = [1, 2, 3]
def on_exited(e):
    left.remove(e.key)
    if not left: guard.stop(15, 1.0)
hooks["exited"] = on_exited
spawn(1, python("raise SystemExit(7)"))
spawn(2, python("import os; os.kill(os.getpid(), 11)"))
spawn(3, ["/no/such/program"])
loop.run_forever()
""")
    statuses = {entry[0][0]: entry[0][2] for entry in named(events, "exited")}  # type: ignore[index]
    assert statuses == {1: 7, 2: -11, 3: 127}
    assert named(events, "spawn_failed") == [[3, 2, "/no/such/program"]]


@pytest.mark.parametrize("argv", [["false"], ["true"], ["sh", "-c", "kill -9 $$"], ["/no/such/program"]])
def test_ranks_that_run_are_known_before_another_one_ends(argv: list[str], drive: Drive) -> None:
    """Else the agent would not know that they run, and would neither hold them nor name them to a post-mortem."""
    events = drive(f"""
hooks["exited"] = lambda e: e.key == 2 and guard.stop(9, 0.0)
spawn(1, ["sleep", "100"])
spawn(2, {argv!r})  # ends while the supervisor still starts the others
for key in range(3, 60): spawn(key, ["sleep", "100"])
loop.run_forever()
""")
    order = [
        event[0]
        for event in events
        if event[:2] == ["spawned", 1] or (event[0] == "exited" and event[1][0] == 2)  # type: ignore[index]
    ]
    assert order == ["spawned", "exited"]


def test_descendants_in_their_own_session_end_with_the_attempt(drive: Drive) -> None:
    events = drive(f"""
hooks["exited"] = lambda e: guard.stop(15, 1.0)
spawn(1, python({SLEEPER + "; raise SystemExit(1)"!r}))
loop.run_forever()
""")
    assert named(events, "stopped") == [[[], []]]  # SIGTERM was enough


def test_what_a_stopped_rank_leaves_gets_the_signal_when_the_rank_ends(drive: Drive) -> None:
    events = drive(
        f"""
spawn(1, python({SLEEPER + "; print('up', flush=True); import time; time.sleep(100)"!r}), "out")
while not os.path.exists("out") or not os.path.getsize("out"): loop.run_once(0.01)
guard.stop(15, 5.0)
loop.run_forever()
""",
        before="import launcher.supervisor.supervisor; launcher.supervisor.supervisor.LOOK_EVERY_S = 1000.0",
    )
    assert named(events, "stopped") == [[[], []]]  # SIGTERM was enough


def test_what_belongs_to_a_rank_that_stays_is_killed_with_it_when_its_time_is_over(drive: Drive) -> None:
    stays = "import signal, subprocess; signal.signal(15, lambda *_: None); "
    stays += (
        "child = subprocess.Popen(['sleep', '100'], start_new_session=True); print('up', flush=True); child.wait()"
    )
    events = drive(f"""
spawn(1, python({stays!r}), "out")
while not os.path.exists("out") or not os.path.getsize("out"): loop.run_once(0.01)
guard.stop(15, 0.3)
loop.run_forever()
""")
    [[[[_pid, name]], stuck]] = named(events, "stopped")  # type: ignore[misc]
    assert (name, stuck) == ("sleep of rank 1", [])
    [[entry]] = named(events, "exited")
    assert entry[2] == -signal.SIGKILL  # type: ignore[index]


def test_what_was_killed_keeps_the_name_of_its_rank(drive: Drive) -> None:
    """A process may take a while to end; by then its rank is gone and its environment cannot be read."""
    stays = "import signal, subprocess, time; signal.signal(15, signal.SIG_IGN); "
    stays += "subprocess.Popen(['sleep', '100'], start_new_session=True, env={}); print('up', flush=True); "
    stays += "time.sleep(100)"
    slow = """
import signal
from bootseer.linux import processes
real, spared = processes.send, set()
def send(process, number):
    if process.name == "sleep" and process.pid not in spared:
        spared.add(process.pid)
        return
    real(process, number)
processes.send = send
"""
    events = drive(
        f"""
spawn(1, python({stays!r}), "out")
while not os.path.exists("out") or not os.path.getsize("out"): loop.run_once(0.01)
guard.stop(15, 0.3)
loop.run_forever()
""",
        before=slow,
    )
    [[killed, stuck]] = named(events, "stopped")
    assert "sleep of rank 1" in [name for _pid, name in killed] and not stuck  # type: ignore[attr-defined]


def test_the_supervisor_rests_after_a_process_that_could_not_be_killed_before_its_program(drive: Drive) -> None:
    """It hangs where it opens its log, and ends when that file system answers again."""
    unkillable = """
from bootseer.linux import processes
from launcher.supervisor import supervisor
supervisor.UNKILLABLE_AFTER_S = 0.0
processes.send = lambda process, number: None
class Watched(supervisor._Supervisor):
    def _read_exec(self, fd):
        if all(rank.exec_fd != fd for rank in self._ranks.values()):
            open("woken", "w").close()
        super()._read_exec(fd)
supervisor._Supervisor = Watched
"""
    events = drive(
        """
os.mkfifo("log")
spawn(1, python("pass"), "log")
guard.stop(15, 0.0)
loop.run_forever()
[[pid, *_]] = seen[-1][2]
reader = os.open("log", os.O_RDONLY | os.O_NONBLOCK)
while os.path.exists(f"/proc/{pid}"): time.sleep(0.01)
hooks["exited"] = lambda e: loop.stop()
spawn(2, python("pass"))
loop.run_forever()
seen.append(["woken", os.path.exists("woken")])
""",
        before=unkillable,
    )
    [[killed, stuck]] = named(events, "stopped")
    assert killed == [] and len(stuck) == 1  # type: ignore[arg-type]
    assert named(events, "woken") == [[False]]


def test_what_ignores_sigterm_is_killed_when_its_time_is_over(drive: Drive) -> None:
    events = drive(f"""
spawn(1, python({STUBBORN!r}), "out")
while not os.path.exists("out") or not os.path.getsize("out"): loop.run_once(0.01)
began = time.monotonic()
guard.stop(15, 0.3)
loop.run_forever()
seen.append(["took", time.monotonic() - began])
""")
    [[entry]] = named(events, "exited")
    assert entry[2] == -signal.SIGKILL  # type: ignore[index]
    [[took]] = named(events, "took")
    assert 0.3 <= took < 2.0  # type: ignore[operator]


def test_leftovers_of_a_rank_that_succeeded_are_named_then_killed(
    drive: Drive,
) -> None:
    events = drive(f"""
guard.set_grace(0.2)
hooks["tree_ended"] = lambda *a: guard.stop(15, 1.0)
spawn(1, python({SLEEPER!r}))
loop.run_forever()
""")
    [[key, left]] = named(events, "lingering")
    assert key == 1
    assert [name for _, name in left] == ["sleep"]  # type: ignore[attr-defined]
    [[_, killed]] = named(events, "tree_ended")
    assert killed == left


def test_leftovers_of_two_ranks_are_told_apart(drive: Drive) -> None:
    events = drive(f"""
guard.set_grace(0.2)
ended = []
def on_tree_ended(key, killed):
    ended.append(key)
    if len(ended) == 2: guard.stop(15, 1.0)
hooks["tree_ended"] = on_tree_ended
spawn(1, python({SLEEPER!r}))
spawn(2, python({SLEEPER!r}))
loop.run_forever()
""")
    left = dict(named(events, "lingering"))  # type: ignore[arg-type, var-annotated]
    assert {key: len(found) for key, found in left.items()} == {1: 1, 2: 1}
    assert dict(named(events, "tree_ended")) == left  # type: ignore[arg-type]


def test_leftovers_get_the_time_of_their_own_rank(drive: Drive) -> None:
    events = drive(f"""
guard.set_grace(100.0)
kept = []
def on_lingering(key, left):
    if key == 2:
        kept.append(left[0][0])
        guard.set_grace(0.2)
        spawn(1, python({SLEEPER!r}))
def on_tree_ended(key, killed):
    seen.append(["lives", key, os.path.exists(f"/proc/{{kept[0]}}")])
    guard.stop(15, 1.0)
hooks.update(lingering=on_lingering, tree_ended=on_tree_ended)
spawn(2, python({SLEEPER!r}))
loop.run_forever()
""")
    assert named(events, "lives") == [[1, True]]


def test_leftovers_that_finish_in_time_are_not_killed(drive: Drive) -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '0.2'], start_new_session=True)"
    events = drive(f"""
hooks["tree_ended"] = lambda *a: guard.stop(15, 1.0)
spawn(1, python({code!r}))
loop.run_forever()
""")
    assert named(events, "tree_ended") == [[1, []]]


def test_stopped_process_gets_its_signal(drive: Drive) -> None:
    events = drive("""
spawn(1, python("import os, signal; open('out', 'w').write('x'); os.kill(os.getpid(), signal.SIGSTOP)"))
while not os.path.exists("out") or not os.path.getsize("out"): loop.run_once(0.01)
guard.stop(15, 5.0)
loop.run_forever()
""")
    [[entry]] = named(events, "exited")
    assert entry[2] == -signal.SIGTERM  # type: ignore[index]


def test_ranks_get_default_signals_and_no_foreign_descriptors(
    drive: Drive,
) -> None:
    code = (
        "import os, signal; "
        "print([signal.getsignal(s).name for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)], "
        "sorted(int(f) for f in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + f)), "
        "os.getsid(0) == os.getpid())"
    )
    events = drive(f"""
leaked = os.open("/dev/null", os.O_RDONLY); os.set_inheritable(leaked, True)
hooks["exited"] = lambda e: guard.stop(15, 1.0)
spawn(1, python({code!r}), "out")
loop.run_forever()
seen.append(["out", open("out").read()])
""")
    [[out]] = named(events, "out")
    assert out == "['SIG_DFL', 'SIG_DFL', 'SIG_DFL'] [0, 1, 2] True\n"


# A rank that needs its helper once more when it is told to stop, as a training job needs data loader workers and
# writers of checkpoints. `helper` says for a second whether it still lives, then writes.
SAVER = """
import os, signal, subprocess, sys, time
WORKER = "import sys; print('up', flush=True); sys.stdin.readline(); print('saved', flush=True)"
def start(how):
    argv = [sys.executable, "-c", WORKER]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if how == "fork":
        (read, to), (from_, write) = os.pipe(), os.pipe()
        if not os.fork():
            os.close(to); os.close(from_)
            os.write(write, b"up\\n"); os.read(read, 1); os.write(write, b"saved\\n"); os._exit(0)
        os.close(read); os.close(write)
        return open(to, "w"), open(from_)
    if how == "daemon":  # its parent is the guard
        apart = "import os, sys; os.fork() and os._exit(0); os.setsid(); exec(sys.argv[1])"
        argv = [sys.executable, "-c", apart, WORKER]
    helper = subprocess.Popen(argv, start_new_session=how == "session", **pipes)
    return helper.stdin, helper.stdout
to, from_ = start(sys.argv[1])
assert from_.readline() == "up\\n"
def save(*_):
    with open("signals", "a") as file: file.write("x")
    end = time.monotonic() + 0.3  # it must live on for as long as the rank does
    while time.monotonic() < end and not os.path.exists("left-has-ended"): time.sleep(0.01)
    try:
        print("ask", file=to, flush=True)
        with open("saved", "w") as file: file.write(from_.readline())
    finally:
        os._exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
while True: time.sleep(100)
"""
# Starts it and stops it; `end` is a hook for more.
STOP_SAVER = """
def up(*names): return all(os.path.exists(name) and os.path.getsize(name) for name in names)
def until(condition):
    while not condition(): loop.run_once(0.01)
def saver(how, key=1): spawn(key, [*python(SAVER), how], "out")
def stop(grace=20.0):
    began = time.monotonic()
    guard.stop(15, grace)
    loop.run_forever()
    seen.append(["took", time.monotonic() - began])
    seen.append(["saved", open("saved").read(), open("signals").read()])
"""
SAVING = f"SAVER = {SAVER!r}\n{STOP_SAVER}"


@pytest.mark.parametrize("how", ["child", "fork", "session", "daemon"])
def test_a_rank_that_is_stopped_keeps_what_it_has_started_until_it_ends(drive: Drive, how: str) -> None:
    events = drive(f"""{SAVING}
saver({how!r})
until(lambda: up("out"))
stop()
""")
    assert named(events, "saved") == [["saved\n", "x"]]
    assert named(events, "took")[0][0] < 5.0  # type: ignore[operator]
    assert named(events, "stopped") == [[[], []]]  # nothing had to be killed


def test_what_an_ended_rank_has_left_ends_while_another_rank_still_saves(drive: Drive) -> None:
    left = (
        "import os, subprocess, sys; left = 'import signal, os, time; "
        'signal.signal(15, lambda *_: (open("left-has-ended", "w"), os._exit(0))); '
        "print(1, flush=True); time.sleep(100)'; "
        "subprocess.Popen([sys.executable, '-c', left], stdout=open('left', 'w')); "
        "import signal; print('up', flush=True); signal.pause()"
    )
    events = drive(f"""{SAVING}
saver("daemon")
spawn(2, python({left!r}), "out2")
until(lambda: up("out", "out2", "left"))
stop()
seen.append(["left ended first", os.path.exists("left-has-ended")])
""")
    assert named(events, "saved") == [["saved\n", "x"]]
    assert named(events, "left ended first") == [[True]]
    assert named(events, "stopped") == [[[], []]]


def test_ranks_that_were_held_go_on_with_their_helpers_when_they_are_stopped(drive: Drive) -> None:
    events = drive(f"""{SAVING}
saver("child")
until(lambda: up("out"))
guard.signal([1], {int(signal.SIGSTOP)})
stop()
""")
    assert named(events, "saved") == [["saved\n", "x"]]


@pytest.mark.parametrize("trap", ["", "trap 'echo trapped' TERM; "])
def test_a_shell_as_rank_hands_the_signal_on_to_what_it_runs_once(drive: Drive, trap: str) -> None:
    """A shell acts on a signal only when the program that it waits for has ended."""
    events = drive(f"""{SAVING}
spawn(1, ["/bin/sh", "-c", {trap!r} + '"$0" -c "$1" child; exit 0', sys.executable, SAVER], "out")
until(lambda: up("out"))
stop()
""")
    assert named(events, "saved") == [["saved\n", "x"]]
    assert named(events, "took")[0][0] < 5.0  # type: ignore[operator]


def test_a_forwarded_signal_goes_to_the_rank_and_not_to_what_it_has_started(drive: Drive) -> None:
    """SIGUSR1 ends whoever does not expect it."""
    events = drive(f"""{SAVING}
SAVER = SAVER.replace("SIGTERM", "SIGUSR1")
saver("child")
until(lambda: up("out"))
hooks["exited"] = lambda e: guard.stop(15, 20.0)
guard.signal([1], {int(signal.SIGUSR1)})
loop.run_forever()
seen.append(["saved", open("saved").read()])
""")
    assert named(events, "saved") == [["saved\n"]]


BLOCKED = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
IGNORED = "import signal; [signal.signal(n, signal.SIG_IGN) for n in signal.valid_signals() if n not in (9, 19)]"


def test_an_end_is_noticed_where_the_starter_has_blocked_signals(drive: Drive) -> None:
    events = drive(
        """
hooks["exited"] = lambda e: guard.stop(15, 5.0)
os.mkfifo("fifo")
spawn(1, python("print('up', flush=True); open('fifo').read(); raise SystemExit(7)"), "out")
while not os.path.exists("out") or not os.path.getsize("out"): loop.run_once(0.01)
open("fifo", "w").close()
loop.call_later(3.0, loop.stop)
loop.run_forever()
""",
        before=BLOCKED,
    )
    [[entry]] = named(events, "exited")
    assert entry[2] == 7  # type: ignore[index]


@pytest.mark.parametrize("state", ["", BLOCKED, IGNORED], ids=["plain", "blocked", "ignored"])
@pytest.mark.parametrize("victim", ["driver", "guard", "both"])
def test_nothing_survives_sigkill(program: support.Programs, victim: str, state: str) -> None:
    """The leak fixture looks for processes that carry the test's mark, in whatever session."""
    snippet = f"""
spawn(1, python({SLEEPER + "; import time; open('up', 'w').close(); time.sleep(100)"!r}))
loop.run_forever()
"""
    driver = program.start(*support.python("-c", f"{state}\n{DRIVER}{snippet}\nfinish()\n"))
    support.wait_until(lambda: os.path.exists(os.path.join(driver.dir, "up")))
    [watchdog] = [p for p in support.processes() if p.ppid == driver.pid]
    [guard] = [p for p in support.processes() if p.ppid == watchdog.pid]
    for pid in {"driver": [driver.pid], "guard": [guard.pid], "both": [driver.pid, guard.pid]}[victim]:
        os.kill(pid, signal.SIGKILL)
    run = driver.wait(20)
    assert run.status == (0 if victim == "guard" else -signal.SIGKILL)
    if victim == "guard":
        assert json.loads(run.stdout.splitlines()[-1])[-1] == ["gone"]


def test_ranks_die_even_when_bootrun_watchdog_and_supervisor_are_killed_at_once(program: support.Programs) -> None:
    """What then survives are descendants of ranks in sessions of their own: nobody is left to end them."""
    snippet = f"""
spawn(1, python({SLEEPER + "; import time; open('up', 'w').close(); time.sleep(100)"!r}))
loop.run_forever()
"""
    driver = program.start(*support.python("-c", DRIVER + snippet))
    support.wait_until(lambda: os.path.exists(os.path.join(driver.dir, "up")))
    [watchdog] = [p for p in support.processes() if p.ppid == driver.pid]
    [guard] = [p for p in support.processes() if p.ppid == watchdog.pid]
    [rank] = [p for p in support.processes() if p.ppid == guard.pid]
    [sleeper] = [p for p in support.processes() if p.ppid == rank.pid]
    for pid in (driver.pid, watchdog.pid, guard.pid):
        os.kill(pid, signal.SIGKILL)
    driver.wait(20)
    support.wait_until(lambda: not support.is_running(rank.pid))
    assert support.is_running(sleeper.pid)
    os.kill(sleeper.pid, signal.SIGKILL)
