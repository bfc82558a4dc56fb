"""PURE: contents of requirement files: packages that are not pinned, further files, directories and archives.

In: text of a requirement file, or single requirements. Out: `Requirements`, with paths as written. Pinned means
that the same text always gives the same package. That holds for: `==` or `===` with an exact version, hashes, a
URL with a hash, a commit of git, and local packages, whose content is hashed. Dependencies of packages are not
checked: only a lock file, or a file made by `pip freeze`, pins those.

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

MAX_LINES = 100_000

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
# The form of lock files. `packaging`, which parses all other forms, takes 20 ms to import.
_PINNED = re.compile(
    r"([A-Za-z0-9](?:[A-Za-z0-9._\-]*[A-Za-z0-9])?)==[0-9]+(?:\.[0-9]+)*"
    r"(?:(?:a|b|rc)[0-9]+)?(?:\.post[0-9]+)?(?:\.dev[0-9]+)?(?:\+[a-z0-9]+)?"
)
_CONDA = re.compile(r"(?:[^\s:]+::?)*([A-Za-z0-9_.\-]+)\s*(.*)")
_CONDA_EXACT = re.compile(r"={2,3}\s*[\w.!+\-]+(=[\w.]+)?|=\s*[\w.!+\-]+=[\w.]+|\s*[\w.!+\-]+\s+[\w.]+")

# Options in requirement files that take a value, by kind.
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


class RequestedPackage(NamedTuple):
    name: str  # in PEP 503 form, "" if unknown
    text: str  # as written; may hold the password of a URL
    is_pinned: bool
    fetcher: str = ""  # the program that downloads it, if it is no installer


class LocalPackage(NamedTuple):
    """A directory or archive that is installed."""

    path: str  # as written
    extras: tuple[str, ...] = ()
    is_editable: bool = False


class Requirements(NamedTuple):
    """The contents of a file or command, in order."""

    wanted: tuple[RequestedPackage, ...] = ()
    requirement_files: tuple[str, ...] = ()
    constraint_files: tuple[str, ...] = ()
    locals: tuple[LocalPackage, ...] = ()
    find_links: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()  # whose values are used in it
    notes: tuple[str, ...] = ()


class Collector:
    """A builder of `Requirements`. Args: markers: facts of the interpreter (PEP 508); {} if unknown."""

    def __init__(self, markers: Mapping[str, str] | None = None) -> None:
        self._markers = dict(markers or {})
        self.wanted: list[RequestedPackage] = []
        self.requirement_files: list[str] = []
        self.constraint_files: list[str] = []
        self.locals: list[LocalPackage] = []
        self.find_links: list[str] = []
        self.variables: list[str] = []
        self.notes: list[str] = []

    def named(self) -> Requirements:
        return Requirements(
            tuple(dict.fromkeys(self.wanted)),
            tuple(dict.fromkeys(self.requirement_files)),
            tuple(dict.fromkeys(self.constraint_files)),
            tuple(dict.fromkeys(self.locals)),
            tuple(dict.fromkeys(self.find_links)),
            tuple(dict.fromkeys(self.variables)),
            tuple(dict.fromkeys(self.notes)),
        )

    def add_options(self, options: Iterable[tuple[str, str]]) -> None:
        """Add options of a line or command: pairs of a kind of `FILE_OPTIONS` and a value."""
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
        """Add one requirement: of PEP 508, a URL, or a path."""
        text = text.strip()
        # Not at "; " alone: a URL may contain it.
        url, _, marker = text.partition(" ;")
        url = url.strip()
        if _URL.match(url):
            if self._applies_text(marker):
                self._add_url("", url, text, has_hash=has_hash, is_editable=is_editable)
            return
        path, extras = split_extras(url)
        if is_editable or (_NAMED_URL.match(text) is None and _looks_like_path(path)):
            if self._applies_text(marker):
                self.locals.append(LocalPackage(path, extras, is_editable))
            return
        self._add_named(text, has_hash)

    def _add_named(self, text: str, has_hash: bool) -> None:
        pinned = _PINNED.fullmatch(text)
        if pinned is not None:
            self.wanted.append(RequestedPackage(re.sub(r"[\-_.]+", "-", pinned[1]).lower(), text, True))
            return
        _need_packaging()
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.utils import canonicalize_name

        try:
            found = Requirement(text)
        except InvalidRequirement:
            # pip will report the error; count it as not pinned.
            self.wanted.append(RequestedPackage("", text, False))
            return
        if found.marker is not None and not self._applies(found.marker):
            return
        name = canonicalize_name(found.name)
        if found.url is not None:
            self._add_url(name, found.url, text, has_hash=has_hash, is_editable=False)
            return
        exact = any(part.operator in ("==", "===") and not part.version.endswith(".*") for part in found.specifier)
        self.wanted.append(RequestedPackage(name, text, exact or has_hash))

    def _add_url(self, name: str, url: str, text: str, *, has_hash: bool, is_editable: bool) -> None:
        if url.startswith("file:"):
            from urllib.parse import unquote

            path = unquote(url.removeprefix("file:").partition("#")[0].partition("?")[0])
            path, extras = split_extras(path)
            path = path.removeprefix("//localhost").removeprefix("//") if path.startswith("//") else path
            self.locals.append(LocalPackage(path, extras, is_editable))
            return
        is_pinned = has_hash or (
            _COMMIT.search(url) is not None
            if url.startswith(("git+", "hg+", "bzr+", "svn+"))
            else _HASHED.search(url) is not None
        )
        self.wanted.append(RequestedPackage(name, text, is_pinned))

    def add_conda(self, text: str) -> None:
        """Add a package in conda's syntax: `channel::name=version=build`."""
        text = text.strip().strip("\"'")
        if _URL.match(text) or _looks_like_path(text):
            self.add_requirement(text)
            return
        found = _CONDA.fullmatch(text.partition("[")[0])
        if found is None:
            self.wanted.append(RequestedPackage("", text, False))
            return
        is_pinned = "*" not in text and "," not in text and _CONDA_EXACT.fullmatch(found[2]) is not None
        self.wanted.append(RequestedPackage(found[1].lower(), text, is_pinned))

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
    """Raise KeyUnknown if `packaging` is missing: set-up runs, and its result is not stored."""
    try:
        import packaging  # noqa: F401
    except ModuleNotFoundError:
        raise KeyUnknown("reading requirements needs packaging: pip install 'bootseer[env]'") from None


