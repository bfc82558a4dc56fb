"""`--help` of the groups of `bootseer`: nothing of what a command does is cut off."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import typer

from launcher import commands

APPS = [importlib.import_module(group.module).app for group in commands.GROUPS.values()]


def groups() -> Iterator[tuple[list[str], typer.core.TyperGroup]]:
    """Command lines, with what they are about."""
    waiting = [([app.info.name], typer.main.get_command(app)) for app in APPS]
    while waiting:
        words, command = waiting.pop()
        if isinstance(command, typer.core.TyperGroup):
            yield words, command
            waiting += [([*words, name], each) for name, each in command.commands.items()]


GROUPS = {" ".join(words): command for words, command in groups()}


@pytest.mark.parametrize("words", GROUPS)
def test_the_first_sentence_of_each_command_is_whole(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert commands.main([*words.split(), "--help"]) == 0
    shown = " ".join(capfd.readouterr().out.partition("Commands:")[2].split())
    for name, command in GROUPS[words].commands.items():
        if command.hidden:
            continue
        assert command.help
        first, dot, _ = " ".join(command.help.partition("\n\n")[0].split()).partition(". ")
        assert f"{name} {first}{dot.strip()}" in shown
    assert "..." not in shown


@pytest.mark.parametrize("words", GROUPS)
def test_h_is_help_as_in_other_tools(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    for more in ([], *([name] for name in GROUPS[words].commands)):
        assert commands.main([*words.split(), *more, "-h"]) == 0
        short = capfd.readouterr().out
        assert commands.main([*words.split(), *more, "--help"]) == 0
        assert short == capfd.readouterr().out and "-h, --help" in short


def test_all_groups_of_commands_were_looked_at() -> None:
    assert {"ckpt", "image", "image hot", "env", "env caches", "keys"} <= set(GROUPS)
    assert sum(len(command.commands) for command in GROUPS.values()) > 25
