"""Completion and man pages: made from the parsers, so that no flag is missing; completed by a real shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.flags import FLAGS
from launcher.completion import main, parsers
from scripts.man import without_date, write_pages, write_shared
from tests.support import needs_program

SHARE = Path(__file__).parents[3] / "share"
ASK = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
function=$(complete -p "$1" | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$function" "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@needs_program("bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("bootrun", "--ima"), {"--image", "--image-bind", "--image-env", "--image-name"}),
        (("bootrun", "--fork-ranks", ""), {"auto", "restarts", "on", "off"}),
        (("bootseer", ""), {"run", "warm", "ckpt", "image", "env", "keys", "report"}),
        (("bootseer", "image", ""), {"build", "mount", "prefetch"}),
        (("bootseer", "env", "caches", ""), {"list", "gc"}),
        (("bootseer", "warm", "--ho"), {"--hold"}),
        (("bootseer", "completion", ""), {"bash", "zsh", "fish", "tcsh"}),
    ],
)
def test_a_shell_completes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], found: set[str]
) -> None:
    assert main(["bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    run = subprocess.run(["bash", "-c", ASK, "ask", script, *words], capture_output=True, text=True, timeout=60)
    assert found <= set(run.stdout.split()), run.stderr


@needs_program("bash")
def test_names_of_files_are_completed_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bash"]) == 0
    script = capsys.readouterr().out
    ask = f"{script}\ncomplete -p bootrun; complete -p bootseer"
    run = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=60)
    told = run.stdout.splitlines()
    assert len(told) == 2, run.stderr
    assert all("-o default" in line for line in told), "bash's own, where ours has nothing to offer"


def test_a_reader_that_has_enough_is_no_error() -> None:
    code = "import sys; from launcher.completion import main; sys.exit(main(['bash']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.close()
        assert (run.stderr.read(), run.wait(60)) == (b"", 0)


def test_pages_have_every_flag(tmp_path: Path) -> None:
    paths = write_pages(f"{tmp_path}")
    assert [Path(path).name for path in paths] == ["bootrun.1", "bootseer.1"]
    text = Path(paths[0]).read_text().replace("\\-", "-")
    for flag in FLAGS:
        assert flag.names[-1] in text
    other = Path(paths[1]).read_text().replace("\\-", "-")
    assert all(f"bootseer {name}" in other for name in ("warm", "image", "env", "ckpt"))


def test_what_an_installation_has_is_what_the_parsers_give(tmp_path: Path) -> None:
    """`make man` makes share/ anew."""
    made = [Path(path).relative_to(tmp_path) for path in write_shared(f"{tmp_path}")]
    assert len(made) == 8
    for path in made:
        assert (SHARE / path).read_text() == (tmp_path / path).read_text(), f"share/{path} is old: make man"


@pytest.mark.parametrize("date", ["2026-11-27", r"2026\-11\-27"])
def test_a_page_is_the_same_on_any_day(date: str) -> None:
    """Releases of argparse-manpage differ in whether they escape the hyphens of the date."""
    rest = '\n.SH NAME\nbootrun "2026-11-27"\n'
    assert without_date(f'.TH BOOTRUN "1" "{date}" "bootrun"{rest}') == f'.TH BOOTRUN "1" "" "bootrun"{rest}'


def test_pages_and_completions_are_in_the_wheel() -> None:
    import tomllib

    built = tomllib.loads((SHARE.parent / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert built["wheel"]["shared-data"] == {"share": "share", "docs": "share/doc/bootseer"}


def test_both_programs_have_parsers() -> None:
    assert set(parsers()) == {"bootrun", "bootseer"}
