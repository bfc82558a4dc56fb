"""What there is on this node of what set-up reads: the state of each name, as text that is the same for the same.

In: `Reads`, the working folder, the user's home. Out: states by label. Files are hashed, those of some size only
once as long as they do not change (digest_cache.py). Folders give their names without what git ignores and what
jobs and tools leave by themselves.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from bootseer.env import reads as kinds
from bootseer.env.digest_cache import DigestCache
from bootseer.env.folder_digest import ARCHIVES, END_BYTES, MOST_BYTES, digest_open
from bootseer.env.reads import Reads, label
from bootseer.env.redaction import redact_text
from bootseer.errors import KeyUnknown

TOLD_BYTES = 1 << 30  # from so much on that has to be read people are told of it
MOST_SETTINGS_BYTES = 1 << 20
GIT_S = 20.0
ABSENT, FOLDER, OTHER = "absent", "folder", "neither a file nor a folder"

# Names that come by themselves: ours beside targets, of tools, of jobs that run in the working folder.
_LEFT = re.compile(
    r"\.bootseer-.*|\.(git|hg|svn|tox|nox|mypy_cache|ruff_cache|pytest_cache|ipynb_checkpoints|DS_Store)|__pycache__"
    r"|.*\.(pyc|pyo|egg-info|dist-info|swp|log)|.*~|\.nfs.*|nohup\.out|core(\.\d+)?|wandb|mlruns|lightning_logs"
    r"|tb_logs|slurm-.*\.out"
)
# Modules that a file in the first folder of sys.path stands in for.
_MODULES = sys.stdlib_module_names | {
    *("pip", "setuptools", "pkg_resources", "wheel", "packaging", "poetry", "pdm", "conda", "uv", "hatchling"),
    *("distutils", "_distutils_hack", "sitecustomize", "usercustomize", "build", "virtualenv"),
}

Say = Callable[[str], object]


class Now:
    """One look; what was read once is not read again.

    Args: excluded: resolved folders whose names do not count, nor those of folders that they are in: targets, the
        store. environ: for home and cache.
    """

    def __init__(
        self, cwd: str, environ: Mapping[str, str], excluded: Collection[str] = (), say: Say = lambda _: None
    ) -> None:
        self.cwd = os.path.realpath(cwd)
        self.home = os.path.realpath(environ["HOME"]) if environ.get("HOME", "").startswith("/") else ""
        self._excluded = frozenset(above for each in excluded for above in _with_above(each))
        self._cache = DigestCache(environ)
        self._say = say
        self._left_bytes = MOST_BYTES
        self._read_bytes = 0
        self._known: dict[tuple[str, str], str] = {}
        self._ignored: dict[str, set[str]] = {}  # by folder
        self._repositories: dict[str, bool] = {}  # whether a folder lies in one

    # ---- names -----------------------------------------------------------------------------------------------

    def path_of(self, name: str) -> str:
        """Of a name of `Reads`, but those of kind ABOVE."""
        if name.startswith("~/"):
            return os.path.join(self.home or "/", name[2:])
        return os.path.normpath(os.path.join(self.cwd, name))

    def name_of(self, path: str) -> str:
        """The name of an absolute path."""
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
        """By label. Raises: KeyUnknown for more than can be read at a start."""
        self.ignore(self.path_of(name) for name, kind in reads.reads if kind == kinds.NAMES)
        found = {label(name, kind): self.state(name, kind, reads.made.get(name, ())) for name, kind in reads.reads}
        self._cache.keep()
        return found

    def state(self, name: str, kind: str, made: Collection[str] = ()) -> str:
        """Of one name. Args: made: of a folder, the names that do not count."""
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
        """Of what is read: its content, and whether it may be executed. Raises: KeyUnknown."""
        try:
            info = os.stat(path)
        except OSError as error:
            return _why_not(error)
        if not stat.S_ISREG(info.st_mode):
            return FOLDER if stat.S_ISDIR(info.st_mode) else OTHER
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
                f"{path}: set-up reads more than {MOST_BYTES / 1e9:g} GB of files, which cannot be read at each "
                "start: keep data out of what set-up reads"
            )
        if self._read_bytes < TOLD_BYTES <= self._read_bytes + size:
            self._say("what set-up reads is more than 1 GB: reading it, to know whether it has changed")
        self._read_bytes += size

    def _above(self, name: str) -> str:
        """Of the files of this name in all folders above the working one, those that are nearest first."""
        found = []
        folder = self.cwd
        while folder != "/":
            folder = os.path.dirname(folder)
            path = os.path.join(folder, name)
            state = _settings(path) if is_settings(path) else self.file(path)
            if state not in (ABSENT, FOLDER):
                found.append(state)
        return hashlib.sha256("\n".join(found).encode()).hexdigest() if found else ABSENT

    # ---- folders ---------------------------------------------------------------------------------------------

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
        """Of names that a folder has, or had; those of folders end in a slash."""
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
        """Whether a name stands in the state of the folder that it is in."""
        folder, name = os.path.split(path)
        self.ignore([folder])
        return self._counts(folder, name + ("/" if os.path.isdir(path) else ""), ())

    def ignore(self, folders: Iterable[str]) -> None:
        """Asks git which names in folders it ignores: of all of them at once."""
        todo = [each for each in dict.fromkeys(folders) if each not in self._ignored]
        paths: dict[str, list[str]] = {}
        for folder in todo:
            self._ignored[folder] = set()
            top = self._repository(folder)
            if top:
                try:
                    paths.setdefault(top, []).extend(os.path.join(folder, name) for name in os.listdir(folder))
                except OSError:
                    continue
        for top, names in paths.items():
            for path in _ignored_by_git(top, names):
                folder, name = os.path.split(path)
                self._ignored.setdefault(folder, set()).add(name)

    def _repository(self, folder: str) -> str:
        """The top of the work tree that a folder lies in; "" for none."""
        while True:
            if folder not in self._repositories:
                self._repositories[folder] = os.path.lexists(os.path.join(folder, ".git"))
            if self._repositories[folder]:
                return folder
            if folder == "/":
                return ""
            folder = os.path.dirname(folder)

    def _modules(self, path: str) -> str:
        """Of names that stand in for modules of Python and of installers."""
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
    """PURE: whether a file is an installer's settings, in which passwords may stand."""
    return _SETTINGS.search(path) is not None


