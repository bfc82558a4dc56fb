"""Decides which files a capture leaves out, and which refuse it. Pure.

Left out: credentials, which all readers of the store could read; sockets, fifos and devices, which are of no use
elsewhere; locks of installers. A file of an installed distribution (its RECORD has its name and checksum) is not a
credential: packages ship keys for their tests.
"""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import json
import posixpath
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from bootseer.env.capture.walk import Entry

MAX_SECRET_BYTES = 64 << 10  # files of credentials are smaller
MAX_METADATA_BYTES = 16 << 20  # of a RECORD; torch's has 1.5 MiB

_ALWAYS = {b".netrc", b"_netrc", b".pypirc", b".git-credentials", b".pgpass", b".vault-token"}
_IN_DIRECTORY = {
    *((b".docker", b"config.json"), (b".aws", b"credentials"), (b".kube", b"config"), (b"huggingface", b"token")),
    *((b".huggingface", b"token"), (b"huggingface", b"stored_tokens"), (b"gh", b"hosts.yml")),
    (b"gcloud", b"application_default_credentials.json"),
}
_SETTINGS = {
    *(b"pip.conf", b".pip.conf", b"pip.ini", b"uv.toml", b".condarc", b"condarc", b".npmrc", b".gitconfig"),
    *(b"auth.toml", b".pydistutils.cfg"),
}
_KEY_ENDINGS = (b".pem", b".key", b".p8")
_PRIVATE_KEY = re.compile(rb"^-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----", re.MULTILINE)
_USER_IN_URL = re.compile(rb"://([^/\s@'\"]+)@")
_NO_SECRET_USERS = {b"git", b"hg", b"svn"}
_TOKEN = re.compile(
    rb"_authToken\s*=\s*\S|/t/[A-Za-z0-9_-]{6,}/|^\s*(?:password|token|secret|api[_-]?key)\s*[=:]\s*[\"']?\S",
    re.MULTILINE | re.IGNORECASE,
)
_VARIABLE = re.compile(rb"^(?:\$\{?\w+\}?:?)+$")


# ---- left out ----------------------------------------------------------------------------------------------


def is_special(entry: Entry) -> bool:
    """Return whether an entry has no data: a socket, a fifo, a device."""
    return not (stat.S_ISREG(entry.mode) or stat.S_ISDIR(entry.mode) or stat.S_ISLNK(entry.mode))


def is_lock(path: bytes, entry: Entry) -> bool:
    """Return whether it is uv's lock of an environment. Other files of that name belong to packages."""
    return path == b".lock" and stat.S_ISREG(entry.mode) and entry.size == 0


def may_hold_secret(path: bytes, entry: Entry) -> bool:
    """Return whether the content of a file must be checked (`holds_secret`)."""
    if not stat.S_ISREG(entry.mode) or not 0 < entry.size <= MAX_SECRET_BYTES:
        return False
    above, _, name = path.rpartition(b"/")
    directory = above.rpartition(b"/")[2]
    return (
        name in _ALWAYS
        or name in _SETTINGS
        or (directory, name) in _IN_DIRECTORY
        or (directory == b".git" and name == b"config")
        or directory == b".ssh"
        or name.endswith(_KEY_ENDINGS)
        or b"." not in name
    )


def holds_secret(path: bytes, data: bytes) -> bool:
    """Return whether a file with this content is a credential."""
    above, _, name = path.rpartition(b"/")
    directory = above.rpartition(b"/")[2]
    if name in _ALWAYS or (directory, name) in _IN_DIRECTORY:
        return True
    if _PRIVATE_KEY.search(data):
        return True
    if name not in _SETTINGS and not (directory == b".git" and name == b"config"):
        return False
    if _TOKEN.search(data):
        return True
    users = (found[1] for found in _USER_IN_URL.finditer(data))
    return any(user not in _NO_SECRET_USERS and not _VARIABLE.match(user) for user in users)


def is_bytecode_of(path: bytes, source: bytes) -> bool:
    """Return whether `path` is the bytecode of this source."""
    above, _, name = source.rpartition(b"/")
    directory, _, made = path.rpartition(b"/")
    return (
        name.endswith(b".py")
        and made.endswith(b".pyc")
        and made.startswith(name[:-2])
        and directory == (above + b"/" if above else b"") + b"__pycache__"
    )


def read_record(data: bytes) -> dict[bytes, str]:
    """Parse a RECORD: path relative to its site-packages -> checksum as written; bad lines are ignored."""
    found = {}
    try:
        for row in csv.reader(data.decode("utf-8", "surrogateescape").splitlines()):
            if len(row) >= 2 and row[1]:
                found[row[0].encode("utf-8", "surrogateescape")] = row[1]
    except csv.Error:
        pass
    return found


