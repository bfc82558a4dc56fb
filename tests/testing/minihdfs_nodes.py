"""The servers of a mini HDFS: Java processes that can be killed, frozen, slowed and restarted."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote

from bootseer.errors import BootseerError
from tests.testing.minihdfs_net import Net, Traffic, read_traffic

READY_LIMIT_S = 60.0  # usually 4 to 8 s on two cores
HTTP_TIMEOUT_S = 5.0
COUNTS_AGE_S = 1.0  # interval at which a server updates its published counts


class MiniHdfsError(BootseerError):
    """The HDFS of a test did not start, or did not fulfil a request."""


class Block(NamedTuple):
    """One block of a file and the locations of its replicas."""

    block_id: int
    offset: int  # bytes, in the file
    length: int  # bytes
    addresses: tuple[str, ...]  # of the DataNodes, in the NameNode's order


class Starter:
    """Starter of programs that end with this process, even if it is killed. One thread, until `close`."""

    def __init__(self) -> None:
        # Linux signals them when the thread that started them ends, so it must outlive them.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="minihdfs")

    def start(self, argv: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        return self._thread.submit(self._start, ["setpriv", "--pdeathsig", "KILL", *argv], log).result()

    def close(self) -> None:
        self._thread.shutdown()

    @staticmethod
    def _start(argv: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        with open(log, "ab") as file:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


class Server:
    """A Java process that can be restarted."""

    def __init__(self, starter: Starter, name: str, argv: Sequence[str], log: str) -> None:
        self._starter = starter
        self.name = name
        self._argv = list(argv)
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self.process is None:
            raise MiniHdfsError(f"{self.name} was never started")
        return self.process.pid

    def start(self) -> None:
        self.process = self._starter.start(self._argv, self._log)

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, signum: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signum)

    def kill(self) -> None:
        """Send SIGKILL and reap: immediate, while an orderly stop takes seconds."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def freeze(self) -> None:
        """Stop it and wait until it answers nothing: after the signal its threads run on for a while."""
        if self.is_running():
            self.signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def count_lines(self, *words: str) -> int:
        """Count the lines of its log, over all restarts, that contain all the words."""
        try:
            with open(self._log, encoding="utf-8", errors="replace") as log:
                return sum(all(word in line for word in words) for line in log)
        except FileNotFoundError:
            return 0

    def last_words(self) -> str:
        with open(self._log, encoding="utf-8", errors="replace") as log:
            lines = [line.strip() for line in log if " ERROR " in line or " FATAL " in line or "Exception" in line]
        return "; ".join(lines[:3]) or "its log has no error"


class DataNode:
    """One DataNode. `number` counts from 0."""

    def __init__(self, number: int, net: Net, server: Server, address: str, web_port: int, folder: str) -> None:
        self.number = number
        self.address = address
        self.web_port = web_port
        self.folder = folder
        self._net = net
        self._server = server

    def start(self) -> None:
        self._server.start()

    def is_running(self) -> bool:
        return self._server.is_running()

    def kill(self) -> None:
        """Kill it as kill -9 does: connections close; the NameNode notices missing heartbeats."""
        self._server.kill()

    def freeze(self) -> None:
        """Freeze it: it holds its connections and answers nothing until `thaw`."""
        self._server.freeze()

    def thaw(self) -> None:
        self._server.thaw()

    @contextmanager
    def slowed(self, running_s: float = 0.002, period_s: float = 0.25) -> Iterator[None]:
        """Let it run for a small part of each period only, so it serves slowly but never stalls."""
        ended = threading.Event()

        def throttle() -> None:
            while not ended.is_set():
                self.freeze()
                ended.wait(period_s - running_s)
                self.thaw()
                time.sleep(running_s)

        thread = threading.Thread(target=throttle, name=f"slow-datanode-{self.number}")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.thaw()

    def read_bytes(self) -> int:
        """Return bytes of blocks sent since its start, at most COUNTS_AGE_S old."""
        return int(self._activity()["BytesRead"])

    def written_bytes(self) -> int:
        """Return bytes of blocks stored since its start, at most COUNTS_AGE_S old."""
        return int(self._activity()["BytesWritten"])

    def traffic(self) -> Traffic:
        """Return the traffic of its capped link."""
        return read_traffic(self._server.pid)

    def block_file(self, block: Block) -> str | None:
        """Return the path of its replica on disk, None if it has none."""
        name = f"blk_{block.block_id}"
        for directory, _, names in os.walk(self.folder):
            if name in names:
                return os.path.join(directory, name)
        return None

    def last_words(self) -> str:
        """Return the first errors of its log, in one line."""
        return self._server.last_words()

    def _activity(self) -> dict[str, Any]:
        return read_bean(self._net, self.address, self.web_port, "Hadoop:service=DataNode,name=DataNodeActivity-*")


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for a condition. Raises: MiniHdfsError after READY_LIMIT_S."""
    end_s = time.monotonic() + READY_LIMIT_S
    while not is_so():
        if time.monotonic() > end_s:
            raise MiniHdfsError(f"waited {READY_LIMIT_S:g} s in vain for {what}")
        time.sleep(0.05)


def read_bean(net: Net, address: str, port: int, bean: str) -> dict[str, Any]:
    """Return one bean of a server's JMX page, empty if it has none of that name."""
    beans = get_json(net, address, port, f"/jmx?qry={quote(bean, safe=':=,*')}").get("beans", [])
    return beans[0] if beans else {}


def get_json(net: Net, address: str, port: int, path: str) -> dict[str, Any]:
    """Return the JSON object that a server answers."""
    connection = http.client.HTTPConnection(address, port, timeout=HTTP_TIMEOUT_S)
    connection.sock = net.connect(address, port, HTTP_TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if not isinstance(answer, dict):
        raise MiniHdfsError(f"{address}:{port}{path.partition('?')[0]} answered no JSON object")
    return answer
