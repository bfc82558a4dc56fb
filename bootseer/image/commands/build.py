"""`bootseer image build`: converts a directory, an OCI layout or an image in a registry to a tree at any place.

Packs are sent as they fill up, and nothing is unpacked meanwhile. The last file makes the tree visible. An
interrupted build leaves its packs, which the next one finds and does not write again.
"""

from __future__ import annotations

import os
import platform as this_platform
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from bootseer import aio
from bootseer.blocks.trace import Trace
from bootseer.errors import AlreadyExists, ConfigError, StorageError
from bootseer.image.commands.common import (
    UNSIGNED,
    Signing,
    is_registry,
    opened,
    opened_store,
    shown,
    tree_url,
)
from bootseer.image.commands.traces import convert_trace, hot_blocks, hot_files, known_traces, publish
from bootseer.logs import get_logger, sent_to
from bootseer.storage import Store
from bootseer.storage.paths import scheme_of
from bootseer.tree.builder.building import BuiltTree, Source, Statistics
from bootseer.tree.builder.building import build as build_tree
from bootseer.tree.head import IMAGE, Head, make_head, split_pin
from bootseer.tree.index import Index
from bootseer.tree.opening import OpenedTree, publish_tree
from bootseer.tree.pack_folder import PackWriter
from bootseer.trust import SigningKey, Trust

_log = get_logger(__name__)

ROOTFS = "rootfs:"
LAYOUT = "oci-layout"  # the file that makes a directory an image layout

Count = Callable[[int, int], object]  # bytes and files since the last call


class BuildOptions(NamedTuple):
    name: str = ""  # for readers, instead of the target's URL
    signing: Signing = Signing()
    hot: str = ""  # URL of a tree whose access traces give the order
    hot_name: str = ""  # its name
    platform: str = ""  # "": this machine's
    reference: str = ""  # selects an image of a layout with several
    owner: tuple[int, int] | None = None  # of everything, instead of the owners found
    crosses_mounts: bool = False
    threads: int | None = None


class BuildResult(NamedTuple):
    digest: str
    name: str
    signer: str  # keyid, "" if it is not signed
    index_bytes: int
    statistics: Statistics
    carried_traces: int  # of the tree given by `hot`


class Target(Protocol):
    """The destination of a tree."""

    def put(self, digest: str, data: bytes) -> object: ...  # a pack, from a thread
    def finish(self, built: BuiltTree, head: Head, key: SigningKey | None) -> None: ...


def build(source: str, target: str, options: BuildOptions, count: Count) -> BuildResult:
    """Build the tree of `source` at `target`.

    Raises: ConfigError for an invalid source or target; IntegrityError for layers that are damaged or hostile;
    StorageError; SourceChanged if a file changes meanwhile.
    """
    target = tree_url(target)
    if split_pin(target)[1] or (is_registry(target) and "@" in target.rpartition("/")[2]):
        raise ConfigError(f"{shown(target)}: names a digest; give the name of the tree without one")
    trust = Trust.load()
    key = options.signing.key(trust)
    with _hot_tree(options, trust) as hot, _opened_source(source, options) as opened_source:
        with _opened_target(target) as place:
            built = build_tree(
                opened_source,
                place.put,
                hot_paths=[os.fsencode(each) for each in hot.paths],
                threads=options.threads,
                on_progress=count,
            )
            head = make_head(built.index_bytes, IMAGE, target, options.name)
            place.finish(built, head, key)
        if key is None:
            _log.info(UNSIGNED)
        carried = _carry(hot, built, target, head, key)
    keyid = "" if key is None else key.keyid
    return BuildResult(built.digest, head.name, keyid, len(built.index_bytes), built.statistics, carried)


# ---- sources -----------------------------------------------------------------------------------------------


@contextmanager
def _opened_source(url: str, options: BuildOptions) -> Iterator[Source]:
    if url.startswith(ROOTFS):
        yield _directory(url.removeprefix(ROOTFS), options)
    elif is_registry(url):
        with _registry_source(url, options) as source:
            yield source
    elif scheme_of(url) not in ("", "file", "local"):
        raise ConfigError(
            f"{shown(url)}: not a source; give a directory, an OCI layout, or docker://REGISTRY/NAME:TAG"
        )
    else:
        from bootseer.storage.open import local_path

        path = local_path(url)
        if os.path.isfile(os.path.join(path, LAYOUT)):
            from bootseer.tree.builder.from_layers import LayersSource
            from bootseer.tree.builder.oci_layout import LayoutImage

            _refuse_directory_options(url, options)
            image = LayoutImage(path, platform=options.platform or None, reference=options.reference or None)
            yield LayersSource(image, name=os.path.basename(path))
        else:
            yield _directory(path, options)


def _directory(path: str, options: BuildOptions) -> Source:
    from bootseer.tree.builder.from_directory import DirectorySource

    path = os.path.abspath(path)
    if not os.path.isdir(path):
        kind = "is a file" if os.path.lexists(path) else "does not exist"
        raise ConfigError(f"{path}: {kind}; give a directory, an OCI layout, or docker://REGISTRY/NAME:TAG")
    if os.path.isfile(os.path.join(path, "tree.json")) and os.path.isdir(os.path.join(path, "packs")):
        raise ConfigError(
            f"{path}: is already a tree; to build one from its files anyway, use {ROOTFS}{path}; to copy it, use"
            " bootseer image push or cp -r"
        )
    for value, flag in ((options.platform, "--platform"), (options.reference, "--reference")):
        if value:
            raise ConfigError(f"{flag} {value}: {path} is a directory of files, not an OCI layout")
    # Without a name: the same files give the same tree at any place.
    return DirectorySource(path, owner=options.owner, crosses_mounts=options.crosses_mounts)


