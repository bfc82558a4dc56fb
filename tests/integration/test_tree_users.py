"""Two users on one node: neither gets at the other's sockets, mounts, cache and runtime folder."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.mounted_trees import TOP, Built, make_files, need_mounts
from tests.support import Program, Programs, is_running, needs_program, wait_until
from tests.testing.faulty_http import FaultyHttpServer

pytestmark = [
    pytest.mark.system,
    needs_program("setpriv"),
]
USER = os.path.join(os.path.dirname(__file__), "tree_user.py")
ADA, BOB, ROOT = 65534, 65533, 0
REFUSALS = {
    "list the runtime folder": "EACCES",
    "list the tree": "EACCES",
    "read a file": "EACCES",
    "read the device": "EACCES",
    "connect": "EACCES",
    "ask": "ConfigError",
    "list trees": "ConfigError",
    "mount there": "ConfigError",
    "unmount": "ConfigError",
    "put a tree there": "EACCES",
    "list the cache": "EACCES",
    "use the cache": "ConfigError",
    "write a block": "EACCES",
}


class Mounted(NamedTuple):
    program: Program
    settings: dict[str, str]  # for an attack
    pid: int  # of the daemon


class Node:
    """A folder that all users may look into, a server, and a namespace in which all may open /dev/fuse."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.server = FaultyHttpServer(Built(make_files(top / "source", count=5)).files)
        self.digest = next(name for name in self.server.files if name.startswith("index/"))[6:]
        self.programs = Programs(os.fspath(top))
        device = top / "fuse"
        os.mknod(device, stat.S_IFCHR | 0o666, os.stat("/dev/fuse").st_rdev)
        os.chmod(device, 0o666)
        commands = [f"mount --bind {device} /dev/fuse", *self._open_interpreter(), "echo ready", "exec sleep 1000"]
        self._service = self.programs.start("unshare", "-m", "sh", "-c", " && ".join(commands))
        wait_until(lambda: self._service.stdout == "ready\n", 10, self._service.stderr)

    def _open_interpreter(self) -> list[str]:
        """Commands that show it to all users, also where it lies in somebody's closed folder, as /root is."""
        commands = []
        paths = sorted({os.path.realpath(path) for path in (sys.base_prefix, sys.prefix, TOP)})
        closed = sorted({each for path in paths for each in map(str, Path(path).parents) if _is_closed(each)})
        for directory in closed[:1]:
            inside = [path for path in paths if path.startswith(f"{directory}/")]
            for number, path in enumerate(inside):
                (self.top / f"inside{number}").mkdir()
                commands.append(f"mount --bind {path} {self.top}/inside{number}")
            commands.append(f"mount -t tmpfs -o mode=755 tmpfs {directory}")
            for number, path in enumerate(inside):
                commands += [f"mkdir -p {path}", f"mount --bind {self.top}/inside{number} {path}"]
        return commands

    @property
    def url(self) -> str:
        return f"{self.server.url}@sha256:{self.digest}"

    def start(self, uid: int, *args: str, may_mount: bool = False, stdin: int | None = None) -> Program:
        """A program of a user. Ordinary ones may mount only with a privilege that is lent to them."""
        home = self.top / f"home{uid}"
        if not home.exists():
            home.mkdir(mode=0o755)  # so that nothing above our folders refuses anybody
            os.chown(home, uid, uid)
        caps = ["--inh-caps=+sys_admin", "--ambient-caps=+sys_admin"] if may_mount else ["--inh-caps=-all"]
        user = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", *caps] if uid else []
        env = {
            "PYTHONPATH": TOP,
            "HOME": os.fspath(home),
            "BOOTSEER_RUNTIME": os.fspath(home / "run"),
            "BOOTSEER_CACHE": os.fspath(home / "cache"),
        }
        enter = ["nsenter", "-t", str(self._service.pid), "-m", f"--wdns={self.top}"]
        return self.programs.start(*enter, *user, sys.executable, "-B", USER, *args, env=env, stdin=stdin)

    def mount(self, uid: int) -> tuple[Mounted, int]:
        """A mounted tree of a user, until the second value is closed."""
        theirs, ours = os.pipe()
        program = self.start(uid, "mount", self.url, may_mount=True, stdin=theirs)
        os.close(theirs)
        wait_until(lambda: "\n" in program.stdout or program.process.poll() is not None, 20, "the mount")
        assert program.stdout, program.stderr
        root, digest, control = json.loads(program.stdout)
        home = self.top / f"home{uid}"
        settings = {
            "root": root,
            "control": control,
            "runtime": os.fspath(home / "run"),
            "cache": os.fspath(home / "cache"),
            "url": self.url,
            "digest": digest,
        }
        state = json.loads(Path(os.path.dirname(root), "state").read_text())
        return Mounted(program, settings, state["daemon"]), ours

    def attack(self, uid: int, mounted: Mounted, *only: str) -> dict[str, str]:
        settings = json.dumps({**mounted.settings, "only": only})
        run = self.start(uid, "attack", settings, may_mount=True).wait(60)
        assert run.status == 0, run.stderr
        return dict(line.split(": ", 1) for line in run.stdout.splitlines())

    def close(self) -> None:
        self.programs.close()
        self.server.close()


