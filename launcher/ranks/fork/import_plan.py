"""PURE: the modules that a later start may import before the script, by the observations of one start.

In: the lines of a Watch (import_watch.py), the candidate modules, the names that their sources mention. Out: the
modules that would see the same before the script, in the order of their imports; the roots of the others, with
reasons; the changes that the script makes. In doubt a module is left out, with all that imports it: then each rank
imports it, as without Bootseer. import_texts.py finds the modules that the user's own sources change.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from launcher.in_rank.import_watch import IS_LIBRARY, MAIN, OF_TORCH, PER_RANK, is_native, takes

MAX_ROUNDS = 20
MAX_WHY_CHARS = 200
# Assumed to use neither the working directory nor relative paths when they are imported, as is the standard
# library; not traced.
_KNOWN_ANYWHERE = """
    torch torchgen functorch torchvision numpy scipy pandas pyarrow transformers tokenizers safetensors
    huggingface_hub accelerate datasets sklearn sympy networkx mpmath yaml regex requests tqdm packaging filelock
    fsspec jinja2 markupsafe typing_extensions dateutil six certifi urllib3 idna charset_normalizer psutil anyio
    h11 h2 httpcore httpx httpcore2 httpx2 truststore botocore boto3 s3transfer jmespath isal attr attrs einops PIL
    zstandard lz4 lightning_utilities dotenv multidict yarl aiohttp
"""
_IS_STANDARD = re.compile(r"/lib(?:64)?/python3\.\d+t?/(?!(?:site|dist)-packages/)").search
# State of the interpreter, and the names a module must mention to read or change it when it is imported.
MENTIONS = {
    "argv": ("sys.argv",),
    "path": ("sys.path",),
    "recursion": ("sys.getrecursionlimit", "sys.setrecursionlimit"),
    "streams": ("sys.stdin", "sys.stdout", "sys.stderr", "logging.StreamHandler", "logging.basicConfig"),
    "hooks": ("sys.excepthook", "sys.unraisablehook", "sys.displayhook"),
    "locale": ("locale.*",),
    "signals": ("signal.signal", "signal.getsignal"),
    "warnings": ("warnings.filters",),
    "random": ("random.getstate",),
    "start method": ("get_start_method", "set_start_method", "get_context"),
}
# If a script changes one of these, that affects modules that also change it while they are imported.
CHANGED_BY = {
    "random": ("random.*",),
    "numpy.random": ("random.*", "numpy.random.*", "np.random.*"),
    "hooks": MENTIONS["hooks"],
    "locale": MENTIONS["locale"],
    "recursion": MENTIONS["recursion"],
    "signals": MENTIONS["signals"],
    "start method": MENTIONS["start method"],
}
FOR_ALL = ("finders", "builtins")  # affect every module
STATE_NAMES = {
    "argv": "sys.argv",
    "path": "sys.path",
    "cwd": "the working directory",
    "recursion": "the recursion limit",
    "streams": "sys.stdin, sys.stdout or sys.stderr",
    "hooks": "the hooks of sys",
    "locale": "the locale",
    "signals": "signal handlers",
    "warnings": "the filters of warnings",
    "random": "the state of random",
    "numpy.random": "the state of numpy.random",
    "start method": "the start method of multiprocessing",
    "finders": "the module finders",
    "builtins": "built-in names",
}


class Module(NamedTuple):
    """The time, importer and file of an import."""

    tick: int
    by: str
    line: int  # of the import statement, if `by` is the user's and executes it itself; 0: unknown
    origin: str


class StateUse(NamedTuple):
    """A use of a variable, a file, or other state."""

    first: int
    last: int
    by: str
    is_change: bool
    what: str


class RankRead(NamedTuple):
    """A read of a variable that differs between ranks."""

    by: str
    variable: str
    line: int  # of the reading statement of the module, 0: unknown


class WatchNotes(NamedTuple):
    modules: Mapping[str, Module]
    needs: Mapping[str, Collection[str]]
    uses: Sequence[StateUse]
    back: Mapping[str, int] = {}  # changed state, and the tick since which it is as at first
    rank_reads: Sequence[RankRead] = ()


class Patch(NamedTuple):
    """A change of a module by a user's file: of an attribute, "" for any; or of its entry in sys.modules."""

    by: str  # the module of the file
    line: int
    module: str  # "*" for any
    name: str
    is_entry: bool = False


