"""Section `tests` of `bench gpu`: tests that are skipped without a GPU, then those of forks and devices."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from xml.etree import ElementTree

from bench.ckpt_run import ROOT
from bench.gpu_section import Section
from bench.record import BenchError

ALSO = ("tests/integration/test_fork_devices.py", "tests/unit/launcher/ranks/test_devices.py")
MIN_S = 15.0
MARK = "pytest.mark.gpu"
AT_ONCE = 4  # tests: most of their time imports torch


def measure(section: Section) -> None:
    """Both, as far as there is time."""
    run_tests(section, "tests", ["-m", "gpu", *find_files()])
    if section.left_s() > MIN_S:
        run_tests(section, "other_tests", list(ALSO))


def find_files() -> list[str]:
    """Files with such tests: to collect all takes longer than to run these, and needs what is not there."""
    found = []
    for directory, _, names in os.walk(os.path.join(ROOT, "tests")):
        for path in [os.path.join(directory, name) for name in names if name.startswith("test_")]:
            with open(path, encoding="utf-8", errors="replace") as file:
                if MARK in file.read():
                    found.append(os.path.relpath(path, ROOT))
    return sorted(found)


def run_tests(section: Section, name: str, words: list[str]) -> None:
    """Counts what passed, failed and was skipped; what failed is said."""
    report = os.path.join(section.folder, f"{name}.xml")
    # Of the plugins that the machine has only those that are known: others may not fit our pytest.
    given = ["-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", "--timeout", "60", "-W", "ignore"]
    if importlib.util.find_spec("xdist"):
        given += ["-p", "xdist.plugin", "-n", str(AT_ONCE)]
    command = [sys.executable, "-m", "pytest", *given, f"--junitxml={report}", *words]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    try:
        status = subprocess.run(command, cwd=ROOT, env=environ, timeout=max(1.0, section.left_s() - 3)).returncode
    except subprocess.TimeoutExpired:
        status = -1
    if not os.path.exists(report):
        raise BenchError(f"{name}: pytest has left no report (status {status}: not done in time, or no tests)")
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    section.sample(f"{name}_passed", "tests", len(cases) - len(failed) - len(skipped))
    section.sample(f"{name}_failed", "tests", len(failed))
    section.sample(f"{name}_skipped", "tests", len(skipped))
    for case in failed:
        section.say(f"FAILED {case.get('classname')}::{case.get('name')}")
    for case in skipped:
        why = case.find("skipped")
        section.say(f"skipped {case.get('name')}: {'' if why is None else why.get('message')}")
