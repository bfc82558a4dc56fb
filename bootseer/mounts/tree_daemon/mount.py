"""Mounted trees, for their users: mounted by a daemon that outlives them, found again, held, ended.

`mount_tree` finds the daemon that serves a tree, or starts one (process.py): one for each user and tree. It
ends by itself some time after the last lease was released. Leftovers of a killed one are removed first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.errors import ConfigError, StorageError, StorageTimeout
from bootseer.ipc.client import Client, GoneError, NotAnsweringError
from bootseer.mounts.tree_daemon.ending import ANSWER_S, TreeState, list_trees, unmount, unmount_tree
from bootseer.mounts.tree_daemon.places import TreeDirectory, is_shown, locate, prepare
from bootseer.mounts.tree_daemon.probe import probe_mount
from bootseer.mounts.tree_daemon.starting import TreeOptions, settings_of, start
from bootseer.mounts.tree_daemon.waiting import end_spare_daemon, start_spare_daemon

if TYPE_CHECKING:
    from bootseer.blocks.cache import Cache
    from bootseer.mounts.tree_daemon.validation import IndexValidation
    from bootseer.tree.index import Config
    from bootseer.trust import Trust

__all__ = [
    "Lease",
    "MountedTree",
    "TreeOptions",
    "TreeState",
    "list_trees",
    "mount_tree",
    "probe_mount",
    "resolve_tree",
    "unmount_tree",
]

REQUEST_S = 30.0  # storing a trace may take a while
_POLL_S = 0.01


class Lease:
    """A lease that keeps a tree mounted until it is closed, or its process ends."""

    def __init__(self, control: Client) -> None:
        self._control = control

    def is_lost(self) -> bool:
        """Return whether the tree's daemon has ended nevertheless; then reads there fail."""
        return self._control.is_gone()

    def close(self) -> None:
        self._control.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MountedTree(NamedTuple):
    folder: str  # its root; read-only
    digest: str
    control: str  # path of its daemon's socket
    unreadable: tuple[str, ...] = ()  # why blocks of it could not be read a moment ago; () if all can be
    is_damaged: bool = False  # the store's data of these is wrong or missing

    @property
    def faults_path(self) -> str:
        """Return the path of its journal of failed reads (faults.py)."""
        return TreeDirectory.of_directory(os.path.dirname(self.control)).faults_path

    def hold(self) -> Lease:
        """Keep it mounted. Raises: StorageError when it has ended meanwhile: mount it again."""
        control = _connect(self.control)
        try:
            control.ask("hold", timeout_s=REQUEST_S)
        except BaseException:
            control.close()
            raise
        return Lease(control)

    def config(self) -> Config:
        """Return how to run an image: its environment, command, user."""
        import msgspec

        from bootseer.tree.index import Config

        return msgspec.convert(self._ask("config"), Config)

    def status(self) -> dict[str, Any]:
        """Return figures of blocks, device, prefetch, cache, and its leases."""
        return self._ask("status")

    def status_folder(self) -> str:
        """Mount the status folder (status_texts.py), if it is not mounted yet; return where it is.

        Raises: ConfigError, StorageError, also for a daemon of an earlier version.
        """
        with _connect(self.control) as control:
            return str(control.ask("status-folder", timeout_s=ANSWER_S)["folder"])

    def end_start(self) -> bool:
        """End the trace, as the job has made its first step. Return whether something was recorded."""
        return bool(self._ask("first-step")["recorded"])

    def prefetch(self, workload: str = "", *, whole: bool = False) -> None:
        """Fetch the access trace of a workload, or all, in the background."""
        more: dict[str, object] = {"workload": workload} if workload else {}
        self._ask("prefetch", whole=whole, **more)

    def trace_path(self, workload: str = "") -> str:
        """Return the file with this node's recordings of a workload; "" without any."""
        more: dict[str, object] = {"workload": workload} if workload else {}
        return str(self._ask("trace", **more)["path"])

    def unmount(self, *, force: bool = False) -> bool:
        """Unmount it, as `unmount_tree`."""
        return unmount(TreeDirectory.of_directory(os.path.dirname(self.control)), force=force)

    def _ask(self, do: str, **more: object) -> dict[str, Any]:
        with _connect(self.control) as control:
            return control.ask(do, timeout_s=REQUEST_S, **more)


def mount_tree(
    url: str,
    *,
    trust: Trust | None = None,
    cache: Cache | None = None,
    name: str = "",
    digest: str = "",
    workload: str = "",
    options: TreeOptions | None = None,
    environ: Mapping[str, str] | None = None,
    vetting: IndexValidation | None = None,
) -> MountedTree:
    """Mount the tree at `url`: by the daemon that serves it already, or by a new one.

    Args:
        url: of the tree's directory; it may end in `@sha256:<tree digest>`.
        trust: keys that are trusted; by default this user's.
        cache: where blocks are cached; by default this user's.
        name: of the tree, if it was published under another name than this URL.
        digest: the tree digest, if it is known; then nothing is read here.
        workload: `bootseer.blocks.trace.workload_key` of the program that starts.
        environ: gives the runtime directory, and the deadline of reads.
        vetting: validation of the index, if a new daemon is needed; it only saves time.
    Raises: ConfigError when this user or machine cannot mount it, with the reason; Untrusted; NotFound;
        NotAnsweringError when a daemon hangs and cannot be ended; StorageError; IntegrityError.
    """
    options = options or TreeOptions()
    end_s = time.monotonic() + options.resolved().ready_s
    environ = os.environ if environ is None else environ
    runtime = locate(environ)
    try:
        place_url, digest, trust = resolve_tree(url, trust, name, digest, options, runtime)
        place = TreeDirectory(prepare(runtime), digest)
        if options.status_folder:
            vetting = None  # its maker begins before it knows the settings
        return _find_or_start(place, place_url, trust, cache, workload, options, environ, end_s, vetting)
    finally:
        end_spare_daemon()  # if it was not needed


