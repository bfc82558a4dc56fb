"""PURE: which modules a later start may import before the script, by what one start has shown.

In: the lines of a Watch (import_watch.py), the modules in question, what their texts mention. Out: those that
would see the same before the script, in the order of their imports; of the others the roots, with reasons; what
the script changes. In doubt a module is left out, with all that imports it: then each rank imports it, as without
us. What the user's own text says about modules that it changes is found by import_texts.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from launcher.import_watch import IS_LIBRARY, MAIN, OF_TORCH, PER_RANK, is_native, takes

MOST_ROUNDS = 20
MOST_WHY_CHARS = 200
# Taken to look neither at the working folder nor at relative paths when they are imported, as is the standard
# library; not traced.
_KNOWN_ANYWHERE = """
    torch torchgen functorch torchvision numpy scipy pandas pyarrow transformers tokenizers safetensors
    huggingface_hub accelerate datasets sklearn sympy networkx mpmath yaml regex requests tqdm packaging filelock
    fsspec jinja2 markupsafe typing_extensions dateutil six certifi urllib3 idna charset_normalizer psutil anyio
    h11 h2 httpcore httpx httpcore2 httpx2 truststore botocore boto3 s3transfer jmespath isal attr attrs einops PIL
    zstandard lz4 lightning_utilities dotenv multidict yarl aiohttp
"""
_IS_STANDARD = re.compile(r"/lib(?:64)?/python3\.\d+t?/(?!(?:site|dist)-packages/)").search
# State of the interpreter, and what a module has to mention to look at it, or to change it, when it is imported.
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
# What a script changes of these matters to what changes them, too, while it is imported.
CHANGED_BY = {
    "random": ("random.*",),
    "numpy.random": ("random.*", "numpy.random.*", "np.random.*"),
    "hooks": MENTIONS["hooks"],
    "locale": MENTIONS["locale"],
    "recursion": MENTIONS["recursion"],
    "signals": MENTIONS["signals"],
    "start method": MENTIONS["start method"],
}
FOR_ALL = ("finders", "builtins")  # how modules are found and what they are made of
SAID = {
    "argv": "sys.argv",
    "path": "sys.path",
    "cwd": "the working folder",
    "recursion": "the recursion limit",
    "streams": "sys.stdout and its fellows",
    "hooks": "hooks of sys",
    "locale": "the locale",
    "signals": "handlers of signals",
    "warnings": "the filters of warnings",
    "random": "the state of random",
    "numpy.random": "the state of numpy.random",
    "start method": "the start method of multiprocessing",
    "finders": "how modules are found",
    "builtins": "built-in names",
}


class Module(NamedTuple):
    """When it was imported, by whom, from which file."""

    tick: int
    by: str
    line: int  # of the import statement, where `by` is the user's and executes it itself; 0: unknown
    origin: str


class Use(NamedTuple):
    """Of a variable, a file, or other state."""

    first: int
    last: int
    by: str
    is_change: bool
    what: str


class RankRead(NamedTuple):
    """Of a variable that differs between ranks."""

    by: str
    variable: str
    line: int  # of the statement of the module that does it, 0: unknown


class Watched(NamedTuple):
    """What a Watch has noted."""

    modules: Mapping[str, Module]
    needs: Mapping[str, Collection[str]]
    uses: Sequence[Use]
    back: Mapping[str, int] = {}  # what was changed, and since when it is as at first
    rank_reads: Sequence[RankRead] = ()


class Patch(NamedTuple):
    """What a file of the user's changes in a module: an attribute, "" for any; or the entry of sys.modules."""

    by: str  # the module whose file it is
    line: int
    module: str  # "*" for any
    name: str
    is_entry: bool = False


class Plan(NamedTuple):
    """What a later start may do."""

    modules: tuple[str, ...]
    left_out: dict[str, str]  # why; "" for what imports such a one
    changes: tuple[str, ...]  # what the script does; nothing that is preloaded minds


# Which of these modules mention one of these names in what they execute when they are imported, or may do so.
Mentions = Callable[[Sequence[str], tuple[str, ...]], Collection[str]]