class ImportPlan(NamedTuple):
    """The modules that a later start may import early."""

    modules: tuple[str, ...]
    left_out: dict[str, str]  # why; "" for a module that imports such a one
    changes: tuple[str, ...]  # by the script; they affect no preloaded module


# Returns the modules that mention one of these names in code that runs when they are imported, or may do so.
Mentions = Callable[[Sequence[str], tuple[str, ...]], Collection[str]]


def parse(text: str) -> WatchNotes | None:
    """Parse the lines of a Watch; None if there are none, or if they are truncated."""
    lines = text.split("\n")
    if lines[-2:] != ["end", ""]:
        return None
    modules: dict[str, Module] = {}
    names: list[str] = []
    needs: dict[str, set[str]] = {}
    uses: list[StateUse] = []
    back: dict[str, int] = {}
    rank_reads: list[RankRead] = []
    try:
        for line in lines[:-2]:
            kind, _, rest = line.partition("\t")
            if kind == "begun":
                tick, by, number, name, origin = rest.split("\t")
                names.append(name)
                modules[name] = Module(int(tick), by, int(number), origin)
            elif kind == "needs":
                who, *found = rest.split("\t")
                needs[names[int(who)]] = {names[int(each)] for each in found}
            elif kind == "uses":
                first, last, who, is_change, what = rest.split("\t")
                uses.append(StateUse(int(first), int(last), names[int(who)], is_change == "1", what))
            elif kind == "rank":
                who, variable, number = rest.split("\t")
                rank_reads.append(RankRead(names[int(who)], variable, int(number)))
            elif kind == "back":
                tick, what = rest.split("\t")
                back[what] = int(tick)
    except (ValueError, IndexError):
        return None
    return WatchNotes(modules, needs, uses, back, rank_reads)


def is_users(origin: str) -> bool:
    """Return whether a file belongs to no installed library."""
    return origin.startswith("/") and not any(each in origin for each in IS_LIBRARY)


def decide(
    watched: WatchNotes,
    candidates: Sequence[str],
    patches: Sequence[Patch],
    mentions: Mentions,
    made_again: Collection[RankRead] = (),
) -> ImportPlan:
    """Make the plan. See the module's docstring.

    Args: candidates: in the order of their imports; made_anew: reads whose results each rank recomputes.
    """
    others = {(read.by, read.variable) for read in watched.rank_reads if read not in made_again}
    again = {(read.by, read.variable) for read in made_again} - others
    chosen = dict.fromkeys(name for name in candidates if name in watched.modules and name != MAIN)
    why: dict[str, str] = {}
    for _ in range(MAX_ROUNDS):
        found = _find_out(watched, chosen, patches, mentions, again)
        if not found:
            break
        roots = {name: found[name] for name in found if name in chosen}
        why.update(roots)
        for name in _dependents(watched.needs, chosen, roots):
            chosen.pop(name, None)
            why.setdefault(name, "")
    else:
        chosen.clear()
    why.update((name, "") for name in candidates if name not in chosen and name not in why)
    changes = {use.what for use in watched.uses if use.is_change and use.by not in chosen}
    # A later start shows whether it is changed back there, too.
    kept = [what for what in changes.difference(watched.back) if what.startswith("env:") or what == "cwd"]
    return ImportPlan(
        tuple(chosen), {name: text[:MAX_WHY_CHARS] for name, text in why.items()}, tuple(sorted(kept))
    )


