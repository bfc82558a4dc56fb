"""The Grafana dashboard and the alerts of examples/ ask only for metrics and labels that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from launcher.serve.metrics import StepTimes, expose
from tests.unit.launcher.serve.test_metrics import TREE, facts, parse

EXAMPLES = Path(__file__).parents[4] / "examples"


def known() -> dict[str, set[str]]:
    """Names of samples, with their labels."""
    steps = StepTimes()
    for at, now_s in enumerate((0.0, 10.0)):
        steps.look(0, {"rank": [0], "steps": [at * 5], "since_step_s": [0.0]}, now_s)
    text, _ = expose("1", [facts()._replace(steps=steps)], [("ab", TREE)])
    found: dict[str, set[str]] = {}
    for family in parse(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> list[str]:
    board: dict[str, Any] = json.loads((EXAMPLES / "grafana.json").read_text("utf-8"))
    alerts: dict[str, Any] = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text("utf-8"))
    panels = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    variables = [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    return [*panels, *variables, *(rule["expr"] for group in alerts["groups"] for rule in group["rules"])]


def test_all_that_is_asked_for_is_exposed() -> None:
    there = known()
    found = expressions()
    assert len(found) > 20
    for expression in found:
        names = set(re.findall(r"\bbootseer_\w+", expression))
        assert names, expression
        assert names <= there.keys(), expression
        for name, selector in re.findall(r"\b(bootseer_\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)=~?\"", selector)) <= there[name], expression
        for labels in re.findall(r"\bby \(([^)]*)\)", expression):
            wanted = {each.strip() for each in labels.split(",")}
            assert all(wanted <= there[name] for name in names), expression
