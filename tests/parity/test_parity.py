"""Every probe through bootrun, its ranks exec'd, forked or without hooks, against torchrun when it was recorded.

Some probes run through torchrun itself each time. A difference that no probe declares is a failure, and so is a
declared one that is not there any more. bootrun runs a probe once for the recordings of all torch versions: in CI
in one of the ways, in turn, in the campaign in all of them. To fork ranks with torch takes its import each time.
Of the probes that do not use it only every fourth has it, and all in the campaign.
"""

from __future__ import annotations

import json
import platform
from importlib import metadata

import pytest

from tests.campaign import IS_FULL
from tests.parity.compare import Verdict, compare
from tests.parity.model import Observation, Probe
from tests.parity.probes import PROBES
from tests.parity.record import is_later, load, path_of
from tests.parity.runner import run
from tests.support import BOOTRUN, TORCHRUN

pytestmark = pytest.mark.random_order(disabled=True)  # test_each_probe_was_compared looks at those before it

INSTALLED = metadata.version("torch").partition("+")[0]
PATH = path_of(INSTALLED)
RECORDED = load(PATH)
# Of newer versions a part of the probes may be recorded; what is new in them is.
NEWER = {version: load(path_of(version)) for version in ("2.14.1", "2.15.0")}
SAME_PYTHON = RECORDED.get("python", "").split(".")[:2] == platform.python_version().split(".")[:2]
LIVE = [probe for probe in PROBES if probe.live]
Verdicts = dict[tuple[str, str], Verdict]
WAYS = {
    "exec": ["--fork-ranks", "off"],
    "fork": ["--fork-ranks", "on"],
    "bare": ["--rank-hooks", "off"],
}


WITH_TORCH = {probe.name for number, probe in enumerate(PROBES) if IS_FULL or probe.needs_torch or number % 4 == 0}


def check(probe: Probe, way: str, theirs: Observation, ours: Observation, verdicts: Verdicts) -> None:
    """Compares, counts and fails with every unexplained fact."""
    hooks = "off" if way.startswith("bare") else "auto"
    better = [rule for rule in probe.better if rule.hooks in ("", hooks)]
    verdict = compare(theirs, json.loads(json.dumps(ours)), better)
    verdicts[probe.name, way] = verdict
    if verdict.unexplained:
        pytest.fail("unexplained:\n  " + "\n  ".join(verdict.unexplained), pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_bootrun_shows_what_torchrun_showed(probe: Probe, way: str, verdicts: Verdicts) -> None:
    if probe.python_bound and not SAME_PYTHON:
        pytest.skip(f"recorded with Python {RECORDED['python']}")
    preload = ["--preload", "none"] if way == "fork" and probe.name not in WITH_TORCH else []
    ours = run(probe, [BOOTRUN, *WAYS[way], *preload])
    for version, recorded in {INSTALLED: RECORDED, **NEWER}.items():
        if probe.name in recorded["probes"]:
            key = way if version == INSTALLED else f"{way}-{version}"
            check(probe, key, recorded["probes"][probe.name]["observation"], ours, verdicts)


def test_each_probe_was_compared(request: pytest.FixtureRequest, verdicts: Verdicts) -> None:
    """All that the tests above had to compare: each probe, in the campaign in each way."""
    config = request.config
    if config.option.keyword or config.option.markexpr or any("::" in argument for argument in config.args):
        pytest.skip("tests are chosen by hand")
    name = test_bootrun_shows_what_torchrun_showed.__name__
    items = [item for item in request.session.items if getattr(item, "originalname", "") == name]
    ran = [(item.callspec.params["probe"], item.callspec.params["way"]) for item in items]  # type: ignore[attr-defined]
    assert {probe.name for probe, _way in ran} == {probe.name for probe in PROBES}
    assert {way for _probe, way in ran} == set(WAYS)
    assert not IS_FULL or len(ran) == len(PROBES) * len(WAYS)
    wanted = {
        (probe.name, way if version == INSTALLED else f"{way}-{version}")
        for probe, way in ran
        for version, recorded in {INSTALLED: RECORDED, **NEWER}.items()
        if probe.name in recorded["probes"] and (SAME_PYTHON or not probe.python_bound)
    }
    assert wanted <= set(verdicts)


@pytest.mark.slow
@pytest.mark.parametrize("probe", LIVE, ids=lambda probe: probe.name)
def test_torchrun_itself_still_shows_the_same(probe: Probe, verdicts: Verdicts) -> None:
    theirs = json.loads(json.dumps(run(probe, [TORCHRUN])))
    recorded = compare(RECORDED["probes"][probe.name]["observation"], theirs, ())
    assert not recorded.unexplained, f"the recording is out of date: {recorded.unexplained}"
    check(probe, "live", theirs, run(probe, [BOOTRUN]), verdicts)


def test_every_probe_is_recorded_as_it_is_now() -> None:
    known = RECORDED["probes"]
    there = [probe for probe in PROBES if not is_later(probe.since, INSTALLED)]
    assert set(known) == {probe.name for probe in there}, "run `make record-parity`"
    old = [probe.name for probe in there if known[probe.name]["digest"] != probe.digest()]
    assert not old, f"changed since they were recorded, run `make record-parity`: {old}"


@pytest.mark.parametrize("version", NEWER)
def test_what_is_new_in_a_version_is_recorded_and_nothing_is_out_of_date(version: str) -> None:
    known = NEWER[version]["probes"]
    new = {probe.name for probe in PROBES if probe.since and not is_later(probe.since, version)}
    assert new <= set(known), f"run `make record-parity TORCH={version}`"
    old = [probe.name for probe in PROBES if probe.name in known and known[probe.name]["digest"] != probe.digest()]
    assert not old, f"changed since they were recorded, run `make record-parity TORCH={version}`: {old}"


def test_enough_probes() -> None:
    assert len(PROBES) >= 45
    assert len(LIVE) >= 8