def decode_text(data: bytes) -> str:
    """Decode the text of a requirement file like pip."""
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
) -> Requirements:
    """Parse a requirement file. Args: environ: for `${NAME}`, which pip expands too."""
    into = Collector(markers)
    for line in joined_lines(text):
        add_line(into, line, environ or {})
    return into.named()


def add_line(into: Collector, line: str, environ: Mapping[str, str]) -> None:
    """Add one line of a requirement file, without its comment."""

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
        into.wanted.append(RequestedPackage("", line, False))
        return
    if requirement:
        into.add_requirement(requirement, has_hash=any(kind == "hash" for kind, _ in options))
    into.add_options(options)


def split_extras(text: str) -> tuple[str, tuple[str, ...]]:
    """Split `path[one,two]` into path and extras."""
    found = _EXTRAS.fullmatch(text)
    if found is None:
        return text, ()
    return found[1], tuple(filter(None, (extra.strip() for extra in found[2].split(","))))


def split_options(words: Sequence[str], valued: Mapping[str, str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return options that take a value as (kind, value), and the words that are not options. Skip other options.

    Args: valued: kinds of the options that take a value, by their spelling.
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


def unpinned(wanted: Iterable[RequestedPackage], pinned: Iterable[str] = ()) -> list[str]:
    """Return the texts of packages that are not pinned, here or by name elsewhere."""
    given = list(wanted)
    names = {each.name for each in given if each.is_pinned and each.name} | set(pinned)
    return list(dict.fromkeys(each.text for each in given if not each.is_pinned and each.name not in names))


def joined_lines(text: str) -> Iterable[str]:
    """Yield lines joined at backslashes, without comments and empty lines (pip's order)."""
    begun = ""
    for line in text.splitlines()[:MAX_LINES]:
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
