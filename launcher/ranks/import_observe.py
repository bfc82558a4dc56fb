"""Decides by what a start has shown what a later one may import before the script; reads texts of modules for it.

In: two files that local rank 0 has written at its first step: its modules (.imports) and what a Watch has noted
(.uses). Out: a file with the plan, for the preloader. Runs in a helper of the guard at low priority, as the texts
of some thousand modules may have to be looked into; at the end of a short job in bootrun itself. Texts of ranks in
an image are read through the root folder of the rank, while it lives.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Sequence

from launcher.import_watch import MAIN
from launcher.rank_values import find_statements
from launcher.ranks import import_plan, import_texts, record_files
from launcher.ranks.fork_policy import filter_hot
from launcher.ranks.import_plan import Patch, Plan, RankRead, Watched

MOST_USES_BYTES = 32 << 20
MOST_SOURCE_BYTES = 4 << 20
MOST_NATIVE_BYTES = 512 << 20  # of an extension module
MOST_USERS_FILES = 2000
SUFFIXES = IMPORTS, USES, PLAN = ".imports", ".uses", ".plan"
_MOST_PLAN_BYTES = 4 << 20


def run(place: str, pid: str = "") -> dict[str, object]:
    """What the guard's helper does.

    Args: place: of the files, without their suffixes; pid: a rank that sees other files than bootrun, or "".
    """
    os.nice(19)
    if not pid:
        plan = observe(place)
    else:
        root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        plan = observe(place, f"/proc/self/fd/{root}")
    return {"why": "nothing was noted"} if plan is None else {"modules": len(plan.modules)}


def observe(place: str, root: str = "") -> Plan | None:
    """Decides, and writes it down; None if nothing was noted.

    Args: root: what the ranks' `/` is here, "" for the same. Raises: OSError, ValueError.
    """
    text = "\n".join([*record_files.read_listing(place + USES, MOST_USES_BYTES), ""])
    watched = import_plan.parse(text)
    if watched is None:
        return None
    lines = record_files.read_listing(place + IMPORTS, record_files.MOST_LISTING_BYTES)
    hot = filter_hot([(words[0], words[1]) for line in lines if len(words := line.split("\t")) == 2])
    mention, anew = Texts(watched, root).mention, find_made_anew(watched, root)
    plan = import_plan.decide(watched, hot, find_patches(watched, root), mention, anew)
    write_plan(place + PLAN, plan)
    return plan


def find_patches(watched: Watched, root: str = "") -> list[Patch]:
    """Of all files of the user's that were imported, and the script."""
    users = [
        (name, module.origin) for name, module in watched.modules.items() if import_plan.is_users(module.origin)
    ]
    found: list[Patch] = []
    for name, path in users[:MOST_USERS_FILES]:
        if path.endswith(".py"):
            source = read_file(root + path, MOST_SOURCE_BYTES)
            found += import_texts.find_patches(source, name, watched.modules) if source else []
    if len(users) > MOST_USERS_FILES:
        found.append(Patch(MAIN, 1, "*", ""))
    return found


def find_made_anew(watched: Watched, root: str = "") -> list[RankRead]:
    """Reads of RANK and the like whose results each rank makes anew (rank_values.py)."""
    found = []
    for by in dict.fromkeys(read.by for read in watched.rank_reads):
        path = watched.modules[by].origin
        source = read_file(root + path, MOST_SOURCE_BYTES) if path.endswith(".py") else None
        try:
            statements = find_statements(source or b"", path)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # of another Python, or more than can be read
        lines = {line for each in statements for line in range(each.first, each.last + 1)}
        found += [read for read in watched.rank_reads if read.by == by and read.line in lines]
    return found


class Texts:
    """Texts of modules, each read once."""

    def __init__(self, watched: Watched, root: str = "") -> None:
        self._watched = watched
        self._root = root
        self._known: dict[tuple[str, tuple[str, ...]], bool] = {}

    def mention(self, modules: Sequence[str], names: tuple[str, ...]) -> Collection[str]:
        """Those that use one of the names when they are imported, or may do so."""
        found = []
        for module in modules:
            key = module, names
            if key not in self._known:
                self._known[key] = self._mentions(self._watched.modules[module].origin, names)
            if self._known[key]:
                found.append(module)
        return found

    def _mentions(self, path: str, names: tuple[str, ...]) -> bool:
        if not path.startswith("/"):
            return False  # built in
        if path.endswith(".py"):
            source = read_file(self._root + path, MOST_SOURCE_BYTES)
            return source is None or import_texts.uses_at_import(source, names)
        if any("." in name for name in names):
            return False  # names of Python
        data = read_file(self._root + path, MOST_NATIVE_BYTES)
        words = [name.removesuffix(".*").rpartition(".")[2].encode() for name in names]
        return data is None or any(word in data for word in words)


def read_file(path: str, most_bytes: int) -> bytes | None:
    """What is in a file; None if it cannot be read, or is too large."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            data = file.read(most_bytes + 1)
    except (OSError, ValueError):
        return None
    return data if len(data) <= most_bytes else None


# ---- the file of a plan --------------------------------------------------------------------------------------


def write_plan(path: str, plan: Plan) -> None:
    """In place of an earlier one. Raises: OSError."""
    lines = [f"module {name}" for name in plan.modules]
    lines += [f"left {name} {why}" for name, why in plan.left_out.items()]
    lines += [f"change {what}" for what in plan.changes]
    data = "\n".join([*lines, "end", ""]).encode("utf-8", "surrogateescape")
    temporary = f"{path}.{os.getpid()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
    os.rename(temporary, path)


def read_plan(path: str) -> Plan | None:
    """None if there is none that is whole."""
    try:
        lines = record_files.read_listing(path, _MOST_PLAN_BYTES)
    except (OSError, ValueError):
        return None
    if lines[-1:] != ["end"]:
        return None
    modules, left_out, changes = [], {}, []
    for line in lines[:-1]:
        kind, _, rest = line.partition(" ")
        name, _, why = rest.partition(" ")
        if kind == "module":
            modules.append(name)
        elif kind == "left":
            left_out[name] = why
        elif kind == "change":
            changes.append(rest)
    return Plan(tuple(modules), left_out, tuple(changes))
