"""A service that is told to end does, also one that hangs; what else runs below the guard goes on."""

from __future__ import annotations

import json

import pytest

from tests import support

DRIVER = """
import json, os, socket, sys
from launcher.supervisor import supervisor as process
process.SERVICE_GRACE_S = 0.2
pipes = process.start_supervisor()
from launcher.supervisor.client import SupervisorClient, SupervisorEvents
from launcher.base.loop import Loop
loop, ended = Loop(), []
def on_ended(number, why):
    ended.append([number, why])
    loop.stop()
guard = SupervisorClient(loop, pipes)
ignore = lambda *_: None
calls = [on_ended if name == "service_ended" else ignore for name in SupervisorEvents._fields]
guard.listen(SupervisorEvents(*calls))
listener = socket.socket(socket.AF_UNIX)
listener.bind(b"\\0bootseer-test-" + os.urandom(8).hex().encode())
listener.listen(2)
def serve(number, code):
    guard.serve(number, [sys.executable, "-c", code + "\\nprint('up', flush=True)\\ntime.sleep(100)"], {}, [],
                listener.getsockname())
    connection = listener.accept()[0]
    assert connection.recv(100) == b"up\\n"
    return connection
other = serve(1, "import time")
it = serve(0, sys.argv[1])
guard.end_service(7)  # there is none
guard.end_service(0)
guard.end_service(0)
loop.run_forever()
other.setblocking(False)
try:
    runs = other.recv(1) != b""
except BlockingIOError:
    runs = True
guard.close()
print(json.dumps([ended, runs]))
"""


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import time", "it was ended by signal 15"),
        ("import time, signal; signal.signal(15, signal.SIG_IGN)", "it was ended by signal 9"),
    ],
)
def test_a_service_is_ended(code: str, why: str, program: support.Programs) -> None:
    done = program(*support.python("-c", DRIVER, code), deadline_s=20)
    assert done.status == 0, done.stderr
    assert json.loads(done.stdout) == [[[0, why]], True]
