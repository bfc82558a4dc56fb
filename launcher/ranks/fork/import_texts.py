"""PURE: static analysis of a module: names that its import uses, modules that a user's file changes.

In: sources. Out: whether executing a module uses certain names; patches (import_plan.py). Text does not show all:
a source that cannot be parsed counts as using everything.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from launcher.ranks.fork.import_plan import Patch
from launcher.ranks.fork.script_text import MAX_NESTED, dotted, executed, flat, parse

# Code that may change a module; a match leads to a closer inspection.
_MAY_PATCH = re.compile(
    r"\b(?:set|del)attr\b|\bsys\s*\.\s*modules\b|\bpatch\b|\breload\b|\bvars\s*\(|__dict__|\bbuiltins\b"
    r"|^\s*(?!self\b|cls\b)[A-Za-z_]\w*(?:\s*\.\s*\w+)+\s*(?:\[[^\]]*\]\s*)?[-+|&]?=(?!=)|^\s*del\s",
    re.MULTILINE,
)


def uses_at_import(source: bytes, names: Iterable[str]) -> bool:
    """Return whether importing a module may use one of these, in its statements or in functions they call.

    Args: names: `sys.argv`, `locale.*`, or one word, which matches anywhere.
    """
    wanted = tuple(names)
    if not any(_last_word(name).encode() in source for name in wanted):
        return False
    tree = parse(source)
    if tree is None:
        return True
    functions = {node.name: node for node in tree.body if type(node).__name__.endswith("FunctionDef")}
    called: dict[str, None] = {}
    bodies: list[Any] = [tree]
    for body in bodies:
        for node in executed(body.body, is_program=False):
            if _is_one_of(node, wanted):
                return True
            if type(node).__name__ == "Call" and type(node.func).__name__ == "Name":
                name = node.func.id
                if name in functions and name not in called:
                    called[name] = None
                    bodies.append(functions[name])
    return False


def _last_word(name: str) -> str:
    return name.removesuffix(".*").rpartition(".")[2]


def _is_one_of(node: Any, wanted: tuple[str, ...]) -> bool:
    kind = type(node).__name__
    if kind == "Import":
        found = [alias.name for alias in node.names]
    elif kind == "ImportFrom":
        found = [node.module or "", *(f"{node.module or ''}.{alias.name}" for alias in node.names)]
        found += [alias.name for alias in node.names]
    elif kind in ("Attribute", "Name"):
        name = dotted(node)
        found = [name, name.rpartition(".")[2]]
    elif kind == "Constant" and isinstance(node.value, str):
        found = [node.value]
    else:
        return False
    return any(_matches(name, each) for name in wanted for each in found)


def _matches(wanted: str, found: str) -> bool:
    if wanted.endswith(".*"):
        return found.startswith(wanted[:-1]) or f".{wanted[:-1]}" in found
    return found == wanted or found.endswith("." + wanted)


def _everything(node: Any, depth: int = 0) -> Iterator[Any]:
    yield node
    if depth < MAX_NESTED:
        for field in node._fields:
            value = getattr(node, field, None)
            for each in value if isinstance(value, list) else [value]:
                if hasattr(each, "_fields"):
                    yield from _everything(each, depth + 1)


# ---- changes of modules by a file ------------------------------------------------------------------------------


def find_patches(source: bytes, who: str, modules: Collection[str]) -> list[Patch]:
    """Find what a user's file changes, or may change, in imported modules.

    Args: who: the module of the file; modules: all that were imported.
    """
    if not _MAY_PATCH.search(source.decode("utf-8", "replace")):
        return []
    tree = parse(source)
    if tree is None:
        return [Patch(who, 1, "*", "")]
    nodes = list(_everything(tree))
    known = _find_bindings(nodes)
    found: list[Patch] = []

    def add(line: int, path: str, name: str = "") -> None:
        module = path
        while module and module not in modules:
            module = module.rpartition(".")[0]
        if module:
            inner = path[len(module) + 1 :].partition(".")[0]
            found.append(Patch(who, line, module, inner or name))

    def resolve(node: Any) -> str:
        first, dot, rest = dotted(node).partition(".")
        return known[first] + dot + rest if first in known else ""

    for node in nodes:
        kind = type(node).__name__
        if kind in ("Assign", "Delete"):
            targets = node.targets
        elif kind in ("AugAssign", "AnnAssign", "For", "AsyncFor"):
            targets = [node.target]
        elif kind == "Call":
            _note_call(node, resolve, add, found, who)
            continue
        else:
            continue
        for target in flat(targets):
            line = target.lineno
            if type(target).__name__ == "Attribute":
                base = resolve(target.value)
                if base:
                    add(line, base, target.attr)
            elif type(target).__name__ == "Subscript":
                base = resolve(target.value)
                name = _text_of(target.slice)
                if base == "sys.modules":
                    found.append(Patch(who, line, name or "*", "", is_entry=True))
                elif base.endswith(".__dict__"):
                    add(line, base.removesuffix(".__dict__"), name)
                elif base and base not in ("os.environ", "os.environb"):
                    add(line, base)
                elif type(target.value).__name__ == "Call" and dotted(target.value.func) == "vars":
                    for argument in target.value.args[:1]:
                        add(line, resolve(argument), name)
    return found


def _note_call(node: Any, resolve: Any, add: Any, found: list[Patch], who: str) -> None:
    called, arguments = dotted(node.func), node.args
    last = called.rpartition(".")[2]
    name = _text_of(arguments[1]) if len(arguments) > 1 else ""
    if last in ("setattr", "delattr", "object") and arguments and (last != "object" or "patch" in called):
        text = _text_of(arguments[0])
        add(node.lineno, text or resolve(arguments[0]), name)
    elif last == "patch" and arguments:
        add(node.lineno, _text_of(arguments[0]))
    elif last == "reload" and arguments:
        add(node.lineno, resolve(arguments[0]))
    elif (
        last in ("pop", "setdefault", "update", "clear", "popitem", "__setitem__", "__delitem__")
        and type(node.func).__name__ == "Attribute"
        and resolve(node.func.value) == "sys.modules"
    ):
        entry = _text_of(arguments[0]) if arguments else ""
        found.append(Patch(who, node.lineno, entry or "*", "", is_entry=True))


def _find_bindings(nodes: Iterable[Any]) -> dict[str, str]:
    """Map the names that stand for modules, or parts of them."""
    known: dict[str, str] = {}
    later = []
    for node in nodes:
        kind = type(node).__name__
        if kind == "Import":
            for alias in node.names:
                known[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif kind == "ImportFrom" and not node.level and node.module:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif kind == "Assign" and type(node.value).__name__ in ("Name", "Attribute"):
            later.append(node)
    for node in later:
        first, dot, rest = dotted(node.value).partition(".")
        for target in node.targets:
            if type(target).__name__ == "Name" and first in known:
                known.setdefault(target.id, known[first] + dot + rest)
    return known


def _text_of(node: Any) -> str:
    value = getattr(node, "value", None)
    return value if type(node).__name__ == "Constant" and isinstance(value, str) else ""
