"""Messages count in singular and plural: "1 file", not "1 files" or "1 file(s)"; what costs something warns.

A number before a plural in an f-string or a logged line is to be given by `bootseer.counted`. Left alone are "of 3
ranks", and what names a limit ("at most"). A line of what is not to be had, kept or used is logged as a warning.
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
    "bootseer/env/capture/hot_imports.py",  # it costs others a prefetch
    "bootseer/image/commands/gc.py",
    "bootseer/mounts/sandbox/service.py",  # as is this
    "bootseer/peers/",  # the store has all bytes
}
# Lines of the logs of daemons.
OF_DAEMONS = ("bootseer/blocks/", "bootseer/mounts/tree_daemon/")


def sources() -> list[Path]:
    return sorted(path for name in ("bootseer", "launcher") for path in (TOP / name).rglob("*.py"))


def level_of(node: ast.AST) -> str:
    """The level of a call of a module's logger; "" for all others."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
    return node.func.attr if is_call and ast.unparse(node.func.value) == "_log" else ""


def parts_of(node: ast.AST) -> list[str | ast.expr]:
    """Texts and values of an f-string, or of a line that is logged; [] for all others."""
    if isinstance(node, ast.JoinedStr):
        return [
            str(part.value) if isinstance(part, ast.Constant) else part.value
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        ]
    if not level_of(node) or not isinstance(node.args[0], ast.Constant):
        return []
    texts = re.split(r"%[.\d]*[a-z]", str(node.args[0].value))
    assert len(texts) == len(node.args), ast.unparse(node)
    return [part for pair in zip(texts, [*node.args[1:], None], strict=True) for part in pair if part is not None]


def wrong_counts(text: str) -> Iterator[tuple[int, str]]:
    """Line and what stands there."""
    for node in ast.walk(ast.parse(text)):
        parts = parts_of(node)
        whole = "".join(part for part in parts if isinstance(part, str))
        for before, value, after in zip([None, *parts], parts, [*parts[1:], None], strict=False):
            if not isinstance(value, ast.expr) or not isinstance(after, str):
                continue
            if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "counted":
                continue
            found = COUNTED.match(after)
            is_part = isinstance(before, str) and before.endswith(("of ", "all ", "of the "))
            if (found and not is_part and not LIMIT.search(whole)) or re.match(r" [a-z]+\(s\)", after):
                yield node.lineno, after


def test_what_is_found() -> None:
    found = list(wrong_counts('f"{a} files"; f"{a} node(s) x"; f"{a} of {b} ranks"; f"{a} names; at most 3"'))
    assert [text for _, text in found] == [" files", " node(s) x"]
    found = list(wrong_counts('_log.info("%s: %d files, %.1f s", a, b, c); _log.info("%s", counted(a, "file"))'))
    assert [text for _, text in found] == [" files, "]


def test_numbers_and_nouns_agree() -> None:
    found = {path.relative_to(TOP).as_posix(): list(wrong_counts(path.read_text())) for path in sources()}
    assert {name: lines for name, lines in found.items() if lines and name not in MANY} == {}


def unwarned(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of what is said without a warning."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if level_of(node) == "info":
            name = "say"
        said = node.args[0]
        parts = said.values if isinstance(said, ast.JoinedStr) else [said]
        line = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
        is_marked = line.startswith(("warning: ", "error: "))
        if (name in SAYS and COSTS.search(line) and not is_marked) or (level_of(node) and is_marked):
            yield node.lineno, line


def test_what_costs_something_warns() -> None:
    assert [line for _, line in unwarned('say(f"{a} could not be read"); say("warning: it is not kept")')]
    assert [line for _, line in unwarned('_log.info("could not be read"); _log.warning("it is not kept")')]
    assert [line for _, line in unwarned('_log.warning("warning: twice")')]
    found = {path.relative_to(TOP).as_posix(): list(unwarned(path.read_text())) for path in sources()}
    left_out = (*ANSWERS, *OF_DAEMONS)
    assert {name: lines for name, lines in found.items() if lines and not name.startswith(left_out)} == {}


TAKES_LINES = re.compile(r"(Say|Callable\[\[str\], \w+\])( \| None)?$")


def passed_lines(text: str) -> Iterator[int]:
    """Lines with a parameter that takes lines for users."""
    for node in ast.walk(ast.parse(text)):
        is_one = isinstance(node, ast.arg) and node.arg in ("say", "log") and node.annotation is not None
        if is_one and TAKES_LINES.match(ast.unparse(node.annotation)):
            yield node.lineno


def test_lines_are_logged_and_not_passed() -> None:
    assert list(
        passed_lines("def a(say: Callable[[str], object], log: str): ...\ndef b(log: Say | None): ...")
    ) == [1, 2]
    found = {path.relative_to(TOP).as_posix(): list(passed_lines(path.read_text())) for path in sources()}
    ours = {name: lines for name, lines in found.items() if lines and name.startswith("bootseer/")}
    # The output of a command; a parameter of a public function (tests/guards/golden).
    assert ours.keys() == {
        "bootseer/cli/check_pairs.py",
        "bootseer/peers/membership.py",
        "bootseer/peers/store.py",
    }
