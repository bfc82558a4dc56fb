"""Where an image's files come from: a tree that is mounted, or unpacked where it cannot be; or a folder.

`rootfs:PATH` is a folder with a root file system as it is (unpacked by other tools); any other URL is a tree.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from bootseer.errors import ConfigError, IntegrityError, NotFound, StorageError
from bootseer.mounts.privileges import may_mount
from bootseer.storage.near import near_folder_of
from bootseer.tree.index import PACKS

if TYPE_CHECKING:
    from bootseer.mounts.tree_mount import MountedTree
    from bootseer.mounts.unpacked import UnpackedTree
    from bootseer.trust import Trust

ROOTFS = "rootfs:"
_FIGURES = (
    "requests",
    "read_bytes",
    "demand_blocks",
    "prefetch_blocks",
    "donated_blocks",
    "waits",
    "blocked_s",
    "peer_bytes",
)

OnOrigin = Callable[[str, Sequence[str]], object]  # a store's URL, folders


class Source(Protocol):
    """An image's files on this node."""

    @property
    def folder(self) -> str: ...  # the root
    @property
    def digest(self) -> str: ...  # of the tree; "" where nothing says so
    @property
    def env(self) -> Sequence[str]: ...  # NAME=value
    @property
    def how(self) -> str: ...  # a word: mounted, unpacked, folder
    @property
    def seconds(self) -> float: ...  # until it could be used
    @property
    def notes(self) -> Sequence[str]: ...  # lines for people
    @property
    def mount(
        self,
    ) -> Sequence[str]: ...  # where it says what cannot be read, socket of who serves it; () for none
    @property
    def lock_path(self) -> str: ...  # as long as somebody has it locked (shared), the files stay; "" for none

    def first_step(self) -> Mapping[str, float]:
        """The start is over: ends the recording. Returns statistics."""
        ...

    def is_lost(self) -> bool:
        """Whether whoever serves it has ended: what is read of it fails."""
        ...

    def close(self) -> None:
        """Nobody uses it any more for us."""
        ...


def open_source(
    url: str,
    workload: tuple[str, str],
    say: Callable[[str], object] = lambda _: None,
    *,
    name: str = "",
    digest: str = "",
    reads_ahead: bool = True,
    peers: str = "",
    avoid_mount: str = "",
    on_origin: OnOrigin = lambda _url, _folders: None,
    on_digest: Callable[[str], object] = lambda _: None,
    on_fall_back: Callable[[str], object] | None = None,
) -> Source:
    """Args:
        workload: program and script: which recording fits.
        say: lines for people while it takes time.
        name: of the tree, where it was published under another one than this URL.
        digest: of the tree, if it has to be this one, whatever the URL means by now.
        reads_ahead: not if what the start reads is to be recorded in any case.
        peers: path of the file of the job's peers (bootseer.peers), who are asked before a store that is far.
        avoid_mount: why it is better unpacked than mounted; if it cannot be, it is mounted all the same.
        on_origin: is told which folders of which store are read through them.
        on_digest: is told the tree's, before it can be used.
        on_fall_back: is told why it is unpacked; by default `say` is.
    Raises: ConfigError, StorageError, IntegrityError.
    """
    if url.startswith(ROOTFS):
        return FolderSource(url.removeprefix(ROOTFS))
    began_s = time.monotonic()
    from bootseer.mounts.tree_waiting import begin_spare, end_spare

    def warn(why: str) -> None:
        say(f"warning: {why}")

    begin_spare(url, unless_served=_runtime())  # it gets ready while the tree is looked for
    try:
        if peers:
            from bootseer.tree.head import store_url_of

            store_url = store_url_of(url)
            peers = "" if near_folder_of(store_url) else peers
            if peers:
                on_origin(store_url, [PACKS])
        return _open_tree(
            *(url, workload, say, name, digest, reads_ahead, peers, avoid_mount, on_digest, on_fall_back or warn),
            began_s,
        )
    finally:
        end_spare()


def _runtime() -> str:
    from bootseer.mounts.tree_places import locate

    try:
        return locate(os.environ)
    except ConfigError:
        return ""  # it is said when it is needed


