"""The line at the end of a run that sums the parity probes up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.parity.compare import Verdict

VERDICTS = pytest.StashKey[dict[tuple[str, str], Verdict]]()


@pytest.fixture(scope="session")
def verdicts(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Verdict]]:
    """Probe and way of running it -> what came of it."""
    yield request.config.stash.setdefault(VERDICTS, {})


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """`parity: 47 probes x hooks auto/off: N same, M deliberately better, 0 unexplained`."""
    verdicts = config.stash.get(VERDICTS, {})
    if verdicts:
        terminalreporter.write_line(summary(verdicts))


def summary(verdicts: dict[tuple[str, str], Verdict]) -> str:
    """One line: a probe counts once for each way in which it ran."""
    ways = sorted({way for _name, way in verdicts if not way.startswith("live")})
    live = sum(way.startswith("live") for _name, way in verdicts)
    unexplained = sum(bool(verdict.unexplained) for verdict in verdicts.values())
    better = sum(bool(verdict.better) and not verdict.unexplained for verdict in verdicts.values())
    facts = sum(len(verdict.same) + len(verdict.better) for verdict in verdicts.values())
    probes = len({name for name, _way in verdicts})
    return (
        f"parity: {probes} probes x hooks {'/'.join(ways) or 'auto'}"
        + (f" + {live} live" if live else "")
        + f": {len(verdicts) - better - unexplained} same, {better} deliberately better, {unexplained} unexplained"
        + f" ({facts} facts)"
    )
