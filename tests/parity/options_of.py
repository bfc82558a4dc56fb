"""The options of each torch version's torchrun: `python -m tests.parity.options_of VERSION [WHEEL]` records them.

In: the parser of a version (overlay.py). Out: recorded/options.json. The guard of prefixes makes the parsers of
other versions out of it, as one torch only is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from typing import Any

PATH = os.path.join(os.path.dirname(__file__), "recorded", "options.json")
TYPES = {"int": int, "float": float, "str": str}
_READ = """
import json, sys
if sys.argv[1]: sys.path.insert(0, sys.argv[1])
from torch.distributed.run import get_args_parser
print(json.dumps([
    {"names": action.option_strings, "nargs": action.nargs, "type": getattr(action.type, "__name__", None),
     "choices": action.choices and list(action.choices), "default": repr(action.default)}
    for action in get_args_parser()._actions if action.option_strings]))
"""


def load() -> dict[str, list[dict[str, Any]]]:
    """By version: each option with its names and what it takes."""
    with open(PATH, encoding="utf-8") as file:
        found: dict[str, list[dict[str, Any]]] = json.load(file)
    return found


def read(directory: str) -> list[dict[str, Any]]:
    """Of the torch in this folder; "": the one that is installed."""
    made = subprocess.run([sys.executable, "-c", _READ, directory], check=True, capture_output=True, text=True)
    found: list[dict[str, Any]] = json.loads(made.stdout)
    return found


def add_missing(parser: argparse.ArgumentParser, version: str) -> None:
    """Makes the parser of the installed torchrun into that of a newer one."""
    from torch.distributed.argparse_util import env

    known = {name for action in parser._actions for name in action.option_strings}
    for option in load()[version]:
        if "--print-completion" in option["names"]:
            if not known & set(option["names"]):
                parser.add_argument(*option["names"], action=_End, choices=option["choices"])
        elif not known & set(option["names"]):
            kind = TYPES.get(option["type"] or "str", str)
            parser.add_argument(*option["names"], action=env, type=kind, default=option["default"].strip("'"))


class _End(argparse.Action):
    """Prints something and ends."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: object, *__: object) -> None:
        parser.exit(0 if isinstance(shell, str) else 2)


def main(argv: list[str]) -> int:
    """Records one version."""
    from tests.parity import overlay

    recorded = load() if os.path.exists(PATH) else {}
    installed = metadata.version("torch").partition("+")[0]
    with tempfile.TemporaryDirectory() as directory:
        if argv[0] != installed:
            overlay.make(argv[0], directory, argv[1] if len(argv) > 1 else "")
        recorded[argv[0]] = read("" if argv[0] == installed else directory)
    with open(PATH, "w", encoding="utf-8") as file:
        json.dump(recorded, file, indent=1, sort_keys=True)
        file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
