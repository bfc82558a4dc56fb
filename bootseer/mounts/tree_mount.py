"""Mounted trees, for those who use them: mounted by a daemon that outlives them, found again, held, ended.

`mount_tree` finds the daemon that serves a tree, or starts one (tree_daemon.py): one a user and tree, however many
ask. It ends by itself some time after the last lease was given back. What a killed one left is taken away first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.errors import ConfigError, StorageError, StorageTimeout
from bootseer.mounts.tree_control import Control, GoneError, NotAnsweringError
from bootseer.mounts.tree_ending import ANSWER_S, TreeState, list_trees, unmount, unmount_tree
from bootseer.mounts.tree_places import Place, is_shown, locate, prepare
from bootseer.mounts.tree_probe import probe_mount
from bootseer.mounts.tree_starting import TreeOptions, settings_of, start
from bootseer.mounts.tree_waiting import begin_spare, end_spare

if TYPE_CHECKING:
    from bootseer.blocks import Cache
    from bootseer.mounts.tree_vetting import Vetting
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

REQUEST_S = 30.0  # keeping a trace may take a while
_POLL_S = 0.01


class Lease:
    """Keeps a tree mounted until it is closed, or its process ends."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def is_lost(self) -> bool:
        """Whether the tree's daemon has ended all the same; then what is read there fails."""
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
    """A tree that can be used."""

    folder: str  # where its root is seen; read-only
    digest: str
    control: str  # path of its daemon's socket
    unreadable: tuple[str, ...] = ()  # why blocks of it could not be had a moment ago; () where all can be
    is_damaged: bool = False  # what the store has of these is wrong, or gone

    @property
    def faults_path(self) -> str:
        """The file that tells what of it could not be read (faults.py)."""
        return Place.of_folder(os.path.dirname(self.control)).faults_path

    def hold(self) -> Lease:
        """Keeps it mounted. Raises: StorageError when it has ended meanwhile: mount it again."""
        control = _connect(self.control)
        try:
            control.ask("hold", timeout_s=REQUEST_S)
        except BaseException:
            control.close()
            raise
        return Lease(control)

    def config(self) -> Config:
        """How an image wants to be run: its environment, command, user."""
        import msgspec

        from bootseer.tree.index import Config

        return msgspec.convert(self._ask("config"), Config)

    def status(self) -> dict[str, Any]:
        """Figures of blocks, device, prefetch, cache; who holds it."""
        return self._ask("status")

    def end_start(self) -> bool:
        """The job has made its first step: what it touched so far is the trace. Whether something was recorded."""
        return bool(self._ask("first-step")["recorded"])

    def prefetch(self, workload: str = "", *, whole: bool = False) -> None:
        """Fetches what a workload touched when it was recorded, or all, in the background."""
        more: dict[str, object] = {"workload": workload} if workload else {}
        self._ask("prefetch", whole=whole, **more)

    def trace_path(self, workload: str = "") -> str:
        """The file with the recordings that this node has of a workload; "" without any."""
        more: dict[str, object] = {"workload": workload} if workload else {}
        return str(self._ask("trace", **more)["path"])

    def unmount(self, *, force: bool = False) -> bool:
        """As `unmount_tree`."""
        return unmount(Place.of_folder(os.path.dirname(self.control)), force=force)

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
    vetting: Vetting | None = None,
) -> MountedTree:
    """The tree at `url`, mounted: by the daemon that serves it already, or by a new one.

    Args:
        url: of the tree's folder; it may end in `@sha256:<tree digest>`.
        trust: who is believed; by default this user's keys.
        cache: where blocks are kept; by default this user's.
        name: of the tree, where it was published under another one than this URL.
        digest: the tree digest, if it is known; then nothing is read here.
        workload: `bootseer.blocks.trace.workload_key` of what is started.
        environ: says where the runtime folder is, and how long reads wait.
        vetting: who looks at the index, if a new daemon is needed; it only gives time.
    Raises: ConfigError when this user or machine cannot mount it, with the reason; Untrusted; NotFound;
        NotAnsweringError when a daemon that hangs is in the way and cannot be ended; StorageError; IntegrityError.
    """
    options = options or TreeOptions()
    end_s = time.monotonic() + options.ready_s
    environ = os.environ if environ is None else environ
    runtime = locate(environ)
    try:
        place_url, digest, trust = resolve_tree(url, trust, name, digest, options, runtime)
        place = Place(prepare(runtime), digest)
        return _find_or_start(place, place_url, trust, cache, workload, options, environ, end_s, vetting)
    finally:
        end_spare()  # if it was not needed


