"""Messages count in singular and plural: "1 file", not "1 files" or "1 file(s)"; what costs something warns.

A number before a plural in an f-string is to be given by `bootseer.counted`. Left alone are "of 3 ranks", and what
names a limit ("at most"). A line that is said of what is not to be had, kept or used begins with "warning:".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).parents[2]
THINGS = (
    "blocks|commands|copies|days|directories|disks|distributions|environments|events|faults|files|findings|folders"
    "|hours|items|jobs|keys"
    "|layers|lines|links|modules|nodes|packages|problems|processes|ranks|restarts|seconds|shards|stripes|tensors|workers"
)
COUNTED = re.compile(rf" (more )?({THINGS})\b")
# Of these the code before says that there are several, or they are about files that nobody makes by hand.
MANY = {
    *("bootseer/blocks/trace.py", "bootseer/checkpoint/versions/save_rules.py", "bootseer/hangs/layout.py"),
    *("bootseer/env/commands/common.py", "bootseer/peers/membership.py", "bootseer/report/slow_words.py"),
    *(
        "bootseer/tree/builder/image_config.py",
        "bootseer/trust/key_folder.py",
        "launcher/coordinator/recovery.py",
        "launcher/provision/environment.py",
    ),
    *("launcher/status/text.py", "launcher/monitor/hang/activity.py", "launcher/monitor/failure/record.py"),
    *(
        "launcher/monitor/samples/stacks.py",
        "bootseer/cli/ckpt.py",
        "bootseer/tree/index.py",
        "bootseer/cli/image.py",
    ),
}
LIMIT = re.compile(r"at most|more than|where its|1 to ")


SAYS = {"say", "_say", "said", "tell_all", "log_to_all"}  # each a line for people
COSTS = re.compile(
    r"\b(cannot be|could not"
    r"|(is|are|was|were) not (kept|stored|used|published|recorded|restored|signed|known)"
    r"|(is|are|was|were) not (visible|saved|cached|trusted)"
    r"|left out|still takes|did not end in time|(is|are) skipped|(?<!is )(?<!are )disabled:?)\b"
)
# Answers of commands that were asked for it.
ANSWERS = {
    "bootseer/cli/env.py",
    "bootseer/env/commands/restore.py",
    "bootseer/image/commands/gc.py",
}


def sources() -> list[Path]:
    return sorted(path for name in ("bootseer", "launcher") for path in (TOP / name).rglob("*.py"))


def wrong_counts(text: str) -> Iterator[tuple[int, str]]:
    """Line and what stands there."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.JoinedStr):
            continue
        whole = "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        for before, value, after in zip([None, *node.values], node.values, [*node.values[1:], None], strict=False):
            if not isinstance(value, ast.FormattedValue) or not isinstance(after, ast.Constant):
                continue
            if isinstance(value.value, ast.Call) and getattr(value.value.func, "id", "") == "counted":
                continue
            found = COUNTED.match(str(after.value))
            is_part = isinstance(before, ast.Constant) and str(before.value).endswith(("of ", "all ", "of the "))
            if (found and not is_part and not LIMIT.search(whole)) or re.match(r" [a-z]+\(s\)", str(after.value)):
                yield node.lineno, str(after.value)


def test_what_is_found() -> None:
    found = list(wrong_counts('f"{a} files"; f"{a} node(s) x"; f"{a} of {b} ranks"; f"{a} names; at most 3"'))
    assert [text for _, text in found] == [" files", " node(s) x"]


def test_numbers_and_nouns_agree() -> None:
    found = {path.relative_to(TOP).as_posix(): list(wrong_counts(path.read_text())) for path in sources()}
    assert {name: lines for name, lines in found.items() if lines and name not in MANY} == {}


def unwarned(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of what is said without a warning."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        said = node.args[0]
        parts = said.values if isinstance(said, ast.JoinedStr) else [said]
        line = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
        if name in SAYS and COSTS.search(line) and not line.startswith(("warning: ", "error: ")):
            yield node.lineno, line


def test_what_costs_something_warns() -> None:
    assert [line for _, line in unwarned('say(f"{a} could not be read"); say("warning: it is not kept")')]
    found = {path.relative_to(TOP).as_posix(): list(unwarned(path.read_text())) for path in sources()}
    assert {name: lines for name, lines in found.items() if lines and name not in ANSWERS} == {}