def _dependents(needs: Mapping[str, Collection[str]], chosen: Iterable[str], roots: Iterable[str]) -> list[str]:
    """Return the modules that import one of these, directly or not, or are inside one of these."""
    wanted_by: dict[str, list[str]] = {}
    for name in chosen:
        for each in needs.get(name, ()):
            wanted_by.setdefault(each, []).append(name)
        parent = name.rpartition(".")[0]
        if parent:
            wanted_by.setdefault(parent, []).append(name)
    found = dict.fromkeys(roots)
    for name in (queue := list(found)):
        for each in wanted_by.get(name, ()):
            if each not in found:
                found[each] = None
                queue.append(each)
    return list(found)


def _find_out(
    watched: WatchNotes,
    chosen: Collection[str],
    patches: Sequence[Patch],
    mentions: Mentions,
    again: Collection[tuple[str, str]],
) -> dict[str, str]:
    """Find modules that would not see the same, each with a reason."""
    modules = watched.modules
    found: dict[str, str] = {}
    changed: dict[str, StateUse] = {}  # the first change by others
    takes_all = {use.by for use in watched.uses if use.what == "env:*"}  # it lacks RANK, as documented
    for use in watched.uses:
        if use.by in chosen:
            variable = use.what[4:] if use.what.startswith("env:") else ""
            if variable in PER_RANK and use.by not in takes_all and (use.by, variable) not in again:
                found.setdefault(use.by, f"{use.by} reads {variable} when it is imported")
        elif (
            use.is_change
            and not _is_own_business(modules, use)
            and (use.what not in changed or use.first < changed[use.what].first)
        ):
            changed[use.what] = use

    lost = [  # these may set the same attribute
        modules[read.by].tick
        for read in watched.rank_reads
        if read.by not in chosen and read.by in modules and not is_users(modules[read.by].origin)
    ]
    for name, variable in again:
        if name in chosen and any(tick < modules[name].tick for tick in lost):
            found.setdefault(name, f"{name} reads {variable} when it is imported, and another module before it")

    fork_server = {use.what for use in watched.uses if use.is_change and use.by in chosen}
    # If a preloaded module also changes it, it differs from the initial state before the script.
    ends = {what: tick for what, tick in watched.back.items() if what not in fork_server}

    def after(use: StateUse) -> list[str]:
        return [name for name in chosen if use.first < modules[name].tick < ends.get(use.what, sys.maxsize)]

    def blame(names: Iterable[str], what: str, does: str, use: StateUse) -> None:
        for name in names:
            who = _said_of(watched, use.by)
            found.setdefault(name, f"{name} {does} {what} when it is imported, and {who} changes it earlier")

    for use in watched.uses:
        if use.by in chosen:
            for cause in _find_causes(changed, use):
                if use.first > ends.get(cause.what, sys.maxsize):
                    continue
                blame([use.by], _said(use.what if "*" not in use.what else cause.what), "reads", cause)
    for what, use in changed.items():
        if what == "cwd":
            names = [name for name in after(use) if not _is_known_anywhere(name, modules[name].origin)]
            blame(names, STATE_NAMES["cwd"], "may read", use)
        elif what in FOR_ALL:
            blame(after(use), STATE_NAMES[what], "depends on", use)
        elif what in MENTIONS:
            names = after(use)
            if what == "start method":  # parts of multiprocessing import functions that they call later
                names = [name for name in names if not _IS_STANDARD(modules[name].origin)]
            blame(mentions(names, MENTIONS[what]), STATE_NAMES[what], "may read", use)
        elif what == "unknown":
            for each, names_of in MENTIONS.items():
                blame(mentions(after(use), names_of), STATE_NAMES[each], "may read", use)
        elif what.startswith("env:"):
            names = [
                name
                for name in after(use)
                if modules[name].origin.endswith(".so") or (name, "native") in _native_users(watched)
            ]
            if what[4:].startswith(OF_TORCH):  # only torch reads these
                names = [name for name in names if name.startswith("torch")]
            if not is_native(what[4:]):
                names = list(
                    mentions([name for name in names if modules[name].origin.endswith(".so")], (what[4:],))
                )
            blame(names, what[4:], "may read", use)
    for use in watched.uses:  # changes by a library while the script imported it
        earlier = changed.get(use.what)
        if use.by in chosen and use.is_change and earlier is not None and earlier.first < use.first:
            unit = [name for name in chosen if modules[use.by].tick <= modules[name].tick < use.first]
            if use.what in CHANGED_BY:
                blame(mentions(unit, CHANGED_BY[use.what]) or unit, STATE_NAMES[use.what], "changes", earlier)
            elif use.what.startswith("logger:"):
                top = use.what.partition(":")[2].partition(".")[0]
                own = [name for name in unit if name.partition(".")[0] == top]
                blame(own or unit, f"the logger {use.what[7:]}", "changes", earlier)
    for patch in patches:
        names = [name for name in chosen if not _is_before(watched, name, patch)]
        if patch.is_entry and patch.module != "*":
            names = list(mentions(names, (patch.module,)))
        elif patch.module != "*":
            names = [name for name in names if patch.module in watched.needs.get(name, ())]
            if patch.name:
                names = list(mentions(names, (patch.name,)))
        for name in names:
            who = _said_of(watched, patch.by)
            text = f"{name} imports {patch.module}" if patch.module != "*" else name
            found.setdefault(name, f"{text}, which {who} changes earlier, or may change (line {patch.line})")
    return found


