"""The reader of a helper process's answers handles each word that the process sends.

A reader drops an unknown word, and may wait for ever for another one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

TOP = Path(__file__).parents[2]
WORD = re.compile(r"[a-z]+([-_][a-z]+)*")
ORDERS = {"ask", "_ask", "send"}  # calls that send orders


class Pair(NamedTuple):
    """A process that sends answers, and the modules of one of its readers."""

    senders: str  # a pattern of files
    calls: set[str]  # functions whose first argument is the word
    known: str  # a word that is found, so that this test does not become blind
    reader: tuple[str, ...]
    unread: dict[str, str]  # words that this reader ignores, and why


_CHECKPOINT = ("bootseer/checkpoint/service/*.py", {"send", "_answer"}, "failed")
_CACHES = ("bootseer/env/compile_cache/service.py", {"_tell", "_seed"}, "opened")
PAIRS = {
    "checkpoint of a job": Pair(
        *_CHECKPOINT,
        ("launcher/provision/checkpoint.py",),
        {
            "alive": "each message is a sign of life",
            "taken": "only `holds` causes it",
            "copied": "`said` reports failures",
            "copying": "nothing waits for the copy",
        },
    ),
    "checkpoint without a job": Pair(
        *_CHECKPOINT,
        ("bootseer/cli/node_arena.py",),
        {
            "listening": "there are no savers",
            "alive": "there is no limit",
            "origin": "there are no peers",
            "statistics": "not requested",
        },
    ),
    "environment": Pair(
        "bootseer/env/service/*.py", {"tell"}, "fetched", ("launcher/provision/environment.py",), {}
    ),
    "image": Pair("bootseer/mounts/sandbox/service.py", {"_tell"}, "ready", ("launcher/provision/image.py",), {}),
    "caches of a job": Pair(*_CACHES, ("launcher/provision/compile_caches.py",), {}),
    "caches that are warmed": Pair(
        *_CACHES,
        ("launcher/warm/stages.py",),
        {
            "failed": "each other word than `opened` is a failure",
            "origin": "there are no peers",
            "seeded": "not requested",
            "captured": "not requested",
        },
    ),
    "worker of a warm daemon": Pair(
        "launcher/warm/worker.py", {"tell"}, "done", ("launcher/warm/answers.py",), {}
    ),
    "supervisor": Pair("launcher/supervisor/*.py", {"_tell"}, "exited", ("launcher/supervisor/client.py",), {}),
}


def sent_words(tree: ast.AST, calls: set[str]) -> Iterator[str]:
    """The words that are the first arguments of these functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            word = node.args[0]
            options = [word.body, word.orelse] if isinstance(word, ast.IfExp) else [word]
            for each in options if name in calls else ():
                if isinstance(each, ast.Constant) and isinstance(each.value, str) and WORD.fullmatch(each.value):
                    yield each.value


def read_words(tree: ast.AST) -> set[str]:
    """The texts and the names of fields of a module; not the orders that it sends."""
    orders = {
        id(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node.args
        and getattr(node.func, "attr", getattr(node.func, "id", "")) in ORDERS
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in orders:
            found.add(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_what_is_found() -> None:
    tree = ast.parse("self._tell('a' if x else 'b-c', why='d'); _tell(e); tell('f'); job._tell('g h')")
    assert list(sent_words(tree, {"_tell"})) == ["a", "b-c"]
    tree = ast.parse("match a:\n case 'b': pass\nif a in ('c', 'd'): ask('e', f='g')\nclass A:\n h: int")
    assert read_words(tree) == {"b", "c", "d", "g", "h"}


@pytest.mark.parametrize("name", PAIRS)
def test_each_word_is_handled(name: str) -> None:
    pair = PAIRS[name]
    sent = {word for path in TOP.glob(pair.senders) for word in sent_words(parse(path), pair.calls)}
    read = set().union(*(read_words(parse(TOP / path)) for path in pair.reader))
    assert pair.known in sent
    assert sent - read == set(pair.unread), "add a handler, or the reason why this reader needs none"
