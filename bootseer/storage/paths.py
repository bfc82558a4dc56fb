"""Names in a store, and URLs as people may see them. Pure.

A path comes from a manifest or a listing, so from outside: none may lead out of the store's root.
"""

from __future__ import annotations

import re

from bootseer.errors import StorageError

MAX_PATH_BYTES = 4096
HIDDEN = "***"

_ADDRESS = re.compile(r"//[^/]*\[[^/]*")  # an IPv6 one, which has colons of its own
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)(://|::)")


def check_path(url: str, path: str, *, is_folder: bool = False) -> str:
    """The path itself. A folder may be "", the root.

    Raises: StorageError for one that is absolute, leaves the root, or has empty or foreign parts.
    """
    if path == "" and is_folder:
        return path
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise StorageError(f"{url}: {_shown(path)} is no path below it: names joined by '/', without '.' and '..'")
    if "\\" in path or any(ord(letter) < 32 or ord(letter) == 127 for letter in path):
        raise StorageError(f"{url}: {_shown(path)} has a backslash or a control character, which no store takes")
    if len(path.encode("utf-8", "surrogateescape")) > MAX_PATH_BYTES:
        raise StorageError(f"{url}: {_shown(path)} is longer than {MAX_PATH_BYTES} bytes")
    return path


def check_offset(url: str, path: str, offset: int) -> None:
    """Raises: StorageError for an offset below zero."""
    if offset < 0:
        raise StorageError(f"{url}: byte {offset} of {path!r}: no file begins below zero")


def join(folder: str, name: str) -> str:
    """A name in a folder, which may be the root."""
    return f"{folder}/{name}" if folder else name


def scheme_of(url: str) -> str:
    """The scheme in small letters, of a chain the first; "" for a plain path."""
    found = _SCHEME.match(url)
    return found[1].lower() if found else ""


def is_chained(url: str) -> bool:
    """Whether it is a chain of fsspec's, `zip://member::s3://bucket/file`."""
    return scheme_of(url) != "" and "::" in _ADDRESS.sub("", url)


def redact(url: str) -> str:
    """The URL without the password, and without the values of its query: they sign or name a caller."""
    head, mark, query = url.partition("?")  # what stands behind is a secret, also where it looks like a chain
    parts = head.split("::") if is_chained(url) else [head]
    return "::".join(map(_redact, [*parts[:-1], parts[-1] + mark + query]))


def _redact(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    rest, _, query = rest.partition("#")[0].partition("?")
    server, slash, path = rest.partition("/")
    if "@" in server:
        user, _, host = server.rpartition("@")
        name, colon, _ = user.partition(":")
        server = f"{name}:{HIDDEN}@{host}" if colon else f"{HIDDEN}@{host}"
    shown = f"{scheme}://{server}{slash}{path}"
    if not query:
        return shown
    return f"{shown}?{'&'.join(part.partition('=')[0] + '=' + HIDDEN for part in query.split('&') if part)}"


def _shown(path: str) -> str:
    return repr(path if len(path) <= 200 else path[:200] + "...")
