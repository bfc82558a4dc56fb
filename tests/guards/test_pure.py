"""Files that promise to need little keep it: pure modules, the guard, and what runs in foreign interpreters.

A module is pure when its docstring says so; then it may import nothing that reads
clocks, files, processes or the network. Read from the source, so also imports inside functions count.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from collections.abc import Iterator

import pytest

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Not `signal`: state machines name signals without touching any.
IMPURE = {"os", "socket", "subprocess", "threading", "time", "asyncio", "select", "io", "tempfile", "shutil"}


def sources() -> Iterator[str]:
    for package in ("bootseer", "launcher"):
        for directory, _, names in os.walk(os.path.join(TOP, package)):
            yield from (
                os.path.relpath(os.path.join(directory, name), TOP) for name in names if name.endswith(".py")
            )


@functools.cache
def parse(path: str) -> ast.Module:
    with open(os.path.join(TOP, path), encoding="utf-8") as file:
        return ast.parse(file.read())


def imports(tree: ast.Module) -> set[str]:
    """Names of all modules that a file imports, wherever, except for type checking."""
    found: set[str] = set()
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module or "")
    return found


def is_pure(tree: ast.Module) -> bool:
    return re.search(r"\b(PURE|Pure)\b(?=[.:;])|; pure\.", ast.get_docstring(tree) or "") is not None


READS = "bootseer.env.reads"


def test_pure_module_does_no_input_or_output() -> None:
    pure = {path: tree for path in sources() if is_pure(tree := parse(path))}
    assert "launcher/coordinator/job.py" in pure and len(pure) > 150
    for path, tree in pure.items():
        roots = {name.partition(".")[0] for name in imports(tree)}
        of_io = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "io"
        }
        assert not roots & (IMPURE - ({"io"} if of_io == {"BytesIO"} else set())), path


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("launcher/in_rank/bootstrap.py", set()),
        ("launcher/rendezvous/list_distributions.py", set()),
        ("launcher/supervisor/cgroup.py", set()),
        (
            "bootseer/linux/processes.py",
            {"bootseer.light_stdlib", "bootseer.light_typing", "bootseer.linux.syscalls"},
        ),
        ("launcher/base/inherited.py", {"bootseer.light_stdlib", "bootseer.light_typing"}),
        ("launcher/in_rank/fork_server.py", set()),
        ("launcher/in_rank/import_watch.py", set()),
        ("launcher/in_rank/rank_values.py", set()),
        ("launcher/in_rank/store_gate.py", set()),
        ("bootseer/mounts/sandbox/enter.py", set()),
        ("bootseer/env/key/base_probe.py", set()),
        ("bootseer/env/capture/compile_list.py", set()),
        ("bootseer/env/service/supervisor.py", {f"{READS}.setup_watch", f"{READS}.watch_rules"}),
        (
            "bootseer/env/reads/setup_watch.py",
            {
                f"{READS}.{name}"
                for name in (
                    *("name_filter", "name_records", "python_directories", "watch_calls", "watch_rules"),
                    "watched_threads",
                )
            },
        ),
        ("bootseer/env/reads/name_records.py", {f"{READS}.name_filter", f"{READS}.watch_rules"}),
        (
            "bootseer/env/reads/name_filter.py",
            {f"{READS}.python_directories", f"{READS}.watch_rules", f"{READS}.watched_threads"},
        ),
        ("bootseer/env/reads/python_directories.py", {f"{READS}.watched_threads"}),
        ("bootseer/env/reads/watched_threads.py", {f"{READS}.watch_calls"}),
        ("bootseer/env/reads/watch_rules.py", set()),
        ("bootseer/env/reads/watch_calls.py", set()),
        ("bootseer/env/restore/trash.py", set()),
        (
            "launcher/supervisor/supervisor.py",
            {
                "bootseer.light_stdlib",
                "bootseer.light_typing",
                "bootseer.linux",
                "bootseer.linux.processes",
                "launcher.base",
                "launcher.supervisor",
                "launcher.supervisor.cgroup",
                "launcher.supervisor.helpers",
                "launcher.supervisor.fork_server_link",
                "launcher.base.inherited",
            },
        ),
        ("launcher/supervisor/fork_server_link.py", {"bootseer.linux"}),
        ("bootseer/heartbeat.py", set()),
    ],
)
def test_file_that_stands_alone_imports_the_standard_library(path: str, ours: set[str]) -> None:
    foreign = {name for name in imports(parse(path)) if name.partition(".")[0] not in sys.stdlib_module_names}
    # The rank-side file knows torch by name only once the script has imported it.
    assert foreign <= ours | ({"torch"} if path == "launcher/in_rank/bootstrap.py" else set())


# What hands tensors out, to programs that have torch.
TENSORS = {"launcher/in_rank/bootstrap.py"} | {
    f"bootseer/checkpoint/{name}.py"
    for name in (
        "dcp/api", "dcp/items", "dcp/metadata", "dcp/reader", "dcp/versions", "dcp/writer", "format/saved_tensor",
        "pt", "safetensors",
    )
}  # fmt: skip


def test_nothing_imports_torch() -> None:
    paths = set(sources())
    assert paths > TENSORS
    for path in paths - TENSORS:
        roots = {name.partition(".")[0] for name in imports(parse(path))}
        assert not roots & {"torch", "numpy", "bench", "tests"}, path


def test_every_file_begins_with_what_it_is() -> None:
    without = [
        path
        for path in sources()
        if not ast.get_docstring(parse(path)) and os.path.getsize(os.path.join(TOP, path)) > 0
    ]
    assert without == []
