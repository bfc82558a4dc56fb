"""Documents that name code: errors with their exit status, modules in the README of their package, links."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import pytest

from bench.record import without_directories
from bootseer import errors

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def read(name: str) -> str:
    with open(os.path.join(TOP, name), encoding="utf-8") as file:
        return file.read()


def test_every_error_is_listed_with_its_exit_status() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (yes|no) \|$", read("docs/reference/errors.md"), re.MULTILINE)
    listed = {name: (int(status), retryable == "yes") for name, status, retryable in rows}
    known = {
        name: (value.exit_status, value.retryable)
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.BootseerError)
    }
    assert listed == known


def packages() -> Iterator[str]:
    for top in ("bootseer", "launcher"):
        for directory, _, names in os.walk(os.path.join(TOP, top)):
            if "__init__.py" in names:
                yield os.path.relpath(directory, TOP)


def documents() -> list[str]:
    found = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
    for directory, _, names in os.walk(os.path.join(TOP, "docs")):
        found += [os.path.relpath(os.path.join(directory, name), TOP) for name in names if name.endswith(".md")]
    return found + [f"{package}/README.md" for package in packages()]


@pytest.mark.parametrize("package", sorted(packages()))
def test_each_package_names_its_modules(package: str) -> None:
    """A stranger finds the module to change from the tree alone."""
    text = read(f"{package}/README.md")
    modules = {name for name in os.listdir(os.path.join(TOP, package)) if name.endswith(".py")} - {"__init__.py"}
    named = set(re.findall(r"\b(\w+\.py)\b", text))
    assert modules <= named
    tops = ("bootseer", "launcher", "tests")
    known = {name for top in tops for _, _, names in os.walk(f"{TOP}/{top}") for name in names}
    assert named <= known, "a module that is not there"
    assert len(text.splitlines()) <= 40


def test_the_architecture_is_short_and_its_files_exist() -> None:
    text = read("ARCHITECTURE.md")
    assert len(text.encode()) <= 8 << 10
    paths = re.findall(r"`((?:bootseer|launcher|tests|docs)/[\w./-]+)`", text)
    assert len(paths) > 20
    assert not [path for path in paths if not os.path.exists(os.path.join(TOP, path))]


def test_decisions_are_listed_and_name_code_that_exists() -> None:
    directory = os.path.join(TOP, "docs", "internals", "adr")
    index = read("docs/internals/adr/README.md")
    names = sorted(name for name in os.listdir(directory) if name[0].isdigit())
    assert len(names) >= 30 and [name[:4] for name in names] == [f"{1 + place:04}" for place in range(len(names))]
    for name in names:
        assert f"({name})" in index
        for path in re.findall(r"(?:bootseer|launcher|tests)/[\w./]*\w", read(f"docs/internals/adr/{name}")):
            assert os.path.exists(os.path.join(TOP, path)), f"{name}: {path}"


def test_links_in_documents_lead_somewhere() -> None:
    for name in documents():
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", read(name)):
            assert os.path.exists(os.path.join(TOP, os.path.dirname(name), target)), f"{name}: {target}"


def test_each_result_names_its_bench_and_commit() -> None:
    """A figure must not outlive the record that it is from: whoever measures anew writes both."""
    directory = os.path.join(TOP, "docs", "numbers")
    recorded = {
        name.removesuffix(".json"): json.loads(read(os.path.join(directory, name)))["commit"]
        for name in os.listdir(directory)
        if name.endswith(".json")
    }
    rows = []
    for name, least in (("README.md", 5), ("docs/results.md", 40)):
        tables = re.findall(r"^\|.* \| of \|\n\|[-|]+\|\n((?:\|.*\n)+)", read(name), re.MULTILINE)
        found = [row for table in tables for row in table.splitlines()]
        assert len(found) >= least, name
        rows += found
    for row in rows:
        named = re.findall(r"(\w+) `([0-9a-f]+)`", row.rstrip(" |").rpartition("|")[2])
        assert named, row
        for stem, commit in named:
            assert recorded[stem].startswith(commit), f"{stem} was recorded at {recorded[stem][:7]}: {row[:80]}"


def test_recorded_commands_name_no_directory_of_one_machine() -> None:
    directory = os.path.join(TOP, "docs", "numbers")
    for name in os.listdir(directory):
        if name.endswith(".json"):
            words = json.loads(read(os.path.join(directory, name)))["argv"]
            assert without_directories(words) == words, f"{name}: {words}"
