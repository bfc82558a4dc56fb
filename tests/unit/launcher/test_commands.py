"""The `bootseer` command itself: what is mistyped is told, with what was meant."""

from __future__ import annotations

import pytest

from launcher.commands import main


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("reprot", "unknown command 'reprot': did you mean report?"),
        ("Warm", "did you mean warm?"),
        (
            "xyzzy",
            "choose from ckpt, image, env, keys, replay, report, check, run, warm, status, serve, completion",
        ),
    ],
)
def test_a_mistyped_command(word: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "--json"]) == 2
    found = capsys.readouterr().err
    assert words in found and found.count("\n") == 1


def test_warm_needs_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["warm", "--help"])
    assert "bootseer warm [flags] [script [arguments of the script]]" in capsys.readouterr().out
