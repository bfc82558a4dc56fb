"""The store for a URL. Each kind's module, and what it stands on, is imported when it is needed.

URLs of files, of the web and of object stores are percent-decoded; plain paths are taken as they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from bootseer.errors import ConfigError
from bootseer.storage.paths import is_chained, redact, scheme_of
from bootseer.storage.protocol import Store

TIMEOUT_S = 30.0
_NONE: Mapping[str, object] = {}
_OBJECTS = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
_RAW = ("hdfs", "viewfs", "webhdfs", "swebhdfs")  # their clients take names as they are written


def open_store(url: str, *, timeout_s: float = TIMEOUT_S, options: Mapping[str, object] = _NONE) -> Store:
    """The store whose root is `url`; nothing is asked of it yet.

    `timeout_s`: the longest time without progress of any call. `options` depend on the kind of store.

    Raises: ConfigError for a URL or options that cannot be, and for a missing package.
    """
    scheme = scheme_of(url)
    if "\0" in url or not url:
        raise ConfigError(f"{redact(url)!r} is no URL and no path")
    if timeout_s <= 0:
        raise ConfigError(f"{redact(url)}: a timeout of {timeout_s:g} s")
    if is_chained(url):
        return _open_fsspec(url, timeout_s, options)
    if scheme in ("", "file", "local"):
        from bootseer.storage.local import LocalStore

        _refuse_options(url, options)
        return LocalStore(local_path(url), timeout_s=timeout_s)
    if scheme == "memory":
        from bootseer.storage.memory import MemoryStore

        _refuse_options(url, options)
        name, _, folder = unquote(url.partition("://")[2].strip("/")).partition("/")
        return MemoryStore(name, folder)
    if scheme in ("http", "https"):
        return _open_http(url, timeout_s, options)
    if scheme in _RAW:
        from bootseer.storage.hdfs import HdfsStore

        return HdfsStore.open(url, timeout_s=timeout_s, options=options)
    if scheme == "oci":
        from bootseer.storage.oci import OciStore

        return OciStore(url, timeout_s=timeout_s, options=options)
    if scheme in _OBJECTS:
        from bootseer.storage.objects import ObjectStore

        return ObjectStore(url, timeout_s=timeout_s, options=options)
    return _open_fsspec(url, timeout_s, options)


def open_at(url: str, *, timeout_s: float = TIMEOUT_S, options: Mapping[str, object] = _NONE) -> tuple[Store, str]:
    """The store of the folder that `url` is in, and the name in it."""
    folder, name = split_url(url)
    return open_store(folder, timeout_s=timeout_s, options=options), name


def split_url(url: str) -> tuple[str, str]:
    """The URL of the folder, and the name in it as stores take it. A query stays with the folder.

    Raises: ConfigError for the root of a store.
    """
    scheme = scheme_of(url)
    if not scheme:
        folder, name = os.path.split(os.path.abspath(url))
        if not name:
            raise ConfigError(f"{url} is the root: name a file or folder in it")
        return folder, name
    if is_chained(url):
        # The first member's path is the file; the rest says where that file system is.
        first, mark, rest = url.partition("::")
        if "://" not in first:
            raise ConfigError(f"{redact(url)}: name a file in it")
        folder, name = split_url(first)
        return f"{folder}{mark}{rest}", name
    query = ""
    if scheme in ("http", "https"):
        url, mark, query = url.partition("?")
        query = mark + query.partition("#")[0]
    start, _, rest = url.partition("://")
    rest = rest.rstrip("/")
    above, slash, name = rest.rpartition("/")
    needs_server = scheme not in ("file", "local", "memory")
    if not slash or not name or (needs_server and not above and scheme not in _RAW):
        raise ConfigError(f"{redact(url)} is the root of a store: name a file or folder in it")
    if scheme not in _RAW and _is_decoded(scheme):
        name = unquote(name)
    return f"{start}://{above or ('/' if scheme in ('file', 'local') else '')}{query}", name


def local_path(url: str) -> str:
    """The path of a plain path or a file: URL.

    Raises: ConfigError when the URL names another machine.
    """
    if not scheme_of(url):
        return os.path.abspath(url)
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{redact(url)}: is on another machine; file:///PATH is on this one")
    return os.path.abspath(unquote(url.partition("://")[2].removeprefix(parts.netloc) or "/"))


def _is_decoded(scheme: str) -> bool:
    return scheme in ("file", "local", "memory", "http", "https", *_OBJECTS)


def _open_http(url: str, timeout_s: float, options: Mapping[str, object]) -> Store:
    from bootseer.storage.http import HttpStore

    rest = dict(options)
    headers, ca_file = rest.pop("headers", None) or {}, rest.pop("ca_file", "")
    _refuse_options(url, rest)
    if not isinstance(headers, Mapping) or not isinstance(ca_file, str):
        raise ConfigError(f"{redact(url)}: `headers` is a mapping and `ca_file` a path")
    return HttpStore(
        url,
        timeout_s=timeout_s,
        headers={str(name): str(value) for name, value in headers.items()},
        ca_file=ca_file,
    )


def _open_fsspec(url: str, timeout_s: float, options: Mapping[str, object]) -> Store:
    from bootseer.storage.fsspec import FsspecStore

    return FsspecStore(url, timeout_s=timeout_s, options=options)


def _refuse_options(url: str, options: Mapping[str, object]) -> None:
    if options:
        raise ConfigError(f"{redact(url)}: unknown options {', '.join(sorted(options))}")
