"""Keepers that say what a test has planned: real processes in place of bootrun's own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.base.loop import Loop
from tests.unit.launcher.ranks.looping import run_until


def install(program: str, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has bootrun start `program`, whatever it wants to start. PYTHON and TOP in it stand for this one and `top`.

    It is to take its line of the file `plan`, and to store the order that it gets as `order0`, `order1` and so on.
    """
    path = top / "service"
    path.write_text(program.replace("PYTHON", sys.executable).replace("TOP", os.fspath(top)))
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", os.fspath(path))


class ServiceBed:
    """A loop of its own, and keepers by a plan."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.loop = Loop()

    def plan(self, lines: object) -> None:
        (self.top / "plan").write_text(json.dumps(lines))

    def until(self, condition: Callable[[], object]) -> None:
        run_until(self.loop, condition)

    def order(self, number: int) -> dict[str, Any]:
        """What the keeper with this number was told at its start, with its `pid`."""
        path = self.top / f"order{number}"
        self.until(path.exists)
        found: dict[str, Any] = json.loads(path.read_text())
        return found
