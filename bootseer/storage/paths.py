"""Names in a store, and URLs without secrets for messages. Pure.

A path may come from a manifest or a listing, so from outside: none may lead out of the store's root.
"""

from __future__ import annotations

import re

from bootseer.errors import StorageError

MAX_PATH_BYTES = 4096
HIDDEN = "***"
WEB_SCHEMES = ("http", "https")
HDFS_SCHEMES = ("hdfs", "viewfs", "webhdfs", "swebhdfs")  # their clients take undecoded names
OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
SCHEMES = ("file", "memory", *WEB_SCHEMES, *HDFS_SCHEMES, "oci", *OBJECT_SCHEMES)

_ADDRESS = re.compile(r"//[^/]*\[[^/]*")  # an IPv6 one, which contains colons
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)(://|::)")


def check_path(url: str, path: str, *, is_folder: bool = False) -> str:
    """Return the path. A directory may be "", the root.

    Raises: StorageError for one that is absolute, leaves the root, or has empty or invalid parts.
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
    """Check an offset. Raises: StorageError for a negative one."""
    if offset < 0:
        raise StorageError(f"{url}: byte {offset} of {path!r}: no file begins below zero")


def join(directory: str, name: str) -> str:
    """Join a directory, which may be the root "", and a name."""
    return f"{directory}/{name}" if directory else name


def scheme_of(url: str) -> str:
    """Return the scheme in lower case, of a chain the first; "" for a plain path."""
    found = _SCHEME.match(url)
    return found[1].lower() if found else ""


def is_web(url: str) -> bool:
    """Return whether it is a URL of a web server, which lists no directories and takes no files."""
    return scheme_of(url) in WEB_SCHEMES


def is_chained(url: str) -> bool:
    """Return whether it is a chain of fsspec, `zip://member::s3://bucket/file`."""
    return scheme_of(url) != "" and "::" in _ADDRESS.sub("", url)


def redact(url: str) -> str:
    """Return the URL without its password and without the values of its query: they may be credentials."""
    head, mark, query = url.partition("?")  # the query is a secret, even if it resembles a chain
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


def unknown_scheme_error(url: str) -> str:
    """PURE: return the message for a URL with an unknown scheme."""
    import difflib

    scheme = scheme_of(url)
    near = difflib.get_close_matches(scheme, SCHEMES, n=1)
    hint = f"did you mean {near[0]}://?" if near else f"there are {', '.join(SCHEMES)} and those of fsspec"
    return f"{redact(url)}: no store has the scheme {scheme!r}: {hint}"
