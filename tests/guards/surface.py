"""What users, their files and other versions of Bootseer depend on, as lines of text: one golden file each.

`python -m tests.guards.surface` adds what is new to the golden files. A line that goes is a break: a flag or key
that is renamed keeps its old name as an alias, formats and messages get a new number. It stays until `--remove`.
"""

from __future__ import annotations

import argparse
import ast
import enum
import functools
import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
GOLDEN = os.path.join(ROOT, "tests", "guards", "golden")
PACKAGES = ("bootseer", "launcher")
# Modules that are programs: importing them runs something, or they belong into other interpreters.
PUBLIC = (
    "bootseer",
    "bootseer.checkpoint",
    "bootseer.storage",
    "bootseer.peers",
    "bootseer.report",
    "bootseer.startup",
)
CALLABLE_MODULES = ("bootseer.heartbeat.heartbeat", "bootseer.layout.layout")
MADE_WHEN_ASKED = ("bootseer.callbacks",)  # of a library that may not be there
NOT_IMPORTED = (
    "__main__",
    "bootseer.env.key.base_probe",
    "bootseer.env.capture.compile_list",
    "bootseer.mounts.sandbox.enter",
)


def collect() -> dict[str, list[str]]:
    """The lines of each golden file, by its name."""
    return {name: sorted(set(lines())) for name, lines in SURFACES.items()}


# ---- what users write ------------------------------------------------------------------------------------------


def list_flags() -> Iterator[str]:
    """PROGRAM COMMAND... NAME[=CHOICES] of all flags and arguments."""
    from launcher.completion import parsers

    for name, parser in parsers().items():
        yield from _list_parser(name, parser)


