"""Starts the daemon of a tree, and waits until the tree can be used."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from bootseer.errors import ConfigError, StorageError, StorageTimeout
from bootseer.ipc.channel import Channel
from bootseer.ipc.replies import read_reply
from bootseer.mounts.tree_daemon.defaults import (
    ANY_WORKLOAD,
    DEADLINE_S,
    READ_AHEAD_SHARE,
    STREAM_AFTER_S,
)
from bootseer.mounts.tree_daemon.orders import DaemonOrder
from bootseer.mounts.tree_daemon.places import TreeDirectory
from bootseer.mounts.tree_daemon.validation import IndexValidation, to_memory
from bootseer.mounts.tree_daemon.waiting import WaitingDaemon, take_spare_daemon
from bootseer.storage.os_errors import map_os_errors
from bootseer.tuning import current

if TYPE_CHECKING:
    from bootseer.blocks.cache import Cache
    from bootseer.trust import Trust

MAX_LOG_BYTES = 1 << 20
DEADLINE_VARIABLE = "BOOTSEER_MOUNT_DEADLINE"
MAX_DEADLINE_S = 3600.0


class TreeOptions(NamedTuple):
    """How a tree is served. A running daemon keeps its options, except `peers`; `idle_s` can only grow."""

    idle_s: float | None = None  # it ends so long after the last use; 0: never; None: as `tuning` says
    deadline_s: float | None = None  # a read that waits longer fails; None: from the environment
    store: Mapping[str, object] = {}  # options of the store
    store_timeout_s: float | None = None  # None: as `tuning` says
    records: bool = True  # the access trace of the start, for the next one
    prefetches: bool = True
    read_ahead_share: float = READ_AHEAD_SHARE  # of the starts; the others record all accesses
    whole_bytes: int = 0  # a tree of at most this size is fetched whole if it has no known trace
    streams: bool = True  # some time after the first step, all blocks that are not cached yet
    stream_after_s: float = STREAM_AFTER_S  # that time
    cold_bytes_per_s: float | None = None  # of that
    shares: bool = False  # write the trace to the store, if it has none of this workload
    peers: str = ""  # path of the file of the job's peers, which are read before the store; the last job's count
    ready_s: float | None = None  # for the mount; None: as `tuning` says
    status_folder: bool = False  # add its place, an empty directory, to the root; not together with `vetting`

    def resolved(self) -> ResolvedOptions:
        """Return the options that depend on `tuning`."""
        tuning = current()
        return ResolvedOptions(
            tuning.mounts.idle_s if self.idle_s is None else self.idle_s,
            tuning.storage.timeout_s if self.store_timeout_s is None else self.store_timeout_s,
            tuning.mounts.ready_s if self.ready_s is None else self.ready_s,
        )


class ResolvedOptions(NamedTuple):
    """Options with the values of `tuning`."""

    idle_s: float
    store_timeout_s: float
    ready_s: float


def deadline_of(environ: Mapping[str, str]) -> float:
    """Return the deadline of reads of a mounted tree from this environment. Raises: ConfigError."""
    text = environ.get(DEADLINE_VARIABLE, "")
    try:
        deadline_s = float(text or DEADLINE_S)
    except ValueError:
        deadline_s = 0.0
    if not 0 < deadline_s <= MAX_DEADLINE_S:
        raise ConfigError(f"{DEADLINE_VARIABLE}={text[:80]}: seconds, more than 0 and at most {MAX_DEADLINE_S:g}")
    return deadline_s


def settings_of(
    url: str,
    trust: Trust | None,
    cache: Cache | None,
    workload: str,
    options: TreeOptions,
    environ: Mapping[str, str],
) -> dict[str, object]:
    """Return the fields of settings.Settings. Raises: ConfigError."""
    from bootseer.trust import Trust

    settings: dict[str, object] = {
        "url": url,
        "options": dict(options.store),
        "keys": [each.key.line for each in (Trust.load() if trust is None else trust).trusted],
        "workload": workload or ANY_WORKLOAD,
        **{
            each: getattr(options, each)
            for each in (
                *("records", "prefetches", "streams"),
                *("read_ahead_share", "whole_bytes", "stream_after_s", "cold_bytes_per_s"),
                *("shares", "peers", "status_folder"),
            )
        },
        "idle_s": options.resolved().idle_s,
        "store_timeout_s": options.resolved().store_timeout_s,
        "deadline_s": deadline_of(environ) if options.deadline_s is None else options.deadline_s,
    }
    if cache is not None:
        from bootseer.linux.page_cache import is_remote

        # On a network file system a cache's directory lies in the named one, and has the node's name.
        directory = os.path.dirname(cache.folder) if is_remote(cache.folder) else cache.folder
        settings.update(cache_folder=directory, cache_bytes=cache.limit.max_bytes, cache_share=cache.limit.share)
    return settings


def start(
    place: TreeDirectory,
    lock: int,
    settings: Mapping[str, object],
    end_s: float,
    vetting: IndexValidation | None = None,
) -> dict[str, Any]:
    """Let this process's spare daemon, or a new one, serve a claimed place; return its answer once it is ready.

    Args: lock: of the place, held; the daemon has it, too; end_s: by `time.monotonic`; vetting: validates the
        tree's index instead of the daemon.
    Raises: the daemon's error; StorageError when it sends no answer.
    """
    log = _open_log(place)
    try:
        said = None
        spare = take_spare_daemon()
        if spare is not None:
            said = _order(spare, place, lock, log, settings, end_s, vetting)
        if said is None:
            daemon = WaitingDaemon(log=log, url=str(settings["url"]))
            said = _order(daemon, place, lock, log, settings, end_s, vetting)
    except OSError as error:
        raise StorageError(
            f"{place.folder}: its daemon could not be started: {error.strerror or error}"
        ) from error
    finally:
        os.close(log)
    if not said:
        raise StorageError(f"{place.folder}: its daemon has died; its log is {place.log_path}")
    return read_reply(said, place.folder)


def _order(
    daemon: WaitingDaemon,
    place: TreeDirectory,
    lock: int,
    log: int,
    settings: Mapping[str, object],
    end_s: float,
    vetting: IndexValidation | None,
) -> dict[str, Any] | None:
    """Return the reply of a daemon to its order; {} if it has died, None if it never got the order.

    Raises: StorageTimeout; OSError.
    """
    found: dict[str, Any] | None = None
    try:
        with ExitStack() as kept:
            kept.callback(daemon.close)
            with ExitStack() as given:  # of these descriptors the daemon has copies afterwards
                index, verdict = _open_vetted(vetting)
                for fd in (index, verdict):
                    if fd >= 0:
                        given.callback(os.close, fd)
                ready, theirs = os.pipe()
                kept.callback(os.close, ready)
                given.callback(os.close, theirs)
                told = json.dumps(settings).encode()
                is_given = daemon.give(DaemonOrder(place.folder, told, theirs, lock, log, index, verdict))
            left_s = max(0.0, end_s - time.monotonic())
            reply = Channel.of_streams(ready, -1).receive(left_s) if is_given else None
            found = reply or ({} if daemon.has_accepted() else None)
    except TimeoutError as error:
        raise StorageTimeout(
            f"{place.folder}: its daemon is not ready in time; its log is {place.log_path}"
        ) from error
    return found


def _open_vetted(vetting: IndexValidation | None) -> tuple[int, int]:
    """Return the descriptors for an index that is validated here: memory and a pipe's end; -1 each without."""
    data = vetting.index_bytes() if vetting is not None else None
    if vetting is None or data is None:
        return -1, -1
    index = to_memory(data)
    with ExitStack() as stack:
        stack.callback(os.close, index)
        verdict, ours = os.pipe()
        stack.callback(os.close, verdict)
        vetting.report(ours)
        stack.pop_all()
    return index, verdict


def _open_log(place: TreeDirectory) -> int:
    with map_os_errors(place.log_path):
        os.makedirs(os.path.dirname(place.log_path), mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        log = os.open(place.log_path, flags, 0o600)
        try:
            if os.fstat(log).st_size > MAX_LOG_BYTES:
                os.ftruncate(log, 0)
        except BaseException:
            os.close(log)
            raise
        return log