def there_state(path: str) -> str:
    """Whether there is something, what, and whether it may be executed."""
    try:
        return kind_of(os.stat(path).st_mode)
    except OSError as error:
        return _why_not(error)


def kind_of(mode: int) -> str:
    """PURE: the same of what was there."""
    if stat.S_ISDIR(mode):
        return FOLDER
    if not stat.S_ISREG(mode):
        return OTHER
    return "file x" if mode & 0o100 else "file"


def link_state(path: str) -> str:
    """Where a link leads."""
    try:
        return link_text(os.readlink(path))
    except OSError as error:
        return ABSENT if isinstance(error, FileNotFoundError | NotADirectoryError) else "no link"


def link_text(target: str) -> str:
    """PURE: the same of where it led."""
    return "to " + hashlib.sha256(os.fsencode(target)).hexdigest()


def _why_not(error: OSError) -> str:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ABSENT
    return f"cannot be read: {error.strerror}"


def _settings(path: str) -> str:
    """Without secrets, as these are in no key."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_SETTINGS_BYTES + 1)
    except IsADirectoryError:
        return FOLDER
    except OSError as error:
        return _why_not(error)
    text = redact_text(data.decode(errors="backslashreplace"))
    return hashlib.sha256(text.encode()).hexdigest()


def _with_above(path: str) -> Iterator[str]:
    """PURE: a folder and those that it is in: the first start may make them all."""
    while path not in ("", "/"):
        yield path
        path = os.path.dirname(path)


def _sum_of(names: list[str]) -> str:
    text = "\n".join(names).encode("utf-8", "surrogateescape")
    return f"{len(names)} {hashlib.sha256(text).hexdigest()}"


# ---- git -----------------------------------------------------------------------------------------------------


def _git(folder: str, *words: str, given: bytes = b"") -> bytes | None:
    """What git says; nothing that a repository configures is run. None where it cannot say it."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C", folder, *words]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=GIT_S, env=environ, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _ignored_by_git(top: str, paths: list[str]) -> list[str]:
    given = b"\0".join(map(os.fsencode, paths))
    found = _git(top, "check-ignore", "-z", "--stdin", given=given) if paths else None
    return [os.fsdecode(each) for each in (found or b"").split(b"\0") if each]


def git_state(folder: str) -> str:
    """Of a repository: what versions are made of. The commit, branch, tags, names, and whether files differ."""
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return "no commit"
    parts = [
        head,
        _git(folder, "symbolic-ref", "-q", "HEAD"),
        _git(folder, "tag", "--merged", "HEAD", "--format=%(refname) %(objectname)"),
        _git(folder, "ls-files"),
        b"dirty" if _git(folder, "status", "--porcelain", "-uno") else b"",
    ]
    return hashlib.sha256(b"\0".join(part or b"" for part in parts)).hexdigest()


def refs_state(folder: str) -> str:
    """Of a repository that something was fetched from: what each of its names stands for."""
    refs = _git(folder, "show-ref", "--head")
    return "no commit" if refs is None else hashlib.sha256(refs).hexdigest()
