"""Forks of the guard that work for a while: what they answer, that they end when told to, and with the job."""

from __future__ import annotations

import json

import pytest

from tests import support

DRIVER = """
import json, os, sys, time, types
from launcher.supervisor import supervisor as process
def run(code):
    exec(code, {"os": os, "time": time, "sys": sys})
    return {"did": code, "fds": sorted(map(int, os.listdir("/proc/self/fd")))[:-1]}
sys.modules["work"] = types.SimpleNamespace(run=run)
pipes = process.start_supervisor()
from launcher.supervisor.client import SupervisorClient, SupervisorEvents
from launcher.base.loop import Loop
loop, ended = Loop(), []
def on_ended(number, cpu_s, answer):
    ended.append([number, answer])
    loop.stop()
guard = SupervisorClient(loop, pipes)
ignore = lambda *_: None
calls = [on_ended if name == "helper_ended" else ignore for name in SupervisorEvents._fields]
guard.listen(SupervisorEvents(*calls))
guard.end_help(5)  # there is none
guard.help(1, "work", "work", [sys.argv[1]])
if sys.argv[2] == "tell":
    time.sleep(0.2)
    guard.end_help(1)
if sys.argv[2] != "leave":
    loop.run_forever()
else:
    while not os.path.exists("began"):
        time.sleep(0.01)
began_s = time.monotonic()
guard.close()
print(json.dumps([ended, time.monotonic() - began_s]))
"""


@pytest.mark.leaks
@pytest.mark.parametrize(
    ("code", "how", "answer"),
    [
        ("pass", "wait", {"did": "pass", "fds": [0, 1, 2, 4]}),
        ("raise OSError('no luck')", "wait", {"error": "OSError: no luck"}),
        ("os._exit(5)", "wait", {}),
        ("os.kill(os.getpid(), 9)", "wait", {}),
        ("print('x'); sys.stdin.read()", "wait", None),
        ("time.sleep(100)", "tell", {}),
    ],
)
def test_a_helper_answers(
    code: str, how: str, answer: dict[str, object] | None, program: support.Programs
) -> None:
    done = program(*support.python("-c", DRIVER, code, how), deadline_s=20)
    assert done.status == 0, done.stderr
    ((number, found),) = json.loads(done.stdout)[0]
    assert number == 1
    if answer is None:
        assert found["did"] == code  # its standard streams are nobody's
    elif "fds" in answer:
        assert found["did"] == "pass"
        assert len(found["fds"]) == 4, "only its streams and its answer are open"
    else:
        assert found == answer


@pytest.mark.leaks
@pytest.mark.parametrize(
    "code",
    [
        "open('began', 'w'); time.sleep(100)",
        "open('began', 'w'); os.kill(os.getpid(), 19)",
        "import signal; signal.signal(15, signal.SIG_IGN); open('began', 'w'); time.sleep(100)",
    ],
    ids=["busy", "stopped", "deaf"],
)
def test_a_helper_ends_with_the_job_which_does_not_wait(code: str, program: support.Programs) -> None:
    done = program(*support.python("-c", DRIVER, code, "leave"), deadline_s=20)
    assert done.status == 0, done.stderr
    ended, seconds = json.loads(done.stdout)
    assert ended == []
    assert seconds < 2
