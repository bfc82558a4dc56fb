"""Environments at another path: which files change and how, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.restore.relocate import (
    RefusedError,
    is_text,
    relocate,
    replace_paths,
    rewrite,
    rewrite_record,
    rewrite_script,
    why_not,
)
from bootseer.tree.builder.building import build
from bootseer.tree.builder.from_directory import DirectorySource
from tests.made_trees import file, folder, make
from tests.testing.trees import MemoryPacks

OLD, NEW = b"/opt/venv", b"/scratch/job/env"
MOVES = [(OLD, NEW)]


@pytest.mark.parametrize(
    ("text", "made"),
    [
        (b"/opt/venv", b"/scratch/job/env"),
        (b'VIRTUAL_ENV="/opt/venv"\n', b'VIRTUAL_ENV="/scratch/job/env"\n'),
        (b"/opt/venv/bin:/opt/venv/lib", b"/scratch/job/env/bin:/scratch/job/env/lib"),
        (b"file:///opt/venv/src", b"file:///scratch/job/env/src"),
        (b"/opt/venv2/bin", b"/opt/venv2/bin"),
        (b"/opt/venv.old", b"/opt/venv.old"),
        (b"/srv/opt/venv/bin", b"/srv/opt/venv/bin"),
        (b"/opt/venv-backup", b"/opt/venv-backup"),
    ],
)
def test_only_the_path_itself_is_replaced(text: bytes, made: bytes) -> None:
    assert replace_paths(text, MOVES) == made


def test_targets_that_change_places() -> None:
    """All at once, not one after the other."""
    assert replace_paths(b"/a/x /b/y", [(b"/a", b"/b"), (b"/b", b"/a")]) == b"/b/x /a/y"
    assert replace_paths(b"/a/b/x /a/c", [(b"/a", b"/n"), (b"/a/b", b"/m")]) == b"/m/x /n/c"


@given(st.binary(max_size=200))
def test_there_and_back(data: bytes) -> None:
    if OLD in data or NEW in data:
        return
    text = data + b' "' + OLD + b'/x" ' + data
    assert replace_paths(replace_paths(text, MOVES), [(NEW, OLD)]) == text


# ---- scripts -----------------------------------------------------------------------------------------------


def test_first_line() -> None:
    text = b"#!/opt/venv/bin/python3 -I\nimport sys\n"
    assert rewrite_script(text, MOVES) == b"#!/scratch/job/env/bin/python3 -I\nimport sys\n"


def test_other_interpreters_stay() -> None:
    for text in (b"#!/usr/bin/env python\nx", b"#!/opt/venv2/bin/python\nx", b"#!/bin/sh\necho hello\n"):
        assert rewrite_script(text, MOVES) == text


def test_a_path_that_is_too_long_for_a_first_line() -> None:
    long = b"/" + b"n" * 120
    made = rewrite_script(b"#!/opt/venv/bin/python -E\nprint(1)\n", [(OLD, long)])
    assert made == b"#!/bin/sh\n'''exec' \"%s/bin/python\" -E \"$0\" \"$@\"\n' '''\nprint(1)\n" % long
    assert rewrite_script(made, [(long, OLD)]).startswith(b"#!/bin/sh\n'''exec' \"/opt/venv/bin/python\" -E ")
    edge = b"/" + b"n" * (127 - len(b"#!/" + b"/bin/python"))
    assert rewrite_script(b"#!/opt/venv/bin/python\n", [(OLD, edge)]) == b"#!" + edge + b"/bin/python\n"
    assert rewrite_script(b"#!/opt/venv/bin/python\n", [(OLD, edge + b"n")]).startswith(b"#!/bin/sh\n'''exec'")


def test_a_path_with_a_space() -> None:
    made = rewrite_script(b"#!/opt/venv/bin/python\nx\n", [(OLD, b"/my env")])
    assert made == b"#!/bin/sh\n'''exec' \"/my env/bin/python\" \"$0\" \"$@\"\n' '''\nx\n"


def test_the_way_of_pip_is_understood() -> None:
    text = b"#!/bin/sh\n'''exec' /opt/venv/bin/python \"$0\" \"$@\"\n' '''\nx = '/opt/venv'\n"
    assert rewrite_script(text, MOVES) == (
        b"#!/bin/sh\n'''exec' \"/scratch/job/env/bin/python\" \"$0\" \"$@\"\n' '''\nx = '/scratch/job/env'\n"
    )


# ---- which files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        b"bin/pip",
        b"bin/activate",
        b"pyvenv.cfg",
        b"lib/python3.11/site-packages/x.pth",
        b"lib/x/a-1.dist-info/direct_url.json",
        b"lib/__editable___a_finder.py",
        b"tools/ruff/bin/ruff",  # of uv, pipx, and whoever has several environments in one folder
        b"pipx/venvs/ruff/share/man/man1/ruff.1",
        b"tools/ruff/uv-receipt.toml",
        b"pipx/venvs/ruff/pipx_metadata.json",
        b"lib/x.egg-link",
    ],
)
def test_files_that_name_their_place(path: bytes) -> None:
    assert is_text(path)


@pytest.mark.parametrize(
    "path",
    [b"lib/a.py", b"lib/python3.11/site-packages/x/bin/y", b"bin/a/b", b"lib/a-1.dist-info/METADATA", b"a.so"],
)
def test_other_files_are_not_read(path: bytes) -> None:
    assert not is_text(path)


def test_programs_are_not_touched() -> None:
    for data in (b"\x7fELF" + OLD + b"/lib", b"PK\x03\x04\0\0" + OLD):
        assert rewrite(b"bin/program", data, MOVES) == data


def test_an_archive_that_python_runs_has_another_first_line_only() -> None:
    data = b"#!/opt/venv/bin/python\nPK\x03\x04\0\0" + OLD
    assert rewrite(b"bin/program", data, MOVES) == data.replace(b"#!/opt/venv", b"#!/scratch/job/env")


BODY = b"import sys\n"
SPACED = b"/opt/my venv"


@pytest.mark.parametrize(
    ("old", "command", "made"),
    [
        (OLD, b'"/opt/venv/bin/python" "$0" "$@"', b'"/scratch/job/env/bin/python" "$0" "$@"'),
        (OLD, b'/opt/venv/bin/python "$0" "$@"', b'"/scratch/job/env/bin/python" "$0" "$@"'),
        (OLD, b'\'/opt/venv/bin/python\' "$0" "$@"', b'"/scratch/job/env/bin/python" "$0" "$@"'),
        (SPACED, b'\'/opt/my venv/bin/python\' "$0" "$@"', b'"/scratch/job/env/bin/python" "$0" "$@"'),
        (b"/opt/it's", b'\'/opt/it\'"\'"\'s/bin/python\' "$0" "$@"', b'"/scratch/job/env/bin/python" "$0" "$@"'),
        # uv venv --relocatable: from where the script is.
        (OLD, b'"$(dirname -- "$(realpath -- "$0")")"/\'python\' "$0" "$@"', None),
        (OLD, b'"$HOME/opt/venv/bin/python" "$0" "$@"', None),
        (OLD, b'/usr/bin/python3 "$0" "$@"', None),
    ],
)
def test_scripts_that_a_shell_starts(old: bytes, command: bytes, made: bytes | None) -> None:
    data = b"#!/bin/sh\n'''exec' " + command + b"\n' '''\n" + BODY
    expected = data if made is None else b"#!/bin/sh\n'''exec' " + made + b"\n' '''\n" + BODY
    assert rewrite_script(data, [(old, NEW)]) == expected


@pytest.mark.parametrize("name", ["it's $HOME", 'a "b"', "c `d`", "back\\slash", "plain place"])
def test_what_is_made_is_started_by_a_real_shell(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").symlink_to(sys.executable)
    script = tmp_path / "script"
    script.write_bytes(
        rewrite_script(
            b"#!/opt/venv/bin/python -I\nimport sys; print(sys.argv[1:])\n", [(OLD, os.fsencode(place))]
        )
    )
    script.chmod(0o755)
    run = subprocess.run([script, "x y", "z"], capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("['x y', 'z']\n", "")


def test_settings_of_jupyter_and_the_like() -> None:
    kernel = b'{"argv": ["/opt/venv/bin/python", "-m", "ipykernel_launcher"]}'
    path = b"share/jupyter/kernels/python3/kernel.json"
    assert is_text(path)
    assert rewrite(path, kernel, MOVES) == kernel.replace(OLD, NEW)
    assert rewrite(b"etc/tool.conf", b"home = /opt/venv\n", MOVES) == b"home = /scratch/job/env\n"
    picture = b"\x89PNG\0/opt/venv"
    assert rewrite(b"share/icon.png", picture, MOVES) == picture


PLACE = "/o/mé 'n env"
SPELLED = [  # path, text with PLACE, the new place, text with that
    ("a-1.dist-info/direct_url.json", "file:///o/m%C3%A9%20%27n%20env/s", "/n/my env", "file:///n/my%20env/s"),
    ("a-1.dist-info/direct_url.json", "file:///o/m%C3%A9%20'n%20env/s", "/n/é", "file:///n/%C3%A9/s"),  # of uv
    ("share/kernel.json", '["/o/m\\u00e9 \'n env/bin/python"]', "/n/é", '["/n/\\u00e9/bin/python"]'),
    ("share/kernel.json", '["/o/mé \'n env/bin/python"]', '/n/"', '["/n/\\"/bin/python"]'),
    ("v/bin/activate.fish", "set -gx VIRTUAL_ENV '/o/mé '\\''n env'", "/n/a", "set -gx VIRTUAL_ENV '/n/a'"),
    ("v/bin/activate", "VIRTUAL_ENV='/o/mé '\"'\"'n env'", "/n/a'b", "VIRTUAL_ENV='/n/a'\"'\"'b'"),
    ("v/bin/activate", 'VIRTUAL_ENV="/o/mé \'n env"', "/n/a", 'VIRTUAL_ENV="/n/a"'),
]


def test_paths_that_files_have_by_other_signs() -> None:
    wrong = []
    for path, text, new, made in SPELLED:
        found = rewrite(path.encode(), text.encode(), [(PLACE.encode(), new.encode())])
        if found != made.encode():
            wrong.append((path, found.decode()))
    assert wrong == []


def test_what_still_names_the_old_place_and_who_is_not_started_is_reported(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    site = old / "lib" / "site-packages"
    site.mkdir(parents=True)
    (old / "bin").mkdir()
    (old / "bin" / "python").write_text("")
    (old / "bin" / "good").write_text(f"#!{old}/bin/python\n")
    (old / "bin" / "lost").write_text(f"#!{old}/bin/python9\n")
    (old / "bin" / "other").write_text("#!/nowhere/python\n")
    (site / "build.py").write_text(f"PREFIX = '{old}'\n")
    (site / "fine.py").write_text(f"PREFIX = '{old}er'\n")
    packs = MemoryPacks()
    built = build(DirectorySource(os.fspath(old)), packs.put)
    shutil.copytree(old, new)
    fd = os.open(new, os.O_RDONLY)
    try:
        told = relocate(built.tree, fd, [(os.fsencode(old), os.fsencode(new))], os.fspath(new))
    finally:
        os.close(fd)
    assert told == [
        f"bin/lost needs the interpreter {new}/bin/python9, which does not exist",
        "bin/other needs the interpreter /nowhere/python, which does not exist",
        "lib/site-packages/build.py still contains the old path",
    ]
    assert (new / "bin" / "good").read_text() == f"#!{new}/bin/python\n"


def test_editable_installs() -> None:
    """What is elsewhere stays there; finders are modules, with bytecode, and are refused."""
    assert rewrite(b"lib/e.pth", b"/home/me/src\n", MOVES) == b"/home/me/src\n"
    assert rewrite(b"lib/e.pth", b"/opt/venv/src/e\n", MOVES) == b"/scratch/job/env/src/e\n"
    with pytest.raises(
        RefusedError, match=r"__editable___e_finder\.py contains its own path; install that package"
    ):
        rewrite(b"lib/__editable___e_finder.py", b"MAPPING = {'e': '/opt/venv/src/e'}", MOVES)
    elsewhere = b"MAPPING = {'e': '/home/me/e'}"
    assert rewrite(b"lib/__editable___e_finder.py", elsewhere, MOVES) == elsewhere


def test_conda_is_refused() -> None:
    index = make([folder(b"0"), folder(b"0/conda-meta"), file(b"0/conda-meta/x-1.json", b"{}")]).index
    assert "conda" in why_not(index, is_relocatable=True)
    assert why_not(make([folder(b"0")]).index, is_relocatable=True) == ""
    assert "not relocatable" in why_not(make([folder(b"0")]).index, is_relocatable=False)


# ---- RECORD ------------------------------------------------------------------------------------------------


def test_record_has_the_new_sums() -> None:
    directory_path = b"lib/python3.11/site-packages"
    data = b"a/__init__.py,sha256=AAAA,3\n../../../bin/a,sha256=BBBB,4\na-1.dist-info/RECORD,,\n"
    made = rewrite_record(data, directory_path, MOVES, {b"bin/a": b"new one"})
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"new one").digest()).rstrip(b"=")
    assert made == data.replace(b"sha256=BBBB,4", b"sha256=" + digest + b",7")
    assert rewrite_record(data, directory_path, MOVES, {}) == data


def test_record_with_absolute_and_odd_names() -> None:
    data = b'/opt/venv/share/x,sha256=AAAA,1\r\n"with, comma",sha256=CCCC,2\r\n'
    made = rewrite_record(data, b"lib", MOVES, {b"lib/with, comma": b"xyz"})
    assert made.startswith(b'/scratch/job/env/share/x,sha256=AAAA,1\r\n"with, comma",sha256=')
    assert made.endswith(b",3\r\n")
