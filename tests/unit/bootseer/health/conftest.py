"""The clock of the runner of checks, for tests in which one check hangs and others answer."""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from bootseer.health import runner
from bootseer.health.finding import Finding


@pytest.fixture
def until(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`until(2)`: the runner's clock stands still until two checks have answered, however slow the machine is."""

    def stand_until(answers: int) -> None:
        collect, real_s, began_s, over = runner._collect, time.monotonic, time.monotonic(), []

        def count(child: runner._Child, *rest: Any) -> list[Finding]:
            over.append(child)
            return collect(child, *rest)

        def now_s() -> float:
            return real_s() if len(over) >= answers else began_s

        monkeypatch.setattr(runner, "_collect", count)
        monkeypatch.setattr(runner, "time", types.SimpleNamespace(monotonic=now_s, sleep=time.sleep))

    return stand_until
