"""`bootseer ckpt ...` as people run it: real processes, local files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BOOTSEER = [os.path.join(os.path.dirname(sys.executable), "bootseer"), "ckpt"]


def run(*words: object, status: int = 0, data: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run([*BOOTSEER, *map(str, words)], capture_output=True, timeout=60, check=False, input=data)
    assert done.returncode == status, (done.stdout[-2000:], done.stderr[-2000:])
    return done


def ask(*words: object) -> Any:
    return json.loads(run(*words, "--json").stdout)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.bin"
    path.write_bytes(os.urandom(70 << 20))
    return path


@pytest.fixture
def source(tmp_path: Path, model: Path) -> Path:
    directory = tmp_path / "source"
    (directory / "sub").mkdir(parents=True)
    (directory / "model.bin").hardlink_to(model)
    (directory / "sub" / "config.json").write_text("{}")
    return directory


def test_there_and_back(source: Path, tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    told = ask("stripe", source, ckpt, "--stripes", 3, "--unit", "4MiB", "--step", 12)
    assert (told["files"], told["size"]) == (2, (70 << 20) + 2)
    listed = ask("ls", ckpt)
    assert [each["version"] for each in listed["versions"]] == [told["version"]]
    assert (listed["loads"]["version"], listed["loads"]["step"]) == (told["version"], 12)
    assert len(list((ckpt / f"v-{told['version']}").glob("*.s*"))) == 4
    assert ask("verify", ckpt) == {
        "files": 2, "checked_bytes": (70 << 20) + 2, "unsummed_bytes": 0, "faults": [], "fault_count": 0,
        "version": told["version"], "passed_over": [],
    }  # fmt: skip
    assert run("cat", ckpt, "sub/config.json").stdout == b"{}"
    out = tmp_path / "out"
    run("unstripe", ckpt, out)
    assert (out / "model.bin").read_bytes() == (source / "model.bin").read_bytes()
    assert b"already exists; nothing was written" in run("unstripe", ckpt, out, status=1).stderr


def test_a_damaged_version(source: Path, tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    version = ask("stripe", source, ckpt)["version"]
    stripe = next((ckpt / f"v-{version}").glob("*.s000"))
    with stripe.open("r+b") as file:
        file.write(b"\xff" if stripe.read_bytes()[:1] != b"\xff" else b"\0")
    done = run("verify", ckpt, status=1)
    assert b"unit 0 in " in done.stdout and b"1 fault (" in done.stdout
    manifest = ckpt / f"v-{version}" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"model", b"modem"))
    for command in ("ls", "verify", "cat"):
        done = run(command, ckpt, status=0 if command == "ls" else 1)
        assert b"is damaged: its SHA-256" in done.stdout + done.stderr


def test_old_versions_go(source: Path, tmp_path: Path) -> None:
    versions = [ask("stripe", source, tmp_path / "ckpt", "--keep", 2)["version"] for _ in range(3)]
    assert [each["version"] for each in ask("ls", tmp_path / "ckpt")["versions"]] == versions[1:]


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["ls", "{tmp}/nothing"], 1, "is empty or does not exist"),
        (["verify", "{tmp}/nothing"], 1, "is empty or does not exist"),
        (["cat", "{tmp}/source"], 1, "has no file ''; name one of: model.bin, sub/config.json"),
        (["stripe", "{tmp}/source", "{tmp}/x", "--unit", "many"], 2, "--unit 'many': give bytes"),
        (["stripe", "{tmp}/source", "{tmp}/x", "--unit", "5000"], 1, "unit_bytes=5000: must be a multiple"),
        (["stripe", "{tmp}/source", "{tmp}/x", "--replication", "2"], 2, "--replication is an option of HDFS"),
        (["stripe", "{tmp}/source"], 2, "Missing argument"),
        (["prefetch", "{tmp}/nothing"], 1, "is empty or does not exist"),
        (["prefetch", "{tmp}/source", "--memory", "1MiB"], 1, "cannot be held in this node's memory"),
        (["prefetch", "{tmp}/source", "--", "{tmp}/nothing"], 1, "no such program"),
        (["mount", "{tmp}/source", "{tmp}/nothing"], 1, "{tmp}/nothing"),
        (["stripe", "{tmp}/source", "/proc/nothing"], 1, "/proc/nothing"),
        (["fly"], 2, "No such command"),
    ],
)
def test_mistakes(words: list[str], status: int, says: str, source: Path, tmp_path: Path) -> None:
    done = run(*(word.replace("{tmp}", str(tmp_path)) for word in words), status=status)
    assert says.replace("{tmp}", str(tmp_path)) in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    if status == 1:
        assert done.stderr.count(b"\n") == 1 and done.stderr.startswith(b"bootseer: error: ")


def test_cat_of_a_large_file(source: Path, tmp_path: Path) -> None:
    run("stripe", source, tmp_path / "ckpt", "--unit", "3MiB", "--stripes", 3)
    assert run("cat", tmp_path / "ckpt", "model.bin").stdout == (source / "model.bin").read_bytes()


def test_writers_of_several_processes(source: Path, tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    saves = [
        subprocess.Popen(
            [*BOOTSEER, "stripe", str(source), str(ckpt), "--step", str(step), "--json"], stdout=subprocess.PIPE
        )
        for step in range(3)
    ]
    told = [json.loads(save.communicate(timeout=60)[0])["version"] for save in saves]
    assert [save.returncode for save in saves] == [0, 0, 0]
    listed = ask("ls", ckpt)
    assert [(each["version"], each["is_complete"]) for each in listed["versions"]] == [
        (version, True) for version in sorted(told)
    ]
    assert listed["loads"]["step"] == told.index(max(told))
    for version in told:
        assert ask("verify", ckpt / f"v-{version}")["fault_count"] == 0


def test_a_save_that_is_killed_is_not_seen(source: Path, tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    first = ask("stripe", source, ckpt)["version"]
    with subprocess.Popen([*BOOTSEER, "stripe", str(source), str(ckpt), "--stripes", "4"]) as save:
        wait_for(lambda: len(list(ckpt.glob("v-*"))) == 2)
        save.kill()
    loads = ask("ls", ckpt)["loads"]
    assert loads["version"] == first or ask("verify", ckpt)["fault_count"] == 0


SHOW = """
import os, sys
import bootseer.checkpoint
with bootseer.checkpoint.open() as checkpoint:
    data = bytearray(os.path.getsize(sys.argv[1]))
    checkpoint.read_into("model.bin", 0, data)
    assert bytes(data) == open(sys.argv[1], "rb").read()
    assert open(os.environ["BOOTSEER_CHECKPOINT"] + "/model.bin", "rb").read() == data
    assert checkpoint.stats()["read_bytes"] == 0
