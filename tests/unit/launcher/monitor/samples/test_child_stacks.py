"""Child processes of a rank: also those that another thread of it has started."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from launcher.monitor.samples import child_stacks
from launcher.monitor.samples.child_stacks import ChildStacks
from tests import support


@pytest.mark.parametrize("in_thread", [False, True])
def test_children_of_all_threads_are_found(in_thread: bool) -> None:
    started: list[subprocess.Popen[bytes]] = []
    ended = threading.Event()

    def start() -> None:
        started.append(subprocess.Popen(["sleep", "100"]))
        if in_thread:
            ended.wait(60)  # its child would be the main thread's once it ends

    thread = threading.Thread(target=start)
    if in_thread:
        thread.start()
        support.wait_until(lambda: bool(started))
    else:
        start()
    try:
        found = ChildStacks(os.getpid(), None, -1, time.monotonic()).look(time.monotonic())
        assert found is not None
        assert (started[0].pid, "sleep") in {(each.pid, each.name) for each in found}
        assert all(each.main == () for each in found), "none got a signal"
    finally:
        started[0].kill()
        started[0].wait()
        ended.set()
        if in_thread:
            thread.join()


def test_a_process_that_is_gone_has_none() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert ChildStacks(child.pid, None, -1, 0.0).look(0.0) == ()


@pytest.mark.parametrize("wait", ["request_wait_answer", "fuse_get_req", "folio_wait_bit", "", "0"])
def test_no_signal_where_a_child_may_be_within_an_exec(wait: str) -> None:
    assert not child_stacks._WAITS.match(wait)


@pytest.mark.parametrize(
    "wait", ["futex_wait_queue", "futex_do_wait", "do_poll.constprop.0", "pipe_read", "ep_poll"]
)
def test_a_child_that_waits_as_programs_do_may_be_asked(wait: str) -> None:
    assert child_stacks._WAITS.match(wait)
