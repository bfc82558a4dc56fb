"""The shipped fixture: links of a set rate, and no server left when the program that started it is killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import support
from tests.integration import hdfs_cluster
from tests.testing import minihdfs, minihdfs_net

pytestmark = pytest.mark.slow

SENT_BYTES = 8 << 20
TOP = str(Path(__file__).parents[2])
CLIENT = """
import os, sys
from bootseer.storage.engine.cancelling import CancelHandle
from bootseer.storage.hdfs.webhdfs_client import WebHdfsClient
client = WebHdfsClient([sys.argv[1]], user="root", timeout_s=20.0)
data = os.urandom(int(sys.argv[2]))
client.write("/file", data, CancelHandle(), node="", replication=1, block_bytes=0, stall_s=20.0)
"""
STARTER = """
import sys
from tests.testing.minihdfs import MiniHdfs
with MiniHdfs(sys.argv[1], datanodes=1, replication=1) as hdfs:
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.system
def test_links_have_their_rate_and_are_counted(tmp_path: Path) -> None:
    if reason := minihdfs_net.why_not_capped():
        support.lacking(reason)
    with hdfs_cluster.start(tmp_path, datanodes=1, replication=1, rate_mbit=64) as hdfs:
        (node,) = hdfs.datanodes
        before = node.traffic()
        argv = [*hdfs.client_prefix, sys.executable, "-c", CLIENT, hdfs_cluster.web_of(hdfs), str(SENT_BYTES)]
        began_s = time.monotonic()
        subprocess.run(argv, check=True, timeout=60)
        seconds = time.monotonic() - began_s
        after = node.traffic()
        (block,) = hdfs.blocks("/file")
        assert block.addresses == (node.address,)
        support.wait_until(lambda: node.written_bytes() == SENT_BYTES)
    received_bytes = after.received_bytes - before.received_bytes
    assert SENT_BYTES < received_bytes < SENT_BYTES * 1.1
    assert after.sent_bytes - before.sent_bytes < SENT_BYTES * 0.1
    assert seconds > (SENT_BYTES - (1 << 20)) * 8 / 64e6  # a first burst is not held up
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert hdfs.client_prefix[1].rpartition("/")[2] not in listed.split()


def test_servers_end_with_the_program_that_started_them(
    tmp_path: Path, program: support.Programs, wait_until: Callable[..., object]
) -> None:
    hdfs_cluster.start(tmp_path / "unused")  # skips where there is no Java
    read_end, write_end = os.pipe()
    try:
        starter = program.start(
            sys.executable, "-c", STARTER, tmp_path / "hdfs", env={"PYTHONPATH": TOP}, stdin=read_end
        )
        wait_until(lambda: "ready" in starter.stdout or not support.is_running(starter.pid), 60.0)
        servers = [process.pid for process in support.descendants(starter.pid)]
        assert len(servers) == 2, starter.stderr
        starter.process.kill()
        starter.process.wait()
        wait_until(lambda: not any(support.is_running(pid) for pid in servers), 5.0)
    finally:
        os.close(read_end)
        os.close(write_end)


def test_a_port_that_is_taken_meanwhile_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the choice of a port and Java's start are seconds, in which any process may take it."""
    hdfs_cluster.start(tmp_path / "unused")  # skips where there is no Java
    real, asked = minihdfs._free_ports, 0
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()

        def with_taken(net: minihdfs_net.Net, address: str, count: int) -> list[int]:
            nonlocal asked
            asked += 1
            return (
                [other.getsockname()[1], *real(net, address, count - 1)]
                if asked == 1
                else real(net, address, count)
            )

        monkeypatch.setattr(minihdfs, "_free_ports", with_taken)
        with hdfs_cluster.start(tmp_path / "hdfs", datanodes=1, replication=1) as hdfs:
            assert asked > 2 and hdfs.datanodes[0].is_running()