def _is_closed(directory: str) -> bool:
    return not os.stat(directory).st_mode & stat.S_IXOTH


@pytest.fixture
def node() -> Iterator[Node]:
    need_mounts()
    top = Path(tempfile.mkdtemp(prefix="bootseer-users-"))  # pytest's own folders are closed to others
    top.chmod(0o755)
    made = Node(top)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(top)


@pytest.mark.parametrize(("owner", "attacker"), [(ADA, BOB), (BOB, ADA), (ROOT, ADA)])
def test_another_user_is_refused(node: Node, owner: int, attacker: int) -> None:
    mounted, hold = node.mount(owner)
    try:
        said = node.attack(attacker, mounted)
        for name, line in said.items():
            print(f"| user {attacker} at user {owner}'s | {name:24} | {line[:90]:90} |")
        assert {name: line.split(":")[0] for name, line in said.items()} == REFUSALS
        assert is_running(mounted.pid)
    finally:
        os.close(hold)
    assert mounted.program.wait(20).status == 0, mounted.program.stderr
    wait_until(lambda: not is_running(mounted.pid), 10)


def test_the_daemon_itself_refuses_who_gets_so_far(node: Node) -> None:
    """Folders that their owner has opened to everybody: the socket still answers nobody else."""
    mounted, hold = node.mount(ADA)
    try:
        runtime = Path(mounted.settings["runtime"])
        for path in (runtime, runtime / "trees", runtime / "trees" / node.digest):
            path.chmod(0o755)
        os.chmod(mounted.settings["control"], 0o666)
        said = node.attack(BOB, mounted)
        assert said["connect"] in ("ECONNRESET", "EPIPE")
        assert said["ask"].startswith("ConfigError")
        assert said["read the device"] == "EACCES"
        # A runtime folder that others may look into is one that its owner does not use either.
        again = node.start(ADA, "mount", node.url, may_mount=True).wait(20)
        assert again.status != 0 and "chmod 700" in again.stderr
        runtime.chmod(0o700)
        assert is_running(mounted.pid)
    finally:
        os.close(hold)
    assert mounted.program.wait(20).status == 0, mounted.program.stderr
    wait_until(lambda: not is_running(mounted.pid), 10)


def test_root_uses_no_directory_of_a_user(node: Node) -> None:
    """Whoever may write there could give root's daemon anything."""
    mounted, hold = node.mount(ADA)
    try:
        said = node.attack(ROOT, mounted, "list trees", "mount there", "unmount", "use the cache")
        assert len(said) == 4
        for line in said.values():
            assert line.startswith("ConfigError") and f"belongs to user {ADA}" in line
    finally:
        os.close(hold)
    mounted.program.wait(20)
    wait_until(lambda: not is_running(mounted.pid), 10)


def test_a_user_without_the_privilege_is_reported_why(node: Node) -> None:
    run = node.start(ADA, "mount", node.url, stdin=subprocess.DEVNULL).wait(20)
    assert run.status != 0
    assert "CAP_SYS_ADMIN" in run.stderr.splitlines()[-1]