def parse(text: str) -> Watched | None:
    """The lines of a Watch; None if there are none, or if they are cut off."""
    lines = text.split("\n")
    if lines[-2:] != ["end", ""]:
        return None
    modules: dict[str, Module] = {}
    names: list[str] = []
    needs: dict[str, set[str]] = {}
    uses: list[Use] = []
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
                uses.append(Use(int(first), int(last), names[int(who)], is_change == "1", what))
            elif kind == "rank":
                who, variable, number = rest.split("\t")
                rank_reads.append(RankRead(names[int(who)], variable, int(number)))
            elif kind == "back":
                tick, what = rest.split("\t")
                back[what] = int(tick)
    except (ValueError, IndexError):
        return None
    return Watched(modules, needs, uses, back, rank_reads)


def is_users(origin: str) -> bool:
    """Whether a file is none of an installed library."""
    return origin.startswith("/") and not any(each in origin for each in IS_LIBRARY)


def decide(
    watched: Watched,
    candidates: Sequence[str],
    patches: Sequence[Patch],
    mentions: Mentions,
    made_anew: Collection[RankRead] = (),
) -> Plan:
    """See the module's docstring.

    Args: candidates: in the order of their imports; made_anew: reads whose results each rank makes anew.
    """
    others = {(read.by, read.variable) for read in watched.rank_reads if read not in made_anew}
    anew = {(read.by, read.variable) for read in made_anew} - others
    chosen = dict.fromkeys(name for name in candidates if name in watched.modules and name != MAIN)
    why: dict[str, str] = {}
    for _ in range(MOST_ROUNDS):
        found = _find_out(watched, chosen, patches, mentions, anew)
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
    # Whether it is changed back in a later start, too, is seen then.
    kept = [what for what in changes.difference(watched.back) if what.startswith("env:") or what == "cwd"]
    return Plan(tuple(chosen), {name: text[:MOST_WHY_CHARS] for name, text in why.items()}, tuple(sorted(kept)))


def _dependents(needs: Mapping[str, Collection[str]], chosen: Iterable[str], roots: Iterable[str]) -> list[str]:
    """What imports one of these, or is in one of these, or imports what does."""
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
    watched: Watched,
    chosen: Collection[str],
    patches: Sequence[Patch],
    mentions: Mentions,
    anew: Collection[tuple[str, str]],
) -> dict[str, str]:
    """Modules that would not see the same, each with a reason."""
    modules = watched.modules
    found: dict[str, str] = {}
    changed: dict[str, Use] = {}  # by others, when first
    takes_all = {use.by for use in watched.uses if use.what == "env:*"}  # lacks RANK, as documented
    for use in watched.uses:
        if use.by in chosen:
            variable = use.what[4:] if use.what.startswith("env:") else ""
            if variable in PER_RANK and use.by not in takes_all and (use.by, variable) not in anew:
                found.setdefault(use.by, f"{use.by} reads {variable} when it is imported")
        elif (
            use.is_change
            and not _is_own_business(modules, use)
            and (use.what not in changed or use.first < changed[use.what].first)
        ):
            changed[use.what] = use

    lost = [  # they may set the same attribute
        modules[read.by].tick
        for read in watched.rank_reads
        if read.by not in chosen and read.by in modules and not is_users(modules[read.by].origin)
    ]
    for name, variable in anew:
        if name in chosen and any(tick < modules[name].tick for tick in lost):
            found.setdefault(name, f"{name} reads {variable} when it is imported, and another module before it")

    preloaded = {use.what for use in watched.uses if use.is_change and use.by in chosen}
    # Where what is preloaded changes it, too, it is not as at first before the script.
    ends = {what: tick for what, tick in watched.back.items() if what not in preloaded}

    def after(use: Use) -> list[str]:
        return [name for name in chosen if use.first < modules[name].tick < ends.get(use.what, sys.maxsize)]

    def blame(names: Iterable[str], what: str, does: str, use: Use) -> None:
        for name in names:
            who = _said_of(watched, use.by)
            found.setdefault(name, f"{name} {does} {what} when it is imported, and {who} changes that before")

    for use in watched.uses:
        if use.by in chosen:
            for cause in _find_causes(changed, use):
                if use.first > ends.get(cause.what, sys.maxsize):
                    continue
                blame([use.by], _said(use.what if "*" not in use.what else cause.what), "reads", cause)
    for what, use in changed.items():
        if what == "cwd":
            names = [name for name in after(use) if not _is_known_anywhere(name, modules[name].origin)]
            blame(names, SAID["cwd"], "may read", use)
        elif what in FOR_ALL:
            blame(after(use), SAID[what], "depends on", use)
        elif what in MENTIONS:
            names = after(use)
            if what == "start method":  # parts of multiprocessing import what they call later
                names = [name for name in names if not _IS_STANDARD(modules[name].origin)]
            blame(mentions(names, MENTIONS[what]), SAID[what], "may look at", use)
        elif what == "unknown":
            for each, names_of in MENTIONS.items():
                blame(mentions(after(use), names_of), SAID[each], "may look at", use)
        elif what.startswith("env:"):
            names = [
                name
                for name in after(use)
                if modules[name].origin.endswith(".so") or (name, "native") in _native_users(watched)
            ]
            if what[4:].startswith(OF_TORCH):  # no other library reads these
                names = [name for name in names if name.startswith("torch")]
            if not is_native(what[4:]):
                names = list(
                    mentions([name for name in names if modules[name].origin.endswith(".so")], (what[4:],))
                )
            blame(names, what[4:], "may read", use)
    for use in watched.uses:  # what a library changed while the script imported it
        earlier = changed.get(use.what)
        if use.by in chosen and use.is_change and earlier is not None and earlier.first < use.first:
            unit = [name for name in chosen if modules[use.by].tick <= modules[name].tick < use.first]
            if use.what in CHANGED_BY:
                blame(mentions(unit, CHANGED_BY[use.what]) or unit, SAID[use.what], "changes", earlier)
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
            found.setdefault(name, f"{text}, which {who} changes before, or may change (line {patch.line})")
    return found


