"""Lists of what set-up reads: their format, and the states of names on a node."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from bootseer.env.reads import read_list as kinds
from bootseer.env.reads.current_state import ReadStates
from bootseer.env.reads.make_list import make_reads
from bootseer.env.reads.read_list import Reads, decode, encode, label, states_for_key
from bootseer.errors import FormatVersion, IntegrityError, KeyUnknown
from tests.support import needs_program

GUESS = "ab" * 32
READS = Reads(
    guess=GUESS,
    how="observed",
    reads=[("conf", "names"), ("pip.conf", "above"), ("~/.config/uv/uv.toml", "settings")],
    made={"conf": ["made"]},
    left={"conf (names in it)": ("1 a", "2 b")},
)


def test_canonical_form_never_changes() -> None:
    assert encode(READS) == (
        b'{"format":"bootseer-env-reads/1","guess":"' + GUESS.encode() + b'","how":"observed","is_placed":false,'
        b'"is_whole":false,"left":{"conf (names in it)":["1 a","2 b"]},"made":{"conf":["made"]},'
        b'"reads":[["conf","names"],["pip.conf","above"],["~/.config/uv/uv.toml","settings"]]}'
    )
    assert decode(encode(READS), "here") == READS


@pytest.mark.parametrize(
    "change",
    [
        {"guess": "x"},
        {"how": "told"},
        {"reads": [("b", "file"), ("a", "file")]},
        {"reads": [("a", "file"), ("a", "file")]},
        {"reads": [("a", "smell")]},
        {"reads": [("../a", "file")]},
        {"reads": [("a/../b", "file")]},
        {"reads": [("", "file")]},
        {"reads": [("a\0b", "file")]},
        {"reads": [("a/b", "above")]},
        {"reads": [(f"{number}", "file") for number in range(kinds.MAX_READS + 1)]},
        {"made": {"other": ["made"]}},
        {"made": {"conf": ["a/b"]}},
        {"left": {"other": ("a", "b")}},
    ],
    ids=str,
)
def test_what_no_reader_takes(change: dict[str, object]) -> None:
    wrong = msgspec.structs.replace(msgspec.structs.replace(READS, made={}, left={}), **change)
    if "made" in change or "left" in change:
        wrong = msgspec.structs.replace(READS, **change)
    with pytest.raises(IntegrityError):
        encode(wrong)
    with pytest.raises(IntegrityError, match=r"^here: "):
        decode(msgspec.json.encode(wrong), "here")


def test_other_formats() -> None:
    with pytest.raises(FormatVersion):
        decode(encode(READS).replace(b"reads/1", b"reads/2"), "here")


def test_what_set_up_leaves_counts_as_what_was_there_before() -> None:
    name = label("conf", "names")
    assert states_for_key(READS, {name: "2 b"}) == {name: "1 a"}
    assert states_for_key(READS, {name: "1 a"}) == {name: "1 a"}
    assert states_for_key(READS, {name: "3 c"}) == {name: "3 c"}


# ---- states ------------------------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path: Path) -> Path:
    directory = tmp_path / "above" / "work"
    directory.mkdir(parents=True)
    (tmp_path / "home").mkdir()
    return directory


def look(work: Path, **more: object) -> ReadStates:
    top = work.parent.parent
    environ = {"HOME": f"{top}/home", "BOOTSEER_CACHE": f"{top}/cache"}
    return ReadStates(os.fspath(work), environ, **more)  # type: ignore[arg-type]


def states(work: Path, *reads: tuple[str, str], made: dict[str, list[str]] | None = None) -> dict[str, str]:
    given = Reads(guess=GUESS, how="observed", reads=sorted(reads), made=made or {})
    return look(work).states(given)


Change = Callable[[Path], object]


def write(path: str, text: str = "x\n") -> Change:
    def do(work: Path) -> None:
        file = work / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return do


@pytest.mark.parametrize(
    ("kind", "name", "before", "change", "is_other"),
    [
        ("file", "a", write("a"), write("a", "y\n"), True),
        ("file", "a", write("a"), lambda work: (work / "a").chmod(0o755), True),
        ("file", "a", write("a"), lambda work: (work / "a").chmod(0o600), False),
        ("file", "a", write("a"), lambda work: os.utime(work / "a", (1, 1)), False),
        ("file", "a", write("b"), write("a"), True),
        ("file", "a", write("a"), lambda work: (work / "a").unlink(), True),
        ("there", "a", write("a"), write("a", "y\n"), False),
        ("there", "a", write("b"), write("a"), True),
        ("there", "a", write("a"), lambda work: (work / "a").unlink() or (work / "a").mkdir(), True),
        ("names", "f", write("f/a"), write("f/a", "y\n"), False),
        ("names", "f", write("f/a"), write("f/b"), True),
        ("names", "f", write("f/a"), write("f/made"), False),
        ("names", "f", write("f/a"), write("f/train.log"), False),
        ("names", "f", write("f/a"), write("f/__pycache__/a.pyc"), False),
        ("names", "f", write("f/a"), write("f/.venv/pyvenv.cfg"), False),
        ("names", "f", write("f/a/b"), lambda work: (work / "f/a/b").rename(work / "f/c"), True),
        ("names", ".", write("a"), write("b"), True),
        ("modules", ".", write("a.py"), write("b.py"), False),
        ("modules", ".", write("a.py"), write("json.py"), True),
        ("link", "a", lambda work: (work / "a").symlink_to("b"), write("b"), False),
        (
            "link",
            "a",
            lambda work: (work / "a").symlink_to("b"),
            lambda work: (work / "a").unlink() or (work / "a").symlink_to("c"),
            True,
        ),
        ("above", "uv.toml", write("uv.toml"), write("uv.toml", "y\n"), False),
        ("above", "uv.toml", write("a"), write("../uv.toml"), True),
        ("above", "uv.toml", write("../uv.toml"), write("../uv.toml", "y\n"), True),
        ("settings", "pip.conf", write("pip.conf"), write("pip.conf", "y\n"), True),
        (
            "settings",
            "pip.conf",
            write("pip.conf", "index-url = https://me:one@h/simple\n"),
            write("pip.conf", "index-url = https://me:another@h/simple\n"),
            False,
        ),
        ("settings", "~/.condarc", write("a"), write("../../home/.condarc"), True),
        ("git", ".", write("a"), write("a", "y\n"), False),
    ],
)
def test_what_changes_a_state(
    work: Path, kind: str, name: str, before: Change, change: Change, is_other: bool
) -> None:
    before(work)
    made = {name: ["made"]} if kind == "names" else {}
    was = states(work, (name, kind), made=made)
    change(work)
    now = states(work, (name, kind), made=made)
    assert (was != now) is is_other


@needs_program("git")
def test_names_that_git_ignores_do_not_count(work: Path) -> None:
    subprocess.run(["git", "init", "-q", work.parent], check=True)
    write(".gitignore", "out*\nlogs/\n")(work)
    write("sub/a")(work)
    was = states(work, (".", "names"), ("sub", "names"))
    write("out.pt")(work)
    write("logs/1")(work)
    write("sub/output")(work)
    assert states(work, (".", "names"), ("sub", "names")) == was
    write("sub/b")(work)
    assert states(work, (".", "names"), ("sub", "names")) != was


def test_a_project_that_lies_elsewhere_has_the_same_states(work: Path, tmp_path: Path) -> None:
    write("a")(work)
    write("../uv.toml")(work)
    other = tmp_path / "deep" / "er" / "project"
    other.mkdir(parents=True)
    write("a")(other)
    write("../../uv.toml")(other)
    names = (("a", "file"), ("uv.toml", "above"), ("b", "there"))
    assert states(work, *names) == states(other, *names)


def test_a_large_file_is_read_once_as_long_as_it_does_not_change(work: Path) -> None:
    large = work / "large"
    large.write_bytes(b"x" * (5 << 20))
    os.utime(large)
    (was,) = states(work, ("large", "file")).values()
    kept = work.parent.parent / "cache" / "env" / "digests.json"
    assert not kept.exists(), "it was changed a moment ago"
    rows = {os.fspath(large): (*_stamp(large), "cd" * 32)}
    kept.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    kept.write_bytes(msgspec.json.encode(rows))
    assert states(work, ("large", "file")) == {"large": "cd" * 32}
    large.write_bytes(b"x" * (5 << 20))
    assert states(work, ("large", "file")) == {"large": was}


def _stamp(path: Path) -> tuple[int, ...]:
    info = path.stat()
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def test_more_than_can_be_read_at_a_start(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.env.reads.current_state.MAX_BYTES", 1000)
    write("a", "x" * 800)(work)
    write("b", "x" * 300)(work)
    with pytest.raises(KeyUnknown, match="cannot be read at each start"):
        states(work, ("a", "file"), ("b", "file"))


# ---- what was watched ------------------------------------------------------------------------------------------


def touched(work: Path, path: str, ops: str, **more: object) -> dict[str, object]:
    try:
        info = os.stat(work / path)
        was: object = [info.st_mode, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]
    except OSError:
        was = None
    return {"ops": ops, "was": was, "digest": "", "names": None, "links": ""} | more


def made_of(work: Path, report: dict[str, object], **more: object) -> object:
    return make_reads({"made": [], "gits": []} | report, GUESS, look(work), **more)  # type: ignore[arg-type]


def test_what_others_change_meanwhile_is_reported(work: Path) -> None:
    write("a")(work)
    write("b")(work)
    report: dict[str, object] = {
        "touched": {f"{work}/{name}": touched(work, name, "r", digest="0" * 64) for name in "ab"}
    }
    write("a", "y\n")(work)
    seen = made_of(work, report)
    assert seen.changed == "a"  # type: ignore[attr-defined]
    ours = made_of(work, report | {"made": [f"{work}/a"]})
    assert ours.changed == "" and ours.states["a"] == "0" * 64  # type: ignore[attr-defined]
    assert ours.reads.left["a"] == ("0" * 64, look(work).file(f"{work}/a"))  # type: ignore[attr-defined]


def test_what_lies_in_a_directory_above_has_no_path(work: Path) -> None:
    write("../uv.toml")(work)
    report: dict[str, object] = {
        "touched": {
            f"{work.parent}/uv.toml": touched(work, "../uv.toml", "r"),
            f"{work.parent.parent}/uv.toml": touched(work, "../../uv.toml", "l"),
            f"{work.parent}": touched(work, "..", "l"),
        }
    }
    seen = made_of(work, report)
    assert seen.reads.reads == [("uv.toml", "above")] and not seen.reads.is_placed  # type: ignore[attr-defined]


def test_what_lies_elsewhere_is_meant_from_the_working_directory_unless_a_text_has_its_path(work: Path) -> None:
    write("../beside/deep/a")(work)
    path = os.path.normpath(work / "../beside/deep/a")
    report: dict[str, object] = {"touched": {path: touched(work, "../beside/deep/a", "r")}}
    assert made_of(work, report).reads.is_placed  # type: ignore[attr-defined]
    named = made_of(work, report, texts=[f"pip install --find-links {os.path.dirname(path)} x"])
    assert not named.reads.is_placed  # type: ignore[attr-defined]


def test_what_was_only_written_to_is_no_input(work: Path) -> None:
    write("log")(work)
    report: dict[str, object] = {
        "touched": {f"{work}/log": touched(work, "log", "a")},
        "made": [f"{work}/log"],
    }
    assert made_of(work, report).reads.reads == []  # type: ignore[attr-defined]
