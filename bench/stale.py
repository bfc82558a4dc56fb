"""`python -m bench check`: which figures of docs/numbers are of code that is no more.

Each file of figures names the commit that was measured. What its bench measures is a set of paths. Where code in
them has changed since, or the commit is not in this repository, the figures say nothing of today's code. A change
of comments, docstrings or layout alone does not count.
"""

from __future__ import annotations

import ast
import glob
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from bench.record import BenchError

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NUMBERS = os.path.join("docs", "numbers")
LAUNCHER = ("launcher",)
TREES = (
    *("bootseer/tree", "bootseer/blocks", "bootseer/mounts", "bootseer/storage", "bootseer/trust"),
    *("bootseer/linux", "bootseer/ipc"),
)
# What a bench runs of the product; one that is not listed runs all of it.
MEASURED: dict[str, tuple[str, ...]] = {
    "launch": LAUNCHER,
    "rendezvous": (
        "launcher/rendezvous",
        "launcher/coordinator",
        "launcher/base/loop.py",
    ),
    "kill": LAUNCHER,
    "kill_restart": LAUNCHER,
    "hosts": LAUNCHER,
    "fork": LAUNCHER,
    "guard": LAUNCHER,
    "fork_fallbacks": LAUNCHER,
    "restarts": LAUNCHER,
    "pressure": ("launcher/ranks", "launcher/in_rank/bootstrap.py"),
    "hang_healthy": ("launcher/monitor", "launcher/base/facts.py"),
    "faults": (*LAUNCHER, "bootseer/hangs"),
    "supervise_cost": ("launcher/monitor", "launcher/base/facts.py", "launcher/in_rank/bootstrap.py"),
    "trace": (
        "launcher/in_rank/tracer.py",
        "launcher/in_rank/bootstrap.py",
        "launcher/monitor",
        "launcher/base/facts.py",
        "bootseer/hangs",
    ),
    "report": ("bootseer/report",),
    "serve": ("launcher/serve", "launcher/status", "launcher/agent/node_status.py"),
    "ckpt": (
        "bootseer/checkpoint",
        "bootseer/storage",
        "bootseer/linux",
        "bootseer/ipc",
        "launcher/provision/checkpoint.py",
        "launcher/provision/checkpoint_version.py",
    ),
    "image": (*TREES, "bootseer/image"),
    "env": (*TREES, "bootseer/env"),
    "env_key": ("bootseer/env",),
    "compile": (
        "bootseer/env",
        "bootseer/tree",
        "launcher/provision/compile_caches.py",
        "launcher/provision/waiting.py",
        "launcher/in_rank/bootstrap.py",
    ),
    "peers": (*TREES, "bootseer/peers"),
}
ALL = ("launcher", "bootseer")
MAX_SHOWN = 3


class Recorded(NamedTuple):
    """One file of figures."""

    path: str
    bench: str
    commit: str
    figures: tuple[str, ...]
    changed: tuple[str, ...] | None  # files of code that have changed since; None where that cannot be known

    @property
    def is_stale(self) -> bool:
        return self.changed is None or bool(self.changed)


def find_recorded(root: str = ROOT) -> Iterator[Recorded]:
    """All files of docs/numbers; each takes a second to compare."""
    for path in sorted(glob.glob(os.path.join(root, NUMBERS, "*.json"))):
        with open(path, encoding="utf-8") as file:
            document: Mapping[str, object] = json.load(file)
        figures, commit, bench = document["figures"], str(document["commit"]), str(document["bench"])
        assert isinstance(figures, dict)
        changed = changed_since(root, commit, MEASURED.get(bench, ALL))
        yield Recorded(os.path.relpath(path, root), bench, commit, tuple(figures), changed)


def changed_since(root: str, commit: str, paths: Sequence[str]) -> tuple[str, ...] | None:
    """Files of code below `paths` that are not as they were at this commit; None where that is not known."""
    if commit.endswith("-dirty") or _git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        return None
    listed = _git(root, "diff", "--name-only", "--no-renames", commit, "--", *paths)
    if listed is None:
        raise BenchError(f"git cannot compare {commit} with the files in {root}")
    names = listed.decode().splitlines()
    return tuple(name for name in names if not name.endswith(".py") or is_changed(root, commit, name))


def is_changed(root: str, commit: str, name: str) -> bool:
    """Whether a module does something else."""
    before = _git(root, "show", f"{commit}:{name}")
    try:
        with open(os.path.join(root, name), "rb") as file:
            now = file.read()
    except FileNotFoundError:
        return True
    return before is None or bare_code(before) != bare_code(now)


@cache
def bare_code(text: bytes) -> str:
    """A module without comments, docstrings and layout."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body[:1] = [ast.Pass()]
    return ast.dump(tree)


def describe(each: Recorded) -> str:
    """One line for people."""
    figures = ", ".join(each.figures[:MAX_SHOWN])
    more = len(each.figures) - MAX_SHOWN
    figures += f" and {more} more" if more > 0 else ""
    head = f"{each.path}: {figures}"
    if each.changed is None:
        return f"OLD    {head}: measured at {each.commit[:12]}, which this repository does not have"
    if not each.changed:
        return f"today  {head}: measured at {each.commit[:12]}, and its code is still the same"
    files = ", ".join(each.changed[:MAX_SHOWN])
    more = len(each.changed) - MAX_SHOWN
    files += f" and {more} more" if more > 0 else ""
    return f"OLD    {head}: measured at {each.commit[:12]}; since then changed: {files}"


def check_recorded(names: bool) -> int:
    """Prints what is old; returns the exit status. Args: names: each figure in a line of its own."""
    found = []
    for each in find_recorded():
        found.append(each)
        print(describe(each), flush=True)
        for figure in each.figures if names and each.is_stale else ():
            print(f"         {figure}")
    old = sum(each.is_stale for each in found)
    print(f"{len(found)} files of figures, {old} of older code: measure these again before you call them today's")
    return 0


def _git(root: str, *words: str) -> bytes | None:
    """What git prints; None where it fails."""
    done = subprocess.run(["git", "-C", root, *words], check=False, capture_output=True)
    return done.stdout if done.returncode == 0 else None
