"""What the commands of `bootseer image` share: trees opened by URL, the key that signs, where a tree is kept.

The commands themselves are in commands_*.py, plain functions with plain results; bootseer.cli.image is their face.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bootseer import aio
from bootseer.blocks import Cache, open_cache
from bootseer.blocks.cache import TREES
from bootseer.errors import BootseerError
from bootseer.storage import Store, open_store, redact
from bootseer.storage.paths import is_chained, scheme_of
from bootseer.tree.head import split_pin
from bootseer.tree.opening import OpenedTree, open_tree, read_head
from bootseer.trust import Trust
from bootseer.trust.signing import Signing as Signing

Progress = Callable[[int, int], None]  # bytes done, and in all
Say = Callable[[str], object]  # a line for people
REGISTRIES = ("oci", "docker")
UNSIGNED = (
    "the tree is not signed: only who owns the folder that it is in can use it; `bootseer keys make` makes a key"
)


def is_registry(url: str) -> bool:
    """Whether a URL names something in a registry."""
    return not is_chained(url) and scheme_of(url) in REGISTRIES


def tree_url(url: str) -> str:
    """The URL of a tree, as stores take it: registries' are `oci://`, however they were written."""
    if not is_registry(url) or scheme_of(url) == "oci":
        return url
    from bootseer.image.references import parse_reference

    return str(parse_reference(url))


@contextmanager
def opened_store(url: str) -> Iterator[Store]:
    """The store whose root is a tree's folder, for any number of calls of `aio.run_sync`."""

    async def begin() -> Store:
        return open_store(split_pin(url)[0])

    store = aio.run_sync(begin())
    try:
        yield store
    finally:
        aio.run_sync(store.aclose())


@contextmanager
def opened(url: str, *, name: str = "", trust: Trust | None = None) -> Iterator[OpenedTree]:
    """A tree that is believed. Raises: as bootseer.tree.opening.open_tree."""
    believed = Trust.load() if trust is None else trust
    with opened_store(url) as store:
        yield aio.run_sync(open_tree(store, url, believed, name=name))


def find_digest(url: str, trust: Trust, *, name: str = "") -> str:
    """The digest of the tree that a URL means now."""
    pin = split_pin(url)[1]
    if pin:
        return pin
    with opened_store(url) as store:
        return aio.run_sync(read_head(store, url, trust, name=name)).head.digest


def node_cache(say: Say = lambda _: None) -> Cache:
    """This user's cache on this node. Raises: ConfigError, StorageError."""
    return open_cache(os.environ, log=lambda line: (say(line), None)[1])


def node_folder(cache: Cache, digest: str) -> str:
    """Where the cache has a tree, or would have it."""
    return os.path.join(cache.folder, TREES, digest)


def try_node_folder(digest: str, say: Say) -> str:
    """The same; "" where this user can have no cache, which `say` is told."""
    try:
        return node_folder(node_cache(), digest)
    except BootseerError as error:
        say(f"warning: what this node has recorded is not looked at: {error}")
        return ""


def shown(url: str) -> str:
    """For messages."""
    return redact(url)
