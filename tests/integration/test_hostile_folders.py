"""A user's modules with names of ours, of our libraries or of Python's: ranks see them, our processes never do.

They lie beside the script, in the working folder and on PYTHONPATH. Ranks look there before anything else, as
under torchrun.
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import support

ROOT = Path(__file__).parents[2]
# Each notes who has imported it, and is of no use to us.
HOSTILE = """
import os, sys
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "imported"), "a") as file:
    print(__name__, "rank" if "RANK" in os.environ else " ".join(sys.orig_argv), file=file)
IS_USERS = True
"""
OURS = ("launcher", "bootseer", "bench", "tests", "msgspec", "typer", "click", "packaging", "zstandard", "fsspec")
# The interpreter loads these, or has them in itself, before it looks anywhere.
AT_START = {"encodings", "site", "sitecustomize", "usercustomize", "__future__", *sys.builtin_module_names}
# pip has written scripts that import re before they import us.
BY_RE = {
    "re",
    "enum",
    "types",
    "operator",
    "functools",
    "collections",
    "keyword",
    "reprlib",
    "copyreg",
    "sre_compile",
}
RANK = """
import os, sys, time
import launcher, typing, json
assert launcher.IS_USERS and typing.IS_USERS and json.IS_USERS
print("rank", os.environ["RANK"], "has them", flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0": raise ValueError("once")
"""
Run = Callable[..., support.Run]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "project"
    found.mkdir()
    names = {name for name in sys.stdlib_module_names if not name.startswith("_") and find_spec(name)} - AT_START
    for name in sorted({*names, *OURS} - BY_RE):
        is_package = name in OURS or name in ("logging", "json", "asyncio", "importlib")
        path = found / name / "__init__.py" if is_package else found / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(HOSTILE)
    (found / "launcher" / "__main__.py").write_text(HOSTILE)
    (found / "train.py").write_text(RANK)
    return found


@pytest.fixture
def command(tmp_path: Path) -> Callable[[str], list[str]]:
    """A command as pip installs it, for what pyproject.toml says now."""

    def write(name: str) -> list[str]:
        with open(ROOT / "pyproject.toml", "rb") as file:
            module, _, function = tomllib.load(file)["project"]["scripts"][name].partition(":")
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f"import re\nimport sys\nfrom {module} import {function}\n"
            f"if __name__ == '__main__':\n    re.sub('x', '', sys.argv[0])\n    sys.exit({function}())\n"
        )
        return [sys.executable, os.fspath(path)]

    return write


def environ(folder: Path, **more: str) -> Mapping[str, str | None]:
    return {"PYTHONPATH": f"{folder}:.:", **more}


def foreign(folder: Path) -> list[str]:
    """Imports by processes that are no ranks."""
    path = folder / "imported"
    return [line for line in path.read_text().splitlines() if not line.endswith(" rank")] if path.exists() else []


@pytest.mark.parametrize("way", ["off", "on"])
def test_a_job_that_fails_restarts_and_ends(
    program: support.Programs, folder: Path, command: Callable[[str], list[str]], way: str
) -> None:
    flags = ("--standalone", "--nproc-per-node", 2, "--max-restarts", 1, "--restart-backoff", 0, "--redirects", 3)
    more = ("--fork-ranks", way, "--preload", "none", "--log-dir", program.dir, "--check", "report", "--tee", "3")
    run = program(*command("bootrun"), *flags, *more, "train.py", cwd=os.fspath(folder), env=environ(folder))
    assert run.status == 0, run.stderr
    assert run.stdout.count("has them") == 4
    assert "exec'd" not in run.stderr
    assert foreign(folder) == []


def test_services_of_environments(
    program: support.Programs, folder: Path, command: Callable[[str], list[str]], tmp_path: Path
) -> None:
    flags = (
        "--standalone",
        "--setup",
        "true",
        "--setup-target",
        tmp_path / "target",
        "--env-store",
        tmp_path / "store",
    )
    (tmp_path / "target").mkdir()
    (folder / "train.py").write_text("print('ran')")
    run = program(*command("bootrun"), *flags, "train.py", cwd=os.fspath(folder), env=environ(folder))
    assert run.status == 0, run.stderr
    assert "ran" in run.stdout
    assert foreign(folder) == []


def test_two_nodes(
    program: support.Programs, folder: Path, command: Callable[[str], list[str]], free_port: int
) -> None:
    (folder / "train.py").write_text("import os, json\nprint('ran', os.environ['WORLD_SIZE'], json.IS_USERS)")
    flags = ("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port}", "train.py")
    bootrun = command("bootrun")
    secret = environ(folder, BOOTSEER_SECRET="x" * 32)
    nodes = [program.start(*bootrun, *flags, cwd=os.fspath(folder), env=secret) for _ in range(2)]
    runs = [node.wait() for node in nodes]
    assert [run.status for run in runs] == [0, 0], runs
    assert all("ran 2 True" in run.stdout for run in runs)
    assert foreign(folder) == []


@pytest.mark.parametrize("words", ["run --version", "check --json", "report {logs}", "status", "ckpt ls {logs}"])
def test_commands_of_bootseer(
    program: support.Programs, folder: Path, command: Callable[[str], list[str]], tmp_path: Path, words: str
) -> None:
    (tmp_path / "logs").mkdir()
    words = words.format(logs=tmp_path / "logs")
    run = program(*command("bootseer"), *words.split(), cwd=os.fspath(folder), env=environ(folder))
    assert "Traceback" not in run.stderr
    assert foreign(folder) == []


def test_python_m_launcher_from_a_directory_without_one(program: support.Programs, folder: Path) -> None:
    """Which `launcher` is meant cannot be told where the user has one, too: docs/guide/running.md says so."""
    kept = {"typing", "json", "logging", "signal", "socket", "argparse", "select", "heapq", "msgspec"}
    for path in folder.iterdir():  # -m itself needs some of the others
        if path.stem not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "train.py").write_text("import json\nprint('ran', json.IS_USERS)")
    run = program(
        *support.python("-m", "launcher", "--standalone", "train.py"), cwd=os.fspath(folder), env=environ(folder)
    )
    assert run.status == 0, run.stderr
    assert "ran True" in run.stdout
    assert foreign(folder) == []
