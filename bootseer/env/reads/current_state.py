"""The present state on this node of each name that set-up reads, as text: equal states give equal texts.

In: `Reads`, the working directory, the user's home. Out: states by label. Files are hashed; large ones only once,
as long as they do not change (digest_cache.py). Directories are represented by their names, without those that git
ignores and those that jobs and tools leave.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping

from bootseer.env.parse.redaction import redact_text
from bootseer.env.reads import read_list as kinds
from bootseer.env.reads.digest_cache import DigestCache
from bootseer.env.reads.directory_digest import ARCHIVES, END_BYTES, MAX_BYTES, digest_open
from bootseer.env.reads.read_list import Reads, label
from bootseer.errors import KeyUnknown
from bootseer.linux.child_processes import run_limited
from bootseer.logs import get_logger

_log = get_logger(__name__)

REPORTED_BYTES = 1 << 30  # reading this much or more is reported to the user
MAX_SETTINGS_BYTES = 1 << 20
GIT_S = 20.0
ABSENT, DIRECTORY, OTHER = "absent", "folder", "neither a file nor a folder"

# Names without meaning: Bootseer's beside targets, those of tools, and of jobs that run in the working directory.
_LEFT = re.compile(
    r"\.bootseer-.*|\.(git|hg|svn|tox|nox|mypy_cache|ruff_cache|pytest_cache|ipynb_checkpoints|DS_Store)|__pycache__"
    r"|.*\.(pyc|pyo|egg-info|dist-info|swp|log)|.*~|\.nfs.*|nohup\.out|core(\.\d+)?|wandb|mlruns|lightning_logs"
    r"|tb_logs|slurm-.*\.out"
)
# Modules that a file in the first directory of sys.path can replace.
_MODULES = sys.stdlib_module_names | {
    *("pip", "setuptools", "pkg_resources", "wheel", "packaging", "poetry", "pdm", "conda", "uv", "hatchling"),
    *("distutils", "_distutils_hack", "sitecustomize", "usercustomize", "build", "virtualenv"),
}


class ReadStates:
    """A sample of this node; each state is read once.

    Args: excluded: resolved directories whose names do not count, nor those of their parents: targets, the store.
        environ: for home and cache. is_logged: that the files are large.
    """

    def __init__(
        self, cwd: str, environ: Mapping[str, str], excluded: Collection[str] = (), *, is_logged: bool = False
    ) -> None:
        self.cwd = os.path.realpath(cwd)
        self.home = os.path.realpath(environ["HOME"]) if environ.get("HOME", "").startswith("/") else ""
        self._excluded = frozenset(above for each in excluded for above in _with_above(each))
        self._cache = DigestCache(environ)
        self._is_logged = is_logged
        self._left_bytes = MAX_BYTES
        self._read_bytes = 0
        self._known: dict[tuple[str, str], str] = {}
        self._ignored: dict[str, set[str]] = {}  # by directory
        self._repositories: dict[str, bool] = {}  # by directory: whether it is in a work tree

    # ---- names -----------------------------------------------------------------------------------------------

    def path_of(self, name: str) -> str:
        """Return the path of a name of `Reads`, except of kind ABOVE."""
        if name.startswith("~/"):
            return os.path.join(self.home or "/", name[2:])
        return os.path.normpath(os.path.join(self.cwd, name))

    def name_of(self, path: str) -> str:
        if path == self.cwd:
            return "."
        if self.cwd != "/" and path.startswith(self.cwd + "/"):
            name = path[len(self.cwd) + 1 :]
            return f"./{name}" if name.startswith("~/") else name
        if self.home and self.home != "/" and path.startswith(self.home + "/"):
            return "~/" + path[len(self.home) + 1 :]
        return path

    # ---- states ----------------------------------------------------------------------------------------------

    def states(self, reads: Reads) -> dict[str, str]:
        """Return states by label. Raises: KeyUnknown if they are too much to read at each start."""
        self.ignore(self.path_of(name) for name, kind in reads.reads if kind == kinds.NAMES)
        found = {label(name, kind): self.state(name, kind, reads.made.get(name, ())) for name, kind in reads.reads}
        self._cache.keep()
        return found

    def state(self, name: str, kind: str, made: Collection[str] = ()) -> str:
        """Return the state of one name. Args: made: names in a directory that do not count."""
        if kind == kinds.NAMES:
            return self._names(self.path_of(name), made)
        known = self._known.get((name, kind))
        if known is None:
            known = self._known[name, kind] = self._state(name, kind)
        return known

    def _state(self, name: str, kind: str) -> str:
        if kind == kinds.ABOVE:
            return self._above(name)
        path = self.path_of(name)
        if kind == kinds.FILE:
            return self.file(path)
        if kind == kinds.SETTINGS:
            return _settings(path)
        if kind == kinds.LINK:
            return link_state(path)
        if kind == kinds.MODULES:
            return self._modules(path)
        if kind == kinds.GIT:
            return git_state(path)
        if kind == kinds.REFS:
            return refs_state(path)
        return there_state(path)

    def file(self, path: str) -> str:
        """Return the digest of a file, and whether it is executable. Raises: KeyUnknown."""
        try:
            info = os.stat(path)
        except OSError as error:
            return _why_not(error)
        if not stat.S_ISREG(info.st_mode):
            return DIRECTORY if stat.S_ISDIR(info.st_mode) else OTHER
        end_bytes = END_BYTES if path.endswith(_ARCHIVE_ENDS) and info.st_size > END_BYTES else 0
        digest = "" if end_bytes else self._cache.find(path, info)
        if not digest:
            self._count(path, end_bytes or info.st_size)
            try:
                digest = digest_open(os.fsencode(path), end_bytes)
            except OSError as error:
                return _why_not(error)
            if not end_bytes:
                self._cache.add(path, info, digest)
        return digest + (" x" if info.st_mode & 0o100 else "")

    def _count(self, path: str, size: int) -> None:
        self._left_bytes -= size
        if self._left_bytes < 0:
            raise KeyUnknown(
                f"{path}: set-up reads more than {MAX_BYTES / 1e9:g} GB of files, which cannot be read at each "
                "start; do not read data in set-up"
            )
        if self._is_logged and self._read_bytes < REPORTED_BYTES <= self._read_bytes + size:
            _log.info("reading more than 1 GB of files that set-up reads, to detect changes")
        self._read_bytes += size

    def _above(self, name: str) -> str:
        """Hash the files of this name in all directories above the working directory, the nearest first."""
        found = []
        directory = self.cwd
        while directory != "/":
            directory = os.path.dirname(directory)
            path = os.path.join(directory, name)
            state = _settings(path) if is_settings(path) else self.file(path)
            if state not in (ABSENT, DIRECTORY):
                found.append(state)
        return hashlib.sha256("\n".join(found).encode()).hexdigest() if found else ABSENT

    # ---- directories -----------------------------------------------------------------------------------------

    def _names(self, path: str, made: Collection[str]) -> str:
        try:
            with os.scandir(path) as entries:
                names = [
                    os.fsdecode(entry.name) + ("/" if entry.is_dir(follow_symlinks=False) else "")
                    for entry in entries
                ]
        except OSError as error:
            return _why_not(error)
        return self.names_state(path, names, made)

    def names_state(self, path: str, names: Iterable[str], made: Collection[str]) -> str:
        """Return the state of names that a directory has, or had; names of directories end in a slash."""
        self.ignore([path])
        return _sum_of(sorted(name for name in names if self._counts(path, name, made)))

    def _counts(self, path: str, name: str, made: Collection[str]) -> bool:
        plain = name.rstrip("/")
        below = os.path.join(path, plain)
        if plain in made or _LEFT.fullmatch(plain) or below in self._excluded:
            return False
        if name.endswith("/") and os.path.lexists(os.path.join(below, "pyvenv.cfg")):
            return False
        return plain not in self._ignored.get(path, ())

    def counts(self, path: str) -> bool:
        """Return whether a name is part of the state of its parent directory."""
        directory, name = os.path.split(path)
        self.ignore([directory])
        return self._counts(directory, name + ("/" if os.path.isdir(path) else ""), ())

    def ignore(self, directories: Iterable[str]) -> None:
        """Query git once for the names in directories that it ignores."""
        todo = [each for each in dict.fromkeys(directories) if each not in self._ignored]
        paths: dict[str, list[str]] = {}
        for directory in todo:
            self._ignored[directory] = set()
            top = self._repository(directory)
            if top:
                try:
                    paths.setdefault(top, []).extend(
                        os.path.join(directory, name) for name in os.listdir(directory)
                    )
                except OSError:
                    continue
        for top, names in paths.items():
            for path in _ignored_by_git(top, names):
                directory, name = os.path.split(path)
                self._ignored.setdefault(directory, set()).add(name)

    def _repository(self, directory: str) -> str:
        """Return the top of the work tree that contains a directory; "" for none."""
        while True:
            if directory not in self._repositories:
                self._repositories[directory] = os.path.lexists(os.path.join(directory, ".git"))
            if self._repositories[directory]:
                return directory
            if directory == "/":
                return ""
            directory = os.path.dirname(directory)

    def _modules(self, path: str) -> str:
        """Return the state of names that replace modules of Python and of installers."""
        try:
            names = os.listdir(path)
        except OSError as error:
            return _why_not(error)
        return _sum_of(sorted(name for name in names if name.partition(".")[0] in _MODULES))


_ARCHIVE_ENDS = tuple(os.fsdecode(each) for each in ARCHIVES)
_SETTINGS = re.compile(
    r"(^|/)(pip\.conf|uv\.toml|\.condarc|condarc|\.mambarc|\.pydistutils\.cfg|(pypoetry|pdm)/config\.toml)$"
)


def is_settings(path: str) -> bool:
    """PURE: return whether a file has settings of an installer, which may contain passwords."""
    return _SETTINGS.search(path) is not None


def there_state(path: str) -> str:
    """Return whether a path exists, its kind, and whether it is executable."""
    try:
        return kind_of(os.stat(path).st_mode)
    except OSError as error:
        return _why_not(error)


def kind_of(mode: int) -> str:
    """PURE: return the same from a mode."""
    if stat.S_ISDIR(mode):
        return DIRECTORY
    if not stat.S_ISREG(mode):
        return OTHER
    return "file x" if mode & 0o100 else "file"


def link_state(path: str) -> str:
    """Return the state of a link's target."""
    try:
        return link_text(os.readlink(path))
    except OSError as error:
        return ABSENT if isinstance(error, FileNotFoundError | NotADirectoryError) else "no link"


