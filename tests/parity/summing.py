"""A plugin: the line at the end of a run that sums the parity probes up."""

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


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist gives its verdicts to the process that prints the line."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        verdicts = session.config.stash.get(VERDICTS, {})
        output["verdicts"] = [[*key, *map(list, verdict)] for key, verdict in verdicts.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes what a worker gave."""
    found = node.config.stash.setdefault(VERDICTS, {})
    for name, way, *parts in getattr(node, "workeroutput", {}).get("verdicts", ()):
        found[name, way] = Verdict(*map(tuple, parts))


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