def _is_known_anywhere(name: str, origin: str) -> bool:
    return name.partition(".")[0] in _KNOWN_ANYWHERE.split() or _IS_STANDARD(origin) is not None


def _is_own_business(modules: Mapping[str, Module], use: Use) -> bool:
    """Whether a library that is left out changes the interpreter: what it imports itself may have done that."""
    is_seen = use.what.startswith(("env:", "file:")) or use.what in ("cwd", "process")
    return not is_seen and use.by in modules and not is_users(modules[use.by].origin)


def _native_users(watched: Watched) -> set[tuple[str, str]]:
    return {(use.by, use.what) for use in watched.uses if use.what == "native"}


def _find_causes(changed: Mapping[str, Use], use: Use) -> list[Use]:
    """Earlier changes of what a module has used: of a variable, a file, or of any where it may have used all."""
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
        folder = _folder(rest)
        names = [
            what
            for what in changed
            if what == "process" or (what.startswith("file:") and _is_about(what[5:], rest, folder))
        ]
    else:
        names = []
    return [changed[name] for name in names if name in changed and changed[name].first < use.last]


def _folder(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _is_about(changed: str, path: str, folder: str) -> bool:
    """Whether a change of one path may be seen by who has read another one, a file or a folder."""
    if path == "*" or changed == path or _folder(changed) == path:
        return True
    return changed == folder or path.startswith(changed.rstrip("/") + "/")


def _is_before(watched: Watched, name: str, patch: Patch) -> bool:
    """Whether a module was imported before a line of a file of the user's can have been executed."""
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


def _said_of(watched: Watched, who: str) -> str:
    """The name of who changes something: a file of the user's, or a library."""
    module = watched.modules.get(who)
    if module is not None and is_users(module.origin):
        return module.origin.rpartition("/")[2]
    return "the script" if who == MAIN else who


def _said(what: str) -> str:
    kind, _, rest = what.partition(":")
    return rest if kind in ("env", "file") and rest != "*" else SAID.get(what, "what others see")
