"""python names.py VERSION=FOLDER ...: writes names.json, from the unpacked wheels of those versions of torch."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

MODULES = (
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.default_planner",
    "torch.distributed.checkpoint.storage",
    "torch.distributed._shard._utils",
)


def names_of(path: Path) -> list[str]:
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return sorted(found)


def main() -> None:
    found = {}
    for each in sys.argv[1:]:
        version, _, directory = each.partition("=")
        found[version] = {name: names_of(Path(directory, *name.split(".")).with_suffix(".py")) for name in MODULES}
    Path(__file__).with_name("names.json").write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
