"""bootseer.heartbeat, and what importing bootseer costs."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import bootseer


def test_nothing_happens_outside_of_a_job() -> None:
    assert "_bootseer_rank" not in sys.modules
    bootseer.heartbeat(1, loss=0.5)


def test_it_goes_to_the_rank_side_file(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    rank = ModuleType("_bootseer_rank")
    rank.heartbeat = lambda *args: seen.append(args)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "_bootseer_rank", rank)
    bootseer.heartbeat(1, loss=0.5)
    assert seen == [(1, {"loss": 0.5})]
    rank.heartbeat = None  # type: ignore[attr-defined]  # no events are written in this job
    bootseer.heartbeat(2)
    assert len(seen) == 1


def test_the_function_and_its_module_do_not_get_in_each_others_way() -> None:
    code = (
        "import bootseer.heartbeat, bootseer; bootseer.heartbeat(1); from bootseer.heartbeat import heartbeat as h"
    )
    code += "; assert h is bootseer.heartbeat; from bootseer import heartbeat; heartbeat(1)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_bootseer_loads_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import bootseer; print(sorted(set(sys.modules) - before))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "['__future__', 'bootseer', 'bootseer.heartbeat', 'bootseer.layout']\n"
    assert bootseer.__version__ == "0.2.0"