sys.exit(int(sys.argv[2]))
"""


def test_a_program_finds_what_was_prefetched(source: Path, tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    run("stripe", source, ckpt)
    model = source / "model.bin"
    run("prefetch", ckpt, "--memory", "1GiB", "--", sys.executable, "-c", SHOW, model, 7, status=7)
    run("prefetch", ckpt, "--memory", "1GiB", "--", "sh", "-c", "kill -TERM $$", status=128 + signal.SIGTERM)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_prefetch_holds_it_until_a_signal(source: Path, tmp_path: Path, signum: int) -> None:
    command = [*BOOTSEER, "prefetch", str(source), "--memory", "1GiB", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as held:
        assert held.stdout is not None and held.stderr is not None
        environ = json.loads(held.stdout.readline())
        command = [sys.executable, "-c", SHOW, str(source / "model.bin"), "0"]
        subprocess.run(command, env={**os.environ, **environ}, check=True, timeout=60)
        held.send_signal(signum)
        assert (held.wait(30), held.stderr.read()) == (0, b"")
    assert not os.path.exists(environ["BOOTSEER_ARENA"])


def test_a_signal_reaches_the_program_that_prefetch_runs(source: Path) -> None:
    script = "import signal, sys; signal.signal(15, lambda *_: sys.exit(9)); print(flush=True); signal.pause()"
    command = [*BOOTSEER, "prefetch", str(source), "--memory", "1GiB", "--", sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stdout.readline() == b"\n"
        running.terminate()
        assert running.wait(30) == 9


@pytest.mark.system
def test_a_mount(source: Path, tmp_path: Path) -> None:
    ckpt, directory = tmp_path / "ckpt", tmp_path / "mounted"
    run("stripe", source, ckpt)
    directory.mkdir()
    log = tmp_path / "log"
    assert str(log) in run("mount", ckpt, directory, "--log", log).stdout.decode()
    try:
        assert (directory / "model.bin").read_bytes() == (source / "model.bin").read_bytes()
    finally:
        subprocess.run(["umount", str(directory)], check=True)
    command = [*BOOTSEER, "mount", str(ckpt), str(directory), "--foreground"]
    with subprocess.Popen(command) as mounting:
        wait_for((directory / "sub" / "config.json").exists)
        mounting.terminate()
        assert mounting.wait(30) in (0, 128 + signal.SIGTERM)
    assert not os.path.ismount(directory)


def wait_for(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_a_reader_that_has_seen_enough(source: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" | head -c 10 >/dev/null', "sh", *BOOTSEER, "cat", str(source), "model.bin"],
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stderr == b""


def test_help_has_examples() -> None:
    for command in ("stripe", "unstripe", "ls", "verify", "cat", "prefetch", "mount"):
        assert f"bootseer ckpt {command} " in run(command, "--help").stdout.decode()
    assert b"stripe" in run("--help").stdout