def _refuse_directory_options(url: str, options: BuildOptions) -> None:
    if options.owner is not None or options.crosses_mounts:
        raise ConfigError(f"{shown(url)}: is an image; its layers give the owners of its files")


@contextmanager
def _registry_source(url: str, options: BuildOptions) -> Iterator[Source]:
    from bootseer.image.registry import Registry, RegistryImage
    from bootseer.storage.oci.manifest import is_tree
    from bootseer.storage.oci.reference import parse_reference
    from bootseer.tree.builder.from_layers import LayersSource
    from bootseer.tree.builder.image_config import platform_of

    _refuse_directory_options(url, options)
    if options.reference:
        raise ConfigError(f"--reference {options.reference}: {shown(url)} names the image already")
    reference = parse_reference(url)
    platform = options.platform or platform_of(this_platform.machine())

    async def find(registry: Registry) -> RegistryImage:
        if is_tree(await registry.document(reference), str(reference)):
            raise ConfigError(f"{reference}: is already a tree; use it, or copy it with `bootseer image pull`")
        return await registry.image(reference, platform)

    registry = Registry()
    try:
        image = aio.run_sync(find(registry))
        yield LayersSource(image, name=f"{reference.name}@{image.reference.digest}")
    finally:
        aio.run_sync(registry.aclose())


# ---- targets -----------------------------------------------------------------------------------------------


@contextmanager
def _opened_target(url: str) -> Iterator[Target]:
    if is_registry(url):
        target = RegistryTarget(url)
        try:
            yield target
        finally:
            target.close()
    else:
        with opened_store(url) as store:
            yield StoreTarget(store)


class StoreTarget:
    """A directory in a store. Implements Target."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._packs = PackWriter(store)
        self.put = self._packs.put

    def finish(self, built: BuiltTree, head: Head, key: SigningKey | None) -> None:
        aio.run_sync(self._finish(built, head, key))

    async def _finish(self, built: BuiltTree, head: Head, key: SigningKey | None) -> None:
        await self._packs.check(built.tree.packs)
        await publish_tree(self._store, built.index_bytes, head, key)


class RegistryTarget:
    """A tag of a repository: packs are pushed as they are made, then the small rest. Implements Target."""

    def __init__(self, url: str) -> None:
        from bootseer.image.registry import Registry
        from bootseer.storage.oci.manifest import is_tree
        from bootseer.storage.oci.reference import parse_reference

        self._reference = parse_reference(url)
        if not self._reference.tag:
            raise ConfigError(f"{self._reference}: has no tag; name one, for example {self._reference}:v1")
        self._registry = Registry()
        try:
            found = aio.run_sync(self._registry.find(self._reference))
            if found is not None and not is_tree(found, str(self._reference)):
                raise AlreadyExists(f"{self._reference}: is already an image; give the tree a tag of its own")
        except BaseException:
            self.close()
            raise
        self._uploads = self._registry.uploads(self._reference)

    def put(self, digest: str, data: bytes) -> None:
        from bootseer.image.uploads import from_memory
        from bootseer.storage.oci.manifest import TREE_PACK, Descriptor

        blob = Descriptor(media_type=TREE_PACK, digest=f"sha256:{digest}", size=len(data))
        aio.run_sync(self._uploads.push(blob, from_memory(data), lambda _: None))

    def finish(self, built: BuiltTree, head: Head, key: SigningKey | None) -> None:
        aio.run_sync(self._finish(built, head, key))

    async def _finish(self, built: BuiltTree, head: Head, key: SigningKey | None) -> None:
        from bootseer.image.artifacts import push_tree
        from bootseer.storage.memory import MemoryStore, forget

        name = f"build-{secrets.token_hex(8)}"
        store = MemoryStore(name)
        try:
            await publish_tree(store, built.index_bytes, head, key)
            await push_tree(self._registry, self._reference, store)  # packs are present and are not read
        finally:
            forget(name)

    def close(self) -> None:
        aio.run_sync(self._registry.aclose())


# ---- hot blocks --------------------------------------------------------------------------------------


class _Hot(NamedTuple):
    """The access traces of an earlier tree."""

    tree: Index | None
    traces: Mapping[str, Trace]  # by workload
    paths: Sequence[str]


@contextmanager
def _hot_tree(options: BuildOptions, trust: Trust) -> Iterator[_Hot]:
    if not options.hot:
        yield _Hot(None, {}, ())
        return
    url = tree_url(options.hot)
    with opened(url, name=options.hot_name, trust=trust) as tree:
        known = known_traces(tree.store, tree.digest, tree.index.block_count, trust)
        if not known:
            raise ConfigError(f"{shown(url)}: has no access trace; record one with `bootseer image record`")
        best: dict[str, Trace] = {}
        for each in known:
            best.setdefault(each.trace.workload, each.trace)
        yield _Hot(tree.index, best, [each.path for each in hot_files(tree.index, hot_blocks(known))])


def _carry(hot: _Hot, built: BuiltTree, url: str, head: Head, key: SigningKey | None) -> int:
    """Convert the traces of the old tree to the new one, so that its first start is prefetched too."""
    if hot.tree is None:
        return 0
    found = [convert_trace(hot.tree, trace, built.tree, built.digest) for trace in hot.traces.values()]
    carried = [each for each in found if each is not None]
    try:
        with opened_store(url) as store:
            tree = OpenedTree(built.tree, built.digest, head, store, built.index_bytes, "")
            with sent_to(lambda _: None):
                publish(tree, url, carried, key)
    except StorageError as error:
        _log.warning("access traces of the old tree are not copied: %s", error)
        return 0
    return len(carried)
