"""No wait for a killed process lasts as long as its file server hangs (bootseer/linux/child_processes.py).

A killed process that waits in the kernel (state D) does not end. `Popen.wait()` and `os.waitpid(pid, 0)` after a
kill block their caller then, and so does `subprocess.run` after its timeout.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).parents[2]
WORTH = re.compile(r"\.kill\(|SIGKILL|subprocess\.\w+\([^#]{0,400}\btimeout=")
RUNS = {"run", "call", "check_call", "check_output"}
# Path and function, where the wait cannot last.
BOUNDED = {
    ("bootseer/health/user_check.py", "run_own"),  # runner.py ends the process that waits
    ("bootseer/mounts/tree_daemon/forked.py", "end"),  # its `wait` has a limit
    ("launcher/base/helper_process.py", "wait_for_detached"),  # nothing else is left to do
}


def sources() -> Iterator[Path]:
    for name in ("bootseer", "launcher"):
        yield from (TOP / name).rglob("*.py")


def is_kill(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        is_module = isinstance(node.value, ast.Name) and node.value.id == "os"
        return node.attr == "SIGKILL" or (node.attr == "kill" and not is_module)
    return False


def is_endless_wait(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr == "wait":
        return not node.args and not node.keywords
    if node.func.attr == "reap":  # launcher/base/children.py
        return any(keyword.arg == "waits" for keyword in node.keywords)
    last = node.args[-1] if node.args else None
    return node.func.attr == "waitpid" and isinstance(last, ast.Constant) and last.value == 0


def is_run_with_timeout(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in RUNS:
        return False
    is_subprocess = isinstance(node.func.value, ast.Name) and node.func.value.id == "subprocess"
    return is_subprocess and any(keyword.arg == "timeout" for keyword in node.keywords)


def endless(text: str) -> Iterator[str]:
    """The functions of a module that wait for a killed process without a limit."""
    if not WORTH.search(text):
        return  # most modules: parsing all of them takes seconds
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = list(ast.walk(node))
            kills_and_waits = any(map(is_kill, inside)) and any(map(is_endless_wait, inside))
            if kills_and_waits or any(map(is_run_with_timeout, inside)):
                yield node.name


def test_what_is_found() -> None:
    assert list(endless("def f():\n p.kill()\n p.wait()\ndef g():\n p.kill()\n p.wait(2)")) == ["f"]
    assert list(endless("def f():\n os.kill(p, signal.SIGKILL)\n os.waitpid(p, 0)")) == ["f"]
    assert list(endless("def f():\n os.kill(p, signal.SIGKILL)\n os.waitpid(p, os.WNOHANG)")) == []
    assert list(endless("def f():\n os.kill(p, signal.SIGTERM)\n os.waitpid(p, 0)")) == []
    assert list(endless("def f():\n os.kill(p, signal.SIGKILL)\n children.reap(p, waits=True)")) == ["f"]
    assert list(endless("def f():\n subprocess.run(a, timeout=3)")) == ["f"]


def test_waits_for_killed_processes_have_limits() -> None:
    found = {(str(path.relative_to(TOP)), name) for path in sources() for name in endless(path.read_text())}
    assert found - BOUNDED == set()
