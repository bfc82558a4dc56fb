"""`python -m bench check FILE`: do the values of a bench's JSON follow from its samples and meet the targets?

The targets are those of the bench's module (`TARGETS`), so a file cannot bring its own. Exit status 0 when
every value agrees and every target that the module states is there and met, else 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.record import Figure, Target, figure, format_number

KEYS = {"bench", "machine", "commit", "argv", "figures"}
MAY_HAVE = {"facts"}
TargetsOf = Callable[
    [str, Sequence[str]], Mapping[str, Target] | None
]  # of a bench, with these words; None: no such


def check_document(document: Any, targets: Mapping[str, Target]) -> tuple[list[str], list[str]]:
    """What was found to be right, and what is wrong with the document, one line each."""
    has_keys = isinstance(document, dict) and set(document) - MAY_HAVE == KEYS
    if not has_keys or not isinstance(document["figures"], dict):
        return [], [f"the document must have exactly the keys {', '.join(sorted(KEYS))}"]
    good: list[str] = []
    bad: list[str] = []
    values: dict[str, Figure] = {}
    for name, stated in document["figures"].items():
        problem, made = recompute(stated)
        if made is None or problem:
            bad.append(f"{name}: {problem}")
        else:
            good.append(f"{name}: {format_number(made.value)} {made.unit} follows from {made.n} samples")
            values[name] = made
    for name, target in targets.items():
        if name not in values:
            bad.append(f"{name}: target {target}, but there is no (valid) figure of that name")
            continue
        made = values[name]
        if made.n < target.samples:
            bad.append(f"{name}: target {target} needs {target.samples} samples, there are {made.n}")
        elif not target.is_met(made.value):
            bad.append(f"{name}: {format_number(made.value)} does not meet the target {target}")
        else:
            good.append(f"{name}: {format_number(made.value)} meets the target {target}")
    return good, bad


def recompute(stated: Any) -> tuple[str, Figure | None]:
    """What is wrong with a figure ("" for nothing), and the figure that its samples make."""
    if not isinstance(stated, dict) or set(stated) != set(Figure._fields):
        return f"must have exactly the keys {', '.join(Figure._fields)}", None
    samples = stated["samples"]
    if not isinstance(samples, list) or not samples:
        return "has no samples", None
    if not all(isinstance(sample, int | float) and math.isfinite(sample) for sample in samples):
        return "has samples that are no numbers", None
    if not isinstance(stated["unit"], str):
        return "has no unit", None
    made = figure(stated["unit"], samples)
    for field in ("value", "low", "high", "n"):
        said, found = stated[field], getattr(made, field)
        if not isinstance(said, int | float) or not math.isclose(said, found, rel_tol=1e-9, abs_tol=1e-12):
            return f"{field} is stated as {said}, the samples give {found}", made
    return "", made


def check_file(path: str, targets_of: TargetsOf) -> int:
    """Prints the findings; returns the exit status."""
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
    except (OSError, ValueError) as error:
        print(f"WRONG  {path} cannot be read: {error}")
        return 1
    bench = str(document.get("bench")) if isinstance(document, dict) else ""
    argv = document.get("argv") if isinstance(document, dict) else None
    targets = targets_of(bench, [str(word) for word in argv[1:]] if isinstance(argv, list) else [])
    if targets is None:
        print(f"WRONG  {path}: no bench is called {bench!r}")
        return 1
    good, bad = check_document(document, targets)
    for line in good:
        print(f"ok     {line}")
    for line in bad:
        print(f"WRONG  {line}")
    print(f"{path}: commit {document.get('commit')}, {len(good)} right, {len(bad)} wrong")
    return 1 if bad else 0
