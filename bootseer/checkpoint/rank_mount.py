"""A version as a folder for one attempt's ranks, served by a process of its own: `RankMount` is the keeper's side.

For code that opens files by name where links into the arena cannot be: several nodes of which each reads a part,
or too little memory for all. What is read through it is bounded memory and the kernel's page cache, so once a
node; with an arena it comes from there, and is recorded as any rank's reading is. Nothing of it outlives the
keeper: the process ends when its connection does.

    in      url version digest arena folder
    out     mounted | failed
"""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from bootseer.checkpoint.lines import LineSocket
from bootseer.errors import BootseerError

READY_S = 60.0  # a store may be slow to answer; the launcher waits longer
END_S = 5.0
NOT_INHERITED = ("RANK", "LOCAL_RANK", "BOOTSEER_ARENA", "BOOTSEER_CHECKPOINT")
Shown = Callable[[str, str], object]


class RankMount:
    """Starts, watches and ends the process. Runs on the keeper's loop."""

    def __init__(self, selector: selectors.BaseSelector, folder: str, then: Shown) -> None:
        """`then(path, why)` is called once: the mount can be used, or, with an empty path, why there is none."""
        self._selector = selector
        self._folder = folder
        self._then: Shown | None = then
        self._lines: LineSocket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._limit_s = time.monotonic() + READY_S

    def start(self, url: str, version: str, digest: str, arena: str) -> None:
        """`arena`: its address, or "": the process reads from the store itself."""
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        environ = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        command = [sys.executable, "-P", "-m", "bootseer.checkpoint.rank_mount"]
        self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=2, env=environ)
        theirs.close()
        self._lines = LineSocket(ours)
        self._selector.register(ours.fileno(), selectors.EVENT_READ, self._hear)
        # URLs by the connection: a URL may hold a password, and everybody sees command lines.
        self._lines.send(
            {"url": url, "version": version, "digest": digest, "arena": arena, "folder": self._folder}
        )

    def tick(self) -> None:
        if self._then is not None and time.monotonic() > self._limit_s:
            self._tell("", f"nothing was mounted within {READY_S:g} s")
            self.end()

    def end(self) -> None:
        """Unmounts; what ranks still have open there fails."""
        self._then = None
        lines, self._lines = self._lines, None
        if lines is not None:
            self._selector.unregister(lines.fd)
            lines.close()
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        clean(self._folder)

    def _hear(self) -> None:
        assert self._lines is not None
        news = self._lines.receive()
        for each in news or ():
            if "mounted" in each:
                self._tell(self._folder, "")
            else:
                self._tell("", str(each.get("failed")))
        if news is None:
            self._tell("", "the process that mounts it has died")
            self.end()

    def _tell(self, path: str, why: str) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(path, why)


def clean(folder: str) -> None:
    """Removes the folder of a mount, also of one whose process was killed."""
    try:
        os.rmdir(folder)
        return
    except OSError:
        pass
    for command in (["umount", "-l", folder], ["fusermount3", "-u", "-z", folder]):
        try:
            if subprocess.run(command, check=False, capture_output=True, timeout=END_S).returncode == 0:
                break
        except (OSError, subprocess.TimeoutExpired):
            continue
    try:
        os.rmdir(folder)
    except OSError:
        pass  # the next keeper tries again


# ---- the process ---------------------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> None:
    settings = _receive(connection)

    def tell(**news: object) -> None:
        try:
            connection.sendall(json.dumps(news).encode() + b"\n")
        except OSError:
            pass  # the keeper is gone; the other thread sees it too

    def end_with_keeper() -> None:
        while True:
            try:
                if not connection.recv(4096):
                    break
            except OSError:
                break
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        from bootseer.checkpoint.capacity import read_memory
        from bootseer.checkpoint.mounting import LEAST_WINDOW_BYTES, MEMORY_SHARE, SourceFiles
        from bootseer.checkpoint.opening import Job, open_job
        from bootseer.mounts import Options, mount
        from bootseer.mounts.mounting import WINDOW_BYTES

        job = Job("", settings["url"], settings["version"], settings["digest"], settings["arena"])
        files = SourceFiles(open_job(job, None))
        window_bytes = max(LEAST_WINDOW_BYTES, min(WINDOW_BYTES, read_memory().free_bytes // MEMORY_SHARE))
        options = Options(name="bootseer", window_bytes=window_bytes)
        threading.Thread(target=end_with_keeper, daemon=True).start()
        try:
            mount(files, settings["folder"], options=options, on_ready=lambda: tell(mounted=True))
        finally:
            files.close()
    except BootseerError as error:
        tell(failed=str(error))
    except ImportError as error:
        tell(failed=f"{error.name or error} is missing: pip install 'bootseer[checkpoint]'")


def _receive(connection: socket.socket) -> dict[str, Any]:
    data = bytearray()
    while not data.endswith(b"\n"):
        if not select.select([connection], [], [], READY_S)[0]:
            sys.exit(1)
        more = connection.recv(65536)
        if not more:
            sys.exit(1)
        data += more
    found: dict[str, Any] = json.loads(data)
    return found


if __name__ == "__main__":
    _serve(socket.socket(fileno=os.dup(0)))