def _open_tree(
    url: str,
    workload: tuple[str, str],
    say: Callable[[str], object],
    name: str,
    digest: str,
    reads_ahead: bool,
    peers: str,
    avoid_mount: str,
    on_digest: Callable[[str], object],
    on_fall_back: Callable[[str], object],
    began_s: float,
) -> Source:
    from bootseer.blocks.trace import workload_key
    from bootseer.mounts.tree_control import NotAnsweringError
    from bootseer.mounts.tree_mount import TreeOptions, mount_tree, probe_mount, resolve_tree
    from bootseer.trust import Trust

    trust, key = Trust.load(), workload_key(*workload)
    digest = resolve_tree(url, trust, name, digest, TreeOptions(), _runtime())[1]
    on_digest(digest)
    why = "" if may_mount() else "it cannot be mounted here: mounts need root (CAP_SYS_ADMIN)"
    unpack = partial(UnpackedSource, url, trust, name, digest, key, say, began_s, peers)
    options = TreeOptions(peers=peers)
    if not reads_ahead:
        options = options._replace(read_ahead_share=0.0)
    for is_last in (False, True):
        if not why and not avoid_mount:
            try:
                tree = mount_tree(url, trust=trust, name=name, digest=digest, workload=key, options=options)
            except NotFound:
                raise
            except NotAnsweringError as error:
                why = f"it cannot be mounted here: {error}"
            except (ConfigError, StorageError):
                reason = probe_mount()
                if not reason:
                    raise  # it is this tree, this URL or its store
                why = f"it cannot be mounted here: {reason}"
            else:
                if is_last or tree.is_damaged or not tree.unreadable:
                    return MountedSource(tree, began_s)
                avoid_mount = "; ".join(tree.unreadable)
        on_fall_back(f"the image is unpacked, as {why or f'reads of its mount have failed: {avoid_mount}'}")
        try:
            return unpack()
        except (StorageError, IntegrityError) as error:
            if why or is_last:
                raise
            on_fall_back(f"the image is mounted all the same, as it cannot be unpacked: {error}")
            avoid_mount = ""
    raise AssertionError("one of them ends it")


class FolderSource:
    """A root file system in a folder of this node. Implements Source."""

    how = "folder"
    digest = ""
    lock_path = ""
    mount: Sequence[str] = ()
    env: Sequence[str] = ()
    notes: Sequence[str] = ()

    def __init__(self, path: str) -> None:
        began_s = time.monotonic()
        self.folder = os.path.realpath(path)
        if not os.path.isabs(path) or not os.path.isdir(self.folder):
            raise ConfigError(f"{ROOTFS}{path}: is no folder of this node; give an absolute path")
        self.seconds = time.monotonic() - began_s

    def first_step(self) -> Mapping[str, float]:
        return {}

    def is_lost(self) -> bool:
        return False

    def close(self) -> None:
        pass


class MountedSource:
    """A tree that is mounted, and stays so. Implements Source."""

    how = "mounted"
    lock_path = ""

    def __init__(self, tree: MountedTree, began_s: float) -> None:
        self._tree = tree
        self.mount = tree.faults_path, tree.control
        self.notes = [_damaged_line(tree)] if tree.unreadable else []
        self._lease = tree.hold()
        try:
            self.folder, self.digest = tree.folder, tree.digest
            self.env = tree.config().env  # of the index that it serves, whatever becomes of cache and store
            self._before = _read_before(tree.status(), time.monotonic() - began_s)
        except BaseException:
            self._lease.close()
            raise
        self.seconds = time.monotonic() - began_s

    def first_step(self) -> Mapping[str, float]:
        status = self._tree.status()  # before the rest is streamed
        is_recorded = self._tree.end_start()
        figures = _numbers(status)
        figures.update((name, max(0.0, figures[name] - value)) for name, value in self._before.items())
        return {**figures, "recorded": float(is_recorded)}

    def is_lost(self) -> bool:
        return self._lease.is_lost()

    def close(self) -> None:
        self._lease.close()


def _damaged_line(tree: MountedTree) -> str:
    what = "is damaged where it is kept" if tree.is_damaged else "cannot be had"
    mend = "mend its store, or build it again (bootseer image build)"
    return (
        f"warning: some of the image {what}, and who reads that gets errors: {'; '.join(tree.unreadable)}: {mend}"
    )


class UnpackedSource:
    """A tree whose files were all written to this node's disk. Implements Source."""

    how = "unpacked"
    mount: Sequence[str] = ()
    notes: Sequence[str] = ()

    def __init__(
        self,
        url: str,
        trust: Trust,
        name: str,
        digest: str,
        workload: str,
        say: Callable[[str], object],
        began_s: float,
        peers: str = "",
    ) -> None:
        from bootseer.mounts.unpacked import unpack_tree

        self._tree: UnpackedTree = unpack_tree(
            url, trust=trust, name=name, digest=digest, workload=workload, say=say, peers=peers
        )
        self.folder, self.digest, self.env = self._tree.folder, self._tree.digest, self._tree.env
        self.lock_path = self._tree.lock_path
        self.seconds = time.monotonic() - began_s

    def first_step(self) -> Mapping[str, float]:
        return {"written_bytes": self._tree.written_bytes}

    def is_lost(self) -> bool:
        return False

    def close(self) -> None:
        self._tree.close()


def _read_before(status: Mapping[str, Any], since_s: float) -> dict[str, float]:
    """What a daemon had read before a start that began so long ago; one of that start has read for it alone."""
    if status["uptime_s"] - status["ready_s"] <= since_s:
        return {}
    figures = _numbers(status)
    return {name: figures[name] for name in _FIGURES if name in figures}


def _numbers(status: Mapping[str, Any]) -> dict[str, float]:
    """Those figures of a daemon that tell what a start was like."""
    blocks = status["blocks"]
    found = {name: float(blocks[name]) for name in _FIGURES if isinstance(blocks.get(name), int | float)}
    return {**found, "ready_s": float(status["ready_s"]), "had_trace": float(bool(status["trace"]))}
