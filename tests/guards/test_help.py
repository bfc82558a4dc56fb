"""Help texts of all flags and commands, by the rules for English in CONTRIBUTING.md."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

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


def test_a_help_text_begins_with_what_is_set() -> None:
    texts = dict(pair for name, parser in parsers().items() for pair in texts_of(name, parser))
    assert len(texts) > 500
    for flag, text in texts.items():
        assert text[0].isupper() or not text[0].isalpha(), (flag, text)
        assert not text.lower().startswith(NO_BEGINNINGS), (flag, text)
        assert "(default " not in text, (flag, "write (default: ...)")