# ---- finding and starting --------------------------------------------------------------------------------------


def _find_or_start(
    place: Place,
    url: str,
    trust: Trust | None,
    cache: Cache | None,
    workload: str,
    options: TreeOptions,
    environ: Mapping[str, str],
    end_s: float,
    vetting: Vetting | None,
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
            raise StorageTimeout(f"{place.folder}: another process has been at it for {options.ready_s:g} s")
        time.sleep(_POLL_S)


def resolve_tree(
    url: str, trust: Trust | None, name: str, digest: str, options: TreeOptions, runtime: str
) -> tuple[str, str, Trust | None]:
    """The URL without its pin, the digest, and the keys if they had to be read.

    Args: as `mount_tree`; runtime: where daemons are. Raises: as `mount_tree`.
    """
    from bootseer.tree.head import is_digest, split_pin, store_url_of

    bare, pin = store_url_of(url), split_pin(url)[1]
    if digest and not is_digest(digest):
        raise ConfigError(f"{digest[:80]!r} is no tree digest: 64 hex digits")
    if digest and pin and digest != pin:
        raise ConfigError(f"the URL asks for another digest than {digest}")
    if digest or pin:
        return bare, digest or pin, trust
    begin_spare(bare, unless_served=runtime)  # it gets ready meanwhile
    from bootseer import aio
    from bootseer.storage import open_store
    from bootseer.tree.opening import read_head
    from bootseer.trust import Trust

    believed = Trust.load() if trust is None else trust

    async def read() -> str:
        store = open_store(bare, timeout_s=options.store_timeout_s, options=options.store)
        try:
            return (await read_head(store, bare, believed, name=name)).head.digest
        finally:
            await store.aclose()

    return bare, aio.run_sync(read()), believed


def _find(place: Place, workload: str, options: TreeOptions, end_s: float) -> MountedTree | None:
    """The daemon that is there, when it can be used."""
    more = {"workload": workload} if workload else {}
    if options.peers:
        more["peers"] = options.peers
    try:
        control = _try_connect(place)
        if control is None:
            return None
        with control:
            said = _greet(control, place, end_s, idle_s=options.idle_s, **more)
    except GoneError:
        return None
    return _mounted(place, said)


def _greet(control: Control, place: Place, end_s: float, **more: object) -> dict[str, Any]:
    try:
        return control.ask("hello", timeout_s=max(ANSWER_S, end_s - time.monotonic()), **more)
    except NotAnsweringError as error:  # it lives, and its store is slow
        raise StorageTimeout(f"{error}; end it: bootseer image umount {place.digest}") from error


def _try_connect(place: Place) -> Control | None:
    """A daemon that answers. One that is stopped or hangs is ended: whoever reads from it waits in vain.

    Raises: NotAnsweringError when it does not even end.
    """
    for is_last in (False, True):  # twice, as a machine can be that busy
        control: Control | None = None
        try:
            control = Control.connect(place.control_path, timeout_s=ANSWER_S)
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


def _mounted(place: Place, said: Mapping[str, Any]) -> MountedTree | None:
    if said.get("state") != "ready":
        return None  # it is about to end: wait for that
    if said.get("namespace") != os.readlink("/proc/self/ns/mnt"):
        raise ConfigError(
            f"{place.root}: is mounted by a process in another mount namespace (another container?), and cannot be"
            " seen here; use another runtime folder (BOOTSEER_RUNTIME)"
        )
    if not is_shown(place):
        return None  # it was unmounted by somebody else: its daemon finds out
    unreadable = tuple(map(str, said.get("unreadable", ())))
    return MountedTree(place.root, place.digest, place.control_path, unreadable, said.get("is_damaged") is True)


def _connect(path: str) -> Control:
    control = Control.connect(path, timeout_s=ANSWER_S)
    if control is None:
        raise GoneError(f"{os.path.dirname(path)}: nobody serves this tree any more: mount it again")
    return control
