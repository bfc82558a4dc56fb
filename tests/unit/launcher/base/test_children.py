"""Who reaps which process in the first process of a container: bootrun its own ones, the handler all others."""

from __future__ import annotations

import json

from tests import support

# As the first process of a container, it becomes the parent of orphans. Its own process ends first.
DRIVER = """
import json, os, sys
from bootseer.linux.processes import become_subreaper
from launcher.base import children
from launcher.base.helper_process import ServiceProcess
from launcher.base.loop import Loop
become_subreaper()
ignore = lambda _: None
own = ServiceProcess(Loop(), [sys.executable, "-S", "-c", "raise SystemExit(3)"], dict(os.environ), ignore, ignore)
os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
pid_read, pid_write = os.pipe()
hold_read, hold_write = os.pipe()
parent = os.fork()
if not parent:
    orphan = os.fork()
    if not orphan:
        os.close(hold_write)
        os.read(hold_read, 1)
        os._exit(0)
    os.write(pid_write, str(orphan).encode())
    os._exit(0)
os.waitpid(parent, 0)
orphan = int(os.read(pid_read, 20))
os.close(hold_write)
os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
children.reap_orphans()
print(json.dumps([os.path.exists(f"/proc/{orphan}"), children.reap(own.pid)]))
"""


def test_orphans_are_reaped_and_own_processes_are_left(program: support.Programs) -> None:
    done = program(*support.python("-c", DRIVER), deadline_s=20)
    assert done.status == 0, done.stderr
    assert json.loads(done.stdout) == [False, 3 << 8]


def test_what_was_reaped_elsewhere_has_ended(program: support.Programs) -> None:
    code = "from launcher.base import children; print(children.reap(1), children.reap(1, waits=True))"
    done = program(*support.python("-c", code), deadline_s=20)
    assert done.stdout.split() == ["0", "0"], done.stderr
