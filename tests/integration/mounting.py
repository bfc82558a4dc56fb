"""What tests of mounts share: a mount in a process of its own, and its end whatever happens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.mount_server import content
from tests.support import Program, Programs, lacking, wait_until

SERVER = os.path.join(os.path.dirname(__file__), "mount_server.py")
TOP = os.path.dirname(os.path.dirname(os.path.dirname(SERVER)))


def need_fuse() -> None:
    """Skips where no mount can be made; with CI set that is an error."""
    missing = ""
    if not os.path.exists("/dev/fuse"):
        missing = "/dev/fuse is missing"
    elif os.getuid() != 0:
        missing = "not root"
    elif shutil.which("fusermount3") is None:
        missing = "fusermount3 is missing (fuse3)"
    if missing:
        lacking(missing)


def is_mounted(directory: str) -> bool:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return any(line.split()[4] == directory for line in file)


class Mounted:
    """A mount of made-up files."""

    def __init__(self, folder: str, control: str, versions: str, program: Program) -> None:
        self.folder, self.control, self.versions_directory = folder, control, versions
        self.program = program

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def read(self, name: str) -> bytes:
        with open(self.path(name), "rb") as file:
            return file.read()

    def fault(self, name: str, text: str = "") -> None:
        with open(os.path.join(self.control, name), "w", encoding="utf-8") as file:
            file.write(text)

    def heal(self, name: str) -> None:
        os.unlink(os.path.join(self.control, name))

    def versions(self) -> list[str]:
        """Those that were made, oldest first."""
        return sorted(name for name in os.listdir(self.versions_directory) if not name.startswith("."))

    def saved(self, version: str) -> dict[str, bytes]:
        """The files of a version."""
        top = os.path.join(self.versions_directory, version)
        found = {}
        for above, _, names in os.walk(top):
            for name in names:
                full = os.path.join(above, name)
                with open(full, "rb") as file:
                    found[os.path.relpath(full, top)] = file.read()
        return found

    def end(self) -> dict[str, Any]:
        """Ends it by SIGTERM; what was asked of the files."""
        self.program.signal(signal.SIGTERM)
        run = self.program.wait(15)
        assert run.status == 0, run.stderr
        assert not is_mounted(self.folder)
        with open(os.path.join(self.control, "asked"), encoding="utf-8") as file:
            return dict(json.load(file))

    @property
    def log(self) -> list[str]:
        return [line for line in self.program.stderr.splitlines() if line.startswith("bootseer mount: ")]


Mount = Callable[..., Mounted]


@pytest.fixture
def mount(tmp_path: Any) -> Iterator[Mount]:
    """`mount(files, latency_s=..., writable=..., **options)`; files: name -> size, or (size, checked_bytes)."""
    need_fuse()
    programs = Programs(os.fspath(tmp_path), (sys.executable, SERVER))
    directories: list[str] = []

    def make(
        files: dict[str, Any] | None = None,
        *,
        latency_s: float = 0.0,
        writable: bool = False,
        keep: int | None = None,
        **options: Any,
    ) -> Mounted:
        number = len(directories)
        directory, control, versions = (
            os.path.join(tmp_path, f"{kind}{number}") for kind in ("mnt", "control", "versions")
        )
        for path in (directory, control):
            os.makedirs(path)
        directories.append(directory)
        sizes = {name: size if isinstance(size, tuple) else (size, 0) for name, size in (files or {}).items()}
        settings = {
            "files": sizes,
            "folder": directory,
            "control": control,
            "versions": versions if writable else "",
            "latency_s": latency_s,
            "keep": keep,
            "options": options,
        }
        program = programs.start(json.dumps(settings), env={"PYTHONPATH": TOP})
        wait_until(lambda: "ready" in program.stdout or program.process.poll() is not None, 20, "the mount")
        assert program.process.poll() is None, program.stderr
        return Mounted(directory, control, versions, program)

    yield make
    for directory in directories:
        hang = os.path.join(directory.replace("mnt", "control"), "hang")
        if os.path.exists(hang):
            os.unlink(hang)
        if is_mounted(directory):
            subprocess.run(["umount", "-l", directory], check=False)
    programs.close()


def expected(name: str, size: int) -> bytes:
    return content(name, size)
