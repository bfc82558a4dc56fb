"""What tests of mounts that take root share: servers and readers as processes, folders unmounted at the end."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import BootseerError
from bootseer.linux import mount as kernel
from bootseer.mounts.device.erofs_mount import mount_erofs
from bootseer.tree.erofs import metadata
from tests.made_trees import file, make
from tests.support import Program, Programs, find_process, lacking, wait_until

PARTS = os.path.join(os.path.dirname(__file__), "flat_parts.py")
TOP = os.path.dirname(os.path.dirname(os.path.dirname(PARTS)))
DATA_BYTES = 24 << 20


def need_root() -> None:
    """Skips where nothing can be mounted; with CI set that is an error."""
    if os.geteuid() != 0:
        lacking("mounts need root")
    if not os.path.exists("/dev/fuse"):
        lacking("/dev/fuse is missing")


def need_erofs(directory: Path) -> None:
    """The same for EROFS from files."""
    need_root()
    made = make([])
    for name, data in (("meta", metadata(made.index, made.digest)), ("device", b"")):
        (directory / name).write_bytes(data)
    shown = directory / "probe"
    shown.mkdir()
    try:
        mount_erofs(str(directory / "meta"), str(directory / "device"), str(shown))
    except BootseerError as error:
        lacking(str(error))
    kernel.unmount(str(shown))


def need_tool(name: str) -> str:
    """Path of a program of erofs-utils."""
    found = shutil.which(name)
    if found is None:
        lacking(f"{name} is missing (erofs-utils)")
    return str(found)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file without a page of zeros, a multiple of 128 KiB long."""
    path = tmp_path_factory.mktemp("data") / "data"
    path.write_bytes(random.Random(1).randbytes(DATA_BYTES))
    return path


class Server:
    """A process that shows a file as a device."""

    def __init__(self, program: Program, folder: str, connection: int, child: int) -> None:
        self.program, self.folder = program, folder
        self.path, self.metadata_path = f"{folder}/device", f"{folder}/metadata"
        self.connection = connection  # of FUSE
        self.child = child  # that it has forked, if it was told so

    def end(self, deadline_s: float = 15.0) -> dict[str, Any]:
        """Stops it by SIGTERM; its statistics."""
        self.program.signal(signal.SIGTERM)
        run = self.program.wait(deadline_s)
        assert run.status == 0, run.stderr
        assert not kernel.mounts_below(self.folder)
        return dict(json.loads(run.stdout.splitlines()[-1]))

    def kill(self) -> None:
        self.program.signal(signal.SIGKILL)
        self.program.process.wait(10)


class Reader:
    """A process that reads and compares."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @property
    def lines(self) -> int:
        """How far it is."""
        return self.program.stdout.count("\n")

    def end(self, deadline_s: float = 30.0) -> str:
        """How it ended: its last line, or the name of the signal."""
        run = self.program.wait(deadline_s)
        if run.status < 0:
            return signal.Signals(-run.status).name
        assert run.status == 0, run.stderr
        return run.stdout.splitlines()[-1]


def wait_until_far(readers: Sequence[Reader], lines: int) -> None:
    wait_until(lambda: all(reader.lines >= lines for reader in readers), 30, "they read")


def wait_until_blocked(reader: Reader) -> None:
    """Until it waits in the kernel, by all that can be seen."""

    def is_blocked() -> bool:
        found = find_process(reader.program.pid)
        return found is not None and found.state in "DS"

    wait_until(lambda: all(is_blocked() for _ in range(50)), what="it waits")


class Stack:
    """Starts servers and readers in a folder; what they leave is ended and unmounted by `close`."""

    def __init__(self, top: Path, data: Path) -> None:
        self.top, self.data = top, data
        self._programs = Programs(os.fspath(top), (sys.executable, PARTS))
        self._count = 0

    def folder(self, name: str = "folder") -> str:
        """A new one, empty."""
        self._count += 1
        path = self.top / f"{name}{self._count}"
        path.mkdir()
        return os.fspath(path)

    def serve(self, *behaviour: str, **settings: Any) -> Server:
        directory = self.folder("flat")
        settings = {"file": str(self.data), "folder": directory, "behaviour": behaviour or ["here"], **settings}
        program = self._programs.start("serve", json.dumps(settings), env={"PYTHONPATH": TOP})
        wait_until(lambda: "\n" in program.stdout or program.process.poll() is not None, 20, "the mount")
        assert program.process.poll() is None, program.stderr
        _, connection, child = program.stdout.split()
        return Server(program, directory, int(connection), int(child))

    def read(self, path: str, how: str = "buffered", *, seed: int = 1, most: int = 100, uid: int = 0) -> Reader:
        settings = {"path": path, "file": str(self.data), "how": how, "seed": seed, "most": most, "uid": uid}
        return Reader(self._programs.start("read", json.dumps(settings), env={"PYTHONPATH": TOP}))

    def mount_data(self, server: Server | None = None) -> tuple[str, str]:
        """EROFS with the data as one file, over a server's device or the file itself: its folder, and the file."""
        directory = self.folder("erofs")
        if server is not None:
            mount_erofs(server.metadata_path, server.path, directory)
        else:
            mount_erofs(self.metadata(), str(self.data), directory)
        return directory, f"{directory}/data"

    def metadata(self) -> str:
        """A file with the metadata of a tree whose device is the data."""
        path = self.top / "metadata"
        if not path.exists():
            made = make([file(b"data", self.data.read_bytes(), mode=0o444)])
            assert made.device == self.data.read_bytes()
            path.write_bytes(metadata(made.index, made.digest))
        return os.fspath(path)

    def close(self) -> None:
        # Connections first: a reader may wait for a server that never answers.
        while kernel.clear(os.fspath(self.top)):
            pass
        self._programs.close()


@pytest.fixture
def stack(tmp_path: Path, data: Path) -> Iterator[Stack]:
    need_root()
    made = Stack(tmp_path, data)
    try:
        yield made
    finally:
        made.close()
