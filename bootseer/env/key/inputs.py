"""Finds the files that decide the result of set-up: declared ones, and those that commands name, as a first guess.

In: the spec, the targets, facts of the interpreter. Out: digests of declared files, functions for those of the
guess, unpinned requirements, names of variables, and notes for the user. Requirement files are followed through
-r, -c and -e, each once, bounded. The actual reads of set-up are known after it has run (make_list.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from bootseer.counted import counted
from bootseer.env.key import compiled
from bootseer.env.key.base import is_below
from bootseer.env.key.document import ABSENT, to_utf8_text
from bootseer.env.parse import command_words, manifests
from bootseer.env.parse.command_words import NamedPath, read_command
from bootseer.env.parse.redaction import user_variables
from bootseer.env.parse.requirements import (
    LocalPackage,
    RequestedPackage,
    Requirements,
    decode_text,
    parse_requirements,
    unpinned,
)
from bootseer.env.reads import directory_digest
from bootseer.env.reads.current_state import git_state
from bootseer.env.spec import SetupSpec
from bootseer.errors import ConfigError, KeyUnknown

MAX_FILES = 256  # named by requirement files
MAX_DEPTH = 16  # of nested requirement files
MAX_REQUIREMENTS_BYTES = 8 << 20
MAX_SCRIPT_BYTES = 16 << 20
_PROJECT_FILES = ("pyproject.toml", "uv.toml", ".python-version", "poetry.toml")
_ELSEWHERE = {
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_SRC",
    "PIP_SOURCE",
    "PIP_EDITABLE",
    "PIP_REPORT",
    "PIP_LOG",
}
_BUILT = (".whl", ".conda", ".egg")
# Variables of pip (PIP_ and any option) and uv; several paths are separated by spaces.
_VARIABLES = {
    **dict.fromkeys(("PIP_CONSTRAINT", "UV_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), command_words.CONSTRAINTS),
    **dict.fromkeys(("PIP_REQUIREMENT", "UV_OVERRIDE"), command_words.REQUIREMENTS),
    **dict.fromkeys(("PIP_FIND_LINKS", "UV_FIND_LINKS"), command_words.LINKS),
}


_CLONED = re.compile(r"\b(git|hg|svn|bzr)\+")


class Inputs(NamedTuple):
    """The inputs of set-up. Texts may still contain secrets."""

    declared: dict[str, str]  # digests by the name in the document
    guessed: dict[str, Callable[[], str]]  # named by commands; each returns its digest, or raises KeyUnknown
    whole: Callable[[], str]  # returns the digest of the whole working directory, or raises KeyUnknown
    unpinned: list[str]
    variables: list[str]  # named in commands and requirement files
    secret_variables: list[str]  # those of them that are user or password of a URL
    notes: list[str]
    editables: list[str]  # directories that are installed in place, resolved
    is_known: bool  # False: programs may read undeclared files
    is_plain: bool  # only pip, and no code of the user is built or run
    only_installs: bool  # pip creates an environment, and no other readable files
    unknown: list[str]  # notes for the user, if the reads of programs are not observed
    may_compile: bool  # code for this machine


def find_inputs(
    spec: SetupSpec, environ: Mapping[str, str], excluded: Sequence[str], markers: Mapping[str, str]
) -> Inputs:
    """Find the inputs. `excluded`: resolved directories that are never inputs: the targets, the store.

    Raises: ConfigError for a missing declared input, and for inputs that are too large or unreadable.
    """
    finder = _Finder(spec, environ, excluded, markers)
    for path in spec.inputs:
        finder.declare(path)
    for number, command in enumerate(spec.commands, 1):
        finder.read(number, command)
    finder.read_variables()
    declared = {name: given() for name, given in finder.digests.items() if name in finder.declared}
    guessed = {name: given for name, given in finder.digests.items() if name not in finder.declared}
    return Inputs(
        dict(sorted(declared.items())),
        dict(sorted(guessed.items())),
        finder.whole,
        unpinned(finder.wanted, finder.pins),
        list(dict.fromkeys(finder.variables)),
        list(dict.fromkeys(finder.secret_variables)),
        list(dict.fromkeys(finder.notes)),
        list(dict.fromkeys(finder.editables)),
        finder.is_known,
        finder.is_known and finder.is_plain,
        finder.is_known and finder.is_plain and finder.only_installs and not _ELSEWHERE.intersection(environ),
        finder.unknown,
        finder.may_compile
        or not finder.is_known
        or compiled.variables_request_build(environ)
        or any(map(compiled.needs_build, finder.wanted)),
    )


class _Finder:
    def __init__(
        self, spec: SetupSpec, environ: Mapping[str, str], excluded: Sequence[str], markers: Mapping[str, str]
    ) -> None:
        self._cwd = os.path.normpath(spec.cwd)
        self._environ = environ
        self._excluded = excluded
        self._markers = markers
        self._parsed: set[tuple[str, bool]] = set()
        self._directories: set[tuple[str, bool]] = set()
        self._declared = {os.path.normpath(path) for path in spec.inputs}
        self.declared: set[str] = set()  # names
        self.digests: dict[str, Callable[[], str]] = {}
        self._absent: set[str] = set()
        self.wanted: list[RequestedPackage] = []
        self.pins: set[str] = set()
        self.variables: list[str] = []
        self.secret_variables: list[str] = []
        self.notes: list[str] = []
        self.editables: list[str] = []
        self.is_known = True
        self.is_plain = True
        self.only_installs = True
        self.unknown: list[str] = []
        self.may_compile = False

    def declare(self, path: str) -> None:
        """Add an input that the user declared."""
        path = os.path.normpath(path)
        name = self._name(path)
        self.declared.add(name)
        if os.path.isdir(path):
            real = os.path.realpath(path)
            self.digests[name] = partial(_directory, directory_digest.digest_directory, real, self._excluded)
            return
        if not os.path.lexists(path):
            raise ConfigError(f"--setup-input: {path}: there is no such file or directory")
        self.digests[name] = partial(directory_digest.digest_file, path)
        if _is_requirements(path):
            self._follow(NamedPath(command_words.REQUIREMENTS, path), (), is_constraint="constraint" in path)

    def read(self, number: int, command: str) -> None:
        """Add the files that a command names, and those that these name."""
        found = read_command(command, self._environ, self._cwd, self._markers)
        self.may_compile = self.may_compile or compiled.requests_build(command)
        self.variables += found.variables
        self.secret_variables += user_variables(command)
        self.wanted += found.wanted
        self.is_plain = self.is_plain and found.is_plain
        self.only_installs = self.only_installs and found.only_installs
        for source in found.sources:
            self._take(source)
        if found.unknown:
            self.is_known = False
            programs = ", ".join(found.unknown[:5])
            self.unknown.append(
                f"set-up command {number} runs {programs}, whose input files are not known; "
                "declare files that decide the result with --setup-input"
            )

    def whole(self) -> str:
        """Return the digest of the whole working directory. Raises: KeyUnknown if it is too large."""
        cwd = os.path.realpath(self._cwd)
        return f"{_directory(directory_digest.digest_project, cwd, self._excluded)} {git_state(cwd)}"

    def read_variables(self) -> None:
        """Add the files that variables of installers name."""
        for variable, kind in _VARIABLES.items():
            for name in self._environ.get(variable, "").split():
                path = os.path.normpath(os.path.join(self._cwd, name))
                if "://" not in name and os.path.exists(path):  # else it may be one of an image
                    self._take(NamedPath(kind, path))

    def _take(self, source: NamedPath, chain: tuple[str, ...] = ()) -> None:
        """Add a file or directory that a command, file or variable names."""
        path = source.path
        if source.kind in (command_words.SCRIPT, command_words.PROJECT, command_words.LOCAL):
            self.is_plain = self.is_plain and path.endswith(_BUILT)
        is_changed = source.kind == command_words.SCRIPT or os.path.isdir(path)
        if (
            is_changed
            and source.kind != command_words.PROJECT
            and is_below(os.path.realpath(path), self._excluded)
        ):
            # Set-up itself changes it; a program there belongs to the environment.
            if source.kind != command_words.SCRIPT:
                self.notes.append(f"{self._name(path)} lies in a target, so it does not count as an input")
            return
        if source.kind == command_words.PROJECT:
            self._project(source)
        elif source.kind in (command_words.LOCAL, command_words.LINKS) and os.path.isdir(path):
            self._directory(source)
            if source.kind == command_words.LINKS:
                self.may_compile = self.may_compile or _has_sources(path)
            else:
                self.may_compile = self.may_compile or compiled.may_compile(path)
        elif source.kind == command_words.SCRIPT:
            self._script(path)
        elif self._file(path) and source.kind not in (command_words.FILE, command_words.LOCAL):
            self._follow(source, chain, is_constraint=source.kind == command_words.CONSTRAINTS)
        if source.kind == command_words.LOCAL and not os.path.isdir(path):
            self.may_compile = self.may_compile or not path.endswith(_BUILT)  # or a directory later

    def _file(self, path: str) -> bool:
        """Add a file; return whether it exists."""
        name = self._name(path)
        if name in self.digests:
            return name not in self._absent
        if len(self.digests) >= MAX_FILES + len(self._declared):
            raise KeyUnknown(
                f"{path}: set-up commands name more than {MAX_FILES} files; use fewer requirement files"
            )
        if not os.path.exists(path):
            self.digests[name] = lambda: ABSENT
            self._absent.add(name)
            self.notes.append(
                f"{name}, which a set-up command names, does not exist yet; a command may still create it"
            )
            return False
        self.digests[name] = partial(directory_digest.digest_file, path)
        if path not in self._declared:
            self.notes.append(f"{name}, which a set-up command, file or variable names, counts as an input")
        return True

    def _script(self, path: str) -> None:
        is_ours = is_below(path, [self._cwd]) if self._cwd != "/" else False
        if not os.path.isfile(path) or os.path.getsize(path) > MAX_SCRIPT_BYTES:
            return
        if is_ours or not is_below(path, ["/usr", "/bin", "/sbin", "/opt"]):
            self._file(path)

    def _directory(self, source: NamedPath) -> None:
        path = os.path.realpath(source.path)
        is_links = source.kind == command_words.LINKS
        if (path, is_links) in self._directories:
            return
        self._directories.add((path, is_links))
        if is_links:
            name = self._name(source.path) + " (archives)"
            self.digests[name] = partial(_directory, directory_digest.digest_archives, path)
            return
        # The result of an editable install contains the path, so another path gives another environment.
        name = to_utf8_text(path) + " (editable)" if source.is_editable else self._name(source.path) + " (project)"
        self.digests[name] = partial(
            _directory, directory_digest.digest_project, path, self._excluded, is_editable=source.is_editable
        )
        if source.is_editable:
            self.editables.append(path)
        if source.has_dependencies:
            self._follow(source._replace(path=os.path.join(path, "pyproject.toml")), ())

    def _project(self, source: NamedPath) -> None:
        """Add the project of uv sync and the like: its files, its lock, and itself as an editable install."""
        directory = source.path
        while not os.path.isfile(os.path.join(directory, "pyproject.toml")) and directory != "/":
            directory = os.path.dirname(directory)
        if directory == "/":
            self.wanted.append(RequestedPackage("", f"a project in {source.path}", False))
            return
        for name in (*_PROJECT_FILES, source.lock):
            path = os.path.join(directory, name)
            if os.path.isfile(path):
                self._file(path)
        if not os.path.isfile(os.path.join(directory, source.lock)):
            text = f"{os.path.join(directory, 'pyproject.toml')} (there is no {source.lock})"
            self.wanted.append(RequestedPackage("", text, False))
        self._directory(source._replace(kind=command_words.LOCAL, path=directory, has_dependencies=False))
        self.may_compile = self.may_compile or compiled.may_compile(directory)

    def _follow(self, source: NamedPath, chain: tuple[str, ...], is_constraint: bool = False) -> None:
        """Add the files that a requirement file names. Each is read once, so a cycle ends."""
        path = source.path
        if path in chain:
            self.notes.append(f"{self._name(path)} names itself, through {counted(len(chain), 'file')}")
        if (path, is_constraint) in self._parsed and not (source.extras or source.groups):
            return
        if len(chain) >= MAX_DEPTH:
            raise KeyUnknown(f"{path}: requirement files name each other {MAX_DEPTH} deep; use fewer")
        self._parsed.add((path, is_constraint))
        text = _read(path)
        if text is None:
            return
        self.may_compile = self.may_compile or compiled.requests_build(text)
        named = self._parse(source, text)
        self.secret_variables += user_variables(text)
        self.variables += named.variables
        self.only_installs = self.only_installs and not any(map(_is_cloned, named.wanted))
        self.notes += [f"{self._name(path)}: {note}" for note in named.notes]
        if is_constraint:
            self.pins |= {each.name for each in named.wanted if each.is_pinned and each.name}
        else:
            self.wanted += named.wanted
        directory, chain = os.path.dirname(path), (*chain, path)
        for names, is_below_constraint in (
            (named.requirement_files, is_constraint),
            (named.constraint_files, True),
        ):
            for name in names:
                self._include(name, directory, chain, is_below_constraint)
        for local in named.locals:
            self._local(local, directory, chain)
        for name in named.find_links:
            if "://" not in name:
                self._take(NamedPath(command_words.LINKS, self._beside(name, directory)), chain)

    def _include(self, name: str, directory: str, chain: tuple[str, ...], is_constraint: bool) -> None:
        if "://" in name:
            self.wanted.append(RequestedPackage("", name, False))
            return
        kind = command_words.CONSTRAINTS if is_constraint else command_words.REQUIREMENTS
        self._take(NamedPath(kind, os.path.normpath(os.path.join(directory, name))), chain)

    def _local(self, local: LocalPackage, directory: str, chain: tuple[str, ...]) -> None:
        path = os.path.normpath(os.path.join(self._cwd, local.path or "."))
        if not os.path.exists(path):  # pip resolves from the working directory, uv from that of the file
            path = self._beside(local.path, directory)
        self._take(NamedPath(command_words.LOCAL, path, local.extras, (), local.is_editable), chain)

    def _beside(self, name: str, directory: str) -> str:
        path = os.path.normpath(os.path.join(directory, name))
        return path if os.path.exists(path) else os.path.normpath(os.path.join(self._cwd, name))

    def _parse(self, source: NamedPath, text: str) -> Requirements:
        name = os.path.basename(source.path)
        if source.kind == command_words.CONDA_ENVIRONMENT:
            return manifests.parse_conda_environment(text, self._environ)
        if source.kind == command_words.CONDA_LIST:
            return manifests.parse_conda_list(text)
        if name == "pyproject.toml":
            return manifests.parse_pyproject(
                text, source.extras, source.groups, self._markers, source.has_dependencies
            )
        if name.endswith(".toml"):
            self.is_plain = False  # it may name directories
            return Requirements()  # pylock.toml pins everything
        if name in ("setup.py", "setup.cfg"):
            return Requirements(wanted=(RequestedPackage("", f"requirements of {name}", False),))
        return parse_requirements(text, self._environ, self._markers)

    def _name(self, path: str) -> str:
        """Return the name of a path in the document: relative below the working directory."""
        path = os.path.normpath(path)
        if self._cwd != "/" and is_below(path, [self._cwd]):
            return to_utf8_text(os.path.relpath(path, self._cwd))
        return to_utf8_text(path)


def _directory(digest: Callable[..., str], *given: object, **more: object) -> str:
    return f"folder {digest(*given, **more)}"


def _read(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_REQUIREMENTS_BYTES + 1)
    except OSError:
        return None  # a project without one; errors of other files were raised when they were hashed
    if len(data) > MAX_REQUIREMENTS_BYTES:
        raise KeyUnknown(f"{path}: is a requirement file of more than {MAX_REQUIREMENTS_BYTES} bytes")
    return decode_text(data)


def _has_sources(directory: str) -> bool:
    """Return whether a directory contains archives that may have to be built."""
    try:
        return any(map(compiled.is_of_sources, os.listdir(directory)))
    except OSError:
        return True


def _is_requirements(path: str) -> bool:
    name = os.path.basename(path).lower()
    return name.endswith((".txt", ".in", ".pip")) and ("require" in name or "constraint" in name)


def _is_cloned(wanted: RequestedPackage) -> bool:
    """Return whether a repository is cloned for a requirement."""
    return _CLONED.search(wanted.text) is not None
