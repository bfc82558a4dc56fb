"""`bootseer ckpt ...` as people run it: real processes, local files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.bin").write_bytes(os.urandom(70 << 20))
    (folder / "sub" / "config.json").write_text("{}")
    return folder


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
        "version": told["version"],
    }  # fmt: skip
    assert run("cat", ckpt, "sub/config.json").stdout == b"{}"
    out = tmp_path / "out"
    run("unstripe", ckpt, out)
    assert (out / "model.bin").read_bytes() == (source / "model.bin").read_bytes()
    assert b"is there already; nothing was written" in run("unstripe", ckpt, out, status=1).stderr


def test_a_damaged_version(source: Path, tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    version = ask("stripe", source, ckpt)["version"]
    stripe = next((ckpt / f"v-{version}").glob("*.s000"))
    with stripe.open("r+b") as file:
        file.write(b"\xff" if stripe.read_bytes()[:1] != b"\xff" else b"\0")
    done = run("verify", ckpt, status=1)
    assert b"unit 0 in " in done.stdout and b"1 faults" in done.stdout
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
        (["stripe", "{tmp}/source", "{tmp}/x", "--unit", "5000"], 1, "a unit of 5000 bytes"),
        (["stripe", "{tmp}/source"], 2, "Missing argument"),
        (["stripe", "{tmp}/source", "/proc/nothing"], 1, "/proc/nothing"),
        (["fly"], 2, "No such command"),
    ],
)
def test_mistakes(words: list[str], status: int, says: str, source: Path, tmp_path: Path) -> None:
    done = run(*(word.replace("{tmp}", str(tmp_path)) for word in words), status=status)
    assert says in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    if status == 1:
        assert done.stderr.count(b"\n") == 1 and done.stderr.startswith(b"bootseer: error: ")


def test_a_reader_that_has_seen_enough(source: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" | head -c 10 >/dev/null', "sh", *BOOTSEER, "cat", str(source), "model.bin"],
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stderr == b""


def test_help_has_examples() -> None:
    for command in ("stripe", "unstripe", "ls", "verify", "cat"):
        assert f"bootseer ckpt {command} " in run(command, "--help").stdout.decode()
    assert b"stripe" in run("--help").stdout