def _is_known_anywhere(name: str, origin: str) -> bool:
    return name.partition(".")[0] in _KNOWN_ANYWHERE.split() or _IS_STANDARD(origin) is not None


def _is_own_business(modules: Mapping[str, Module], use: StateUse) -> bool:
    """Return whether a library that is left out changes the interpreter: its own imports may have done that."""
    is_seen = use.what.startswith(("env:", "file:")) or use.what in ("cwd", "process")
    return not is_seen and use.by in modules and not is_users(modules[use.by].origin)


def _native_users(watched: WatchNotes) -> set[tuple[str, str]]:
    return {(use.by, use.what) for use in watched.uses if use.what == "native"}


def _find_causes(changed: Mapping[str, StateUse], use: StateUse) -> list[StateUse]:
    """Find earlier changes of the variable or file that a module used, or of any if it may have used all."""
    kind, _, rest = use.what.partition(":")
    if kind == "env":
        start = "env:" + takes(use.by)
        names = (
            [use.what]
            if rest != "*" and rest.startswith(start[4:])
            else []
            if rest != "*"
            else [what for what in changed if what.startswith(start)]
        )
    elif kind == "file" and not use.is_change:
        directory = _directory(rest)
        names = [
            what
            for what in changed
            if what == "process" or (what.startswith("file:") and _is_about(what[5:], rest, directory))
        ]
    else:
        names = []
    return [changed[name] for name in names if name in changed and changed[name].first < use.last]


def _directory(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _is_about(changed: str, path: str, directory: str) -> bool:
    """Return whether a change of one path may affect the reader of another one, a file or a directory."""
    if path == "*" or changed == path or _directory(changed) == path:
        return True
    return changed == directory or path.startswith(changed.rstrip("/") + "/")


def _is_before(watched: WatchNotes, name: str, patch: Patch) -> bool:
    """Return whether a module was imported before a line of a user's file can have run."""
    top = watched.modules[name]
    begun = watched.modules.get(patch.by)
    if begun is not None and top.tick < begun.tick:
        return True
    seen = set()
    while name in watched.modules and name not in seen:
        seen.add(name)
        module = watched.modules[name]
        if module.by == patch.by:
            return 0 < module.line < patch.line
        name = module.by
    return False


def _said_of(watched: WatchNotes, who: str) -> str:
    """Return the name of a module that changes something: a user's file, or a library."""
    module = watched.modules.get(who)
    if module is not None and is_users(module.origin):
        return module.origin.rpartition("/")[2]
    return "the script" if who == MAIN else who


def _said(what: str) -> str:
    kind, _, rest = what.partition(":")
    return rest if kind in ("env", "file") and rest != "*" else STATE_NAMES.get(what, "shared state")
