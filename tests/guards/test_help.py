"""Help texts of all flags and commands, by the rules for English in CONTRIBUTING.md."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from launcher.completion import parsers

# Beginnings of half sentences: of what, that what?
NO_BEGINNINGS = ("of ", "that ", "its ", "for ", "what ", "instead ", "without ", "also ", "although ", "there ")


def texts_of(path: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from texts_of(f"{path} {name}", below)
        elif action.help and action.option_strings != ["-h", "--help"]:
            yield f"{path} {'/'.join(action.option_strings) or action.dest}", action.help


TEXTS = dict(pair for name, parser in parsers().items() for pair in texts_of(name, parser))


@pytest.mark.parametrize("flag", TEXTS)
def test_a_help_text_begins_with_what_is_set(flag: str) -> None:
    text = TEXTS[flag]
    assert text[0].isupper() or not text[0].isalpha(), text
    assert not text.lower().startswith(NO_BEGINNINGS), text
    assert "(default " not in text, "write (default: ...)"


def test_the_texts_are_found() -> None:
    assert len(TEXTS) > 200
