"""What a captured environment leaves out, and what it cannot be captured with. Pure.

Left out: credentials, which would be for everybody who reads the store; what is no file to be had elsewhere
(sockets, fifos, devices); locks of installers. A file that an installed distribution brought (its RECORD names it,
with this sum) is no credential: packages ship keys for their tests.
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

from bootseer.env.walk import Entry

MOST_SECRET_BYTES = 64 << 10  # no file of credentials is larger
MOST_METADATA_BYTES = 16 << 20  # of a RECORD; torch's has 1.5 MiB

_ALWAYS = {b".netrc", b"_netrc", b".pypirc", b".git-credentials", b".pgpass", b".vault-token"}
_IN_FOLDER = {
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
    """Whether a name stands for no data: a socket, a fifo, a device."""
    return not (stat.S_ISREG(entry.mode) or stat.S_ISDIR(entry.mode) or stat.S_ISLNK(entry.mode))


def is_lock(path: bytes, entry: Entry) -> bool:
    """Whether it is the file that uv locks an environment by. Others of such names are packages' own."""
    return path == b".lock" and stat.S_ISREG(entry.mode) and entry.size == 0


def may_hold_secret(path: bytes, entry: Entry) -> bool:
    """Whether a look into the file is needed (`holds_secret`)."""
    if not stat.S_ISREG(entry.mode) or not 0 < entry.size <= MOST_SECRET_BYTES:
        return False
    above, _, name = path.rpartition(b"/")
    folder = above.rpartition(b"/")[2]
    return (
        name in _ALWAYS
        or name in _SETTINGS
        or (folder, name) in _IN_FOLDER
        or (folder == b".git" and name == b"config")
        or folder == b".ssh"
        or name.endswith(_KEY_ENDINGS)
        or b"." not in name
    )


def holds_secret(path: bytes, data: bytes) -> bool:
    """Whether a file of this content is a credential."""
    above, _, name = path.rpartition(b"/")
    folder = above.rpartition(b"/")[2]
    if name in _ALWAYS or (folder, name) in _IN_FOLDER:
        return True
    if _PRIVATE_KEY.search(data):
        return True
    if name not in _SETTINGS and not (folder == b".git" and name == b"config"):
        return False
    if _TOKEN.search(data):
        return True
    users = (found[1] for found in _USER_IN_URL.finditer(data))
    return any(user not in _NO_SECRET_USERS and not _VARIABLE.match(user) for user in users)


def is_bytecode_of(path: bytes, source: bytes) -> bool:
    """Whether `path` is what Python made of this source."""
    above, _, name = source.rpartition(b"/")
    folder, _, made = path.rpartition(b"/")
    return (
        name.endswith(b".py")
        and made.endswith(b".pyc")
        and made.startswith(name[:-2])
        and folder == (above + b"/" if above else b"") + b"__pycache__"
    )


def read_record(data: bytes) -> dict[bytes, str]:
    """Of a RECORD: by path relative to its site-packages, the sum as it stands there; no line is an error."""
    found = {}
    try:
        for row in csv.reader(data.decode("utf-8", "surrogateescape").splitlines()):
            if len(row) >= 2 and row[1]:
                found[row[0].encode("utf-8", "surrogateescape")] = row[1]
    except csv.Error:
        pass
    return found


def is_of_record(path: bytes, data: bytes, site: bytes, record: Mapping[bytes, str]) -> bool:
    """Whether a distribution in the folder `site` brought this file as it is; both paths are below the target."""
    written = record.get(posixpath.relpath(path, site or b"."))
    if written is None:
        return False
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return written == f"sha256={digest}"


# ---- what points outside -----------------------------------------------------------------------------------


class Pointer(NamedTuple):
    """A package whose files are elsewhere."""

    name: str  # of the distribution, or of the file that says so
    folder: str  # absolute


def metadata_kind(path: bytes) -> str:
    """What `find_pointers` reads: "direct_url", "egg-link", "pth", "finder"; "" for other files."""
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


def find_pointers(path: bytes, data: bytes) -> list[Pointer]:
    """Folders that a metadata file makes imports come from."""
    above, _, name = path.rpartition(b"/")
    shown = name.decode(errors="replace")
    kind = metadata_kind(path)
    if kind == "direct_url":
        distribution = above.rpartition(b"/")[2].partition(b"-")[0].decode(errors="replace")
        return [Pointer(distribution, folder) for folder in _of_direct_url(data)]
    if kind == "egg-link":
        lines = data.decode(errors="surrogateescape").splitlines()[:1]
        return [Pointer(shown.removesuffix(".egg-link"), line.strip()) for line in lines if line.startswith("/")]
    if kind == "pth":
        lines = data.decode(errors="surrogateescape").splitlines()
        return [Pointer(_editable_name(shown), line.strip()) for line in lines if line.startswith("/")]
    if kind == "finder":
        return [Pointer(_editable_name(shown), folder) for folder in _of_finder(data)]
    return []


class Editables(NamedTuple):
    """What is installed in place."""

    required: list[str]  # inputs that a node must have at the same path
    refused: list[Pointer]  # of which nobody knows whether another node has them


def judge_pointers(pointers: Iterable[Pointer], targets: Iterable[str], inputs: Iterable[str]) -> Editables:
    """A source folder has to lie in a target, or in a declared input; paths are absolute and resolved."""
    required: set[str] = set()
    refused: list[Pointer] = []
    known_targets, known_inputs = list(targets), list(inputs)
    for pointer in pointers:
        folder = posixpath.normpath(pointer.folder)
        if any(is_within(folder, target) for target in known_targets):
            continue
        found = [each for each in known_inputs if is_within(folder, each)]
        if found:
            required.update(found[:1])
        elif pointer not in refused:
            refused.append(pointer)
    return Editables(sorted(required), refused)


def is_within(path: str, folder: str) -> bool:
    """Whether an absolute path is the folder or below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _editable_name(name: str) -> str:
    """Of `__editable__.NAME-VERSION.pth`, `__editable___NAME_VERSION_finder.py`; else the file's own."""
    found = re.fullmatch(r"__editable__[._]+(.+?)(?:-[^-]*\.pth|_finder\.py)", name)
    return found[1] if found else name


def _of_direct_url(data: bytes) -> Iterator[str]:
    try:
        direct = json.loads(data)
        is_editable = direct["dir_info"]["editable"] is True
        url = urlsplit(str(direct["url"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return  # of something else, or nothing that an installer wrote
    if is_editable and url.scheme == "file":
        yield unquote(url.path)


def _of_finder(data: bytes) -> Iterator[str]:
    """As setuptools writes it: MAPPING and NAMESPACES are literals."""
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
            for folder in value if isinstance(value, list) else [value]:
                if isinstance(folder, str) and folder.startswith("/"):
                    yield folder
