"""Does the key of an environment change with its inputs, and stay where nothing that counts does? With real tools.

Each layout is a project as users have it, for one version of one installer (env_key_pip.py, env_key_uv.py,
env_key_others.py). Its set-up runs once, watched as in a job, on wheels that are made here; then each change is
made and taken back, and the key of a start is computed. Some changes are followed by set-up: what is restored then
has to be of after the change, whatever installers have cached. What watching costs is measured beside that
(env_key_cost.py). The failing cases are named on stdout before the figures.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

from bench import env_key_cost, env_key_others, env_key_pip, env_key_uv
from bench.env_key_project import Layout, Project
from bench.env_key_tools import Tools
from bench.record import BenchError, Figures, Target, note
from bootseer import aio

ROUNDS = 7
TARGETS = {
    "env_key.changed": Target(at_least=120),
    "env_key.changed_share": Target(at_least=1.0),
    "env_key.stayed": Target(at_least=40),
    "env_key.stayed_share": Target(at_least=1.0),
    "env_key.rebuilt_share": Target(at_least=1.0),
    "env_key.watch_cost": Target(at_most=1.03, samples=7),
}
CHANGED, STAYED, REBUILT = "changed", "stayed", "rebuilt"


class Case(NamedTuple):
    """One change of one layout."""

    layout: str
    change: str
    expected: str  # CHANGED, STAYED or REBUILT
    problem: str  # "" if it came so
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this bench."""
    parser.add_argument(
        "--tools", default=default_directory(), metavar="DIRECTORY", help="where installers are kept"
    )
    parser.add_argument(
        "--place", default="~", metavar="DIRECTORY", help="where projects lie: no folder for temporaries"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="layouts with this in their name")
    parser.add_argument("--change", default="", metavar="TEXT", help="changes with this in their name")
    parser.add_argument("--without-cost", action="store_true", help="do not measure what watching costs")
    parser.add_argument("--verbose", action="store_true", help="name every case, and what is read")


def default_directory() -> str:
    above = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(above, "bootseer-bench", "env-key")


def run(args: argparse.Namespace) -> Figures:
    """All layouts, then the cost."""
    layouts = [each for each in all_layouts() if args.only in each.name]
    tools = Tools(os.path.abspath(args.tools))
    tools.prepare([each.tool for each in layouts])
    cases: list[Case] = []
    place = os.path.expanduser(args.place)
    for layout in layouts:
        began_s = time.perf_counter()
        with tempfile.TemporaryDirectory(
            prefix="bench-env-key-", dir=place, ignore_cleanup_errors=True
        ) as directory:
            own: list[Case] = []
            try:
                own.extend(run_layout(layout, directory, tools, args.change, verbose=args.verbose))
            except BenchError as error:  # of a tool that does not run here; what was tried before is kept
                note(str(error))
                own.append(Case(layout.name, "set-up", CHANGED, str(error).partition("\n")[0], 0.0))
        wrong = sum(bool(each.problem) for each in own)
        note(f"{layout.name}: {len(own)} cases, {wrong} wrong, {time.perf_counter() - began_s:.1f} s")
        for each in own:
            if each.problem or args.verbose:
                print(format_case(each), flush=True)
        cases += own
    figures = Figures()
    add_cases(figures, cases)
    if not args.without_cost:
        env_key_cost.measure(figures, tools, args.rounds, place)
    aio.close()
    return figures


def all_layouts() -> list[Layout]:
    return [*env_key_pip.layouts(), *env_key_uv.layouts(), *env_key_others.layouts()]


def run_layout(
    layout: Layout, directory: str, tools: Tools, only: str = "", *, verbose: bool = False
) -> Iterator[Case]:
    """Raises: BenchError where the user's commands fail, or nothing is found without a change."""
    project = Project(directory, layout, tools)
    project.prepare()
    key = project.snapshot()
    first = project.explain()
    if first.found is None:
        raise BenchError(f"{layout.name}: nothing was changed, and there is no environment: {first.lines}")
    if verbose:
        note("\n".join([*project.said, *first.inputs, *first.keyed.document.reads]))
    for expected, changes in ((CHANGED, layout.changed), (STAYED, layout.stayed)):
        for change in (each for each in changes if only in each.name):
            began_s = time.perf_counter()
            change.do(project)
            try:
                found = project.explain()
            finally:
                change.undo(project)
            has_changed = found.found is None and found.keyed.key != key
            problem = ""
            if expected == CHANGED and not has_changed:
                problem = "the key is the same: what was made before would be restored"
            elif expected == STAYED and (found.found is None or found.keyed.key != key):
                problem = f"another key: {'; '.join(found.lines)[:500]}"
            yield Case(layout.name, change.name, expected, problem, time.perf_counter() - began_s)
    if project.explain().keyed.key != key:
        raise BenchError(
            f"{layout.name}: all was taken back, and the key is another one: {project.explain().lines}"
        )
    for rebuilt in (each for each in layout.rebuilt if only in each.change):
        began_s = time.perf_counter()
        (change,) = (each for each in layout.changed if each.name == rebuilt.change)
        change.do(project)
        try:
            project.snapshot()
            project.restore()
            says = project.ask(rebuilt.statement)
        finally:
            change.undo(project)
        project.become_another()
        problem = "" if says == rebuilt.says else f"what is restored says {says} and not {rebuilt.says}"
        yield Case(layout.name, rebuilt.change, REBUILT, problem, time.perf_counter() - began_s)


def add_cases(figures: Figures, cases: list[Case]) -> None:
    """Of each kind: how many came as they had to, and their share."""
    for kind in (CHANGED, STAYED, REBUILT):
        own = [each for each in cases if each.expected == kind]
        if own:
            right = sum(not each.problem for each in own)
            figures.add(f"env_key.{kind}", "cases that are right", [float(right)])
            figures.add(f"env_key.{kind}_share", "of all cases", [right / len(own)])
    if cases:
        looks = [each.seconds for each in cases if each.expected != REBUILT]
        if looks:
            figures.add("env_key.look_s", "s, a start's look", looks)
        figures.facts["cases"] = [[each.layout, each.change, each.expected] for each in cases]
        figures.facts["wrong"] = [[each.layout, each.change, each.problem] for each in cases if each.problem]


def format_case(case: Case) -> str:
    return f"{'WRONG' if case.problem else 'right'}  {case.layout}: {case.change} ({case.expected}) {case.problem}"
