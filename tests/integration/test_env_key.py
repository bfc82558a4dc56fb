"""Keys of real environments: what changes one and what does not, with interpreters, packages and files of tests.

Must show 4: after a change of what decides, the key is another; after a change of what does not, it is the same.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bootseer.env.key import base
from bootseer.env.key.base import probe_interpreter
from bootseer.env.key.document import differences, encode
from bootseer.env.key.explain import explain, explain_lines, explain_rows
from bootseer.env.key.keying import UNPINNED_AGE_S, Keyed, make_key
from bootseer.env.spec import SetupSpec
from bootseer.errors import BootseerError, ConfigError, LaunchError
from tests.made_wheels import make_wheel
from tests.support import clean_environ, lacking, wait_until

SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
SYSTEM_PYTHON = "/usr/bin/python3"


def make_venv(path: Path, python: str = sys.executable) -> None:
    subprocess.run([python, "-m", "venv", "--without-pip", str(path)], check=True, capture_output=True)


def install(directory: Path, name: str, version: str, **more: object) -> None:
    """A distribution as an installer leaves it, without one."""
    directory.mkdir(parents=True, exist_ok=True)
    wheel = make_wheel(directory / "wheels", name, version, **more)  # type: ignore[arg-type]
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    shutil.rmtree(directory / "wheels")


def uninstall(directory: Path, name: str) -> None:
    for path in directory.glob(f"{name}*"):
        shutil.rmtree(path)


class Job(NamedTuple):
    """A project, its environment, and packages that lie outside of it."""

    top: Path
    environ: dict[str, str]

    @property
    def venv(self) -> Path:
        return self.top / "venv"

    @property
    def work(self) -> Path:
        return self.top / "work"

    @property
    def outside(self) -> Path:
        return self.top / "outside"

    def spec(self, **more: object) -> SetupSpec:
        fields: dict[str, object] = {
            "commands": ("pip install -r requirements.txt", "pip install ./helper"),
            "inputs": (f"{self.work}/data",),
            "python": f"{self.venv}/bin/python",
            "cwd": str(self.work),
        }
        return SetupSpec(**{**fields, **more})  # type: ignore[arg-type]

    def key(
        self, known: dict[str, str] | None = None, environ: dict[str, str] | None = None, **more: object
    ) -> Keyed:
        made = make_key(self.spec(**more), {**self.environ, **(environ or {})}, known_base=known)
        assert made.key, "what commands name is read when it is asked for: now"
        return made


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("env-key") / "venv"
    make_venv(path)
    return path


@pytest.fixture
def job(tmp_path: Path, venv: Path) -> Job:
    found = Job(tmp_path, {**clean_environ(), "PYTHONPATH": f"{tmp_path}/outside", "HOME": str(tmp_path)})
    for name in list(found.environ):
        if name.startswith(("PIP_", "UV_", "VIRTUAL_ENV", "CONDA_")):
            del found.environ[name]
    shutil.copytree(venv, found.venv, symlinks=True)
    install(found.venv / SITE, "inner", "1.0")
    install(found.outside, "outer", "1.0")
    (found.work / "data").mkdir(parents=True)
    (found.work / "helper").mkdir()
    (found.work / "requirements.txt").write_text("one==1.0\n-r more.txt\n")
    (found.work / "more.txt").write_text("two==1.0\n")
    (found.work / "data/list.txt").write_text("a\n")
    (found.work / "helper/pyproject.toml").write_text("[project]\nname = 'helper'\nversion = '1'\n")
    (found.work / "helper/helper.py").write_text("A = 1\n")
    return found


# ---- what changes the key, and what does not ---------------------------------------------------------------


class Case(NamedTuple):
    name: str
    act: Callable[[Job], object] = lambda job: None
    field: str = ""  # the one that changes, "" for none
    spec: dict[str, object] = {}  # noqa: RUF012
    environ: dict[str, str] = {}  # noqa: RUF012


def text(path: str, content: str) -> Callable[[Job], object]:
    return lambda job: (job.top / path).write_text(content)


def touch(job: Job) -> None:
    for path in job.work.rglob("*"):
        os.utime(path, (1, 1))


def move(job: Job) -> None:
    """The same content elsewhere: every file is another one, of another inode and another time."""
    shutil.copytree(job.work, job.top / "copy")
    shutil.rmtree(job.work)
    (job.top / "copy").rename(job.work)


CASES = [
    Case("nothing"),
    # what is installed
    Case(
        "a requirement is pinned otherwise",
        text("work/requirements.txt", "one==1.1\n-r more.txt\n"),
        "inputs:requirements.txt",
    ),
    Case("a file that a requirement file names", text("work/more.txt", "two==1.1\n"), "inputs:more.txt"),
    Case("a file of a declared folder", text("work/data/list.txt", "b\n"), "inputs:data"),
    Case("another file in it", text("work/data/new.txt", ""), "inputs:data"),
    Case("a module that is installed", text("work/helper/helper.py", "A = 2\n"), "inputs:helper (project)"),
    Case(
        "a command",
        spec={"commands": ("pip install -r requirements.txt", "pip install --pre ./helper")},
        field="commands:2",
    ),
    Case(
        "one command more",
        spec={"commands": ("pip install -r requirements.txt", "pip install ./helper", "true")},
        field="commands:3",
    ),
    Case(
        "the order of commands",
        spec={"commands": ("pip install ./helper", "pip install -r requirements.txt")},
        field="commands:order",
    ),
    # what it starts from
    Case(
        "a version in the base",
        lambda job: (uninstall(job.outside, "outer"), install(job.outside, "outer", "2.0")),
        "base:dist:outer",
    ),
    Case(
        "the content of a package in the base, version and all else alike",
        lambda job: install(job.outside, "outer", "1.0", files={"outer/__init__.py": "changed"}),
        "base:dist:outer",
    ),
    Case("a package more in the base", lambda job: install(job.outside, "third", "1.0"), "base:dist:third"),
    Case("a package less in the base", lambda job: uninstall(job.outside, "outer"), "base:dist:outer"),
    Case(
        "a package in the environment",
        lambda job: install(job.venv / SITE, "third", "1.0"),
        "base:target:dist:third",
    ),
    # what is said beside
    Case("the salt", spec={"salt": "2"}, field="salt"),
    Case("a variable of compilers", environ={"CC": "clang"}, field="variables:CC"),
    Case("a variable of pip", environ={"PIP_NO_BINARY": ":all:"}, field="variables:PIP_NO_BINARY"),
    Case(
        "a variable of the user's", environ={"MODE": "fast"}, spec={"variables": ("MODE",)}, field="variables:MODE"
    ),
    # what decides nothing
    Case("an unrelated variable", environ={"SLURM_JOB_ID": "17", "OMP_NUM_THREADS": "4", "RANK": "3"}),
    Case("where pip keeps its cache", environ={"PIP_CACHE_DIR": "/elsewhere", "UV_CACHE_DIR": "/elsewhere"}),
    Case("a variable that the user names and nobody sets", spec={"variables": ("NOT_SET",)}),
    Case("times of inputs only", touch),
    Case("the same content elsewhere", move),
    Case("a file that nobody named", text("work/train.py", "print()\n")),
    Case(
        "bytecode",
        lambda job: (job.work / "data/__pycache__").mkdir() or text("work/data/__pycache__/a.pyc", "")(job),
    ),
    Case("how long set-up may take", spec={"timeout_s": 5.0, "wait_s": 5.0, "max_age_s": 60.0}),
    Case("the store", spec={"store": "s3://bucket/env"}),
    Case("a requirement file that is declared too", spec={"inputs": None}),
    Case("the bits of a mode that nobody installs", lambda job: (job.work / "data/list.txt").chmod(0o600)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_changes_the_key(job: Job, case: Case) -> None:
    before = job.key()
    case.act(job)
    more = dict(case.spec)
    if "inputs" in more:
        more["inputs"] = (f"{job.work}/data", f"{job.work}/requirements.txt")
    after = job.key(environ=case.environ, **more)
    changes = differences(before.document, after.document)
    assert [change.field for change in changes] == ([case.field] if case.field else [])
    assert (before.key != after.key) is bool(case.field)


def test_another_directory_of_the_same_project_has_the_same_key(job: Job) -> None:
    """Jobs often run in a folder made for them."""
    one = job.key()
    shutil.copytree(job.work, job.top / "other")
    other = job.key(cwd=f"{job.top}/other", inputs=(f"{job.top}/other/data",))
    assert one.key == other.key
    editable = ("pip install -e ./helper",)
    assert job.key(commands=editable).editables == [f"{job.work}/helper"]
    assert job.key(commands=editable).key != job.key(commands=editable, cwd=f"{job.top}/other").key, "it names it"
    script = {"commands": ("make deps",), "inputs": ()}
    assert job.key(**script).key != job.key(**script, cwd=f"{job.top}/other").key, "who knows what it reads there"
    told = [
        job.key(commands=("make deps",), cwd=str(directory), inputs=(f"{directory}/data",))
        for directory in (job.work, job.top / "other")
    ]
    assert told[0].key == told[1].key, "the user said what it reads"


def test_another_interpreter(job: Job) -> None:
    asked = probe_interpreter(f"{job.venv}/bin/python", job.environ, "/")
    if not os.access(SYSTEM_PYTHON, os.X_OK):
        lacking(f"there is no {SYSTEM_PYTHON}")
    if probe_interpreter(SYSTEM_PYTHON, job.environ, "/").build == asked.build:
        pytest.skip(f"{SYSTEM_PYTHON}, the only other one that could be there, is that of these tests")
    before = job.key()
    shutil.rmtree(job.venv)
    make_venv(job.venv, SYSTEM_PYTHON)
    fields = {change.field for change in differences(before.document, job.key().document)}
    assert {"base:build", "base:base_prefix"} <= fields
    with pytest.raises(ConfigError, match="no environment of its own"):
        job.key(python=SYSTEM_PYTHON)


def test_another_prefix(job: Job) -> None:
    shutil.copytree(job.venv, job.top / "second", symlinks=True)
    other = job.key(python=f"{job.top}/second/bin/python")
    assert other.targets == [f"{job.top}/second"]
    assert {change.field for change in differences(job.key().document, other.document)} >= {
        "targets:1",
        "base:prefix",
    }


# ---- after set-up ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_a_target_that_is_set_up_has_the_key_it_had_before(job: Job, tool: str) -> None:
    """With real installers, which also write .pth files and entries that the base must not take for its own."""
    wheels = job.top / "wheels"
    make_wheel(wheels, "one", "1.0", scripts={"one": "one:main"})
    make_wheel(wheels, "inner", "2.0")
    shutil.copytree(job.work / "helper", job.top / "source")
    (job.top / "source/helper.egg-info").mkdir()
    (job.top / "source/helper.egg-info/PKG-INFO").write_text("Name: helper\nVersion: 1\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        f"{job.venv}/bin/python",
        "install",
    ]
    if tool == "uv":
        if shutil.which("uv") is None and not os.path.exists(os.path.join(os.path.dirname(sys.executable), "uv")):
            lacking("uv is not installed")
        found = shutil.which("uv") or os.path.join(os.path.dirname(sys.executable), "uv")
        pip = [found, "pip", "install", "--offline", "--no-cache", "--python", f"{job.venv}/bin/python"]
    before = job.key()
    words = [*pip, "--no-index", "--find-links", str(wheels), "one==1.0", "inner==2.0"]
    subprocess.run(words, check=True, capture_output=True, env=job.environ, cwd="/")
    (job.venv / SITE / "__editable__.pth").write_text(f"{job.top}/source\n")
    assert {change.field for change in differences(before.document, job.key().document)} == {
        *("base:target:dist:helper", "base:target:dist:inner", "base:target:dist:one")
    }
    known = before.document.base
    assert job.key(known).key == before.key
    uninstall(job.outside, "outer")
    assert [change.field for change in differences(before.document, job.key(known).document)] == [
        "base:dist:outer"
    ]


def test_an_environment_within_the_project_is_no_input_of_it(job: Job) -> None:
    make_venv(job.work / ".venv")
    (job.work / "pyproject.toml").write_text("[project]\nname = 'x'\nversion = '1'\n")
    store = job.work / "store"
    more = {
        "commands": ("pip install .", "pip install -e ."),
        "inputs": (str(job.work),),
        "python": f"{job.work}/.venv/bin/python",
        "store": f"file://{store}",
    }
    before = job.key(**more)
    install(job.work / ".venv" / SITE, "one", "1.0")
    store.mkdir()
    (store / "pack").write_text("")
    assert job.key(before.document.base, **more).key == before.key
    (job.work / "pyproject.toml").write_text("[project]\nname = 'x'\nversion = '2'\n")
    assert job.key(before.document.base, **more).key != before.key


def test_a_requirement_file_within_a_target_counts(job: Job) -> None:
    targets = (str(job.work),)
    before = job.key(targets=targets)
    (job.work / "requirements.txt").write_text("one==2.0\n")
    assert job.key(targets=targets).key != before.key
    assert "helper lies in a target, so it does not count as an input" in before.notes


def test_asking_changes_nothing(job: Job) -> None:
    def look() -> set[tuple[str, int, int]]:
        found = [(str(path), path.lstat()) for path in job.top.rglob("*")]
        return {(path, info.st_mtime_ns, info.st_ino) for path, info in found}

    before = look()
    job.key()
    assert look() == before


# ---- requirements ------------------------------------------------------------------------------------------


def test_what_is_not_pinned_is_reported_and_ages(job: Job) -> None:
    (job.work / "more.txt").write_text("two>=1\nthree\nfour==1.*\nfive; python_version < '3'\nsix\n-c pins.txt\n")
    (job.work / "pins.txt").write_text("six==1.0\nseven\n")
    keyed = job.key(commands=("pip install -r requirements.txt eight",))
    assert keyed.unpinned == ["eight", "two>=1", "three", "four==1.*"]
    assert keyed.max_age_s == UNPINNED_AGE_S
    assert job.key(max_age_s=60.0).max_age_s == 60.0
    assert set(keyed.document.inputs) == {"data", "requirements.txt", "more.txt", "pins.txt"}
    assert any("more.txt" in note for note in keyed.notes)
    (job.work / "more.txt").write_text("two==1.0\n")
    assert job.key().max_age_s is None


def test_inputs_that_are_not_there(job: Job) -> None:
    with pytest.raises(ConfigError, match=r"--setup-input: .*/missing: there is no such file"):
        job.key(inputs=(f"{job.work}/missing",))
    keyed = job.key(commands=("uv pip compile -o lock.txt && pip install -r lock.txt",))
    assert keyed.document.inputs["lock.txt"] == "absent"


def test_requirement_files_that_name_each_other(job: Job) -> None:
    (job.work / "more.txt").write_text("-r requirements.txt\n-c more.txt\n")
    assert any("names itself" in note for note in job.key().notes)
    for number in range(30):
        (job.work / f"r{number}.txt").write_text(f"-r r{number + 1}.txt\n")
    with pytest.raises(ConfigError, match="16 deep"):
        job.key(commands=("pip install -r r0.txt",))
    (job.work / "wide.txt").write_text("".join(f"-r w{number}.txt\n" for number in range(300)))
    with pytest.raises(ConfigError, match="more than 256 files"):
        job.key(commands=("pip install -r wide.txt",))


def test_files_that_commands_name_count_without_being_declared(job: Job) -> None:
    wheel = make_wheel(job.work / "wheels", "one", "1.0")
    (job.work / "setup.sh").write_text("pip install one\n")
    commands = (
        "pip install ./wheels/one-1.0-py3-none-any.whl",
        "sh setup.sh",
        "pip install --find-links wheels one==1.0",
    )
    before = job.key(commands=commands)
    assert {"wheels/one-1.0-py3-none-any.whl", "setup.sh", "wheels (archives)"} <= set(before.document.inputs)
    assert any("setup.sh" in note and "--setup-input" in note for note in before.unknown)
    make_wheel(job.work / "wheels", "one", "1.0", files={"one/__init__.py": "A = 2\n"})
    assert os.path.basename(wheel) in os.listdir(job.work / "wheels")
    after = job.key(commands=commands)
    assert {change.field for change in differences(before.document, after.document)} == {
        *("inputs:wheels/one-1.0-py3-none-any.whl", "inputs:wheels (archives)")
    }


def test_a_constraint_file_of_the_environment(job: Job) -> None:
    pins = job.top / "pins.txt"
    pins.write_text("three==1.0\n")
    commands = ("pip install three",)
    keyed = job.key(commands=commands, environ={"PIP_CONSTRAINT": str(pins)})
    assert keyed.unpinned == []
    pins.write_text("three==2.0\n")
    assert job.key(commands=commands, environ={"PIP_CONSTRAINT": str(pins)}).key != keyed.key


def test_a_project_of_uv(job: Job) -> None:
    (job.work / "pyproject.toml").write_text("[project]\nname = 'x'\nversion = '1'\ndependencies = ['a']\n")
    keyed = job.key(commands=("uv sync",))
    assert keyed.unpinned == [f"{job.work}/pyproject.toml (there is no uv.lock)"]
    (job.work / "uv.lock").write_text("version = 1\n")
    locked = job.key(commands=("uv sync",))
    assert locked.unpinned == []
    (job.work / "uv.lock").write_text("version = 2\n")
    assert job.key(commands=("uv sync",)).key != locked.key


# ---- secrets -----------------------------------------------------------------------------------------------

SECRETS = ("Hunter22Alpha", "Hunter22Beta", "Hunter22Gamma", "Hunter22Delta", "Hunter22Epsilon")


def test_no_secret_gets_out(job: Job) -> None:
    alpha, beta, gamma, delta, epsilon = SECRETS
    (job.work / "requirements.txt").write_text(
        f"--extra-index-url https://me:{alpha}@host/simple\nthree @ https://host/three.whl?sig={beta}\n"
        "four @ https://${NAME_OF_USER}:${WORD_OF_USER}@host/four.whl\n"
    )
    environ = {
        "PIP_INDEX_URL": f"https://me:{gamma}@host/simple",
        "SOME_TOKEN": delta,
        "NAME_OF_USER": "somebody",
        "WORD_OF_USER": epsilon,
        "MODE": f"with {delta} in it",
    }
    commands = (
        "pip install -r requirements.txt",
        f"pip install --index-url https://{delta}@host/simple three",
        f"pip install https://me:{alpha}@host/a.whl $SOME_TOKEN",
        f"echo {epsilon}",
        f"./missing.sh --password {beta}",
    )
    keyed = job.key(commands=commands, environ=environ, variables=("MODE",), max_age_s=5.0)
    empty = job.key()
    told = explain(keyed.document, [("0" * 64, empty.document)])
    back = explain(empty.document, [("0" * 64, keyed.document)])
    everything = [
        repr(keyed),
        encode(keyed.document).decode(),
        *explain_lines(told, 100),
        *explain_lines(back, 100),
    ]
    everything += [json.dumps(explain_rows(told)), json.dumps(explain_rows(back))]
    errors = [{"inputs": (f"{job.work}/missing",)}, {"targets": ("/etc",)}, {"python": f"{job.top}/missing"}]
    for more in errors:
        with pytest.raises(BootseerError) as caught:
            job.key(environ=environ, **{"commands": commands, **more})
        everything.append(str(caught.value))
    for each in everything:
        assert not [secret for secret in SECRETS if secret in each]
    others = {name: value.replace("Hunter22", "Another1") for name, value in environ.items()}
    same = job.key(
        commands=commands,
        environ={**others, "SOME_TOKEN": delta, "WORD_OF_USER": epsilon, "MODE": environ["MODE"]},
        variables=("MODE",),
    )
    assert same.key == keyed.key, "a new password makes no other environment"


# ---- the interpreter ---------------------------------------------------------------------------------------


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exit 3", r"exit status 3\): it wrote nothing"),
        ("echo nonsense; printf '\\033[31m'", "nonsense|\\?\\[31m"),
        ("echo; echo 'bootseer-base {}'", "exit status 0"),
        ('echo; echo "bootseer-base $2 {}"', "invalid report"),
        ('echo; echo "bootseer-base $2 [[[["', "invalid report"),
        ('echo; printf "bootseer-base $2 {"', "exit status 0"),
        ("exec head -c 20000000 /dev/zero", "more than 16777216 bytes"),
    ],
)
def test_an_interpreter_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    python = program(tmp_path / "python", text)
    with pytest.raises(ConfigError, match=message) as caught:
        probe_interpreter(python, {"PATH": os.environ["PATH"]}, "/")
    assert str(caught.value).startswith(f"{python}: ")
    assert str(caught.value).isprintable()


def test_an_interpreter_that_cannot_run_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot be run"):
        probe_interpreter(f"{tmp_path}/missing", {}, "/")
    with pytest.raises(ConfigError, match="cannot be run"):
        probe_interpreter(sys.executable, {}, f"{tmp_path}/missing")
    monkeypatch.setattr(base, "PROBE_TIMEOUT_S", 0.2)
    with pytest.raises(LaunchError, match=r"did not report within 0.2 s"):
        probe_interpreter(program(tmp_path / "python", "exec sleep 600"), {"PATH": os.environ["PATH"]}, "/")


@pytest.fixture
def noisy(job: Job) -> Iterator[Job]:
    """Start-up code that writes before us, and leaves a process with our pipe open.

    By a .pth file: Debian's Python has a sitecustomize of its own.
    """
    (job.venv / SITE / "noisy.pth").write_text("import start_up_code\n")
    (job.venv / SITE / "start_up_code.py").write_text(
        "import subprocess, sys\n"
        "print('{\"bootseer-base\": 1}')\n"
        "print('\\nbootseer-base {}')\n"
        f"with open({str(job.top / 'pid')!r}, 'w') as file:\n"
        "    file.write(str(subprocess.Popen(['sleep', '600']).pid) + '\\n')\n"
    )
    yield job
    os.kill(int((job.top / "pid").read_text()), signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{int((job.top / 'pid').read_text())}"))


def test_start_up_code_is_the_interpreters_own_business(noisy: Job) -> None:
    started_s = time.monotonic()
    assert noisy.key().document.base["target:dist:inner"].startswith("1.0 ")
    assert time.monotonic() - started_s < base.PROBE_TIMEOUT_S / 2, "its child was waited for"


def test_conda_packages_are_known_by_name_version_and_build(job: Job) -> None:
    meta = job.venv / "conda-meta"
    meta.mkdir()
    (meta / "lib-name-1.0-py_0.json").write_text("{}")
    (meta / "history").write_text("")
    (meta / "bad.json").write_text("")
    found = job.key(targets=(f"{job.top}/target",)).document.base
    assert {name: value for name, value in found.items() if "conda:" in name} == {"conda:lib-name": "1.0 py_0"}
    assert job.key().document.base["target:conda:lib-name"] == "1.0 py_0"


def test_hundreds_of_distributions_take_no_time(job: Job) -> None:
    for number in range(200):
        install(job.venv / SITE, f"made{number}", "1.0")
    python = f"{job.venv}/bin/python"
    took_s = []
    for _ in range(3):
        started_s = time.monotonic()
        found = probe_interpreter(python, job.environ, "/")
        took_s.append(time.monotonic() - started_s)
    assert sum(len(directory.distributions) for directory in found.folders) >= 201
    assert min(took_s) < 1.0, "a fifth of a second on an idle machine"


def test_editing_ones_own_code_makes_no_other_environment(job: Job) -> None:
    """The loop of whoever develops: edit a module of an editable install, start again."""
    commands = ("pip install -e .",)
    (job.work / "pyproject.toml").write_text("[project]\nname = 'x'\nversion = '1'\n")
    (job.work / "train.py").write_text("A = 1\n")
    (job.work / "x").mkdir()
    (job.work / "x/model.py").write_text("A = 1\n")
    before = job.key(commands=commands)
    (job.work / "x/model.py").write_text("A = 2\n")
    (job.work / "output.log").write_text("step 1\n")
    assert job.key(commands=commands).key == before.key
    (job.work / "pyproject.toml").write_text("[project]\nname = 'x'\nversion = '2'\n")
    assert job.key(commands=commands).key != before.key
