"""The source of an image's files: a tree that is mounted, or unpacked where it cannot be mounted; or a directory.

`rootfs:PATH` is a directory with an unpacked root file system (of other tools); any other URL is a tree.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from bootseer.errors import ConfigError, IntegrityError, NotFound, StorageError
from bootseer.linux.privileges import may_mount
from bootseer.logs import get_logger
from bootseer.storage.local_stores import local_disk_directory_of
from bootseer.tree.index import PACKS

if TYPE_CHECKING:
    from bootseer.mounts.tree_daemon.mount import MountedTree
    from bootseer.mounts.unpacked.tree import UnpackedTree
    from bootseer.trust import Trust

_log = get_logger(__name__)

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

OnOrigin = Callable[[str, Sequence[str]], object]  # a store's URL, directories


class ImageSource(Protocol):
    """An image's files on this node."""

    @property
    def folder(self) -> str: ...  # the root
    @property
    def digest(self) -> str: ...  # of the tree; "" if it is not known
    @property
    def env(self) -> Sequence[str]: ...  # NAME=value
    @property
    def how(self) -> str: ...  # one of mounted, unpacked, folder
    @property
    def seconds(self) -> float: ...  # until it could be used
    @property
    def notes(self) -> Sequence[str]: ...  # lines for users
    @property
    def mount(
        self,
    ) -> Sequence[str]: ...  # path of its fault journal, socket of its server; () for none
    @property
    def lock_path(self) -> str: ...  # while a process has it locked (shared), the files stay; "" for none

    def first_step(self) -> Mapping[str, float]:
        """End the recording, as the start is over. Returns statistics."""
        ...

    def open_status_folder(self) -> str:
        """Return the directory of its status folder, which is mounted if it was not; "" for none.

        Raises: ConfigError, StorageError.
        """
        ...

    def is_lost(self) -> bool:
        """Return whether its server has ended, so that reads fail."""
        ...

    def close(self) -> None:
        """End this process's use of it."""
        ...


def open_source(
    url: str,
    workload: tuple[str, str],
    *,
    name: str = "",
    digest: str = "",
    reads_ahead: bool = True,
    peers: str = "",
    avoid_mount: str = "",
    on_origin: OnOrigin = lambda _url, _directories: None,
    on_digest: Callable[[str], object] = lambda _: None,
    on_fall_back: Callable[[str], object] | None = None,
) -> ImageSource:
    """Open the source of an image. Args:
        workload: program and script: select the access trace.
        name: of the tree, if it was published under another name than this URL.
        digest: of the tree, if it has to be this one, even if the URL names another one by now.
        reads_ahead: False if the access trace of the start is recorded in any case.
        peers: path of the file of the job's peers (bootseer.peers), which are read before a store that is far.
        avoid_mount: reason to unpack it instead of mounting it; if that fails, it is mounted.
        on_origin: receives the store and its directories that are read through the peers.
        on_digest: receives the tree's digest, before the tree can be used.
        on_fall_back: receives the reason why it is unpacked; by default it is logged as a warning.
    Raises: ConfigError, StorageError, IntegrityError.
    """
    if url.startswith(ROOTFS):
        return DirectorySource(url.removeprefix(ROOTFS))
    began_s = time.monotonic()
    from bootseer.mounts.tree_daemon.waiting import end_spare_daemon, start_spare_daemon

    start_spare_daemon(url, unless_served=_runtime())  # it gets ready while the tree is resolved
    try:
        if peers:
            from bootseer.tree.head import store_url_of

            store_url = store_url_of(url)
            peers = "" if local_disk_directory_of(store_url) else peers
            if peers:
                on_origin(store_url, [PACKS])
        return _open_tree(
            *(
                url,
                workload,
                name,
                digest,
                reads_ahead,
                peers,
                avoid_mount,
                on_digest,
                on_fall_back or _log.warning,
            ),
            began_s,
        )
    finally:
        end_spare_daemon()


def _runtime() -> str:
    from bootseer.mounts.tree_daemon.places import locate

    try:
        return locate(os.environ)
    except ConfigError:
        return ""  # reported once the directory is needed


def _open_tree(
    url: str,
    workload: tuple[str, str],
    name: str,
    digest: str,
    reads_ahead: bool,
    peers: str,
    avoid_mount: str,
    on_digest: Callable[[str], object],
    on_fall_back: Callable[[str], object],
    began_s: float,
) -> ImageSource:
    from bootseer.blocks.trace import workload_key
    from bootseer.ipc.client import NotAnsweringError
    from bootseer.mounts.tree_daemon.mount import TreeOptions, mount_tree, probe_mount, resolve_tree
    from bootseer.trust import Trust

    trust, key = Trust.load(), workload_key(*workload)
    digest = resolve_tree(url, trust, name, digest, TreeOptions(), _runtime())[1]
    on_digest(digest)
    why = "" if may_mount() else "it cannot be mounted here: mounts need root (CAP_SYS_ADMIN)"
    unpack = partial(UnpackedSource, url, trust, name, digest, key, began_s, peers)
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
            on_fall_back(f"the image is mounted, as it cannot be unpacked: {error}")
            avoid_mount = ""
    raise AssertionError("one of them returns or raises")


class DirectorySource:
    """A root file system in a directory of this node. Implements Source."""

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
            raise ConfigError(f"{ROOTFS}{path}: is not a directory of this node; give an absolute path")
        self.seconds = time.monotonic() - began_s

    def first_step(self) -> Mapping[str, float]:
        return {}

    def open_status_folder(self) -> str:
        return ""

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
            self.env = tree.config().env  # of the index that it serves, independent of cache and store
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

    def open_status_folder(self) -> str:
        return self._tree.status_folder()

    def is_lost(self) -> bool:
        return self._lease.is_lost()

    def close(self) -> None:
        self._lease.close()


def _damaged_line(tree: MountedTree) -> str:
    what = "is damaged in its store" if tree.is_damaged else "cannot be read"
    recover = "repair its store, or build it again (bootseer image build)"
    return f"warning: a part of the image {what}, and reads of it fail: {'; '.join(tree.unreadable)}: {recover}"


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
        began_s: float,
        peers: str = "",
    ) -> None:
        from bootseer.mounts.unpacked.tree import unpack_tree

        self._tree: UnpackedTree = unpack_tree(
            url, trust=trust, name=name, digest=digest, workload=workload, peers=peers
        )
        self.folder, self.digest, self.env = self._tree.folder, self._tree.digest, self._tree.env
        self.lock_path = self._tree.lock_path
        self.seconds = time.monotonic() - began_s

    def first_step(self) -> Mapping[str, float]:
        return {"written_bytes": self._tree.written_bytes}

    def open_status_folder(self) -> str:
        return ""

    def is_lost(self) -> bool:
        return False

    def close(self) -> None:
        self._tree.close()


def _read_before(status: Mapping[str, Any], since_s: float) -> dict[str, float]:
    """Return the figures of a daemon before a start of this age; {} for a daemon that the start began."""
    if status["uptime_s"] - status["ready_s"] <= since_s:
        return {}
    figures = _numbers(status)
    return {name: figures[name] for name in _FIGURES if name in figures}


def _numbers(status: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a daemon that describe a start."""
    blocks = status["blocks"]
    found = {name: float(blocks[name]) for name in _FIGURES if isinstance(blocks.get(name), int | float)}
    return {**found, "ready_s": float(status["ready_s"]), "had_trace": float(bool(status["trace"]))}
