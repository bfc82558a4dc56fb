"""What tests of mounted trees share: a tree at an HTTP server, its daemon, readers, and their end."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer import aio
from bootseer.linux import mount as kernel
from bootseer.mounts.tree_daemon.mount import MountedTree, TreeOptions, list_trees, mount_tree, probe_mount
from bootseer.tree.builder.building import build
from bootseer.tree.builder.from_directory import DirectorySource
from bootseer.tree.index import Index
from tests.support import Program, Programs, clean_environ, is_running, lacking, wait_until
from tests.testing.faulty_http import FaultyHttpServer

READER = os.path.join(os.path.dirname(__file__), "tree_reader.py")
TOP = os.path.dirname(os.path.dirname(os.path.dirname(READER)))
FILES = 60
_reasons: dict[str, str] = {}


def need_mounts() -> None:
    """Skips where trees cannot be mounted; with CI set that is an error."""
    if "reason" not in _reasons:
        _reasons["reason"] = "mounts need root" if os.geteuid() else probe_mount()
    if _reasons["reason"]:
        lacking(_reasons["reason"])


class Built:
    """A tree, and what it was made of."""

    def __init__(self, source: Path) -> None:
        self.source = os.fspath(source)
        self.files: dict[str, bytes] = {}  # as in a store
        built = build(DirectorySource(self.source), self._put, threads=1)
        self.index: Index = built.tree
        self.digest = built.digest
        self.files[f"index/{built.digest}"] = built.index_bytes

    def _put(self, digest: str, data: bytes) -> None:
        self.files[f"packs/{digest}"] = data

    @property
    def pack(self) -> str:
        """Path of the first pack."""
        return self.index.pack_path(0)


def make_files(directory: Path, seed: int = 1, count: int = FILES) -> Path:
    """Files that cannot be compressed, about a block long each."""
    chance = random.Random(seed)
    for number in range(count):
        path = directory / f"{number % 7}" / f"file{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chance.randbytes(chance.choice((100, 5000, 131_072, 200_000, 400_000))))
    return directory


class Outcome(dict[str, Any]):
    """What a reader got."""

    @property
    def errors(self) -> int:
        return sum(count for name, count in self.items() if name.startswith(("E", "SIG")))


class Reader:
    """A process that reads a mounted tree."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @property
    def files(self) -> int:
        """So many it has read so far."""
        return self.program.stdout.count("\n")

    def end(self, deadline_s: float = 60.0) -> Outcome:
        """What it got."""
        run = self.program.wait(deadline_s)
        if run.status < 0:
            # Of a map: what it got before is not known but for the files that it has told of.
            return Outcome(
                {"right": self.files, "wrong": 0, signal.Signals(-run.status).name: 1, "slowest_s": 0.0}
            )
        assert run.status == 0, run.stderr
        return Outcome(json.loads(run.stdout.splitlines()[-1]))


class Trees:
    """Servers, mounts and readers of one test, in one folder. The runtime folder and the cache are in it, too."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top = top
        self.cache = top / "cache"
        self.runtime = top / "run"
        self.environ = {
            "BOOTSEER_CACHE": os.fspath(self.cache),
            "BOOTSEER_RUNTIME": os.fspath(self.runtime),
            "BOOTSEER_KEYS": os.fspath(top / "keys"),
        }
        for name, value in self.environ.items():
            monkeypatch.setenv(name, value)
        self.built = Built(make_files(top / "source"))
        self.server = FaultyHttpServer(self.built.files)
        self._sets: list[Programs] = []
        self._others = 0
        self.table: list[str] = []

    @property
    def url(self) -> str:
        return f"{self.server.url}@sha256:{self.built.digest}"

    def mount(self, **options: Any) -> MountedTree:
        """By a daemon that does not end by itself, unless `idle_s` says so."""
        return mount_tree(self.url, options=TreeOptions(**{"idle_s": 0.0, **options}))

    def read(
        self,
        root: str,
        *,
        how: str = "read",
        until: str = "",
        source: str = "",
    ) -> Reader:
        settings = {
            "root": root,
            "source": source or self.built.source,
            "seed": self._others,
            "how": how,
            "until": until,
        }
        return Reader(self.run(sys.executable, READER, json.dumps(settings), env={"PYTHONPATH": TOP}))

    def run(self, *command: str, env: dict[str, str] | None = None) -> Program:
        """A program, in a folder of its own."""
        self._others += 1
        directory = self.top / f"program{self._others}"
        directory.mkdir()
        programs = Programs(os.fspath(directory))
        self._sets.append(programs)
        return programs.start(*command, env={**self.environ, **(env or {})})

    def note(self, case: str, *outcomes: Outcome) -> None:
        """A line of the table that is printed at the end."""
        total: dict[str, Any] = {}
        for each in outcomes:
            for name, value in each.items():
                total[name] = max(total.get(name, 0), value) if name == "slowest_s" else total.get(name, 0) + value
        rest = ", ".join(f"{name} {total[name]}" for name in sorted(total) if name not in ("right", "slowest_s"))
        self.table.append(
            f"| {case:48} | right {total['right']:6} | {rest:34} | slowest {total['slowest_s']:7.3f} s |"
        )

    def daemon(self, tree: MountedTree) -> int:
        return int(tree.status()["pid"])

    def mounted(self) -> list[kernel.Mount]:
        return kernel.mounts_below(os.fspath(self.runtime))

    def wait_gone(self, deadline_s: float = 60.0) -> None:
        """Until nothing of the mounted tree is left. Namespaces that other tests make meanwhile keep it, too."""
        directory = self.runtime / "trees" / self.built.digest
        wait_until(lambda: not directory.exists() and not self.mounted(), deadline_s, "the end of the mount")

    def close(self) -> None:
        pids = []
        try:
            for each in list_trees():
                pids.append(int(each.status.get("pid", 0)))
                MountedTree(each.folder, each.digest, f"{os.path.dirname(each.folder)}/control").unmount(
                    force=True
                )
        finally:
            while kernel.clear(os.fspath(self.top)):
                pass
            for programs in self._sets:
                programs.close()
            self.server.close()
            aio.close()
            wait_until(lambda: not any(pid and is_running(pid) for pid in pids), 20, "the end of the daemons")
        if self.table:
            print("\n" + "\n".join(self.table))


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trees]:
    need_mounts()
    for name in os.environ.keys() - clean_environ().keys():
        if name.startswith("BOOTSEER_"):
            monkeypatch.delenv(name)
    made = Trees(tmp_path, monkeypatch)
    try:
        yield made
    finally:
        made.close()