def _list_parser(path: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    positionals = 0
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield f"{path} {name}"
                yield from _list_parser(f"{path} {name}", below)
            continue
        choices = "" if action.choices is None else "=" + ",".join(map(str, action.choices))
        positionals += not action.option_strings
        for option in action.option_strings or [f"argument {positionals} ({action.nargs or 1})"]:
            takes = " VALUE" if action.option_strings and action.nargs != 0 else ""
            yield f"{path} {option}{takes}{choices}"


def list_settings() -> Iterator[str]:
    """[TABLE] KEY: what it may hold, in bootseer.toml."""
    from bootseer.job_file import TABLES
    from bootseer.tuning_limits import LIMITS, is_whole

    for table, keys in TABLES.items():
        for key, setting in keys.items():
            choices = f" ({', '.join(setting.choices)})" if setting.choices else ""
            yield f"[{table}] {key}: {setting.kind.name}{choices} as {setting.flag}"
    for package, limits in LIMITS.items():
        for name in limits:
            yield f"[tuning.{package}] {name}: {'NUMBER' if is_whole(name) else 'SECONDS'}"


def list_variables() -> Iterator[str]:
    """Environment variables of ours, and those of torchrun's flags."""
    from launcher.cli.flags import FLAGS

    yield from filter(None, (flag.env for flag in FLAGS))
    for _, tree in _read_sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.findall(r"\bBOOTSEER_[A-Z][A-Z_]*[A-Z]\b", node.value)


# ---- what programs read ----------------------------------------------------------------------------------------


def list_events() -> Iterator[str]:
    """What docs/reference/events.md names, files, fields, stages, events and their facts, and a source holds."""
    with open(os.path.join(ROOT, "docs", "reference", "events.md"), encoding="utf-8") as file:
        documented = set(re.findall(r"`([a-z][a-z_]+)`", file.read()))
    for _, tree in _read_sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from documented.intersection((node.value,))
            elif isinstance(node, ast.keyword | ast.arg):
                yield from documented.intersection((node.arg,))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield from documented.intersection((node.target.id,))


def list_formats() -> Iterator[str]:
    """Families and numbers of what is stored: `bootseer-tree/1`."""
    for _, tree in _read_sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.findall(r"\bbootseer-[a-z-]+/\d+\b", node.value)


def list_stored() -> Iterator[str]:
    """Fields, in order, of what is stored with a format."""
    for kind in _all_structs():
        if "format" in kind.__struct_fields__:
            yield _describe(kind, ())


def list_messages() -> Iterator[str]:
    """TAG LIMIT PAYLOAD of all messages between nodes: of one with fixed values, as it goes over the wire."""
    from launcher.rendezvous import codec

    for direction, kinds in (("member", codec.FROM_MEMBER), ("coordinator", codec.FROM_COORDINATOR)):
        for tag, kind in kinds.items():
            tag_sent, payload = codec.encode(_sample(kind.type, 1))
            assert tag_sent == tag
            yield f"{direction} {tag:3} {kind.max_bytes:8} {payload.hex()}"


def list_json() -> Iterator[str]:
    """GROUP KEY of what `--json` prints, and the structure of reports."""
    for group, places in JSON_PLACES.items():
        for path, tree in _read_sources():
            if os.path.relpath(path, ROOT).startswith(places):
                for node in ast.walk(tree):
                    yield from (f"{group} {key}" for key in _text_keys(node))
    for name in JSON_STRUCTS:
        module, _, kind = name.partition(":")
        yield f"report {kind} {_describe(getattr(importlib.import_module(module), kind), ())}"


def _text_keys(node: ast.AST) -> Iterator[str]:
    keys: list[ast.expr | None] = []
    if isinstance(node, ast.Dict):
        keys = node.keys
    elif isinstance(node, ast.Assign):
        keys = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
    for key in keys:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


# ---- what code imports -----------------------------------------------------------------------------------------


def list_names() -> Iterator[str]:
    """Public names of Python, with what they take: those that packages export, and those that documents give."""
    exported = [f"{module}.{name}" for module in PUBLIC for name in importlib.import_module(module).__all__]
    pattern = re.compile(r"\b(?:bootseer|launcher)(?:\.[A-Za-z_]\w*)+")
    importing = re.compile(r"^\s*from ((?:bootseer|launcher)[\w.]*) import ([\w, ]+)", re.MULTILINE)
    found = {*exported, *CALLABLE_MODULES}
    for path in _documents():
        with open(path, encoding="utf-8") as file:
            text = file.read()
        found.update(pattern.findall(text))
        for module, names in importing.findall(text):
            for name in filter(None, map(str.strip, names.split(","))):
                found.add(f"{module}.{name}")
                found.update(f"{module}.{name}.{part}" for part in re.findall(rf"\b{name}\.(\w+)", text))
    for name in found:
        value = _resolve(name)
        if value is not None and _is_ours(value):
            yield f"{name}{_signature(value)}"


def _is_ours(value: Any) -> bool:
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return not isinstance(module, str) or module.split(".")[0] in PACKAGES


def _documents() -> Iterator[str]:
    yield os.path.join(ROOT, "README.md")
    for directory in ("docs", "examples"):
        for above, _, names in os.walk(os.path.join(ROOT, directory)):
            for name in names:
                if name.endswith((".md", ".py")):
                    yield os.path.join(above, name)


def _resolve(name: str) -> Any:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if value is not None and value.__name__ in MADE_WHEN_ASKED:
                return value
            value = getattr(value, part, None)
        return value
    return None


def _signature(value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return " (module)"
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return " " + ",".join(value.__members__)
    if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
        # The launch path has a lighter `__new__` for them, whose signature says less.
        defaults = value._field_defaults
        return "(" + ", ".join(name + "=..." * (name in defaults) for name in value._fields) + ")"
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    return "(" + ", ".join(_parameter(each) for each in parameters) + ")"


def _parameter(parameter: inspect.Parameter) -> str:
    star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = "" if parameter.default is inspect.Parameter.empty else "=..."
    named = "~" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
    return f"{star}{named}{parameter.name}{default}"


# ---- helpers ---------------------------------------------------------------------------------------------------


@functools.cache
def _read_sources() -> list[tuple[str, ast.Module]]:
    return list(_parse_sources())


def _parse_sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for directory, _, names in os.walk(os.path.join(ROOT, package)):
            for name in sorted(names):
                if name.endswith(".py"):
                    path = os.path.join(directory, name)
                    with open(path, encoding="utf-8") as file:
                        yield path, ast.parse(file.read(), path)


def _all_structs() -> list[type[msgspec.Struct]]:
    for package in PACKAGES:
        module = importlib.import_module(package)
        for found in pkgutil.walk_packages(module.__path__, package + "."):
            if not found.name.endswith(NOT_IMPORTED):
                try:
                    importlib.import_module(found.name)
                except ImportError:
                    pass  # a library that is not installed
    kinds, queue = [], list(msgspec.Struct.__subclasses__())
    while queue:
        kind = queue.pop()
        queue += kind.__subclasses__()
        if kind.__module__.startswith(PACKAGES):
            kinds.append(kind)
    return kinds


def _describe(of: Any, above: tuple[Any, ...]) -> str:
    """A type without the names of classes, which nobody sees."""
    origin, args = typing.get_origin(of), typing.get_args(of)
    if isinstance(of, type) and issubclass(of, msgspec.Struct):
        if of in above:
            return "(above)"
        hints = typing.get_type_hints(of, include_extras=True)
        needed = set(of.__struct_fields__[: len(of.__struct_fields__) - len(of.__struct_defaults__)])
        shown = [
            f"{encoded}{'' if name in needed else '?'}: {_describe(hints[name], (*above, of))}"
            for name, encoded in zip(of.__struct_fields__, of.__struct_encode_fields__, strict=True)
        ]
        return ("[%s]" if of.__struct_config__.array_like else "{%s}") % ", ".join(shown)
    if isinstance(of, type) and issubclass(of, tuple) and hasattr(of, "_fields"):
        hints = typing.get_type_hints(of, include_extras=True)
        return "[" + ", ".join(f"{name}: {_describe(hints[name], (*above, of))}" for name in of._fields) + "]"
    if isinstance(of, type) and issubclass(of, enum.Enum):
        return "|".join(json.dumps(each.value) for each in of)
    if origin is not None:
        name = "|" if origin in (typing.Union, types.UnionType) else getattr(origin, "__name__", str(origin))
        shown = [_describe(arg, above) if not isinstance(arg, str | int) else json.dumps(arg) for arg in args]
        return "|".join(shown) if name == "|" else f"{name}[{', '.join(shown)}]"
    return getattr(of, "__name__", str(of))


def _sample(of: Any, number: int) -> Any:
    """A value of a type; the same for the same type."""
    origin, args = typing.get_origin(of), typing.get_args(of)
    if isinstance(of, type) and issubclass(of, tuple) and hasattr(of, "_fields"):
        hints = typing.get_type_hints(of)
        return of(*[_sample(hints[name], place) for place, name in enumerate(of._fields, number)])
    if isinstance(of, type) and issubclass(of, enum.Enum):
        return next(iter(of))
    if origin is tuple:
        return (_sample(args[0], number),) if args[-1] is Ellipsis else tuple(_sample(arg, number) for arg in args)
    if origin in (typing.Union, types.UnionType):
        return _sample(next(arg for arg in args if arg is not type(None)), number)
    if origin is typing.Literal:
        return args[0]
    plain: dict[Any, Any] = {str: f"t{number}", bytes: b"b", int: number, float: number + 0.5, bool: True}
    return plain[of]


# Where the records of `--json` are made.
JSON_PLACES = {
    "status": ("launcher/status/", "launcher/agent/node_status.py", "bootseer/hangs/stuck.py"),
    "warm": ("launcher/warm/command.py", "launcher/warm/results.py", "launcher/warm/rounds.py"),
    "check": ("bootseer/cli/check.py",),
    "replay": ("bootseer/cli/replay.py",),
    "ckpt": ("bootseer/cli/ckpt.py",),
    "keys": ("bootseer/cli/keys.py",),
    "image": ("bootseer/cli/image", "bootseer/image/commands/look.py"),
    "env": ("bootseer/cli/env", "bootseer/env/commands/look.py"),
}
JSON_STRUCTS = ("bootseer.report.report:Report",)
SURFACES: dict[str, Callable[[], Iterator[str]]] = {
    "flags.txt": list_flags,
    "settings.txt": list_settings,
    "variables.txt": list_variables,
    "events.txt": list_events,
    "formats.txt": list_formats,
    "stored.txt": list_stored,
    "messages.txt": list_messages,
    "json.txt": list_json,
    "names.txt": list_names,
}


def read_golden(name: str) -> list[str]:
    """The lines that were frozen."""
    with open(os.path.join(GOLDEN, name), encoding="utf-8") as file:
        return file.read().splitlines()


def merge(golden: list[str], found: list[str], *, removes: bool) -> tuple[list[str], list[str]]:
    """PURE: the lines of a golden file from now on, and those of them that are not true any more."""
    gone = sorted(set(golden) - set(found))
    return sorted(set(found) if removes else {*golden, *found}), [] if removes else gone


def main() -> int:
    """Add new lines to all golden files. Return 1 if a frozen line is not true any more."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--remove", action="store_true", help="Remove lines that are not true any more: a break")
    removes = parser.parse_args().remove
    status = 0
    os.makedirs(GOLDEN, exist_ok=True)
    for name, found in collect().items():
        lines, gone = merge(read_golden(name), found, removes=removes)
        with open(os.path.join(GOLDEN, name), "w", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))
        print(f"{name}: {len(lines)} lines", file=sys.stderr)
        for line in gone:
            status = 1
            print(f"{name}: not true any more: {line}; restore it, or --remove", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
