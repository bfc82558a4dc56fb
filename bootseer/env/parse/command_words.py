"""PURE: the files and packages that a set-up command names, parsed from its words: pip, uv, conda and the like.

In: the command, the environment for `$NAME`, its working directory. Out: `CommandInputs`: packages that are named,
files and directories (absolute paths) that decide the result, and unknown programs. Nothing is run.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer.env.parse.requirements import FILE_OPTIONS, Collector, RequestedPackage, split_options
from bootseer.env.parse.shell_words import Simple, Word, parse_line

MAX_DEPTH = 4  # of `sh -c "sh -c ..."`

REQUIREMENTS, CONSTRAINTS, LOCAL, LINKS = "requirements", "constraints", "local", "find-links"
PROJECT, CONDA_LIST, CONDA_ENVIRONMENT, SCRIPT, FILE = (
    "project",
    "conda-list",
    "conda-environment",
    "script",
    "file",
)

_PIP = re.compile(r"pip(\d+(\.\d+)*)?")
_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*t?)?")
_SHELLS = {"sh", "bash", "dash", "zsh", "ksh"}
_CONDAS = {"conda", "mamba", "micromamba"}
_LOCKS = {"uv": "uv.lock", "poetry": "poetry.lock", "pdm": "pdm.lock"}
# These programs read no file that decides which packages are installed.
_HARMLESS = {
    *(
        "echo",
        "printf",
        "true",
        "false",
        ":",
        "export",
        "set",
        "unset",
        "umask",
        "ulimit",
        "pwd",
        "ls",
    ),
    *("mkdir", "rmdir", "rm", "touch", "chmod", "chown", "sleep", "date", "which", "type", "hash", "exit", "trap"),
    *("df", "du", "id", "whoami", "hostname", "uname", "nproc", "virtualenv", "activate", "deactivate", "wait"),
}
_MAKE = {"mkdir", "rmdir", "rm", "touch", "chmod", "chown", "virtualenv", "trap"}
# Options of pip by which it creates other files than an environment, or in another place.
_ELSEWHERE = re.compile(
    r"-[tde]|--(target|prefix|root|src|source|source-dir|source-directory|editable|log|report|download)\b"
    r"|(git|hg|svn|bzr)\+"
)
# They test whether names exist, and later commands depend on the result.
_ASKS = {"test", "["}
# Their results depend on their servers and the time.
_FETCHERS = {
    *("git", "hg", "curl", "wget", "aria2c", "rsync", "scp", "hf", "huggingface-cli", "gsutil", "gcloud", "aws"),
    *("apt", "apt-get", "yum", "dnf", "microdnf", "apk", "zypper", "npm", "cargo", "pipx", "uvx", "go", "gem"),
}
# Programs that run the rest of their arguments: their options that take a value, their own arguments before it.
_WRAPPERS: dict[str, tuple[str, int]] = {
    **dict.fromkeys(("exec", "command", "nohup", "builtin", "eval"), ("", 0)),
    "sudo": ("ughpCrtTDR", 0),
    "env": ("uCS", 0),
    "time": ("fo", 0),
    "nice": ("n", 0),
    "ionice": ("cnp", 0),
    "timeout": ("ks", 1),
    "stdbuf": ("ioe", 0),
    "setsid": ("", 0),
    "xargs": ("aEIiLnPsd", 0),
}
_WITHOUT_FILES = (
    *(
        "-t",
        "--target",
        "--platform",
        "--python-version",
        "--implementation",
        "--abi",
        "--root",
        "--prefix",
        "--src",
    ),
    *(
        "--upgrade-strategy",
        "-C",
        "--config-settings",
        "--config-setting",
        "--global-option",
        "--no-binary",
        "--hash",
    ),
    *("--only-binary", "--progress-bar", "--root-user-action", "--report", "-i", "--index-url", "--pypi-url"),
    *("--extra-index-url", "--log", "--log-file", "--keyring-provider", "--proxy", "--retries", "--timeout"),
    *("--exists-action", "--trusted-host", "--cert", "--client-cert", "--cache-dir", "--use-feature", "--python"),
    *("--use-deprecated", "--install-option", "--uploaded-prior-to", "--resume-retries", "--all-releases"),
    *("--only-final", "--default-timeout"),
)
PIP = {
    **FILE_OPTIONS,
    **dict.fromkeys(_WITHOUT_FILES, ""),
    **dict.fromkeys(("--build-constraint", "--build-constraints"), "constraint"),
    "--group": "group",
    "--requirements-from-script": "file",
}
UV = {
    **PIP,
    **dict.fromkeys(("-p", "--index", "--default-index", "--index-strategy", "-P", "--upgrade-package"), ""),
    **dict.fromkeys(("--reinstall-package", "--refresh-package", "--resolution", "--prerelease"), ""),
    **dict.fromkeys(("--fork-strategy", "--config-settings-package", "--no-build-isolation-package"), ""),
    **dict.fromkeys(("--exclude-newer", "--exclude-newer-package", "--link-mode", "--python-platform"), ""),
    **dict.fromkeys(("--torch-backend", "--color", "--allow-insecure-host", "--python-preference"), ""),
    **dict.fromkeys(("--no-build-package", "--no-binary-package", "--no-install-package", "--package"), ""),
    **dict.fromkeys(("--no-group", "--only-group", "--no-extra", "--upgrade-group", "--env-file", "--with"), ""),
    **dict.fromkeys(("--override", "--overrides", "--exclude", "--excludes", "-b", "--config-file"), "file"),
    "--extra": "extra",
    **dict.fromkeys(("--project", "--directory"), "project"),
}
CONDA = {
    **dict.fromkeys(
        ("-n", "--name", "-p", "--prefix", "-c", "--channel", "--solver", "--subdir", "--platform"), ""
    ),
    **dict.fromkeys(("--revision", "--repodata-fn", "--clone", "--experimental", "-r", "--root-prefix"), ""),
    **dict.fromkeys(("--file", "-f"), "file"),
}


class NamedPath(NamedTuple):
    """A file or directory that a command names."""

    kind: str  # one of the constants above
    path: str  # absolute
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    is_editable: bool = False
    has_dependencies: bool = True  # whether its dependencies are installed too
    lock: str = ""  # of a project: name of its lock file


class CommandInputs(NamedTuple):
    """The packages and files that a command names, in order."""

    wanted: tuple[RequestedPackage, ...]
    sources: tuple[NamedPath, ...]
    variables: tuple[str, ...]  # that occur in it
    unknown: tuple[str, ...]  # names of unknown programs
    is_plain: bool = True  # only pip, and programs that read nothing: all names that they test are known
    only_installs: bool = True  # it creates nothing but an environment


def read_command(
    command: str, environ: Mapping[str, str], cwd: str, markers: Mapping[str, str] | None = None
) -> CommandInputs:
    """Parse one line for /bin/sh. `markers`: facts of the interpreter (PEP 508). Never raises."""
    reader = _Reader(environ, markers)
    reader.read(command, cwd, 0)
    return CommandInputs(
        tuple(dict.fromkeys(reader.wanted)),
        tuple(dict.fromkeys(reader.sources)),
        tuple(dict.fromkeys(reader.variables)),
        tuple(dict.fromkeys(reader.unknown)),
        reader.is_plain and not reader.unknown,
        reader.only_installs,
    )


class _Reader:
    def __init__(self, environ: Mapping[str, str], markers: Mapping[str, str] | None) -> None:
        self._environ = environ
        self._markers = markers
        self._cwd = "/"
        self.wanted: list[RequestedPackage] = []
        self.sources: list[NamedPath] = []
        self.variables: list[str] = []
        self.unknown: list[str] = []
        self.is_plain = True
        self.only_installs = True

    def read(self, command: str, cwd: str, depth: int) -> None:
        """Parse a line; the effect of its `cd` ends with it."""
        before, self._cwd = self._cwd, cwd
        line = parse_line(command, self._environ)
        self.variables += line.variables
        if not line.is_certain:
            self.unknown.append("shell syntax other than simple commands")
        for simple in line.commands:
            self.sources += [NamedPath(FILE, self._at(word.text)) for word in simple.reads if word.is_certain]
            self._simple(simple, depth)
        self._cwd = before

    def _simple(self, simple: Simple, depth: int) -> None:
        words = _unwrap(list(simple.words))
        if simple.writes:
            self.only_installs = False
        if not words:
            return
        if not words[0].is_certain:
            self.unknown.append("a program whose name the shell computes")
            return
        program, rest = posixpath.basename(words[0].text), words[1:]
        texts = [word.text for word in rest]
        if program == "cd":
            self._cwd = self._at(texts[0]) if texts else self._environ.get("HOME", "/")
            if not all(word.is_certain for word in rest):
                self.unknown.append("cd")
        elif program in _SHELLS or _PYTHON.fullmatch(program):
            self._interpreter(program, rest, depth)
        elif _PIP.fullmatch(program):
            self._pip(rest)
        elif program == "uv":
            self.is_plain = False  # it searches many directories for settings
            self._uv(rest)
        elif program in ("poetry", "pdm"):
            if texts[:1] in (["install"], ["sync"]):
                self.sources.append(NamedPath(PROJECT, self._cwd, is_editable=True, lock=_LOCKS[program]))
            else:
                self.unknown.append(program)
        elif program in _CONDAS:
            self.is_plain = False
            self._conda(program, rest)
        elif program in ("source", "."):
            if texts and posixpath.basename(texts[0]) != "activate":
                self._script(rest[0], texts[0])
        elif program in _FETCHERS:
            self.wanted.append(RequestedPackage("", f"downloads by {program}", False, fetcher=program))
            self.is_plain = False
        elif program in _ASKS:
            self.is_plain = False
        elif program not in _HARMLESS:
            self._script(words[0], words[0].text)
        elif program in _MAKE:
            self.only_installs = False

    def _interpreter(self, program: str, rest: Sequence[Word], depth: int) -> None:
        texts = [word.text for word in rest]
        place = 0
        is_python = program not in _SHELLS
        while place < len(texts) and texts[place].startswith("-"):
            option = texts[place]
            if is_python and option == "-m":
                self._module(rest[place + 1 :])
                return
            if not is_python and not option.startswith("--") and "c" in option:
                if place + 1 < len(rest) and rest[place + 1].is_certain and depth < MAX_DEPTH:
                    self.read(texts[place + 1], self._cwd, depth + 1)
                else:
                    self.unknown.append(f"{program} -c")
                return
            if is_python and option == "-c":
                self.unknown.append(f"{program} -c")
                return
            place += 2 if is_python and option in ("-W", "-X") else 1
        if place < len(texts):
            self._script(rest[place], texts[place], of=program)

    def _module(self, rest: Sequence[Word]) -> None:
        name = rest[0].text if rest else ""
        if name == "pip":
            self._pip(rest[1:])
        elif name == "uv":
            self.is_plain = False
            self._uv(rest[1:])
        elif name not in ("venv", "virtualenv", "ensurepip", "compileall", "site"):
            self.unknown.append(f"python -m {name}")

    def _script(self, word: Word, text: str, of: str = "") -> None:
        """Add a program of the user: it is a source itself, and the files that it reads are unknown."""
        self.unknown.append(posixpath.basename(text) if word.is_certain else of or "a program")
        if word.is_certain and ("/" in text or of):
            self.sources.append(NamedPath(SCRIPT, self._at(text)))

    def _pip(self, rest: Sequence[Word]) -> None:
        _, positional = split_options([word.text for word in rest], PIP)
        action = positional[0] if positional else ""
        if action != "install" or any(_ELSEWHERE.match(word.text) for word in rest):
            self.only_installs = False
        if action in ("install", "download", "wheel", "uninstall"):
            self._install(_without(rest, action), PIP, reads_only=action == "uninstall")

    def _uv(self, rest: Sequence[Word]) -> None:
        options, positional = split_options([word.text for word in rest], UV)
        action = positional[0] if positional else ""
        if action == "pip":
            inner = positional[1] if len(positional) > 1 else ""
            after = _without(_without(rest, "pip"), inner)
            if inner == "sync":
                for text in positional[2:]:
                    self.sources.append(NamedPath(REQUIREMENTS, self._at(text)))
                self._install([word for word in after if word.text not in positional[2:]], UV)
            elif inner in ("install", "uninstall"):
                self._install(after, UV, reads_only=inner == "uninstall")
            elif inner == "compile":
                self.unknown.append("uv pip compile")
            return
        directory = self._at(next((value for kind, value in options if kind == "project"), "."))
        if action == "sync" or (action == "add" and positional[1:]):
            extras = tuple(value for kind, value in options if kind == "extra")
            groups = tuple(value for kind, value in options if kind == "group")
            self.sources.append(NamedPath(PROJECT, directory, extras, groups, is_editable=True, lock=_LOCKS["uv"]))
            if action == "add":
                self._install(_without(rest, "add"), UV)
        elif action in ("run", "tool", "build", "publish", "lock", "add", "remove"):
            self.unknown.append(f"uv {action}")

    def _install(self, rest: Sequence[Word], valued: Mapping[str, str], *, reads_only: bool = False) -> None:
        """Parse arguments that pip and uv have in common."""
        if not all(word.is_certain for word in rest):
            self.unknown.append("arguments of an installer that the shell computes")
        texts = [word.text for word in rest if word.is_certain]
        options, positional = split_options(texts, valued)
        into = Collector(self._markers)
        into.add_options(options)
        for text in [] if reads_only else positional:
            into.add_requirement(text)
        named = into.named()
        has_dependencies = not {"--no-deps", "--no-dependencies"} & set(texts)
        extras = tuple(value for kind, value in options if kind == "extra")
        groups = tuple(value for kind, value in options if kind == "group")
        self.wanted += named.wanted
        for path in named.requirement_files:
            self._add_file(REQUIREMENTS, path, extras, groups, has_dependencies)
        for path in named.constraint_files:
            self._add_file(CONSTRAINTS, path)
        for local in named.locals:
            path = self._at(local.path or ".")
            self.sources.append(NamedPath(LOCAL, path, local.extras, (), local.is_editable, has_dependencies))
        self.sources += [NamedPath(LINKS, self._at(path)) for path in named.find_links if "://" not in path]
        self.sources += [NamedPath(FILE, self._at(value)) for kind, value in options if kind == "file"]
        for group in groups if not named.requirement_files else ():
            directory, _, name = group.rpartition(":")
            path = self._at(directory or "pyproject.toml")
            self.sources.append(NamedPath(REQUIREMENTS, path, (), (name,), has_dependencies=False))

    def _add_file(
        self,
        kind: str,
        path: str,
        extras: tuple[str, ...] = (),
        groups: tuple[str, ...] = (),
        has_dependencies: bool = True,
    ) -> None:
        if "://" in path:
            self.wanted.append(RequestedPackage("", path, False))
        elif path != "-":
            self.sources.append(NamedPath(kind, self._at(path), extras, groups, False, has_dependencies))

    def _conda(self, program: str, rest: Sequence[Word]) -> None:
        if not all(word.is_certain for word in rest):
            self.unknown.append("arguments of an installer that the shell computes")
        options, positional = split_options([word.text for word in rest if word.is_certain], CONDA)
        files = [value for kind, value in options if kind == "file"]
        action, names = (positional[0], positional[1:]) if positional else ("", [])
        if action == "env":
            action, names = (names[0] if names else "", [])
            if action in ("create", "update"):
                self.sources += [
                    NamedPath(CONDA_ENVIRONMENT, self._at(path)) for path in files or ["environment.yml"]
                ]
        elif action in ("install", "create", "update", "upgrade"):
            into = Collector(self._markers)
            for name in names:
                into.add_conda(name)
            named = into.named()
            self.wanted += named.wanted
            self.sources += [NamedPath(LOCAL, self._at(local.path)) for local in named.locals]
            for path in files:
                kind = CONDA_ENVIRONMENT if path.endswith((".yml", ".yaml")) else CONDA_LIST
                self.sources.append(NamedPath(kind, self._at(path)))
        elif action in ("run", "build", "develop"):
            self.unknown.append(f"{program} {action}")

    def _at(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self._cwd, path))


def _unwrap(words: list[Word]) -> list[Word]:
    """Remove sudo, env, nice and the like."""
    while words and (wrapper := _WRAPPERS.get(posixpath.basename(words[0].text))) is not None:
        letters, own = wrapper
        place = 1
        while place < len(words):
            text = words[place].text
            if text.startswith("-") and text != "-":
                takes = len(text) == 2 and text[1] in letters
                place += 2 if takes else 1
            elif re.match(r"[A-Za-z_]\w*=", text) and posixpath.basename(words[0].text) in ("env", "sudo"):
                place += 1
            elif own:
                own -= 1
                place += 1
            else:
                break
        words = words[place:]
    return words


def _without(words: Sequence[Word], text: str) -> list[Word]:
    """Remove the first word of this text."""
    place = next((place for place, word in enumerate(words) if word.text == text), len(words))
    return [*words[:place], *words[place + 1 :]]
