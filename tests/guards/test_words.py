"""The project's former private words stay out of names, messages and documents: docs/reference/glossary.md has the
terms.
"""

from __future__ import annotations

import re
from pathlib import Path

TOP = Path(__file__).parents[2]
WORDS = (
    *(
        "keeper",
        "keepers",
        "minder",
        "minders",
        "bringer",
        "bringers",
        "workplace",
        "whoever",
        "somebody",
        "stranger",
    ),
    *(
        "donor",
        "donors",
        "door",
        "doors",
        "flights",
        "mend",
        "mends",
        "mended",
        "brings",
        "bringing",
        "standstill",
    ),
    *("strangers", "believe", "believes", "believed", "brought", "heed", "heeds", "MOST"),
)
STANDSTILL = (
    "agent/node_status",
    "monitor/failure/notes",
    "monitor/failure/record",
    "monitor/node_watch",
    "serve/app",
    "serve/views",
    "status/text",
)
# What other programs and versions read, or means another thing: path, word.
FROZEN = {
    ("CONTRIBUTING.md", "believe"),  # it names words to avoid
    ("CONTRIBUTING.md", "whoever"),
    ("CONTRIBUTING.md", "mend"),
    ("bootseer/peers/filling.py", "flights"),  # a statistic's name
    *((f"launcher/{path}.py", "standstill") for path in STANDSTILL),  # a key of records, the name of a file
    ("docs/guide/running.md", "standstill"),
    ("docs/guide/operating.md", "standstill"),
    ("docs/guide/dashboard.md", "standstill"),
    ("docs/internals/testing.md", "standstill"),  # names of tests
    ("bootseer/mounts/tree_daemon/process.py", "minder"),  # a key of the daemon's state file
    ("bootseer/mounts/tree_daemon/prefetch_worker.py", "bringer"),  # the process's name in ps
    ("launcher/provision/checkpoint.py", "keeper"),  # an address
}
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def sources() -> list[str]:
    found = [path for top in ("bootseer", "launcher") for path in (TOP / top).rglob("*.py")]
    found += [TOP / "README.md", TOP / "ARCHITECTURE.md", TOP / "CONTRIBUTING.md"]
    found += [path for path in (TOP / "docs").rglob("*.md") if path.name not in ("numbers.md", "glossary.md")]
    return sorted(str(path.relative_to(TOP)) for path in found)


def words_of(text: str) -> set[str]:
    """The words of a text, also those that names are made of."""
    return set(PART.findall(text))


def test_no_private_word() -> None:
    paths = sources()
    assert len(paths) > 700
    private: set[tuple[str, str]] = set()
    for path in paths:
        found = words_of((TOP / path).read_text(encoding="utf-8"))
        lower = {word.lower() for word in found if not word.isupper()}
        private |= {(path, word) for word in WORDS if word in (found if word.isupper() else lower)}
    assert private == FROZEN


def test_names_are_divided_into_words() -> None:
    assert words_of("_CheckpointKeeper MAX_MOST keeper_of") == {
        "Checkpoint",
        "Keeper",
        "MAX",
        "MOST",
        "keeper",
        "of",
    }
