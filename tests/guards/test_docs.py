"""Documents that name code: every error with its exit status, and every file of the table in ARCHITECTURE.md."""

from __future__ import annotations

import json
import os
import re

from bootseer import errors

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def read(name: str) -> str:
    with open(os.path.join(TOP, name), encoding="utf-8") as file:
        return file.read()


def test_every_error_is_listed_with_its_exit_status() -> None:
    listed = {
        found[1]: (int(found[2]), found[3] == "yes")
        for found in re.finditer(r"^\| `(\w+)` \| (\d+) \| (yes|no) \|$", read("docs/errors.md"), re.MULTILINE)
    }
    known = {
        name: (value.exit_status, value.retryable)
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.BootseerError)
    }
    assert listed == known


def test_files_named_in_the_architecture_exist() -> None:
    table = read("ARCHITECTURE.md").partition("## I want")[2].partition("## Decisions")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) > 20
    for row in rows:
        folder = ""
        for name in re.findall(r"`([\w./]+(?:\.py|\.md|/))`", row.partition(" | ")[2]):
            if "/" in name:
                folder = os.path.dirname(name)
            path = name if "/" in name else os.path.join(folder, name)
            assert os.path.exists(os.path.join(TOP, path)), f"{path}: {row}"


def test_every_module_of_the_launcher_is_named_in_the_architecture() -> None:
    text = read("ARCHITECTURE.md")
    for folder, _, names in os.walk(os.path.join(TOP, "launcher")):
        for name in names:
            if name.endswith(".py") and os.path.getsize(os.path.join(folder, name)):
                stem = name.removesuffix(".py")
                assert re.search(rf"\b{stem}\b", text), f"{os.path.join(folder, name)} is not in ARCHITECTURE.md"


def test_links_in_documents_lead_somewhere() -> None:
    documents = [f"docs/{name}" for name in os.listdir(os.path.join(TOP, "docs")) if name.endswith(".md")]
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", *documents):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", read(name)):
            assert os.path.exists(os.path.join(TOP, os.path.dirname(name), target)), f"{name}: {target}"


def test_each_measured_row_of_the_readme_names_its_bench_and_commit() -> None:
    """A figure must not outlive the record that it is from: whoever measures anew writes both."""
    folder = os.path.join(TOP, "docs", "numbers")
    recorded = {
        name.removesuffix(".json"): json.loads(read(os.path.join(folder, name)))["commit"]
        for name in os.listdir(folder)
        if name.endswith(".json")
    }
    table = read("README.md").partition("| measured | result | of |")[2].partition("\n\n")[0]
    rows = [line for line in table.splitlines()[2:] if line.startswith("|")]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"(\w+) `([0-9a-f]+)`", row.rstrip(" |").rpartition("|")[2])
        assert named, row
        for stem, commit in named:
            assert recorded[stem].startswith(commit), f"{stem} was recorded at {recorded[stem][:7]}: {row[:80]}"