def is_of_record(path: bytes, data: bytes, site: bytes, record: Mapping[bytes, str]) -> bool:
    """Return whether a RECORD in the directory `site` lists this file unchanged; paths are below the target."""
    written = record.get(posixpath.relpath(path, site or b"."))
    if written is None:
        return False
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return written == f"sha256={digest}"


# ---- pointers outside --------------------------------------------------------------------------------------


class EditablePointer(NamedTuple):
    """A package whose files are elsewhere."""

    name: str  # of the distribution, or of the file that points there
    folder: str  # absolute


def metadata_kind(path: bytes) -> str:
    """Return the kind of a file for `find_pointers`: "direct_url", "egg-link", "pth", "finder"; "" for others."""
    above, _, name = path.rpartition(b"/")
    if name == b"direct_url.json" and above.endswith(b".dist-info"):
        return "direct_url"
    if name.endswith(b".egg-link"):
        return "egg-link"
    if name == b"easy-install.pth" or (name.startswith(b"__editable__") and name.endswith(b".pth")):
        return "pth"
    if name.startswith(b"__editable__") and name.endswith(b"_finder.py"):
        return "finder"
    return ""


def find_pointers(path: bytes, data: bytes) -> list[EditablePointer]:
    """Return the directories from which a metadata file makes Python import."""
    above, _, name = path.rpartition(b"/")
    shown = name.decode(errors="replace")
    kind = metadata_kind(path)
    if kind == "direct_url":
        distribution = above.rpartition(b"/")[2].partition(b"-")[0].decode(errors="replace")
        return [EditablePointer(distribution, directory) for directory in _of_direct_url(data)]
    if kind == "egg-link":
        lines = data.decode(errors="surrogateescape").splitlines()[:1]
        return [
            EditablePointer(shown.removesuffix(".egg-link"), line.strip())
            for line in lines
            if line.startswith("/")
        ]
    if kind == "pth":
        lines = data.decode(errors="surrogateescape").splitlines()
        return [EditablePointer(_editable_name(shown), line.strip()) for line in lines if line.startswith("/")]
    if kind == "finder":
        return [EditablePointer(_editable_name(shown), directory) for directory in _of_finder(data)]
    return []


class Editables(NamedTuple):
    """Packages that are installed in place."""

    required: list[str]  # inputs that a node must have at the same path
    refused: list[EditablePointer]  # other nodes may not have their directories


def judge_pointers(
    pointers: Iterable[EditablePointer], targets: Iterable[str], inputs: Iterable[str]
) -> Editables:
    """Check that source directories lie in a target or a declared input; paths are absolute and resolved."""
    required: set[str] = set()
    refused: list[EditablePointer] = []
    known_targets, known_inputs = list(targets), list(inputs)
    for pointer in pointers:
        directory = posixpath.normpath(pointer.folder)
        if any(is_within(directory, target) for target in known_targets):
            continue
        found = [each for each in known_inputs if is_within(directory, each)]
        if found:
            required.update(found[:1])
        elif pointer not in refused:
            refused.append(pointer)
    return Editables(sorted(required), refused)


def is_within(path: str, directory: str) -> bool:
    """Return whether an absolute path is the directory or below it."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _editable_name(name: str) -> str:
    """Return NAME of `__editable__.NAME-VERSION.pth` or `__editable___NAME_VERSION_finder.py`, else the file's."""
    found = re.fullmatch(r"__editable__[._]+(.+?)(?:-[^-]*\.pth|_finder\.py)", name)
    return found[1] if found else name


def _of_direct_url(data: bytes) -> Iterator[str]:
    try:
        direct = json.loads(data)
        is_editable = direct["dir_info"]["editable"] is True
        url = urlsplit(str(direct["url"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return  # another kind of source, or not written by an installer
    if is_editable and url.scheme == "file":
        yield unquote(url.path)


def _of_finder(data: bytes) -> Iterator[str]:
    """Parse a finder of setuptools: MAPPING and NAMESPACES are literals."""
    text = data.decode(errors="replace")
    for line in text.splitlines():
        found = re.match(r"(?:MAPPING|NAMESPACES)\b[^=]*=\s*(\{.*\})\s*$", line)
        if found is None:
            continue
        try:
            values = ast.literal_eval(found[1])
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        for value in values.values():
            for directory in value if isinstance(value, list) else [value]:
                if isinstance(directory, str) and directory.startswith("/"):
                    yield directory
