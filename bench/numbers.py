"""`python -m bench numbers FILE...`: the JSON of benches as the Markdown of docs/numbers.md.

Each value is recomputed from its samples; a file whose values do not follow from them is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bench.check import TargetsOf, recompute
from bench.record import BenchError, Target, format_number

HEAD = """\
# Measured figures

Written by `python -m bench numbers docs/numbers/*.json`; do not edit. Each value is the median of its samples, low
and high enclose that median with 95 % confidence (with fewer than six samples: the smallest and the largest).
Ratios are formed within rounds, in which the programs ran alternately. No absolute time is a claim.
bootrun's own CPU time until its ranks
have reached their first statement is `launch.first_bootrun_own_cpu_s`.
"""

NO_GPU = """\
**None of these was measured on a GPU.** `bench/gpu.sh` does so on a machine that has one; so far it ran on CPUs.
"""


def format_documents(paths: Sequence[str], targets_of: TargetsOf) -> str:
    """The page of these files, in the order given."""
    parts = [HEAD]
    documents: list[dict[str, Any]] = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            documents.append(json.load(file))
    if not any(document.get("facts", {}).get("gpus") for document in documents):
        parts.append(NO_GPU)
    for path, document in zip(paths, documents, strict=True):
        parts.append(_format(document, targets_of(document["bench"], document["argv"][1:]) or {}, path))
    return "\n".join(parts)


def _format(document: Mapping[str, Any], targets: Mapping[str, Target], path: str) -> str:
    machine = document["machine"]
    lines = [
        f"## {document['bench']}",
        "",
        f"`python -m bench {' '.join(document['argv'])}`, commit `{document['commit'][:12]}`",
        "",
        _describe(machine),
        "",
        "| figure | median | low | high | unit | n | target |",
        "|---|---:|---:|---:|---|---:|---|",
    ]
    for name, stated in document["figures"].items():
        problem, made = recompute(stated)
        if problem or made is None:
            raise BenchError(f"{path}: {name}: {problem}")
        verdict = ""
        if name in targets:
            verdict = f"{targets[name]}: {'met' if targets[name].is_met(made.value) else '**not met**'}"
        numbers = " | ".join(format_number(number) for number in (made.value, made.low, made.high))
        lines.append(f"| `{name}` | {numbers} | {made.unit} | {made.n} | {verdict} |")
    return "\n".join(lines) + "\n"


def _describe(machine: Mapping[str, Any]) -> str:
    memory_gib = machine["memory_bytes"] / 2**30
    kernel = machine["kernel"].split("-")[0]
    return (
        f"{machine['cores']} cores ({machine['cpu']}), {memory_gib:.0f} GiB, kernel {kernel}, "
        f"Python {machine['python']}, torch {machine['torch']}"
    )