def link_text(target: str) -> str:
    """PURE: return the same from a target."""
    return "to " + hashlib.sha256(os.fsencode(target)).hexdigest()


def _why_not(error: OSError) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ABSENT
    return f"cannot be read: {error.strerror}"


def _settings(path: str) -> str:
    """Hash settings without their secrets, which are part of no key."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SETTINGS_BYTES + 1)
    except IsADirectoryError:
        return DIRECTORY
    except OSError as error:
        return _why_not(error)
    text = redact_text(data.decode(errors="backslashreplace"))
    return hashlib.sha256(text.encode()).hexdigest()


def _with_above(path: str) -> Iterator[str]:
    """PURE: yield a directory and its parents, as the first start may create them all."""
    while path not in ("", "/"):
        yield path
        path = os.path.dirname(path)


def _sum_of(names: list[str]) -> str:
    text = "\n".join(names).encode("utf-8", "surrogateescape")
    return f"{len(names)} {hashlib.sha256(text).hexdigest()}"


# ---- git -----------------------------------------------------------------------------------------------------


def _git(directory: str, *words: str, given: bytes = b"") -> bytes | None:
    """Return git's output without running anything that a repository configures; None on failure."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C", directory, *words]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = run_limited(command, timeout_s=GIT_S, data=given, environ=environ)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _ignored_by_git(top: str, paths: list[str]) -> list[str]:
    given = b"\0".join(map(os.fsencode, paths))
    found = _git(top, "check-ignore", "-z", "--stdin", given=given) if paths else None
    return [os.fsdecode(each) for each in (found or b"").split(b"\0") if each]


def git_state(directory: str) -> str:
    """Hash what versions are made of: commit, branch, tags, names, and whether files differ."""
    head = _git(directory, "rev-parse", "HEAD")
    if head is None:
        return "no commit"
    parts = [
        head,
        _git(directory, "symbolic-ref", "-q", "HEAD"),
        _git(directory, "tag", "--merged", "HEAD", "--format=%(refname) %(objectname)"),
        _git(directory, "ls-files"),
        b"dirty" if _git(directory, "status", "--porcelain", "-uno") else b"",
    ]
    return hashlib.sha256(b"\0".join(part or b"" for part in parts)).hexdigest()


def refs_state(directory: str) -> str:
    """Hash the refs of a repository that set-up has fetched from."""
    refs = _git(directory, "show-ref", "--head")
    return "no commit" if refs is None else hashlib.sha256(refs).hexdigest()
