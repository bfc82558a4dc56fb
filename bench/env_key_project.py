"""A project of `bench env_key`: the user's files, what set-up installs into, a store; and changes of all that.

Set-up runs once, with the real tool and watched as in a job; then the target and what is known of it go, as on
another node, and the key is computed as a start does, after each change.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from bench.env_key_tools import PIP_TOOLS, PIPS, UV, Tools
from bench.record import BenchError
from bootseer.env.commands.look import StartExplanation
from bootseer.env.commands.look import explain as look
from bootseer.env.commands.restore import restore_spec
from bootseer.env.commands.snapshot import SnapshotOptions
from bootseer.env.commands.snapshot import snapshot as make_snapshot
from bootseer.env.spec import SetupSpec
from bootseer.errors import BootseerError
from bootseer.logs import sent_to

COMMAND_S = 300.0
# Of the machine that the bench runs on, which would decide beside the case.
FOREIGN = (
    "PIP_",
    "UV_",
    "POETRY_",
    "PDM_",
    "HATCH_",
    "PIPENV_",
    "CONDA_",
    "BOOTSEER_",
    "VIRTUAL_ENV",
    "PYTHON",
    "GIT_",
)
DAY = (1980, 1, 1, 0, 0, 0)


class Project:
    """Args: top: an empty folder."""

    def __init__(self, top: str, layout: Layout, tools: Tools) -> None:
        self.top, self.layout, self._tools = os.path.realpath(top), layout, tools
        self.work = os.path.join(self.top, "above", "work")
        self.home = os.path.join(self.top, "home")
        self.target = os.path.join(self.work if layout.is_inside else self.top, layout.target)
        self.store = os.path.join(self.top, "store")
        for directory in (self.work, self.home, os.path.join(self.top, "tmp")):
            os.makedirs(directory)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        self.environ = kept | {
            "HOME": self.home,
            "PATH": os.pathsep.join((tools.program(layout.tool), kept.get("PATH", os.defpath))),
            "TMPDIR": os.path.join(self.top, "tmp"),
            "XDG_CACHE_HOME": os.path.join(self.home, ".cache"),
            "XDG_CONFIG_HOME": os.path.join(self.home, ".config"),
            "XDG_DATA_HOME": os.path.join(self.home, ".local", "share"),
            "BOOTSEER_CACHE": os.path.join(self.home, ".cache", "bootseer"),
            "BOOTSEER_KEYS": os.path.join(self.top, "keys"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        for name in ("PIP_CERT", "SSL_CERT_FILE"):
            if name in os.environ:
                self.environ[name] = os.environ[name]
        for name, value in layout.environ.items():
            self.environ[name] = self.fill(value)
        self.said: list[str] = []
        self.output: list[str] = []
        self._pristine = ""

    def fill(self, text: str) -> str:
        """With this project's own paths."""
        text = text.replace("{tools}", self._tools.folder).replace("{backends}", self._tools.backends)
        text = text.replace("{bin}", self._tools.program(self.layout.tool)).replace("{target}", self.target)
        return text.replace("{work}", self.work).replace("{python}", sys.executable)

    def path(self, name: str) -> str:
        """Of a file below the working folder, of the user (`~/`), beside (`../`) or in the target (`target:`)."""
        if name.startswith("~/"):
            return os.path.join(self.home, name[2:])
        if name.startswith("target:"):
            return os.path.join(self.target, name[7:])
        return os.path.normpath(os.path.join(self.work, name))

    def write(self, name: str, content: Content) -> str:
        """Makes a file with what is above it, or replaces it."""
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if isinstance(content, Wheel):
            content.write(path)
        elif isinstance(content, Link):
            os.symlink(content.to, path)
        else:
            with open(path, "w", encoding="utf-8") as file:
                file.write(self.fill(content))
            if content.startswith("#!"):
                os.chmod(path, 0o755)
        return path

    def prepare(self) -> None:
        """The user's files, and what they have done before: a lock, a commit, a virtual environment."""
        for name, content in self.layout.files.items():
            self.write(name, content)
        if self.layout.has_venv:
            self.run(f"{sys.executable} -m venv --without-pip {self.target}")
            if self.layout.tool in (*PIPS, PIP_TOOLS):
                python = os.path.join(self.target, "bin", "python")
                uv, version = (
                    os.path.join(self._tools.program(UV), "uv"),
                    (self.layout.tool if self.layout.tool in PIPS else PIPS[2]).partition("-")[2],
                )
                self.run(f"{uv} pip install -q --python {python} pip=={version}", is_own=True)
        for command in self.layout.before:
            self.run(command)
        if self.layout.has_venv:
            self._pristine = os.path.join(self.top, "pristine")
            self.run(f"cp -a {self.target} {self._pristine}")

    def run(self, command: str, *, is_own: bool = False) -> str:
        """A command line of the user's; what it says. Raises: BenchError."""
        environ = dict(os.environ) if is_own else self.environ
        done = subprocess.run(
            ["/bin/sh", "-e", "-c", self.fill(command)],
            cwd=self.work,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if done.returncode:
            raise BenchError(
                f"{self.layout.name}: {command}: status {done.returncode}\n{done.stderr}{done.stdout}"
            )
        return done.stdout.strip()

    def spec(self) -> SetupSpec:
        python = os.path.join(self.target, "bin", "python")
        return SetupSpec(
            commands=tuple(map(self.fill, self.layout.commands)),
            targets=(self.target,),
            store=self.store,
            cwd=self.work,
            python=python,
            inputs=tuple(map(self.path, self.layout.inputs)),
        )

    def snapshot(self) -> str:
        """Runs set-up, and keeps what it made; its key. Raises: BenchError."""
        try:
            with sent_to(self.said.append):
                made = make_snapshot(
                    self.spec(),
                    SnapshotOptions(),
                    self.environ,
                    on_line=self.output.append,
                    count=lambda _, __: None,
                )
        except BootseerError as error:
            raise BenchError(f"{self.layout.name}: {error}\n" + "\n".join(self.output[-40:])) from error
        if not made.is_ours:
            raise BenchError(f"{self.layout.name}: set-up was not run: the key has not changed")
        self.become_another()
        return made.keyed.key

    def become_another(self) -> None:
        """A node that has the same project, no environment, and what installers have cached."""
        shutil.rmtree(self.target, ignore_errors=True)
        shutil.rmtree(os.path.join(self.home, ".cache", "bootseer"), ignore_errors=True)
        if self._pristine:
            self.run(f"cp -a {self._pristine} {self.target}")

    def explain(self) -> StartExplanation:
        """As a start here and now."""
        with sent_to(self.said.append):
            return look(self.spec(), self.environ, "")

    def restore(self) -> None:
        """Puts what is kept into its place."""
        with sent_to(self.said.append):
            restore_spec(self.spec(), (), self.environ, count=lambda _, __: None)

    def ask(self, statement: str) -> str:
        """What the environment's Python prints."""
        return self.run(f"{self.target}/bin/python -c '{statement}'")


# ---- files ----------------------------------------------------------------------------------------------------


class Wheel(NamedTuple):
    """A distribution with one module, as a wheel."""

    name: str
    version: str = "1.0"
    text: str = "V = 1\n"
    requires: tuple[str, ...] = ()

    def write(self, path: str) -> None:
        info = f"{self.name}-{self.version}.dist-info"
        requires = "".join(f"Requires-Dist: {each}\n" for each in self.requires)
        files = {
            f"{self.name}/__init__.py": self.text,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {self.version}\n{requires}",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: own\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        sums = {each: urlsafe_b64encode(hashlib.sha256(text.encode()).digest()) for each, text in files.items()}
        record = "".join(
            f"{each},sha256={sums[each].decode().rstrip('=')},{len(text)}\n" for each, text in files.items()
        )
        record += f"{info}/RECORD,,\n"
        with zipfile.ZipFile(path, "w") as archive:
            for each, text in [*files.items(), (f"{info}/RECORD", record)]:
                archive.writestr(zipfile.ZipInfo(each, DAY), text)


class Link(NamedTuple):
    """A symbolic link."""

    to: str


Content = str | Wheel | Link


def wheels(directory: str, *made: Wheel) -> dict[str, Content]:
    """Files of a folder with wheels."""
    return {f"{directory}/{each.name}-{each.version}-py3-none-any.whl": each for each in made}


# ---- changes --------------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """Something that the user does, and that takes it back."""

    name: str
    do: Callable[[Project], object]
    undo: Callable[[Project], object]


def edit(name: str, path: str, old: str, new: str) -> Change:
    """In a text one part becomes another one."""
    before: dict[str, bytes] = {}

    def do(project: Project) -> None:
        file = project.path(path)
        with open(file, "rb") as opened:
            before[path] = opened.read()
        text = before[path].decode()
        if project.fill(old) not in text:
            raise BenchError(f"{project.layout.name}: {path} has no {old!r}")
        with open(file, "w", encoding="utf-8") as written:
            written.write(text.replace(project.fill(old), project.fill(new)))

    def undo(project: Project) -> None:
        with open(project.path(path), "wb") as file:
            file.write(before.pop(path))

    return Change(name, do, undo)


def add(name: str, path: str, content: Content = "new\n") -> Change:
    """A new file, with its folders; or another one in the place of one that is there."""
    first: list[str] = []

    def do(project: Project) -> None:
        file = project.path(path)
        if os.path.lexists(file):
            os.rename(file, f"{project.top}/replaced")
        above = file
        while not os.path.lexists(os.path.dirname(above)):
            above = os.path.dirname(above)
        first.append(above)
        project.write(path, content)

    def undo(project: Project) -> None:
        above = first.pop()
        _remove(above)
        if os.path.lexists(f"{project.top}/replaced"):
            os.rename(f"{project.top}/replaced", project.path(path))

    return Change(name, do, undo)


def remove(name: str, path: str) -> Change:
    """A file or folder goes."""
    return Change(
        name,
        lambda project: os.rename(project.path(path), f"{project.top}/removed"),
        lambda project: os.rename(f"{project.top}/removed", project.path(path)),
    )


def variable(name: str, variable: str, value: str | None) -> Change:
    """A variable gets another value, or goes."""
    before: list[str | None] = []

    def give(project: Project, given: str | None) -> None:
        if given is None:
            project.environ.pop(variable, None)
        else:
            project.environ[variable] = project.fill(given)

    def do(project: Project) -> None:
        before.append(project.environ.get(variable))
        give(project, value)

    return Change(name, do, lambda project: give(project, before.pop()))


def touch(name: str, path: str) -> Change:
    """Another time."""
    return Change(name, lambda project: os.utime(project.path(path)), lambda _: None)


def chmod(name: str, path: str, bits: int) -> Change:
    """These bits of the mode turn over."""

    def turn(project: Project) -> None:
        file = project.path(path)
        os.chmod(file, stat.S_IMODE(os.stat(file).st_mode) ^ bits)

    return Change(name, turn, turn)


def commands(name: str, do: str, undo: str = "true") -> Change:
    """Commands of the user's."""
    return Change(name, lambda project: project.run(do), lambda project: project.run(undo))


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


# ---- layouts --------------------------------------------------------------------------------------------------


class Rebuilt(NamedTuple):
    """After a change set-up runs again, with what tools have cached; what is restored then has to say this."""

    change: str  # its name
    statement: str  # of Python
    says: str


class Layout(NamedTuple):
    """One set-up of a tool, and what is changed after it."""

    name: str
    tool: str
    commands: tuple[str, ...]
    files: Mapping[str, Content]
    changed: Sequence[Change]  # each gives another key
    stayed: Sequence[Change] = ()  # each leaves it
    rebuilt: Sequence[Rebuilt] = ()
    environ: Mapping[str, str] = MappingProxyType({})
    inputs: tuple[str, ...] = ()  # declared
    before: tuple[str, ...] = ()  # commands of the user's before all that
    target: str = "venv"
    has_venv: bool = True  # else set-up makes it
    is_inside: bool = False  # the target lies in the working folder
