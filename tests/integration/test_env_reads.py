"""What set-up reads decides its key: real commands, one snapshot each, then one change at a time.

The commands are of kinds that no text tells of: subshells, scripts of the user's own, a build of a local package,
links, names that are looked up and are not there. After a change of what was read a start finds nothing; after a
change of anything else it finds the snapshot.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bootseer import aio
from bootseer.env.commands.look import StartExplanation
from bootseer.env.commands.look import explain as look
from bootseer.env.commands.snapshot import SnapshotOptions
from bootseer.env.commands.snapshot import snapshot as make_snapshot
from bootseer.env.spec import SetupSpec
from tests.integration.captured_envs import environ_of, make_venv
from tests.made_wheels import make_wheel
from tests.support import needs_program

SCRIPT = """\
. conf/site.env
if [ -f extra.txt ]; then cat extra.txt; fi
cat "$(cat where)"
for each in parts/*.part; do cat "$each"; done
cat current/text
[ -d vendor ] && ls vendor
true
"""
PROGRAM = """\
import json, os, sys
import helper
made = [json.load(open("settings.json"))["name"], helper.NAME, os.path.exists("flag")]
made += sorted(os.listdir("plugins"))
made.append(os.access("tool", os.X_OK))
print(made)
"""
# A build backend of the project's own: pip needs to fetch nothing for it.
BACKEND = """\
import base64, hashlib, os, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "liby-1.0-py3-none-any.whl"
    files = {}
    for above, _, names in os.walk("src"):
        for each in names:
            path = os.path.join(above, each)
            if each.endswith(".py"):
                files[os.path.relpath(path, "src")] = open(path).read()
    info = "liby-1.0.dist-info"
    files[info + "/METADATA"] = "Metadata-Version: 2.1\\nName: liby\\nVersion: 1.0\\n"
    files[info + "/WHEEL"] = "Wheel-Version: 1.0\\nGenerator: own\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path, text in sorted(files.items()):
            wheel.writestr(path, text)
        wheel.writestr(info + "/RECORD", "".join(f"{path},,\\n" for path in [*files, info + "/RECORD"]))
    os.makedirs("build/lib", exist_ok=True)
    open("build/lib/left", "w").write("by the build")
    return name
"""
PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "liby"
version = "1.0"
"""


class Project:
    """A working folder, the folder that set-up makes, a store."""

    def __init__(self, top: Path) -> None:
        self.top, self.work, self.out, self.store = top, top / "above" / "work", top / "out", top / "store"
        self.work.mkdir(parents=True)
        self.out.mkdir()
        self.environ = environ_of(top, BOOTSEER_KEYS=os.fspath(top / "keys"), OUT=os.fspath(self.out))
        self.commands: tuple[str, ...] = ()

    def write(self, path: str, text: str = "x\n") -> Path:
        file = self.work / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def spec(self, **more: object) -> SetupSpec:
        fields: dict[str, object] = {
            "commands": self.commands,
            "targets": (os.fspath(self.out),),
            "store": os.fspath(self.store),
            "cwd": os.fspath(self.work),
        }
        return SetupSpec(**{**fields, **more})  # type: ignore[arg-type]

    def snapshot(self) -> None:
        made = make_snapshot(
            self.spec(),
            SnapshotOptions(),
            self.environ,
            on_line=lambda _: None,
            count=lambda _, __: None,
        )
        assert made.is_ours
        self.become_another()

    def become_another(self) -> None:
        """A node that has the same project and nothing else."""
        # Moved, not removed: a child that set-up left (pip asks `rustc` for its version) may still write in it.
        home = self.top / "home"
        home.rename(Path(tempfile.mkdtemp(prefix="earlier-", dir=self.top)) / "home")
        home.mkdir(exist_ok=True)
        for path in self.out.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def explain(self) -> StartExplanation:
        return look(self.spec(), self.environ, "")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """All kinds of reads in one set-up."""
    made = Project(tmp_path_factory.mktemp("reads"))
    for path in ("a/list.txt", "b/list.txt", "deep/er/list.txt", "given.txt", "one.txt", "src/liby/other.txt"):
        made.write(path)
    made.write("conf/site.env", "SITE=1\n")
    made.write("where", "one.txt\n")
    made.write("parts/1.part")
    made.write("first/text")
    made.write("second/text", "another\n")
    (made.work / "current").symlink_to("first")
    made.write("settings.json", '{"name": "small"}')
    made.write("helper.py", "NAME = 1\n")
    made.write("plugins/one.py")
    made.write("tool").chmod(0o644)
    made.write("../beside/list.txt")
    made.write("setup.sh", SCRIPT)
    made.write("program.py", PROGRAM)
    made.write("train.py", "print(1)\n")
    made.write("liby/pyproject.toml", PYPROJECT)
    made.write("liby/backend.py", BACKEND)
    made.write("liby/src/liby/__init__.py", "A = 1\n")
    made.write("liby/src/liby/build/__init__.py", "B = 1\n")
    made.write("liby/tests/test_liby.py")
    made.write("../../repository/file")
    for words in (["init", "-qb", "main"], ["add", "-A"], ["commit", "-qm", "one"], ["branch", "other"]):
        git(made.top / "repository", *words)
    venv = made.top / "venv"
    make_venv(venv)
    pip = f"{sys.executable} -m pip --python {venv}/bin/python -q"
    made.commands = (
        "(cd a && cat list.txt) > $OUT/a",
        'cd b && cat "$PWD"/list.txt > $OUT/b',
        "sh -c 'cd deep; cd er; cat list.txt' > $OUT/deep",
        "cat < given.txt > $OUT/given",
        "cat ../beside/list.txt > $OUT/beside",
        "sh setup.sh > $OUT/sh",
        f"{sys.executable} program.py > $OUT/py",
        f"{pip} install --no-index --target $OUT/lib ./liby",
        "if [ -f ../up.toml ]; then echo up > $OUT/up; fi",
        f"git clone -q -b other file://{made.top}/repository $OUT/cloned",
    )
    made.snapshot()
    yield made
    aio.close()


def git_commit(project: Project) -> str:
    """A new one, on no branch."""
    words = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit-tree", "-m", "two", "main^{tree}"]
    done = subprocess.run(words, cwd=project.top / "repository", check=True, capture_output=True, text=True)
    return done.stdout.strip()


class Edit(NamedTuple):
    """A change of the project, and that of it which takes it back."""

    do: Callable[[Project], object]
    undo: Callable[[Project], object]


def edit(path: str, text: str = "edited\n") -> Edit:
    before: dict[str, bytes] = {}

    def do(project: Project) -> None:
        file = project.work / path
        before[path] = file.read_bytes()
        file.write_text(text)

    return Edit(do, lambda project: (project.work / path).write_bytes(before[path]))


def add(path: str, text: str = "new\n") -> Edit:
    return Edit(
        lambda project: project.write(path, text),
        lambda project: (project.work / path).unlink(),
    )


def add_directory(path: str) -> Edit:
    return Edit(lambda project: (project.work / path).mkdir(), lambda project: (project.work / path).rmdir())


def remove(path: str) -> Edit:
    return Edit(
        lambda project: (project.work / path).rename(project.top / "removed"),
        lambda project: (project.top / "removed").rename(project.work / path),
    )


def point(path: str, to: str, back: str) -> Edit:
    def turn(project: Project, target: str) -> None:
        (project.work / path).unlink()
        (project.work / path).symlink_to(target)

    return Edit(lambda project: turn(project, to), lambda project: turn(project, back))


def git(directory: Path, *words: str) -> None:
    options = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *options, *words], cwd=directory, check=True, capture_output=True)


def chmod(path: str, mode: int, back: int) -> Edit:
    return Edit(
        lambda project: (project.work / path).chmod(mode), lambda project: (project.work / path).chmod(back)
    )


CHANGED = {
    "in a subshell's folder": edit("a/list.txt"),
    "by $PWD after cd": edit("b/list.txt"),
    "by a shell in a shell": edit("deep/er/list.txt"),
    "as standard input": edit("given.txt"),
    "beside the project": edit("../beside/list.txt"),
    "a script": edit("setup.sh", SCRIPT + "# more\n"),
    "what a script sources": edit("conf/site.env"),
    "a name that another file holds": edit("where", "given.txt\n"),
    "the file of that name": edit("one.txt"),
    "a file that was looked up and was not there": add("extra.txt"),
    "a folder that was looked up and was not there": add_directory("vendor"),
    "a file that a pattern matches": edit("parts/1.part"),
    "another file that a pattern would match": add("parts/2.part"),
    "a file behind a link": edit("first/text"),
    "where a link leads": point("current", "second", "first"),
    "a program": edit("program.py", PROGRAM + "# more\n"),
    "what a program reads": edit("settings.json", '{"name": "large"}'),
    "what a program imports": edit("helper.py", "NAME = 2\n"),
    "a file that a program looks up": add("flag"),
    "a folder that a program lists": add("plugins/two.py"),
    "a name that a program no longer lists": remove("plugins/one.py"),
    "whether a file may be executed": chmod("tool", 0o755, 0o644),
    "a module of a local package": edit("liby/src/liby/__init__.py", "A = 2\n"),
    "a new module of a local package": add("liby/src/liby/more.py"),
    "a package's own folder named build": edit("liby/src/liby/build/__init__.py", "B = 2\n"),
    "the build backend": edit("liby/backend.py", BACKEND + "# more\n"),
    "the description of a local package": edit("liby/pyproject.toml", PYPROJECT + "# more\n"),
    "a file above the project that is looked up": add("../up.toml"),
    "a commit on the branch of a repository elsewhere": Edit(
        lambda project: git(project.top / "repository", "branch", "-f", "other", git_commit(project)),
        lambda project: git(project.top / "repository", "branch", "-f", "other", "main"),
    ),
}
SAME = {
    "a file of a repository elsewhere that is not committed": Edit(
        lambda project: (project.top / "repository/file").write_text("edited\n"),
        lambda project: git(project.top / "repository", "checkout", "-q", "file"),
    ),
    "nothing": Edit(lambda _: None, lambda _: None),
    "a file that nobody reads": edit("train.py"),
    "a new file that nobody looks up": add("train2.py"),
    "a new folder that nobody looks up": add_directory("checkpoints"),
    "what a link no longer leads to": edit("second/text"),
    "tests of a local package": edit("liby/tests/test_liby.py"),
    "a new test of a local package": add("liby/tests/test_more.py"),
    "what is no part of a build": edit("src/liby/other.txt"),
    "what the build left": edit("liby/build/lib/left"),
    "a file that nobody reads in a folder that somebody does": add("conf/more.env"),
    "times": Edit(
        lambda project: [os.utime(path) for path in project.work.rglob("*.txt")],
        lambda _: None,
    ),
    "bits that are not for the owner": chmod("one.txt", 0o640, 0o644),
}


def test_what_set_up_reads_decides_the_key(project: Project) -> None:
    stale = []
    for name, change in CHANGED.items():
        change.do(project)
        try:
            if project.explain().found is not None:
                stale.append(name)
        finally:
            change.undo(project)
    assert not stale
    assert project.explain().found is not None


def test_what_set_up_does_not_read_decides_nothing(project: Project) -> None:
    missed = {}
    for name, change in SAME.items():
        change.do(project)
        try:
            if project.explain().found is None:
                missed[name] = project.explain().lines
        finally:
            change.undo(project)
    assert not missed


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Project]:
    """One with nothing in it; what was begun for it ends with it, whichever test is the first."""
    yield Project(tmp_path)
    aio.close()


@needs_program("git")
def test_a_version_that_git_gives_decides_the_key(another: Project) -> None:
    project = another
    project.write("train.py")

    git(project.work, "init", "-q")
    git(project.work, "add", "-A")
    git(project.work, "commit", "-qm", "one")
    project.commands = ("git describe --always --dirty > $OUT/version",)
    project.snapshot()
    assert project.explain().found is not None
    git(project.work, "status")  # it writes to the index
    assert project.explain().found is not None
    project.write("train.py", "edited\n")
    assert project.explain().found is None
    git(project.work, "checkout", "train.py")
    assert project.explain().found is not None
    git(project.work, "commit", "-q", "--allow-empty", "-m", "two")
    assert project.explain().found is None


def test_what_we_leave_in_a_directory_that_set_up_lists_decides_nothing(another: Project) -> None:
    """As where the environment and its store lie in the project, whose folder an installer lists."""
    another.out = another.work / "made"
    another.out.mkdir()
    another.store = another.work / "kept" / "here" / "store"
    another.environ["OUT"] = os.fspath(another.out)
    another.write("train.py")
    another.commands = (f"{sys.executable} -c 'import os; print(os.listdir())' > $OUT/names",)
    another.snapshot()
    assert another.explain().found is not None, another.explain().lines
    another.write("train2.py")
    assert another.explain().found is None


def test_what_pip_alone_reads_and_looks_for_decides_the_key(another: Project) -> None:
    """Of such commands the kernel tells less: neither names that are looked up nor what is made."""
    project, home = another, another.top / "home"
    del project.environ["PIP_CONFIG_FILE"]
    venv = project.out / "venv"
    bare = project.top / "bare"
    make_venv(venv)
    shutil.copytree(venv, bare, symlinks=True)
    files = {"pyproject.toml": PYPROJECT, "backend.py": BACKEND, "src/liby/__init__.py": "A = 1\n"}
    with tarfile.open(project.write("links/liby-1.0.tar.gz"), "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"liby-1.0/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    project.write("requirements.txt", "liby==1.0\n")
    project.write("bin/pip", f'#!/bin/sh\nexec {sys.executable} -m pip --python {venv}/bin/python "$@"\n')
    (project.work / "bin/pip").rename(project.top / "pip")
    (project.top / "pip").chmod(0o755)
    project.environ["PATH"] = f"{project.top}:{project.environ['PATH']}"
    project.commands = ("pip install -q --no-index --find-links links -r requirements.txt",)

    def is_found() -> bool:
        return project.explain().found is not None

    project.snapshot()
    shutil.copytree(bare, venv, symlinks=True)
    assert is_found(), project.explain().lines
    names = project.explain().keyed.document.reads
    assert not [name for name in names if name.startswith(os.fspath(project.top / "tmp"))]
    project.write("links/liby-1.1.tar.gz")
    assert not is_found()
    (project.work / "links/liby-1.1.tar.gz").unlink()
    for place in (home / ".config/pip/pip.conf", home / ".pip/pip.conf"):
        place.parent.mkdir(parents=True)
        place.write_text("[install]\nno-deps = true\n")
        assert not is_found(), place
        place.unlink()
    assert is_found()


def test_temporary_names_of_pip_in_the_working_directory_decide_nothing(another: Project) -> None:
    """As where TMPDIR is below it: pip's names there differ each time."""
    project = another
    temporary = project.work / "tmp"
    temporary.mkdir()
    project.environ["TMPDIR"] = os.fspath(temporary)
    venv = project.out / "venv"
    bare = project.top / "bare"
    make_venv(venv)
    shutil.copytree(venv, bare, symlinks=True)
    make_wheel(project.work / "links", "small", "1.0")
    project.write("requirements.txt", "small==1.0\n")
    (project.top / "pip").write_text(f'#!/bin/sh\nexec {sys.executable} -m pip --python {venv}/bin/python "$@"\n')
    (project.top / "pip").chmod(0o755)
    project.environ["PATH"] = f"{project.top}:{project.environ['PATH']}"
    project.commands = ("pip install -q --no-index --find-links links -r requirements.txt",)
    project.snapshot()
    shutil.copytree(bare, venv, symlinks=True)
    assert project.explain().found is not None, project.explain().lines
    project.write("requirements.txt", "small\n")
    assert project.explain().found is None
