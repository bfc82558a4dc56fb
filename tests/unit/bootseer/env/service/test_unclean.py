"""Targets in which set-up has begun, and inputs that change meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from bootseer.env.capture.walk import walk
from bootseer.env.key.document import ABSENT, KeyDocument
from bootseer.env.restore.markers import Markers, is_clean
from bootseer.env.service.unclean import changed_input, why_another


@pytest.fixture
def markers(tmp_path: Path) -> Markers:
    return Markers(f"{tmp_path}/there", boot="a")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    directory = tmp_path / "target"
    (directory / "lib").mkdir(parents=True)
    (directory / "lib" / "file").write_text("of before")
    return directory


def looks_clean(markers: Markers, target: Path) -> bool:
    """As who wants to publish asks."""
    found = markers.unclean(os.fspath(target))
    return found is None or is_clean(found, walk(os.fspath(target)))


def begin(markers: Markers, target: Path) -> None:
    markers.begin(os.fspath(target), walk(os.fspath(target)))


def tick(directory: Path) -> None:
    """Until the file system gives another time than that of what was made last."""
    probe, last_ns = directory / "probe", max(entry.ctime_ns for entry in walk(os.fspath(directory)).values())
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        probe.write_text("")
        if probe.stat().st_ctime_ns > last_ns:
            break
    probe.unlink()


def test_what_was_left_counts_until_the_target_is_as_it_was(markers: Markers, target: Path) -> None:
    assert looks_clean(markers, target)
    begin(markers, target)
    assert looks_clean(markers, target), "nothing has been changed yet"
    (target / "tool").touch()
    assert not looks_clean(markers, target)
    (target / "tool").unlink()
    assert looks_clean(markers, target)
    (target / "lib" / "file").write_text("of after!")
    assert not looks_clean(markers, target)


def test_bytecode_is_no_change(markers: Markers, target: Path) -> None:
    begin(markers, target)
    (target / "lib" / "__pycache__").mkdir()
    (target / "lib" / "__pycache__" / "file.cpython-311.pyc").touch()
    assert looks_clean(markers, target)


def test_set_up_that_ends_well_takes_it_away_only_if_it_began_clean(markers: Markers, target: Path) -> None:
    begin(markers, target)
    (target / "tool").touch()
    begin(markers, target)  # again, on top of it
    markers.end(os.fspath(target), is_clean=False)
    assert not looks_clean(markers, target)
    found = markers.unclean(os.fspath(target))
    assert found is not None and found.is_over
    markers.end(os.fspath(target), is_clean=True)
    assert markers.unclean(os.fspath(target)) is None


def test_a_target_that_was_made_again_is_clean(markers: Markers, target: Path, tmp_path: Path) -> None:
    begin(markers, target)
    (target / "tool").touch()
    tick(tmp_path)
    target.rename(tmp_path / "old")
    assert looks_clean(markers, target), "there is nothing"
    (target / "lib").mkdir(parents=True)
    (target / "lib" / "file").write_text("another one")
    assert looks_clean(markers, target)


def test_a_target_that_was_empty_is_clean_when_it_is_so_again(markers: Markers, tmp_path: Path) -> None:
    directory = tmp_path / "empty"
    begin(markers, directory)  # it is not even there
    directory.mkdir()
    assert looks_clean(markers, directory)
    (directory / "tool").touch()
    assert not looks_clean(markers, directory)


def test_a_note_that_cannot_be_read_counts(markers: Markers, target: Path) -> None:
    begin(markers, target)
    (note,) = Path(markers.folder).glob("*.unclean")
    note.write_bytes(b"{")
    assert not looks_clean(markers, target)
    note.unlink()
    begin(markers, target)
    note.chmod(0o666)  # somebody else may have written it
    assert not looks_clean(markers, target)


def document(**inputs: str) -> KeyDocument:
    return KeyDocument(commands=["c"], targets=["/t"], inputs=inputs, base={}, variables={}, salt="")


def test_inputs_that_change_are_named() -> None:
    before = document(a="1", b=ABSENT, c="3")
    assert changed_input(before, document(a="1", b="made by set-up", c="3", d="found in b")) == ""
    assert changed_input(before, document(a="1", b=ABSENT, c="4")) == "c"
    assert changed_input(before, document(b=ABSENT, c="3")) == "a"
    assert why_another(before, document(a="2", b=ABSENT, c="3")).startswith("a changed")
    assert "/t: changed by another job" in why_another(before, before)
    listed = msgspec.structs.replace(before, reads={". (names in it)": "1 a"})
    relisted = msgspec.structs.replace(before, reads={". (names in it)": "2 b"})
    assert why_another(listed, relisted) == ". (names in it) changed before set-up began"
