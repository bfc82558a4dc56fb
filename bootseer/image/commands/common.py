"""Common parts of the commands of `bootseer image`: trees opened by URL, the signing key, places of trees.

The commands themselves are plain functions in commands_*.py with plain results; bootseer.cli.image is their CLI.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bootseer import aio
from bootseer.blocks.cache import TREES, Cache, open_cache
from bootseer.errors import BootseerError
from bootseer.logs import get_logger
from bootseer.storage import Store, open_store, redact
from bootseer.storage.paths import is_chained, scheme_of
from bootseer.tree.head import split_pin
from bootseer.tree.opening import OpenedTree, open_tree, read_head
from bootseer.trust import Trust
from bootseer.trust.trust import Signing as Signing

_log = get_logger(__name__)

Progress = Callable[[int, int], None]  # bytes done, and in total
REGISTRIES = ("oci", "docker")
UNSIGNED = (
    "the tree is not signed: only the owner of its directory can use it; create a key with `bootseer keys make`"
)


def is_registry(url: str) -> bool:
    """Return whether a URL names an artifact in a registry."""
    return not is_chained(url) and scheme_of(url) in REGISTRIES


def tree_url(url: str) -> str:
    """Return the URL of a tree in the form for stores: registries' are `oci://`, however they were written."""
    if not is_registry(url) or scheme_of(url) == "oci":
        return url
    from bootseer.storage.oci.reference import parse_reference

    return str(parse_reference(url))


@contextmanager
def opened_store(url: str) -> Iterator[Store]:
    """Yield the store whose root is a tree's directory, for any number of calls of `aio.run_sync`."""

    async def begin() -> Store:
        return open_store(split_pin(url)[0])

    store = aio.run_sync(begin())
    try:
        yield store
    finally:
        aio.run_sync(store.aclose())


@contextmanager
def opened(url: str, *, name: str = "", trust: Trust | None = None) -> Iterator[OpenedTree]:
    """Yield a trusted tree. Raises: as bootseer.tree.opening.open_tree."""
    trusted = Trust.load() if trust is None else trust
    with opened_store(url) as store:
        yield aio.run_sync(open_tree(store, url, trusted, name=name))


def find_digest(url: str, trust: Trust, *, name: str = "") -> str:
    """Return the digest of the tree that a URL means now."""
    pin = split_pin(url)[1]
    if pin:
        return pin
    with opened_store(url) as store:
        return aio.run_sync(read_head(store, url, trust, name=name)).head.digest


def node_cache() -> Cache:
    """Open this user's cache on this node. Raises: ConfigError, StorageError."""
    return open_cache(os.environ)


def node_directory(cache: Cache, digest: str) -> str:
    """Return the directory of a tree in the cache, whether it exists or not."""
    return os.path.join(cache.folder, TREES, digest)


def try_node_directory(digest: str) -> str:
    """Return the same; "" if this user can have no cache, with a warning."""
    try:
        return node_directory(node_cache(), digest)
    except BootseerError as error:
        _log.warning("access traces of this node disabled: %s", error)
        return ""


def shown(url: str) -> str:
    return redact(url)
