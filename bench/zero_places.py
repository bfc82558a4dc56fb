"""Where `bench zero` has its environment: on the local disk, and in a store that is mounted by FUSE.

A place is made cold before each start: the page cache is dropped, the store is mounted anew. The store's own files
are in memory (tmpfs), so that what it costs is its latency alone.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from bench.record import BenchError, note
from bootseer.linux import mount as kernel

DROP = "/proc/sys/vm/drop_caches"
READY_S, END_S = 30.0, 10.0
# What no start of the bench's script touches, and would only fill memory.
LEFT_OUT = (
    "pip",
    "cfnlint",
    "botocore",
    "boto3",
    "mypy",
    "moto",
    "uv",
    "ruff",
    "setuptools",
    "hypothesis",
    "networkx.tests",
)
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def drop_caches() -> None:
    """Nothing of any file is in memory afterwards. Raises: BenchError without the right to."""
    os.sync()
    try:
        with open(DROP, "w", encoding="ascii") as file:
            file.write("3")
    except OSError as error:
        raise BenchError(f"{DROP}: {error.strerror}: this bench needs root") from None


class Disk:
    """The environment that the bench itself runs in."""

    name = "disk"
    python = sys.executable

    @contextmanager
    def cold(self) -> Iterator[None]:
        """Cold for one start."""
        drop_caches()
        yield


class Store:
    """A copy of it behind the store; `requests` of the last start by kind."""

    name = "store"

    def __init__(self, folder: str, latency_ms: float, valid_s: float) -> None:
        self._memory = os.path.join(folder, "store")
        self._mount_point = os.path.join(folder, "mnt")
        self._counts = os.path.join(folder, "counts.json")
        self._latency_ms, self._valid_s = latency_ms, valid_s
        self.requests: dict[str, int] = {}
        self.python = os.path.join(self._mount_point, "bin/python")
        for path in (self._memory, self._mount_point):
            os.makedirs(path)
        kernel.mount("zero", self._memory, "tmpfs", 0, "mode=755")
        try:
            copy_environment(self._memory)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def cold(self) -> Iterator[None]:
        """Mounted anew for one start, with a cold page cache."""
        drop_caches()
        argv = [sys.executable, "-m", "bench.zero_store", self._memory, self._mount_point]
        with tempfile.TemporaryFile() as output:
            server = subprocess.Popen(
                [*argv, str(self._latency_ms), str(self._valid_s), self._counts],
                cwd=HERE,
                stdout=subprocess.PIPE,
                stderr=output,
            )
            try:
                assert server.stdout is not None
                if server.stdout.readline() != b"ready\n":
                    output.seek(0)
                    raise BenchError(f"the store does not start: {output.read().decode(errors='replace')[-2000:]}")
                yield
            finally:
                kernel.unmount_lazily(self._mount_point, kernel.DETACH)
                try:
                    server.wait(END_S)
                except subprocess.TimeoutExpired:
                    server.kill()
                    server.wait()
                    raise BenchError("the store does not end: is something still in it?") from None
        with open(self._counts, encoding="ascii") as file:
            self.requests = json.load(file)

    def close(self) -> None:
        """Takes it away."""
        kernel.unmount_lazily(self._memory, kernel.DETACH)


def copy_environment(target: str) -> None:
    """This interpreter's environment, with bootseer as an ordinary package in it."""
    prefix, packages = sys.prefix, sysconfig.get_path("purelib")
    note(f"copying {packages} into memory")
    os.makedirs(os.path.join(target, "bin"))
    os.symlink(os.path.realpath(sys.executable), os.path.join(target, "bin/python"))
    shutil.copy(os.path.join(prefix, "pyvenv.cfg"), target)
    inside = os.path.join(target, os.path.relpath(packages, prefix))
    shutil.copytree(packages, inside, symlinks=True, ignore=_left_out)
    for path in glob.glob(os.path.join(inside, "_editable_*")):
        os.unlink(path)
    for package in ("bootseer", "launcher"):
        if not os.path.isdir(os.path.join(inside, package)):
            shutil.copytree(os.path.join(HERE, package), os.path.join(inside, package))
    shutil.copy(os.path.join(HERE, "_bootseer_entry.py"), inside)
    subprocess.run([sys.executable, "-m", "compileall", "-q", inside], check=False, stdout=subprocess.DEVNULL)


def _left_out(_directory: str, names: list[str]) -> list[str]:
    return [name for name in names if name in LEFT_OUT or name == "include"]
