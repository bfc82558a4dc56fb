"""What a node knows of its mounts' faults when a rank has failed, and what it tells of them."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from bootseer.mounts.faults import Journal
from launcher.provision.failed_mounts import NodeMounts, ServedMount
from launcher.rendezvous.messages import MountFault


def test_faults_of_this_attempt_each_once(tmp_path: Path) -> None:
    journals = {what: Journal(os.fspath(tmp_path / what)) for what in ("env", "image")}
    mounts = NodeMounts()
    assert mounts.find(0) == ()
    for what in journals:
        mounts.put(what, ServedMount(os.fspath(tmp_path / what)))
    journals["env"].note("block 1", is_damage=True, blocks=[1])
    journals["image"].note("nothing came", blocks=[3])
    journals["env"].note("block 2", is_damage=True, blocks=[2])
    found = [MountFault("env", "block 1", True), MountFault("env", "block 2", True)]
    found.append(MountFault("image", "nothing came", False))
    assert list(mounts.find(0)) == found
    assert mounts.news(0) == found and mounts.news(0) == []
    later_ns = time.monotonic_ns() + 1_000_000_000
    assert mounts.find(later_ns) == ()
    mounts.begin()
    assert mounts.news(0) == found, "another attempt"
    mounts.put("env", None)
    assert list(mounts.find(0)) == found[2:]


def test_who_waits_has_no_error_yet(tmp_path: Path) -> None:
    mounts = NodeMounts()
    mounts.put("env", ServedMount(os.fspath(tmp_path / "journal")))
    Journal(os.fspath(tmp_path / "journal")).note("block 1 has not come", is_wait=True)
    assert mounts.find(0) == () and mounts.news(0) == []
    assert mounts.waits(0) == [("env", "block 1 has not come")] and mounts.waits(0) == []


def test_a_server_that_has_gone_is_a_fault(tmp_path: Path) -> None:
    """Its readers have errors at once, maybe before anybody could write them down."""
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    mounts = NodeMounts()
    mounts.put("env", ServedMount(os.fspath(tmp_path / "journal"), os.fspath(deep / "control")))
    ended = (MountFault("env", "the process that serves its files has ended", False, True),)
    assert mounts.find(0) == ended and mounts.find(0, asks=False) == ()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        fd = os.open(deep, os.O_PATH)
        server.bind(f"/proc/self/fd/{fd}/control")
        os.close(fd)
        server.listen(1)
        for _ in range(5):
            assert mounts.find(0) == (), "also of one that answers nobody"
    assert mounts.find(0) == ended
    Journal(os.fspath(tmp_path / "journal")).note("it was killed by signal 9")
    assert [fault.why for fault in mounts.find(0)] == ["it was killed by signal 9"]
