"""Finds the files that decide what set-up makes: those declared, and, as a first guess, those that commands name.

In: the spec, the targets, facts of the interpreter. Out: digests of what is declared, those of the guess when they
are asked for, what is not pinned, names of variables, and notes for the user. Requirement files are followed
through -r, -c and -e, each once, bounded. What set-up really reads is known when it has run (reads_make.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from bootseer.counted import counted
from bootseer.env import command_words, compiled, folder_digest, manifests
from bootseer.env.base import is_below
from bootseer.env.command_words import Source, read_command
from bootseer.env.document import ABSENT, plain
from bootseer.env.reads_now import git_state
from bootseer.env.redaction import user_variables
from bootseer.env.requirements import Local, Named, Wanted, decode_text, parse_requirements, unpinned
from bootseer.env.spec import SetupSpec
from bootseer.errors import ConfigError, KeyUnknown

MOST_FILES = 256  # that requirement files name
MOST_DEPTH = 16  # of requirement files in requirement files
MOST_REQUIREMENTS_BYTES = 8 << 20
MOST_SCRIPT_BYTES = 16 << 20
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
# Of pip (PIP_ and any option) and uv; several paths have spaces between them.
_VARIABLES = {
    **dict.fromkeys(("PIP_CONSTRAINT", "UV_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), command_words.CONSTRAINTS),
    **dict.fromkeys(("PIP_REQUIREMENT", "UV_OVERRIDE"), command_words.REQUIREMENTS),
    **dict.fromkeys(("PIP_FIND_LINKS", "UV_FIND_LINKS"), command_words.LINKS),
}


_CLONED = re.compile(r"\b(git|hg|svn|bzr)\+")


class Inputs(NamedTuple):
    """What was found. Texts may still hold secrets."""

    declared: dict[str, str]  # digests by the name that the document has
    guessed: dict[str, Callable[[], str]]  # of what commands name; each gives its digest, or raises KeyUnknown
    whole: Callable[[], str]  # the digest of all of the working folder, or KeyUnknown
    unpinned: list[str]
    variables: list[str]  # named in commands and requirement files
    secret_variables: list[str]  # those among them that stand as user or password in a URL
    notes: list[str]
    editables: list[str]  # folders that are installed in place, resolved
    is_known: bool  # False: programs may read what nobody declared
    is_plain: bool  # pip alone, and nothing of the user's own is built or run
    only_installs: bool  # pip makes an environment, and nothing else is made that anybody could read
    unknown: list[str]  # notes for the user, where nobody sees what programs read
    may_compile: bool  # for the machine that it runs on


def find_inputs(
    spec: SetupSpec, environ: Mapping[str, str], excluded: Sequence[str], markers: Mapping[str, str]
) -> Inputs:
    """`excluded`: resolved folders that are no input wherever they lie: the targets, the store.

    Raises: ConfigError for a declared input that is not there, and for what is too large or cannot be read.
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
        or compiled.variables_ask(environ)
        or any(compiled.has_to_be_built(each.text) for each in finder.wanted),
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
        self._folders: set[tuple[str, bool]] = set()
        self._declared = {os.path.normpath(path) for path in spec.inputs}
        self.declared: set[str] = set()  # names
        self.digests: dict[str, Callable[[], str]] = {}
        self._absent: set[str] = set()
        self.wanted: list[Wanted] = []
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
        """An input that the user named."""
        path = os.path.normpath(path)
        name = self._name(path)
        self.declared.add(name)
        if os.path.isdir(path):
            real = os.path.realpath(path)
            self.digests[name] = partial(_folder, folder_digest.digest_folder, real, self._excluded)
            return
        if not os.path.lexists(path):
            raise ConfigError(f"--setup-input: {path}: there is no such file or folder")
        self.digests[name] = partial(folder_digest.digest_file, path)
        if _is_requirements(path):
            self._follow(Source(command_words.REQUIREMENTS, path), (), is_constraint="constraint" in path)

    def read(self, number: int, command: str) -> None:
        """A command: what it names, and what that names."""
        found = read_command(command, self._environ, self._cwd, self._markers)
        self.may_compile = self.may_compile or compiled.asks_to_compile(command)
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
                f"set-up command {number} runs {programs}: what that reads is not known: "
                "declare files that decide the result by --setup-input"
            )

    def whole(self) -> str:
        """Of all of the working folder. Raises: KeyUnknown for more than can be read at each start."""
        cwd = os.path.realpath(self._cwd)
        return f"{_folder(folder_digest.digest_project, cwd, self._excluded)} {git_state(cwd)}"

    def read_variables(self) -> None:
        """Files that installers take from the environment."""
        for variable, kind in _VARIABLES.items():
            for name in self._environ.get(variable, "").split():
                path = os.path.normpath(os.path.join(self._cwd, name))
                if "://" not in name and os.path.exists(path):  # else it may be one of an image
                    self._take(Source(kind, path))

    def _take(self, source: Source, chain: tuple[str, ...] = ()) -> None:
        """A file or folder that somebody named, but maybe the user did not declare."""
        path = source.path
        if source.kind in (command_words.SCRIPT, command_words.PROJECT, command_words.LOCAL):
            self.is_plain = self.is_plain and path.endswith(_BUILT)
        is_changed = source.kind == command_words.SCRIPT or os.path.isdir(path)
        if (
            is_changed
            and source.kind != command_words.PROJECT
            and is_below(os.path.realpath(path), self._excluded)
        ):
            # Set-up itself changes it; a program there is one of the environment.
            if source.kind != command_words.SCRIPT:
                self.notes.append(f"{self._name(path)} lies in a target: it does not count as an input")
            return
        if source.kind == command_words.PROJECT:
            self._project(source)
        elif source.kind in (command_words.LOCAL, command_words.LINKS) and os.path.isdir(path):
            self._folder(source)
            if source.kind == command_words.LINKS:
                self.may_compile = self.may_compile or _has_sources(path)
            else:
                self.may_compile = self.may_compile or compiled.may_compile(path)
        elif source.kind == command_words.SCRIPT:
            self._script(path)
        elif self._file(path) and source.kind not in (command_words.FILE, command_words.LOCAL):
            self._follow(source, chain, is_constraint=source.kind == command_words.CONSTRAINTS)
        if source.kind == command_words.LOCAL and not os.path.isdir(path):
            self.may_compile = self.may_compile or not path.endswith(_BUILT)  # a folder, if a command makes it

    def _file(self, path: str) -> bool:
        """Hashes it; whether it is there."""
        name = self._name(path)
        if name in self.digests:
            return name not in self._absent
        if len(self.digests) >= MOST_FILES + len(self._declared):
            raise KeyUnknown(
                f"{path}: set-up commands name more than {MOST_FILES} files: use fewer requirement files"
            )
        if not os.path.exists(path):
            self.digests[name] = lambda: ABSENT
            self._absent.add(name)
            self.notes.append(
                f"{name} is named by a set-up command and is not there (yet): if a command makes it, fine"
            )
            return False
        self.digests[name] = partial(folder_digest.digest_file, path)
        if path not in self._declared:
            self.notes.append(f"{name} is named by a set-up command, a file or a variable: it counts as an input")
        return True

    def _script(self, path: str) -> None:
        is_ours = is_below(path, [self._cwd]) if self._cwd != "/" else False
        if not os.path.isfile(path) or os.path.getsize(path) > MOST_SCRIPT_BYTES:
            return
        if is_ours or not is_below(path, ["/usr", "/bin", "/sbin", "/opt"]):
            self._file(path)

    def _folder(self, source: Source) -> None:
        path = os.path.realpath(source.path)
        is_links = source.kind == command_words.LINKS
        if (path, is_links) in self._folders:
            return
        self._folders.add((path, is_links))
        if is_links:
            name = self._name(source.path) + " (archives)"
            self.digests[name] = partial(_folder, folder_digest.digest_archives, path)
            return
        # The result of an editable install names the folder, so another one makes another environment.
        name = plain(path) + " (editable)" if source.is_editable else self._name(source.path) + " (project)"
        self.digests[name] = partial(
            _folder, folder_digest.digest_project, path, self._excluded, is_editable=source.is_editable
        )
        if source.is_editable:
            self.editables.append(path)
        if source.has_dependencies:
            self._follow(source._replace(path=os.path.join(path, "pyproject.toml")), ())

    def _project(self, source: Source) -> None:
        """Of uv sync and the like: the project's own files, its lock, and itself as an editable install."""
        folder = source.path
        while not os.path.isfile(os.path.join(folder, "pyproject.toml")) and folder != "/":
            folder = os.path.dirname(folder)
        if folder == "/":
            self.wanted.append(Wanted("", f"a project in {source.path}", False))
            return
        for name in (*_PROJECT_FILES, source.lock):
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                self._file(path)
        if not os.path.isfile(os.path.join(folder, source.lock)):
            text = f"{os.path.join(folder, 'pyproject.toml')} (there is no {source.lock})"
            self.wanted.append(Wanted("", text, False))
        self._folder(source._replace(kind=command_words.LOCAL, path=folder, has_dependencies=False))
        self.may_compile = self.may_compile or compiled.may_compile(folder)

    def _follow(self, source: Source, chain: tuple[str, ...], is_constraint: bool = False) -> None:
        """What a requirement file names. Each is read once, so one that names itself ends."""
        path = source.path
        if path in chain:
            self.notes.append(f"{self._name(path)} names itself, through {counted(len(chain), 'file')}")
        if (path, is_constraint) in self._parsed and not (source.extras or source.groups):
            return
        if len(chain) >= MOST_DEPTH:
            raise KeyUnknown(f"{path}: requirement files name each other {MOST_DEPTH} deep: use fewer")
        self._parsed.add((path, is_constraint))
        text = _read(path)
        if text is None:
            return
        self.may_compile = self.may_compile or compiled.asks_to_compile(text)
        named = self._parse(source, text)
        self.secret_variables += user_variables(text)
        self.variables += named.variables
        self.only_installs = self.only_installs and not any(map(_is_cloned, named.wanted))
        self.notes += [f"{self._name(path)}: {note}" for note in named.notes]
        if is_constraint:
            self.pins |= {each.name for each in named.wanted if each.is_pinned and each.name}
        else:
            self.wanted += named.wanted
        folder, chain = os.path.dirname(path), (*chain, path)
        for names, is_below_constraint in (
            (named.requirement_files, is_constraint),
            (named.constraint_files, True),
        ):
            for name in names:
                self._include(name, folder, chain, is_below_constraint)
        for local in named.locals:
            self._local(local, folder, chain)
        for name in named.find_links:
            if "://" not in name:
                self._take(Source(command_words.LINKS, self._beside(name, folder)), chain)

    def _include(self, name: str, folder: str, chain: tuple[str, ...], is_constraint: bool) -> None:
        if "://" in name:
            self.wanted.append(Wanted("", name, False))
            return
        kind = command_words.CONSTRAINTS if is_constraint else command_words.REQUIREMENTS
        self._take(Source(kind, os.path.normpath(os.path.join(folder, name))), chain)

    def _local(self, local: Local, folder: str, chain: tuple[str, ...]) -> None:
        path = os.path.normpath(os.path.join(self._cwd, local.path or "."))
        if not os.path.exists(path):  # pip takes the working folder, uv that of the file
            path = self._beside(local.path, folder)
        self._take(Source(command_words.LOCAL, path, local.extras, (), local.is_editable), chain)

    def _beside(self, name: str, folder: str) -> str:
        path = os.path.normpath(os.path.join(folder, name))
        return path if os.path.exists(path) else os.path.normpath(os.path.join(self._cwd, name))

    def _parse(self, source: Source, text: str) -> Named:
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
            self.is_plain = False  # it may name folders
            return Named()  # pylock.toml pins everything
        if name in ("setup.py", "setup.cfg"):
            return Named(wanted=(Wanted("", f"what {name} names", False),))
        return parse_requirements(text, self._environ, self._markers)

    def _name(self, path: str) -> str:
        """As the document has it: relative below the working folder."""
        path = os.path.normpath(path)
        if self._cwd != "/" and is_below(path, [self._cwd]):
            return plain(os.path.relpath(path, self._cwd))
        return plain(path)


def _folder(digest: Callable[..., str], *given: object, **more: object) -> str:
    return f"folder {digest(*given, **more)}"


def _read(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_REQUIREMENTS_BYTES + 1)
    except OSError:
        return None  # a project without one; files were hashed before, with an error if that failed
    if len(data) > MOST_REQUIREMENTS_BYTES:
        raise KeyUnknown(f"{path}: a requirement file of more than {MOST_REQUIREMENTS_BYTES} bytes")
    return decode_text(data)


def _has_sources(folder: str) -> bool:
    """Whether archives there may have to be built."""
    try:
        return any(map(compiled.is_of_sources, os.listdir(folder)))
    except OSError:
        return True


def _is_requirements(path: str) -> bool:
    name = os.path.basename(path).lower()
    return name.endswith((".txt", ".in", ".pip")) and ("require" in name or "constraint" in name)


def _is_cloned(wanted: Wanted) -> bool:
    """Whether a repository is fetched for it."""
    return _CLONED.search(wanted.text) is not None
