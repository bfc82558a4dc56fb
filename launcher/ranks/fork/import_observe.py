"""The decision which modules a later start may import before the script, by observing one start and its sources.

In: two files that local rank 0 has written at its first step: its modules (.imports) and the notes of a Watch
(.uses). Out: a file with the plan, for the preloader. Runs in a helper of the supervisor at low priority, as it
may have to read the sources of some thousand modules; at the end of a short job, in bootrun itself. Sources of
ranks in an image are read through the root directory of the rank, while it lives.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from bootseer.linux.files import read_regular, replace_file
from launcher.in_rank.import_watch import MAIN
from launcher.in_rank.rank_values import find_statements
from launcher.ranks.fork import import_plan, import_texts
from launcher.ranks.fork.import_plan import ImportPlan, Patch, RankRead, WatchNotes
from launcher.ranks.fork.policy import filter_hot
from launcher.ranks.start_trace import files as record_files

MAX_USES_BYTES = 32 << 20
MAX_SOURCE_BYTES = 4 << 20
MAX_NATIVE_BYTES = 512 << 20  # of an extension module
MAX_USERS_FILES = 2000
IMPORTS, USES, PLAN = ".imports", ".uses", ".plan"
_MAX_PLAN_BYTES = 4 << 20


def run(place: str, pid: str = "") -> dict[str, object]:
    """Run the supervisor's helper.

    Args: place: path of the files, without suffixes; pid: a rank that sees other files than bootrun, or "".
    """
    os.nice(19)
    if not pid:
        plan = observe(place)
    else:
        root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        plan = observe(place, f"/proc/self/fd/{root}")
    return {"why": "nothing was recorded"} if plan is None else {"modules": len(plan.modules)}


def observe(place: str, root: str = "") -> ImportPlan | None:
    """Make the plan and write it; None if nothing was recorded.

    Args: root: path of the ranks' `/` here, "" for the same. Raises: OSError, ValueError.
    """
    text = "\n".join([*record_files.read_listing(place + USES, MAX_USES_BYTES), ""])
    watched = import_plan.parse(text)
    if watched is None:
        return None
    lines = record_files.read_listing(place + IMPORTS, record_files.MAX_LISTING_BYTES)
    hot = filter_hot([(words[0], words[1]) for line in lines if len(words := line.split("\t")) == 2])
    mention, again = ModuleSources(watched, root).mention, find_recomputed(watched, root)
    plan = import_plan.decide(watched, hot, find_patches(watched, root), mention, again)
    write_plan(place + PLAN, plan)
    return plan


def find_patches(watched: WatchNotes, root: str = "") -> list[Patch]:
    """Find patches in all imported files of the user, and in the script."""
    users = [
        (name, module.origin) for name, module in watched.modules.items() if import_plan.is_users(module.origin)
    ]
    found: list[Patch] = []
    for name, path in users[:MAX_USERS_FILES]:
        if path.endswith(".py"):
            source = read_regular(root + path, MAX_SOURCE_BYTES)
            found += import_texts.find_patches(source, name, watched.modules) if source else []
    if len(users) > MAX_USERS_FILES:
        found.append(Patch(MAIN, 1, "*", ""))
    return found


def find_recomputed(watched: WatchNotes, root: str = "") -> list[RankRead]:
    """Find reads of RANK and similar variables whose results each rank recomputes (rank_values.py)."""
    found = []
    for by in dict.fromkeys(read.by for read in watched.rank_reads):
        path = watched.modules[by].origin
        source = read_regular(root + path, MAX_SOURCE_BYTES) if path.endswith(".py") else None
        try:
            statements = find_statements(source or b"", path)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue  # syntax of another Python, or too large to parse
        lines = {line for each in statements for line in range(each.first, each.last + 1)}
        found += [read for read in watched.rank_reads if read.by == by and read.line in lines]
    return found


class ModuleSources:
    """Sources of modules, each read once."""

    def __init__(self, watched: WatchNotes, root: str = "") -> None:
        self._watched = watched
        self._root = root
        self._known: dict[tuple[str, tuple[str, ...]], bool] = {}

    def mention(self, modules: Sequence[str], names: tuple[str, ...]) -> Collection[str]:
        """Return the modules that use one of the names when they are imported, or may do so."""
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
            source = read_regular(self._root + path, MAX_SOURCE_BYTES)
            return source is None or import_texts.uses_at_import(source, names)
        if any("." in name for name in names):
            return False  # names of Python
        data = read_regular(self._root + path, MAX_NATIVE_BYTES)
        words = [name.removesuffix(".*").rpartition(".")[2].encode() for name in names]
        return data is None or any(word in data for word in words)


# ---- the file of a plan --------------------------------------------------------------------------------------


def write_plan(path: str, plan: ImportPlan) -> None:
    """Write the plan, replacing an earlier one. Raises: OSError."""
    lines = [f"module {name}" for name in plan.modules]
    lines += [f"left {name} {why}" for name, why in plan.left_out.items()]
    lines += [f"change {what}" for what in plan.changes]
    replace_file(path, "\n".join([*lines, "end", ""]).encode("utf-8", "surrogateescape"))


def read_plan(path: str) -> ImportPlan | None:
    """Read a plan; None if there is no complete one."""
    try:
        lines = record_files.read_listing(path, _MAX_PLAN_BYTES)
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
    return ImportPlan(tuple(modules), left_out, tuple(changes))