# ---- finding and starting --------------------------------------------------------------------------------------


def _find_or_start(
    place: TreeDirectory,
    url: str,
    trust: Trust | None,
    cache: Cache | None,
    workload: str,
    options: TreeOptions,
    environ: Mapping[str, str],
    end_s: float,
    vetting: IndexValidation | None,
) -> MountedTree:
    while True:
        found = _find(place, workload, options, end_s)
        if found is not None:
            return found
        lock = place.try_claim()
        if lock >= 0:
            try:
                place.clear()
                settings = settings_of(url, trust, cache, workload, options, environ)
                found = _mounted(place, start(place, lock, settings, end_s, vetting))
            finally:
                os.close(lock)  # the daemon has it
            if found is not None:
                return found
        if time.monotonic() > end_s:
            ready_s = options.resolved().ready_s
            raise StorageTimeout(f"{place.folder}: another process has been mounting it for {ready_s:g} s")
        time.sleep(_POLL_S)


def resolve_tree(
    url: str, trust: Trust | None, name: str, digest: str, options: TreeOptions, runtime: str
) -> tuple[str, str, Trust | None]:
    """Return the URL without its pin, the digest, and the keys if they had to be read.

    Args: as `mount_tree`; runtime: directory of daemons. Raises: as `mount_tree`.
    """
    from bootseer.tree.head import is_digest, split_pin, store_url_of

    bare, pin = store_url_of(url), split_pin(url)[1]
    if digest and not is_digest(digest):
        raise ConfigError(f"{digest[:80]!r} is no tree digest: 64 hex digits")
    if digest and pin and digest != pin:
        raise ConfigError(f"the URL names another digest than {digest}")
    if digest or pin:
        return bare, digest or pin, trust
    start_spare_daemon(bare, unless_served=runtime)  # it starts up meanwhile
    from bootseer import aio
    from bootseer.storage import open_store
    from bootseer.tree.opening import read_head
    from bootseer.trust import Trust

    trusted = Trust.load() if trust is None else trust

    async def read() -> str:
        store = open_store(bare, timeout_s=options.resolved().store_timeout_s, options=options.store)
        try:
            return (await read_head(store, bare, trusted, name=name)).head.digest
        finally:
            await store.aclose()

    return bare, aio.run_sync(read()), trusted


def _find(place: TreeDirectory, workload: str, options: TreeOptions, end_s: float) -> MountedTree | None:
    """Return the running daemon's tree, once it can be used."""
    more = {"workload": workload} if workload else {}
    if options.peers:
        more["peers"] = options.peers
    try:
        control = _try_connect(place)
        if control is None:
            return None
        with control:
            said = _greet(control, place, end_s, idle_s=options.resolved().idle_s, **more)
    except GoneError:
        return None
    return _mounted(place, said)


def _greet(control: Client, place: TreeDirectory, end_s: float, **more: object) -> dict[str, Any]:
    try:
        return control.ask("hello", timeout_s=max(ANSWER_S, end_s - time.monotonic()), **more)
    except NotAnsweringError as error:  # it lives, but its store is slow
        raise StorageTimeout(f"{error}; end it: bootseer image umount {place.digest}") from error


def _try_connect(place: TreeDirectory) -> Client | None:
    """Return a daemon that answers. One that is stopped or hangs is ended, as its readers would wait for ever.

    Raises: NotAnsweringError when it cannot be ended.
    """
    for is_last in (False, True):  # twice, as a machine can be that busy
        control: Client | None = None
        try:
            control = Client.connect(place.control_path, timeout_s=ANSWER_S)
            if control is not None:
                control.ask("ping", timeout_s=ANSWER_S)
            return control
        except NotAnsweringError as error:
            if control is not None:
                control.close()
            if is_last:
                try:
                    unmount(place, force=True)
                except StorageError as failure:
                    raise NotAnsweringError(f"{error}, and cannot be ended: {failure}") from error
        except BaseException:
            if control is not None:
                control.close()
            raise
    return None


def _mounted(place: TreeDirectory, said: Mapping[str, Any]) -> MountedTree | None:
    if said.get("state") != "ready":
        return None  # it is about to end: wait for that
    if said.get("namespace") != os.readlink("/proc/self/ns/mnt"):
        raise ConfigError(
            f"{place.root}: is mounted by a process in another mount namespace (another container?), and is not"
            " visible here; use another runtime directory (BOOTSEER_RUNTIME)"
        )
    if not is_shown(place):
        return None  # another process has unmounted it: its daemon finds out
    unreadable = tuple(map(str, said.get("unreadable", ())))
    return MountedTree(place.root, place.digest, place.control_path, unreadable, said.get("is_damaged") is True)


def _connect(path: str) -> Client:
    control = Client.connect(path, timeout_s=ANSWER_S)
    if control is None:
        raise GoneError(f"{os.path.dirname(path)}: the daemon of this tree has ended: mount it again")
    return control
