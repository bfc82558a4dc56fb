"""Opening of stores by URL. The modules of each kind are imported on demand.

URLs of files, of the web and of object stores are percent-decoded; plain paths are not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from bootseer.errors import ConfigError
from bootseer.storage.paths import HDFS_SCHEMES, OBJECT_SCHEMES, WEB_SCHEMES, is_chained, redact, scheme_of
from bootseer.storage.protocol import Store
from bootseer.tuning import current

_NONE: Mapping[str, object] = {}


def open_store(url: str, *, timeout_s: float | None = None, options: Mapping[str, object] = _NONE) -> Store:
    """Open the store whose root is `url`. Sends no request yet.

    `timeout_s`: the longest time without progress for any call; None: as `tuning` says. `options` depend on the
    kind of store.

    Raises: ConfigError for an invalid URL or option, and for a missing package.
    """
    scheme = scheme_of(url)
    timeout_s = current().storage.timeout_s if timeout_s is None else timeout_s
    if "\0" in url or not url:
        raise ConfigError(f"{redact(url)!r} is neither a URL nor a path")
    if timeout_s <= 0:
        raise ConfigError(f"{redact(url)}: invalid timeout of {timeout_s:g} s")
    if is_chained(url):
        return _open_fsspec(url, timeout_s, options)
    if scheme in ("", "file", "local"):
        from bootseer.storage.local.store import LocalStore

        _refuse_options(url, options)
        return LocalStore(local_path(url), timeout_s=timeout_s)
    if scheme == "memory":
        from bootseer.storage.memory import MemoryStore

        _refuse_options(url, options)
        name, _, directory = unquote(url.partition("://")[2].strip("/")).partition("/")
        return MemoryStore(name, directory)
    if scheme in WEB_SCHEMES:
        return _open_http(url, timeout_s, options)
    if scheme in HDFS_SCHEMES:
        from bootseer.storage.hdfs.store import HdfsStore

        return HdfsStore.open(url, timeout_s=timeout_s, options=options)
    if scheme == "oci":
        from bootseer.storage.oci.store import OciStore

        return OciStore(url, timeout_s=timeout_s, options=options)
    if scheme in OBJECT_SCHEMES:
        from bootseer.storage.fsspec.objects import ObjectStore

        return ObjectStore(url, timeout_s=timeout_s, options=options)
    return _open_fsspec(url, timeout_s, options)


def open_at(
    url: str, *, timeout_s: float | None = None, options: Mapping[str, object] = _NONE
) -> tuple[Store, str]:
    """Open the store of the parent directory of `url`, and return it with the name in it."""
    directory, name = split_url(url)
    return open_store(directory, timeout_s=timeout_s, options=options), name


def split_url(url: str) -> tuple[str, str]:
    """Split a URL into its directory and the name in it, decoded for stores. A query stays with the directory.

    Raises: ConfigError for the root of a store.
    """
    scheme = scheme_of(url)
    if not scheme:
        directory, name = os.path.split(os.path.abspath(url))
        if not name:
            raise ConfigError(f"{url} is the root: name a file or directory in it")
        return directory, name
    if is_chained(url):
        # The first member's path is the file; the rest is the location of that file system.
        first, mark, rest = url.partition("::")
        if "://" not in first:
            raise ConfigError(f"{redact(url)}: name a file in it")
        directory, name = split_url(first)
        return f"{directory}{mark}{rest}", name
    query = ""
    if scheme in WEB_SCHEMES:
        url, mark, query = url.partition("?")
        query = mark + query.partition("#")[0]
    start, _, rest = url.partition("://")
    rest = rest.rstrip("/")
    above, slash, name = rest.rpartition("/")
    needs_server = scheme not in ("file", "local", "memory")
    if not slash or not name or (needs_server and not above and scheme not in HDFS_SCHEMES):
        raise ConfigError(f"{redact(url)} is the root of a store: name a file or directory in it")
    if scheme not in HDFS_SCHEMES and _is_decoded(scheme):
        name = unquote(name)
    return f"{start}://{above or ('/' if scheme in ('file', 'local') else '')}{query}", name


def local_path(url: str) -> str:
    """Return the path of a plain path or of a file: URL.

    Raises: ConfigError when the URL names another machine.
    """
    if not scheme_of(url):
        return os.path.abspath(url)
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{redact(url)}: is on another machine; file:///PATH is on this one")
    return os.path.abspath(unquote(url.partition("://")[2].removeprefix(parts.netloc) or "/"))


def _is_decoded(scheme: str) -> bool:
    return scheme in ("file", "local", "memory", *WEB_SCHEMES, *OBJECT_SCHEMES)


def _open_http(url: str, timeout_s: float, options: Mapping[str, object]) -> Store:
    from bootseer.storage.http.store import HttpStore

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
    from bootseer.storage.fsspec.store import FsspecStore

    return FsspecStore(url, timeout_s=timeout_s, options=options)


def _refuse_options(url: str, options: Mapping[str, object]) -> None:
    if options:
        raise ConfigError(f"{redact(url)}: unknown options {', '.join(sorted(options))}")
