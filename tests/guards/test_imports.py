"""What a single-node start may import, who may import whom, and that the commands are installed.

Each module of the list would cost milliseconds of every start; `-X importtime` names what the launcher really
loads, also late. What it loads for a report or for jobs of several nodes is not looked at.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata

import pytest

from tests import support

HEAVY = {
    *("torch", "numpy", "aiohttp", "fsspec", "pyarrow", "typer", "msgspec"),
    *("asyncio", "concurrent", "multiprocessing", "threading", "subprocess", "queue"),
    *("dataclasses", "inspect", "logging", "tempfile", "shutil", "pathlib", "random"),
    *(
        "typing",
        "uuid",
        "urllib",
        "http",
        "email",
        "importlib.metadata",
        "zipfile",
        "ssl",
        "hashlib",
        "ast",
        "dis",
    ),
    # bootseer/light_stdlib.py has what is needed of these; re also by pip before 25.2, which writes the command.
    *("re", "enum", "collections", "contextlib", "functools", "json", "selectors", "signal", "socket"),
}
PRIVATE = {"launcher", "bootseer", "bench", "msgspec"}
RANK = """
import json, os, sys
seen = {"modules": sorted(sys.modules), "environ": dict(os.environ)}
json.dump(seen, open(sys.argv[1] + os.environ["RANK"], "w"))
"""


def imported(stderr: str) -> set[str]:
    """The names that -X importtime lists."""
    return {found[1] for found in re.finditer(r"^import time:.*\| +([\w.]+)$", stderr, re.MULTILINE)}


def belongs(name: str, names: set[str]) -> bool:
    """Whether `name` is one of the names or a module below one."""
    return any(name == known or name.startswith(known + ".") for known in names)


@pytest.mark.leaks
def test_single_node_launch_imports_nothing_heavy(program, script) -> None:
    empty = script("")
    run = program(
        *(sys.executable, "-X", "importtime", support.BOOTRUN, "--standalone", "--nproc-per-node", "2", empty),
        env={"PYTHONPROFILEIMPORTTIME": None},
    )
    assert run.status == 0, run.stderr
    names = imported(run.stderr)
    assert "launcher.app" in names, "the launcher itself was looked at"
    assert len(names) > 30
    # What site brings into every interpreter of this environment (a .pth file) is not ours.
    base = imported(
        subprocess.run([sys.executable, "-X", "importtime", "-c", ""], capture_output=True, text=True).stderr
    )
    heavy = sorted(name for name in names - base if belongs(name, HEAVY))
    assert heavy == [], "the launch path imports these"


@pytest.mark.leaks
@pytest.mark.parametrize("hooks", ["auto", "off"])
def test_rank_sees_nothing_of_ours_but_one_name(bootrun, script, tmp_path, hooks: str) -> None:
    path = script(RANK)
    plain = program_modules(path, tmp_path / "plain")
    for name in ("launcher", "bootseer", "bench"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a user module of this name was imported')")
    plainly = {"BOOTSEER_CACHE_DIR": None, "HOME": str(tmp_path)}  # the user's own variable would be passed on
    words = ("--standalone", "--nproc-per-node", "2", "--rank-hooks", hooks, path, tmp_path / "rank")
    run = bootrun(*words, env=plainly)
    assert run.status == 0, run.stderr
    for rank in ("0", "1"):
        seen = json.loads((tmp_path / f"rank{rank}").read_text())
        more = set(seen["modules"]) - plain
        assert not [name for name in more if belongs(name, PRIVATE)]
        ours = [name for name in more if "bootseer" in name]
        assert len(ours) <= (1 if hooks == "auto" else 0), ours
        assert not [name for name in seen["environ"] if "BOOTSEER" in name.upper()]


def program_modules(path: str, output) -> set[str]:
    """The modules of the script without a launcher."""
    subprocess.run([sys.executable, "-u", path, output], env={**os.environ, "RANK": ""}, check=True)
    return set(json.loads(output.read_text())["modules"])


def test_commands_are_installed() -> None:
    found = metadata.distribution("bootseer").entry_points
    entries = {entry.name: entry.value for entry in found.select(group="console_scripts")}
    assert entries == {"bootrun": "_bootseer_entry:bootrun", "bootseer": "_bootseer_entry:bootseer"}
    for name in entries:
        assert os.access(os.path.join(support.SCRIPTS, name), os.X_OK)


def test_imports_go_one_way() -> None:
    run = subprocess.run(
        [os.path.join(support.SCRIPTS, "lint-imports"), "--no-cache"],
        cwd=os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
