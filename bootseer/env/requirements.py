"""PURE: what requirement files name: packages that are not pinned, further files, folders and archives.

In: text of a requirement file, or single requirements. Out: `Named`, with paths as they are written. Pinned means
that the same text gives the same package again: `==` or `===` with an exact version, hashes, a URL with a hash, a
commit of git, or something local, whose content is hashed. What packages depend on is not looked at: only a lock
file, or a file made by `pip freeze`, pins that.

Syntax: pip's requirements file format (pip 23 to 26), PEP 508 by `packaging`.
"""

from __future__ import annotations

import codecs
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bootseer.errors import KeyUnknown

if TYPE_CHECKING:
    from packaging.markers import Marker

MOST_LINES = 100_000

_BOMS = (
    *((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32")),
    *((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")),
)
_CODING = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_COMMENT = re.compile(r"(^|\s+)#.*$")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
_ARCHIVE = re.compile(r"\.(whl|zip|tar|tgz|tbz|txz|tlz|tar\.(gz|bz2|xz|lz|lzma|Z)|conda)$")
_EXTRAS = re.compile(r"^(.*?)\s*\[([^\[\]]*)\]$")
_HASHED = re.compile(
    r"[#&](sha256|sha384|sha512|sha224|sha1|md5|blake2b)=[0-9a-fA-F]{32,}|#[0-9a-f]{32}(?![0-9a-f])"
)
_COMMIT = re.compile(r"@[0-9a-f]{40}([0-9a-f]{24})?(?=$|[#?])")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://|file:")
_NAMED_URL = re.compile(r"[A-Za-z0-9][\w.\-]*\s*(\[[^\]]*\])?\s*@\s*([A-Za-z][A-Za-z0-9+.\-]*://|file:)")
# What lock files consist of: `packaging`, which knows all the rest, takes 20 ms to import.
_PINNED = re.compile(
    r"([A-Za-z0-9](?:[A-Za-z0-9._\-]*[A-Za-z0-9])?)==[0-9]+(?:\.[0-9]+)*"
    r"(?:(?:a|b|rc)[0-9]+)?(?:\.post[0-9]+)?(?:\.dev[0-9]+)?(?:\+[a-z0-9]+)?"
)
_CONDA = re.compile(r"(?:[^\s:]+::?)*([A-Za-z0-9_.\-]+)\s*(.*)")
_CONDA_EXACT = re.compile(r"={2,3}\s*[\w.!+\-]+(=[\w.]+)?|=\s*[\w.!+\-]+=[\w.]+|\s*[\w.!+\-]+\s+[\w.]+")

# Options in requirement files that take a value, by what they are.
FILE_OPTIONS: dict[str, str] = {
    **dict.fromkeys(("-r", "--requirement", "--requirements"), "requirement"),
    **dict.fromkeys(("-c", "--constraint", "--constraints"), "constraint"),
    **dict.fromkeys(("-e", "--editable"), "editable"),
    **dict.fromkeys(("-f", "--find-links"), "find-links"),
    "--hash": "hash",
    **dict.fromkeys(("-i", "--index-url", "--pypi-url", "--extra-index-url", "--trusted-host"), ""),
    **dict.fromkeys(("--no-binary", "--only-binary", "--use-feature", "--global-option", "--install-option"), ""),
    **dict.fromkeys(("-C", "--config-settings", "--config-setting"), ""),
}


class Wanted(NamedTuple):
    """A package that is asked for."""

    name: str  # as PEP 503 writes it, "" where it is not known
    text: str  # as written; may hold the password of a URL
    is_pinned: bool


class Local(NamedTuple):
    """A folder, or an archive, that is installed."""

    path: str  # as written
    extras: tuple[str, ...] = ()
    is_editable: bool = False


class Named(NamedTuple):
    """What a file or a command names, in order."""

    wanted: tuple[Wanted, ...] = ()
    requirement_files: tuple[str, ...] = ()
    constraint_files: tuple[str, ...] = ()
    locals: tuple[Local, ...] = ()
    find_links: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()  # whose values stand in it
    notes: tuple[str, ...] = ()


class Collector:
    """Makes a Named, piece by piece. `markers`: facts of the interpreter (PEP 508), {} if it is not known."""

    def __init__(self, markers: Mapping[str, str] | None = None) -> None:
        self._markers = dict(markers or {})
        self.wanted: list[Wanted] = []
        self.requirement_files: list[str] = []
        self.constraint_files: list[str] = []
        self.locals: list[Local] = []
        self.find_links: list[str] = []
        self.variables: list[str] = []
        self.notes: list[str] = []

    def named(self) -> Named:
        return Named(
            tuple(dict.fromkeys(self.wanted)),
            tuple(dict.fromkeys(self.requirement_files)),
            tuple(dict.fromkeys(self.constraint_files)),
            tuple(dict.fromkeys(self.locals)),
            tuple(dict.fromkeys(self.find_links)),
            tuple(dict.fromkeys(self.variables)),
            tuple(dict.fromkeys(self.notes)),
        )

    def add_options(self, options: Iterable[tuple[str, str]]) -> None:
        """Of a line or a command: pairs of what `FILE_OPTIONS` says and the value."""
        for kind, value in options:
            if kind == "requirement":
                self.requirement_files.append(value)
            elif kind == "constraint":
                self.constraint_files.append(value)
            elif kind == "editable":
                self.add_requirement(value, is_editable=True)
            elif kind == "find-links":
                self.find_links.append(value)

    def add_requirement(self, text: str, *, has_hash: bool = False, is_editable: bool = False) -> None:
        """One requirement: of PEP 508, a URL, or a path."""
        text = text.strip()
        # Never at "; " alone: a URL may hold one.
        url, _, marker = text.partition(" ;")
        url = url.strip()
        if _URL.match(url):
            if self._applies_text(marker):
                self._add_url("", url, text, has_hash=has_hash, is_editable=is_editable)
            return
        path, extras = split_extras(url)
        if is_editable or (_NAMED_URL.match(text) is None and _looks_like_path(path)):
            if self._applies_text(marker):
                self.locals.append(Local(path, extras, is_editable))
            return
        self._add_named(text, has_hash)

    def _add_named(self, text: str, has_hash: bool) -> None:
        pinned = _PINNED.fullmatch(text)
        if pinned is not None:
            self.wanted.append(Wanted(re.sub(r"[\-_.]+", "-", pinned[1]).lower(), text, True))
            return
        _need_packaging()
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.utils import canonicalize_name

        try:
            found = Requirement(text)
        except InvalidRequirement:
            # pip says what is wrong with it. Who knows what it gives.
            self.wanted.append(Wanted("", text, False))
            return
        if found.marker is not None and not self._applies(found.marker):
            return
        name = canonicalize_name(found.name)
        if found.url is not None:
            self._add_url(name, found.url, text, has_hash=has_hash, is_editable=False)
            return
        exact = any(part.operator in ("==", "===") and not part.version.endswith(".*") for part in found.specifier)
        self.wanted.append(Wanted(name, text, exact or has_hash))

    def _add_url(self, name: str, url: str, text: str, *, has_hash: bool, is_editable: bool) -> None:
        if url.startswith("file:"):
            from urllib.parse import unquote

            path = unquote(url.removeprefix("file:").partition("#")[0].partition("?")[0])
            path, extras = split_extras(path)
            path = path.removeprefix("//localhost").removeprefix("//") if path.startswith("//") else path
            self.locals.append(Local(path, extras, is_editable))
            return
        is_pinned = has_hash or (
            _COMMIT.search(url) is not None
            if url.startswith(("git+", "hg+", "bzr+", "svn+"))
            else _HASHED.search(url) is not None
        )
        self.wanted.append(Wanted(name, text, is_pinned))

    def add_conda(self, text: str) -> None:
        """A package as conda has it: `channel::name=version=build`."""
        text = text.strip().strip("\"'")
        if _URL.match(text) or _looks_like_path(text):
            self.add_requirement(text)
            return
        found = _CONDA.fullmatch(text.partition("[")[0])
        if found is None:
            self.wanted.append(Wanted("", text, False))
            return
        is_pinned = "*" not in text and "," not in text and _CONDA_EXACT.fullmatch(found[2]) is not None
        self.wanted.append(Wanted(found[1].lower(), text, is_pinned))

    def _applies(self, marker: Marker) -> bool:
        from packaging.markers import UndefinedComparison, UndefinedEnvironmentName

        if not self._markers:
            return True
        try:
            return bool(marker.evaluate(self._markers))
        except (UndefinedComparison, UndefinedEnvironmentName):
            return True

    def _applies_text(self, text: str) -> bool:
        if not text.strip():
            return True
        _need_packaging()
        from packaging.markers import InvalidMarker, Marker

        try:
            return self._applies(Marker(text))
        except InvalidMarker:
            return True


def _need_packaging() -> None:
    """Raises: KeyUnknown without it: set-up goes on, and is not kept."""
    try:
        import packaging  # noqa: F401
    except ModuleNotFoundError:
        raise KeyUnknown("reading requirements takes packaging: pip install 'bootseer[env]'") from None


def decode_text(data: bytes) -> str:
    """Text of a requirement file, as pip decodes it."""
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return data.decode(encoding, "replace").removeprefix("\ufeff")
    for line in data.split(b"\n", 2)[:2]:
        found = _CODING.match(line)
        if found:
            try:
                return data.decode(found[1].decode("ascii"), "replace")
            except (LookupError, ValueError):
                break
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def parse_requirements(
    text: str, environ: Mapping[str, str] | None = None, markers: Mapping[str, str] | None = None
) -> Named:
    """A requirement file. `environ`: for `${NAME}`, which pip expands too."""
    into = Collector(markers)
    for line in joined_lines(text):
        add_line(into, line, environ or {})
    return into.named()


def add_line(into: Collector, line: str, environ: Mapping[str, str]) -> None:
    """One line of a requirement file, without its comment."""

    def expand(found: re.Match[str]) -> str:
        into.variables.append(found[1])
        return environ.get(found[1]) or found[0]

    line = _VARIABLE.sub(expand, line)
    words = line.split(" ")
    first = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    requirement = " ".join(words[:first]).strip()
    try:
        options, _ = split_options(shlex.split(" ".join(words[first:])), FILE_OPTIONS)
    except ValueError:
        into.wanted.append(Wanted("", line, False))
        return
    if requirement:
        into.add_requirement(requirement, has_hash=any(kind == "hash" for kind, _ in options))
    into.add_options(options)


def split_extras(text: str) -> tuple[str, tuple[str, ...]]:
    """`path[one,two]` as path and extras."""
    found = _EXTRAS.fullmatch(text)
    if found is None:
        return text, ()
    return found[1], tuple(filter(None, (extra.strip() for extra in found[2].split(","))))


def split_options(words: Sequence[str], valued: Mapping[str, str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Options that take a value as (kind, value), and the words that are no options. Other options are left out.

    `valued`: by its spelling, the kind of each option that takes a value.
    """
    options: list[tuple[str, str]] = []
    others: list[str] = []
    left = list(reversed(words))
    while left:
        word = left.pop()
        if word == "--":
            others += reversed(left)
            break
        if word.startswith("--"):
            name, mark, value = word.partition("=")
            if name in valued:
                options.append((valued[name], value if mark else left.pop() if left else ""))
        elif word.startswith("-") and len(word) > 1:
            for place in range(1, len(word)):
                name = f"-{word[place]}"
                if name in valued:
                    value = word[place + 1 :].removeprefix("=")
                    options.append((valued[name], value or (left.pop() if left else "")))
                    break
        else:
            others.append(word)
    return options, others


def unpinned(wanted: Iterable[Wanted], pinned: Iterable[str] = ()) -> list[str]:
    """The texts of those that neither are pinned nor have a name that something else pins."""
    given = list(wanted)
    names = {each.name for each in given if each.is_pinned and each.name} | set(pinned)
    return list(dict.fromkeys(each.text for each in given if not each.is_pinned and each.name not in names))


def joined_lines(text: str) -> Iterable[str]:
    """Joined where a backslash says so, without comments and empty ones (pip's order)."""
    begun = ""
    for line in text.splitlines()[:MOST_LINES]:
        is_comment = _COMMENT.match(line) is not None
        if line.endswith("\\") and not is_comment:
            begun += line[:-1]
            continue
        whole = begun + (" " + line if is_comment else line)
        begun = ""
        whole = _COMMENT.sub("", whole).strip()
        if whole:
            yield whole
    if begun.strip():
        yield begun.strip()


def _looks_like_path(text: str) -> bool:
    return "/" in text.partition(";")[0] or text.startswith(".") or _ARCHIVE.search(text) is not None
